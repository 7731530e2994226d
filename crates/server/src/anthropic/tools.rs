//! The tools of a request: those that the prompt lists, and those that the conversation introduces later. A client with many tools defers them: the model finds one
//! with a search tool, whose result refers to it. The definition is written at that place, so the start of the prompt stays the same and cached.

use serde_json::{Value, json};

use crate::api::messages::function;
use crate::http::context::note_ignored;
use crate::http::error::ApiError;

/// Prefix of a search tool that Anthropic's own server runs. This server has none, and lists all tools instead.
const SEARCH: &str = "tool_search_tool";

/// The tools of a request.
#[derive(Default)]
pub struct OfferedTools {
    listed: Vec<Value>,
    deferred: Vec<Value>,
    /// Tools that the conversation has introduced, in order.
    introduced: Vec<Value>,
}

fn name(tool: &Value) -> &str {
    tool["function"]["name"].as_str().unwrap_or_default()
}

impl OfferedTools {
    /// Tools of other types than functions run on Anthropic's side; they are recorded as ignored.
    ///
    /// # Errors
    /// A tool without a name.
    pub fn new(all: &[Value]) -> Result<OfferedTools, ApiError> {
        let mut offered = OfferedTools::default();
        let kind = |tool: &Value| tool["type"].as_str().unwrap_or("custom").to_owned();
        let searches = all.iter().any(|tool| kind(tool).starts_with(SEARCH));
        for (i, tool) in all.iter().enumerate() {
            let kind = kind(tool);
            if kind != "custom" {
                note_ignored(&format!("tools.{kind}"));
                continue;
            }
            let function = definition(&format!("tools.{i}"), tool)?;
            let is_deferred = tool["defer_loading"] == true && !searches;
            let list = if is_deferred { &mut offered.deferred } else { &mut offered.listed };
            list.push(function);
        }
        Ok(offered)
    }

    /// The text for a reference to a tool, which may be called from there on. `None`: there is no such tool.
    pub fn refer(&mut self, wanted: &str) -> Option<String> {
        let is = |tool: &&Value| name(tool) == wanted;
        if self.listed.iter().any(|tool| name(tool) == wanted) {
            return Some(format!("{wanted} can be called."));
        }
        let tool = self.introduced.iter().chain(&self.deferred).find(is)?.clone();
        let text = definition_text(&tool);
        self.introduce(tool);
        Some(text)
    }

    /// The text for a `tool_addition` or `tool_removal`. `None`: the block is neither, or names no tool.
    ///
    /// # Errors
    /// A tool without a name.
    pub fn change(&mut self, field: &str, block: &Value) -> Result<Option<String>, ApiError> {
        let tool = &block["tool"];
        let referred = tool["name"].as_str().or(tool["tool_name"].as_str());
        match (block["type"].as_str(), tool["type"].as_str(), referred) {
            (Some("tool_addition"), Some("tool_definition"), _) => {
                let tool = definition(&format!("{field}.tool.definition"), &tool["definition"])?;
                let text = definition_text(&tool);
                self.introduce(tool);
                Ok(Some(text))
            }
            (Some("tool_addition"), _, Some(wanted)) => Ok(self.refer(wanted)),
            (Some("tool_removal"), _, Some(gone)) => {
                self.introduced.retain(|tool| name(tool) != gone);
                Ok(Some(format!("{gone} can no longer be called.")))
            }
            _ => Ok(None),
        }
    }

    /// All tools that may be called: first those that the prompt lists, then the introduced ones, with the number of the latter.
    pub fn tools(self) -> (Option<Value>, usize) {
        let unlisted = self.introduced.len();
        let all: Vec<Value> = self.listed.into_iter().chain(self.introduced).collect();
        ((!all.is_empty()).then_some(Value::Array(all)), unlisted)
    }

    fn introduce(&mut self, tool: Value) {
        self.introduced.retain(|other| name(other) != name(&tool));
        self.introduced.push(tool);
    }
}

/// The tool as chat templates take it.
fn definition(field: &str, tool: &Value) -> Result<Value, ApiError> {
    let name = tool["name"]
        .as_str()
        .ok_or_else(|| ApiError::invalid_field(&format!("{field}.name"), "a tool needs a name"))?;
    Ok(function(name, tool.get("description"), tool.get("input_schema")))
}

/// The definition as text, in the form that Claude Code announces to its model.
fn definition_text(tool: &Value) -> String {
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

    fn names(offered: OfferedTools) -> (Vec<String>, usize) {
        let (tools, unlisted) = offered.tools();
        let names = tools.into_iter().flat_map(|tools| tools.as_array().unwrap().clone());
        (names.map(|tool| name(&tool).to_owned()).collect(), unlisted)
    }

    #[test]
    fn a_deferred_tool_is_known_from_where_it_is_referred_to() {
        let all = [tool("search", false), tool("fetch", true), tool("draw", true), tool("read", false)];
        assert_eq!(names(OfferedTools::new(&all).unwrap()), (vec!["search".into(), "read".into()], 0));
        let mut offered = OfferedTools::new(&all).unwrap();
        let text = offered.refer("fetch").unwrap();
        assert_eq!(
            text,
            "<functions>\n<function>{\"description\":\"D\",\"name\":\"fetch\",\"parameters\":{\"type\":\"object\"}}</function>\n</functions>"
        );
        assert_eq!(offered.refer("fetch").unwrap(), text);
        assert_eq!(offered.refer("read").unwrap(), "read can be called.");
        assert_eq!(offered.refer("paint"), None);
        assert_eq!(names(offered), (vec!["search".into(), "read".into(), "fetch".into()], 1));
        // With Anthropic's own search tool, nothing is deferred.
        let search = json!({"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"});
        let offered = OfferedTools::new(&[tool("fetch", true), search]).unwrap();
        assert_eq!(names(offered), (vec!["fetch".into()], 0));
    }

    #[test]
    fn tools_are_added_and_taken_away_in_the_midst_of_a_conversation() {
        let mut offered = OfferedTools::new(&[tool("read", false), tool("fetch", true)]).unwrap();
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
