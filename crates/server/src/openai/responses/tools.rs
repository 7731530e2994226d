//! Tools of a request. Codex groups functions in namespaces, its own and those of MCP servers. Models know only plain functions: they see one joined name, and clients
//! get the namespace and the name back.

use std::collections::HashMap;

use serde_json::Value;

use crate::api::messages::function;
use crate::api::output_spec::{ToolChoice, strict_names};
use crate::http::context::note_ignored;
use crate::http::error::ApiError;
use crate::openai::output_fields::allowed_tools;

/// Joins a namespace and a name, as agents write it.
const SEPARATOR: &str = "__";

/// The name by which the model knows a function.
pub fn joined(namespace: Option<&str>, name: &str) -> String {
    match namespace.filter(|namespace| !namespace.is_empty()) {
        None => name.to_owned(),
        Some(namespace) if namespace.ends_with(SEPARATOR) => format!("{namespace}{name}"),
        Some(namespace) => format!("{namespace}{SEPARATOR}{name}"),
    }
}

/// Functions in namespaces: maps the joined name to the namespace and the name.
#[derive(Debug, Default)]
pub struct Namespaces(HashMap<String, (String, String)>);

impl Namespaces {
    /// Splits a joined name into its namespace, if it has one, and the name in it.
    pub fn split<'a>(&'a self, name: &'a str) -> (Option<&'a str>, &'a str) {
        self.0.get(name).map_or((None, name), |(namespace, name)| (Some(namespace.as_str()), name.as_str()))
    }
}

/// A request's functions as chat templates take them. Tools of other kinds are recorded as ignored.
///
/// # Errors
/// A function or a namespace without a name; two functions with the same joined name.
pub fn functions(tools: &[Value]) -> Result<(Vec<Value>, Namespaces), ApiError> {
    let (mut functions, mut namespaces) = (Vec::new(), Namespaces::default());
    let named = |field: &str, tool: &Value| {
        tool["name"]
            .as_str()
            .map(str::to_owned)
            .ok_or_else(|| ApiError::invalid_field(&format!("{field}.name"), "a tool needs a name"))
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
                        note_ignored(&format!("tools.namespace.{}", kind_of(tool)));
                        continue;
                    }
                    let field = format!("{field}.tools[{j}]");
                    let own = named(&field, tool)?;
                    let name = joined(Some(&namespace), &own);
                    let is_taken = tools.iter().any(|other| kind_of(other) == "function" && other["name"] == *name);
                    if is_taken || namespaces.0.contains_key(&name) {
                        return Err(ApiError::invalid_field(
                            &format!("{field}.name"),
                            &format!("another tool is already called {name}"),
                        ));
                    }
                    functions.push(function(&name, tool.get("description"), tool.get("parameters")));
                    namespaces.0.insert(name, (namespace.clone(), own));
                }
            }
            kind => note_ignored(&format!("tools.{kind}")),
        }
    }
    Ok((functions, namespaces))
}

fn kind_of(tool: &Value) -> &str {
    tool["type"].as_str().unwrap_or("no type")
}

/// Joined names of the functions that have `strict`.
pub fn strict_functions(tools: &[Value]) -> Vec<String> {
    let within = |space: &Value| {
        let namespace = space["name"].as_str();
        let own = strict_names(space["tools"].as_array().into_iter().flatten());
        own.into_iter().map(move |name| joined(namespace, &name)).collect::<Vec<_>>()
    };
    let spaces = tools.iter().filter(|tool| tool["type"] == "namespace");
    strict_names(tools.iter().filter(|tool| tool["type"] == "function"))
        .into_iter()
        .chain(spaces.flat_map(within))
        .collect()
}

/// Parses `tool_choice`.
///
/// # Errors
/// An unknown choice.
pub fn parse_tool_choice(choice: &Value) -> Result<ToolChoice, ApiError> {
    match (choice.as_str().or_else(|| choice["type"].as_str()), choice["name"].as_str()) {
        (None, _) if choice.is_null() => Ok(ToolChoice::Auto),
        (Some("auto"), _) => Ok(ToolChoice::Auto),
        (Some("none"), _) => Ok(ToolChoice::None),
        (Some("required"), _) => Ok(ToolChoice::Required),
        (Some("function"), Some(name)) => Ok(ToolChoice::Named(joined(choice["namespace"].as_str(), name))),
        (Some("allowed_tools"), _) => {
            let one = |tool: &Value| Some(joined(tool["namespace"].as_str(), tool["name"].as_str()?));
            let names = choice["tools"].as_array().and_then(|all| all.iter().map(one).collect());
            let wrong = || {
                ApiError::invalid_field(
                    "tool_choice",
                    "allowed_tools needs a mode (auto or required) and a list of functions",
                )
            };
            allowed_tools(&choice["mode"], names).ok_or_else(wrong)
        }
        _ => {
            let shown: String = choice.to_string().chars().take(60).collect();
            Err(ApiError::invalid_field(
                "tool_choice",
                &format!("{shown} is not supported; it must be auto, none, required, a function or allowed_tools"),
            ))
        }
    }
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
        for (name, split) in
            names.iter().zip([(None, "shell"), (Some("agents"), "spawn"), (Some("mcp__files__"), "read")])
        {
            assert_eq!(namespaces.split(name), split);
            assert_eq!(joined(split.0, split.1), *name);
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
