//! Functions in namespaces: Codex groups its own there, and those of MCP servers. Models know functions alone: they see one name, and clients get the two that it was made of.

use std::collections::HashMap;

use serde_json::Value;

use super::request::invalid;
use crate::context::ignore;
use crate::error::ApiError;
use crate::request::function;

/// Between a namespace and a name, as agents that write both as one have it.
const BETWEEN: &str = "__";

/// What the model calls a function.
pub fn joined(namespace: Option<&str>, name: &str) -> String {
    match namespace.filter(|namespace| !namespace.is_empty()) {
        None => name.to_owned(),
        Some(namespace) if namespace.ends_with(BETWEEN) => format!("{namespace}{name}"),
        Some(namespace) => format!("{namespace}{BETWEEN}{name}"),
    }
}

/// Functions that are in namespaces: by the model's name the namespace and the name in it.
#[derive(Debug, Default)]
pub struct Namespaces(HashMap<String, (String, String)>);

impl Namespaces {
    /// Of a function that the model has called by this name: its namespace, and its name there.
    pub fn parted<'a>(&'a self, name: &'a str) -> (Option<&'a str>, &'a str) {
        self.0.get(name).map_or((None, name), |(namespace, name)| (Some(namespace.as_str()), name.as_str()))
    }
}

/// A request's functions, as templates take them. Tools of other kinds are OpenAI's own, or the client's, and named.
///
/// # Errors
/// A function or a namespace without a name; a function in a namespace that is called as another tool is.
pub fn functions(tools: &[Value]) -> Result<(Vec<Value>, Namespaces), ApiError> {
    let (mut functions, mut namespaces) = (Vec::new(), Namespaces::default());
    let named = |field: &str, tool: &Value| {
        tool["name"].as_str().map(str::to_owned).ok_or_else(|| invalid(&format!("{field}.name"), "a tool needs a name"))
    };
    for (i, tool) in tools.iter().enumerate() {
        let field = format!("tools[{i}]");
        match kind_of(tool) {
            "function" => {
                functions.push(function(&named(&field, tool)?, tool.get("description"), tool.get("parameters")));
            }
            "namespace" => {
                let namespace = named(&field, tool)?;
                for (j, tool) in tool["tools"].as_array().into_iter().flatten().enumerate() {
                    if kind_of(tool) != "function" {
                        ignore(&format!("tools.namespace.{}", kind_of(tool)));
                        continue;
                    }
                    let field = format!("{field}.tools[{j}]");
                    let own = named(&field, tool)?;
                    let name = joined(Some(&namespace), &own);
                    let is_taken = tools.iter().any(|other| kind_of(other) == "function" && other["name"] == *name);
                    if is_taken || namespaces.0.contains_key(&name) {
                        return Err(invalid(
                            &format!("{field}.name"),
                            &format!("another tool is called {name} already"),
                        ));
                    }
                    functions.push(function(&name, tool.get("description"), tool.get("parameters")));
                    namespaces.0.insert(name, (namespace.clone(), own));
                }
            }
            kind => ignore(&format!("tools.{kind}")),
        }
    }
    Ok((functions, namespaces))
}

fn kind_of(tool: &Value) -> &str {
    tool["type"].as_str().unwrap_or("no type")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn tool(name: &str) -> Value {
        json!({"type": "function", "name": name, "parameters": {"type": "object"}})
    }

    #[test]
    fn functions_in_namespaces_have_one_name_for_the_model_and_two_for_the_client() {
        let tools = [
            tool("shell"),
            json!({"type": "namespace", "name": "agents", "tools": [tool("spawn"), {"type": "custom", "name": "patch"}]}),
            json!({"type": "namespace", "name": "mcp__files__", "tools": [tool("read")]}),
            json!({"type": "web_search"}),
        ];
        let (functions, namespaces) = functions(&tools).unwrap();
        let names: Vec<&str> = functions.iter().map(|f| f["function"]["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["shell", "agents__spawn", "mcp__files__read"]);
        for (name, parted) in
            names.iter().zip([(None, "shell"), (Some("agents"), "spawn"), (Some("mcp__files__"), "read")])
        {
            assert_eq!(namespaces.parted(name), parted);
            assert_eq!(joined(parted.0, parted.1), *name);
        }
    }

    #[test]
    fn one_name_for_two_functions_is_refused() {
        let space = |name: &str, tools: Value| json!({"type": "namespace", "name": name, "tools": tools});
        for tools in [
            vec![tool("a__b"), space("a", json!([tool("b")]))],
            vec![space("a", json!([tool("b")])), tool("a__b")],
            vec![space("a", json!([tool("b"), tool("b")]))],
            vec![space("a", json!([tool("b")])), space("a__", json!([tool("b")]))],
        ] {
            let error = functions(&tools).unwrap_err();
            assert!(error.message.contains("a__b"), "{}", error.message);
        }
        assert!(functions(&[json!({"type": "namespace", "tools": []})]).is_err());
    }
}
