//! The tools of a request: those that are listed in its prompt, and those that become known in the midst of the conversation. A client that has many defers them: the model looks
//! for one with another tool, whose result refers to it. There its definition is written, so that what the conversation began with stays as it was.

use serde_json::{Value, json};

use super::request::invalid;
use crate::context::ignore;
use crate::error::ApiError;
use crate::request::function;

/// A search among deferred tools that Anthropic's own server does: there is none here, and all tools are listed instead.
const SEARCH: &str = "tool_search_tool";

#[derive(Default)]
pub struct Offered {
    listed: Vec<Value>,
    deferred: Vec<Value>,
    /// Those that became known, in their order.
    known: Vec<Value>,
}

fn name(tool: &Value) -> &str {
    tool["function"]["name"].as_str().unwrap_or_default()
}

impl Offered {
    /// Those of other kinds than functions are Anthropic's own, and named.
    ///
    /// # Errors
    /// A tool without a name.
    pub fn new(all: &[Value]) -> Result<Offered, ApiError> {
        let mut offered = Offered::default();
        let kind = |tool: &Value| tool["type"].as_str().unwrap_or("custom").to_owned();
        let searches = all.iter().any(|tool| kind(tool).starts_with(SEARCH));
        for (i, tool) in all.iter().enumerate() {
            let kind = kind(tool);
            if kind != "custom" {
                ignore(&format!("tools.{kind}"));
                continue;
            }
            let function = defined(&format!("tools.{i}"), tool)?;
            let is_deferred = tool["defer_loading"] == true && !searches;
            let list = if is_deferred { &mut offered.deferred } else { &mut offered.listed };
            list.push(function);
        }
        Ok(offered)
    }

    /// What stands where a conversation refers to a tool; from there on it may be called. `None` where there is no such tool.
    pub fn refer(&mut self, wanted: &str) -> Option<String> {
        let is = |tool: &&Value| name(tool) == wanted;
        if self.listed.iter().any(|tool| name(tool) == wanted) {
            return Some(format!("{wanted} can be called."));
        }
        let tool = self.known.iter().chain(&self.deferred).find(is)?.clone();
        let text = written(&tool);
        self.know(tool);
        Some(text)
    }

    /// What stands for a change of the tools: `tool_addition` or `tool_removal`; `None` where it is neither, or says nothing of a tool.
    ///
    /// # Errors
    /// A tool without a name.
    pub fn change(&mut self, field: &str, block: &Value) -> Result<Option<String>, ApiError> {
        let tool = &block["tool"];
        let referred = tool["name"].as_str().or(tool["tool_name"].as_str());
        match (block["type"].as_str(), tool["type"].as_str(), referred) {
            (Some("tool_addition"), Some("tool_definition"), _) => {
                let tool = defined(&format!("{field}.tool.definition"), &tool["definition"])?;
                let text = written(&tool);
                self.know(tool);
                Ok(Some(text))
            }
            (Some("tool_addition"), _, Some(wanted)) => Ok(self.refer(wanted)),
            (Some("tool_removal"), _, Some(gone)) => {
                self.known.retain(|tool| name(tool) != gone);
                Ok(Some(format!("{gone} can no longer be called.")))
            }
            _ => Ok(None),
        }
    }

    /// All that may be called, those that the prompt lists first, and how many follow them.
    pub fn tools(self) -> (Option<Value>, usize) {
        let unlisted = self.known.len();
        let all: Vec<Value> = self.listed.into_iter().chain(self.known).collect();
        ((!all.is_empty()).then_some(Value::Array(all)), unlisted)
    }

    fn know(&mut self, tool: Value) {
        self.known.retain(|known| name(known) != name(&tool));
        self.known.push(tool);
    }
}

fn defined(field: &str, tool: &Value) -> Result<Value, ApiError> {
    let name = tool["name"].as_str().ok_or_else(|| invalid(&format!("{field}.name"), "a tool needs a name"))?;
    Ok(function(name, tool.get("description"), tool.get("input_schema")))
}

/// As Claude Code tells its model that it will be.
fn written(tool: &Value) -> String {
    let function = &tool["function"];
    let all =
        json!({"description": function["description"], "name": function["name"], "parameters": function["parameters"]});
    format!("<functions>\n<function>{all}</function>\n</functions>")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tool(name: &str, deferred: bool) -> Value {
        json!({"name": name, "description": "D", "input_schema": {"type": "object"}, "defer_loading": deferred})
    }

    fn names(offered: Offered) -> (Vec<String>, usize) {
        let (tools, unlisted) = offered.tools();
        let names = tools.into_iter().flat_map(|tools| tools.as_array().unwrap().clone());
        (names.map(|tool| name(&tool).to_owned()).collect(), unlisted)
    }

    #[test]
    fn a_deferred_tool_is_known_from_where_it_is_referred_to() {
        let all = [tool("search", false), tool("fetch", true), tool("draw", true), tool("read", false)];
        assert_eq!(names(Offered::new(&all).unwrap()), (vec!["search".into(), "read".into()], 0));
        let mut offered = Offered::new(&all).unwrap();
        let text = offered.refer("fetch").unwrap();
        assert_eq!(
            text,
            "<functions>\n<function>{\"description\":\"D\",\"name\":\"fetch\",\"parameters\":{\"type\":\"object\"}}</function>\n</functions>"
        );
        assert_eq!(offered.refer("fetch").unwrap(), text);
        assert_eq!(offered.refer("read").unwrap(), "read can be called.");
        assert_eq!(offered.refer("paint"), None);
        assert_eq!(names(offered), (vec!["search".into(), "read".into(), "fetch".into()], 1));
        // Where Anthropic's server would search, nobody does.
        let search = json!({"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"});
        let offered = Offered::new(&[tool("fetch", true), search]).unwrap();
        assert_eq!(names(offered), (vec!["fetch".into()], 0));
    }

    #[test]
    fn tools_are_added_and_taken_away_in_the_midst_of_a_conversation() {
        let mut offered = Offered::new(&[tool("read", false), tool("fetch", true)]).unwrap();
        let mut change = |block: Value| offered.change("messages.1.content.0", &block);
        let added =
            json!({"type": "tool_addition", "tool": {"type": "tool_definition", "definition": tool("draw", false)}});
        assert!(change(added).unwrap().unwrap().contains("\"draw\""));
        let known = json!({"type": "tool_addition", "tool": {"type": "tool_reference", "name": "fetch"}});
        assert!(change(known).unwrap().unwrap().contains("\"fetch\""));
        let gone = json!({"type": "tool_removal", "tool": {"type": "tool_reference", "name": "draw"}});
        assert_eq!(change(gone).unwrap().unwrap(), "draw can no longer be called.");
        assert_eq!(change(json!({"type": "text"})).unwrap(), None);
        let nameless = json!({"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {}}});
        assert!(change(nameless).unwrap_err().message.starts_with("messages.1.content.0.tool.definition.name"));
        assert_eq!(names(offered), (vec!["read".into(), "fetch".into()], 1));
    }
}
