//! The harmony format of gpt-oss. An answer is a list of messages, each with a header that names a channel: `analysis` is a thought, `final` is text, and
//! `commentary` is a call where it has a recipient, else text before one. Source: OpenAI's description of the format, and the chat template of the models.
//!
//! ```text
//! <|start|>assistant<|channel|>analysis<|message|>THOUGHT<|end|>
//! <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>
//! <|start|>assistant<|channel|>final<|message|>TEXT<|return|>
//! ```

mod history;
pub(crate) mod marks;
mod parser;

use serde_json::{Map, Value};

pub(super) use history::{history, message_around};
pub(super) use parser::HarmonyParser;

/// The variable of templates that says how long to think.
const EFFORT: &str = "reasoning_effort";

/// Makes what a request says of thinking one of the efforts that the models know: low, medium and high. They always think.
pub(in crate::text) fn effort(variables: &mut Map<String, Value>) {
    let effort = match variables.get(EFFORT).and_then(Value::as_str) {
        Some("none" | "minimal") => "low",
        Some("xhigh" | "max") => "high",
        None if variables.get("enable_thinking") == Some(&Value::Bool(false)) => "low",
        _ => return,
    };
    variables.insert(EFFORT.into(), effort.into());
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn efforts_are_those_that_the_models_know() {
        for (said, wanted) in [
            (json!({"reasoning_effort": "none"}), json!("low")),
            (json!({"reasoning_effort": "minimal"}), json!("low")),
            (json!({"reasoning_effort": "medium", "enable_thinking": false}), json!("medium")),
            (json!({"reasoning_effort": "max"}), json!("high")),
            (json!({"enable_thinking": false}), json!("low")),
            (json!({"enable_thinking": true}), Value::Null),
        ] {
            let mut variables = said.as_object().unwrap().clone();
            effort(&mut variables);
            assert_eq!(variables.get(EFFORT).unwrap_or(&Value::Null), &wanted, "{said}");
        }
    }
}
