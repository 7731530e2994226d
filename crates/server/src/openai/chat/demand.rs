//! What a request demands of its answer, in the words of OpenAI's clients, vLLM's and llama-server's.

use serde::Deserialize;
use serde_json::{Value, json};
use sluice_engine::{Called, Demand, Form};

use crate::error::ApiError;

/// Tools of a request at most, and characters of a tool's name.
const MOST_TOOLS: usize = 512;
const NAME: usize = 128;

/// Fields of tools, and of what an answer is to be.
#[derive(Debug, Default, Deserialize)]
pub struct Fields {
    #[serde(default)]
    tools: Option<Vec<Value>>,
    #[serde(default)]
    tool_choice: Option<Value>,
    #[serde(default)]
    parallel_tool_calls: Option<bool>,
    #[serde(default)]
    response_format: Option<Value>,
    /// vLLM's: `json`, `regex`, `choice`, `grammar`, `json_object`.
    #[serde(default)]
    structured_outputs: Option<Value>,
    #[serde(default)]
    guided_json: Option<Value>,
    #[serde(default)]
    guided_regex: Option<Value>,
    #[serde(default)]
    guided_choice: Option<Value>,
    #[serde(default)]
    guided_grammar: Option<Value>,
    /// llama-server's.
    #[serde(default)]
    json_schema: Option<Value>,
    #[serde(default)]
    regex: Option<Value>,
    #[serde(default)]
    grammar: Option<Value>,
    /// Tokens of thoughts at most; below 0: any number.
    #[serde(default, alias = "thinking_budget", alias = "thinking_token_budget")]
    reasoning_budget: Option<i64>,
}

/// What becomes of a request's fields.
#[derive(Debug, Default)]
pub struct Demanded {
    /// As templates take them.
    pub tools: Option<Value>,
    /// Calls are read as such.
    pub reads_calls: bool,
    pub demand: Demand,
}

impl Fields {
    /// # Errors
    /// A field that cannot be what it is, and fields that contradict each other.
    pub fn demanded(&self) -> Result<Demanded, ApiError> {
        let tools = self.tools()?;
        let (form, _) = self.form()?;
        let several = self.parallel_tool_calls.unwrap_or(true);
        let unknown = |choice: &Value| ApiError::invalid("tool_choice", format!("tool_choice cannot be {choice}"));
        let mut called = None;
        let mut reads_calls = tools.is_some();
        match &self.tool_choice {
            None | Some(Value::Null) => {}
            Some(Value::String(word)) if word == "auto" => {}
            Some(Value::String(word)) if word == "none" => reads_calls = false,
            Some(Value::String(word)) if word == "required" => {
                let tools =
                    tools.clone().ok_or_else(|| ApiError::invalid("tool_choice", "there are no tools to call"))?;
                called = Some(Called { tools, several, must: true });
            }
            Some(choice) if choice["type"] == "function" => {
                let name =
                    choice["function"]["name"].as_str().or(choice["name"].as_str()).ok_or_else(|| unknown(choice))?;
                let all = tools.as_ref().and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
                let tool = all.iter().find(|tool| tool["function"]["name"] == name);
                let tool =
                    tool.ok_or_else(|| ApiError::invalid("tool_choice", format!("there is no tool {name:?}")))?;
                called = Some(Called { tools: json!([tool]), several: false, must: true });
            }
            Some(choice) => return Err(unknown(choice)),
        }
        if let (None, Some(tools), true) = (&called, &tools, reads_calls && form != Form::Text) {
            called = Some(Called { tools: tools.clone(), several, must: false });
        }
        let form = if called.as_ref().is_some_and(|called| called.must) { Form::Text } else { form };
        let thinking_budget = self.reasoning_budget.and_then(|tokens| usize::try_from(tokens).ok());
        Ok(Demanded { tools, reads_calls, demand: Demand { form, called, thinking_budget } })
    }

    /// The field that a wrong form is to be blamed on.
    pub fn blame(&self) -> &'static str {
        match self.form() {
            Ok((Form::Text, _)) | Err(_) => "tools",
            Ok((_, field)) => field,
        }
    }

    fn tools(&self) -> Result<Option<Value>, ApiError> {
        let mut tools = Vec::new();
        for (i, tool) in self.tools.iter().flatten().enumerate() {
            let wrong = |what: String| ApiError::invalid(&format!("tools[{i}]"), format!("tools[{i}]{what}"));
            // What a client's own side would do is nothing that a model can be told of.
            if tool["type"].as_str().is_some_and(|kind| kind != "function") {
                continue;
            }
            let name = tool["function"]["name"].as_str().ok_or_else(|| wrong(" has no function.name".into()))?;
            let is_fit = |c: char| !c.is_control() && !c.is_whitespace() && !"\"\\<>".contains(c);
            if name.is_empty() || name.chars().count() > NAME || !name.chars().all(is_fit) {
                return Err(wrong(format!(": {name:?} is no name for a function")));
            }
            if !matches!(tool["function"].get("parameters"), None | Some(Value::Null | Value::Object(_))) {
                return Err(wrong(".function.parameters is no schema".into()));
            }
            tools.push(tool.clone());
        }
        if tools.len() > MOST_TOOLS {
            return Err(ApiError::invalid("tools", format!("at most {MOST_TOOLS} tools are accepted")));
        }
        Ok((!tools.is_empty()).then(|| Value::Array(tools)))
    }

    /// The form that is asked for, and by which field.
    fn form(&self) -> Result<(Form, &'static str), ApiError> {
        let mut forms = Vec::new();
        let format = "response_format";
        match &self.response_format {
            None | Some(Value::Null) => {}
            Some(asked) => match asked["type"].as_str() {
                Some("text") => {}
                Some("json_object") if asked["schema"].is_object() => {
                    forms.push((Form::Schema(asked["schema"].clone()), format));
                }
                Some("json_object") => forms.push((Form::Object, format)),
                Some("json_schema") => {
                    let schema = [&asked["json_schema"]["schema"], &asked["schema"]].into_iter().find(|s| !s.is_null());
                    let schema =
                        schema.ok_or_else(|| ApiError::invalid(format, "response_format has no json_schema.schema"))?;
                    forms.push((Form::Schema(schema.clone()), format));
                }
                Some("regex") => forms.push((Form::Regex(text(format, first(asked, &["regex", "pattern"]))?), format)),
                Some("grammar") => forms.push((lark(format, &asked["grammar"])?, format)),
                _ => {
                    let message = "response_format.type must be text, json_object, json_schema, regex or grammar";
                    return Err(ApiError::invalid(format, message));
                }
            },
        }
        let structured = self.structured_outputs.as_ref().unwrap_or(&Value::Null);
        if structured["json_object"] == true {
            forms.push((Form::Object, "structured_outputs"));
        }
        let given = |value: &Option<Value>| value.clone().filter(|v| !v.is_null());
        let within = |name: &str| Some(structured[name].clone()).filter(|v| !v.is_null());
        for (value, field) in [
            (within("json"), "structured_outputs"),
            (given(&self.guided_json), "guided_json"),
            (given(&self.json_schema), "json_schema"),
        ] {
            // Some send the schema's text.
            let read = |value| match value {
                Value::String(json) => {
                    serde_json::from_str(&json).map_err(|e| ApiError::invalid(field, format!("{field}: {e}")))
                }
                other => Ok(other),
            };
            forms.extend(value.map(read).transpose()?.map(|schema| (Form::Schema(schema), field)));
        }
        for (value, field) in [
            (within("regex"), "structured_outputs"),
            (given(&self.guided_regex), "guided_regex"),
            (given(&self.regex), "regex"),
        ] {
            forms.extend(value.map(|v| text(field, &v)).transpose()?.map(|regex| (Form::Regex(regex), field)));
        }
        for (value, field) in [
            (within("grammar"), "structured_outputs"),
            (given(&self.guided_grammar), "guided_grammar"),
            (given(&self.grammar), "grammar"),
        ] {
            forms.extend(value.map(|v| lark(field, &v)).transpose()?.map(|form| (form, field)));
        }
        for (value, field) in [(within("choice"), "structured_outputs"), (given(&self.guided_choice), "guided_choice")]
        {
            forms.extend(value.map(|v| one_of(field, &v)).transpose()?.map(|form| (form, field)));
        }
        match forms.len() {
            0 => Ok((Form::Text, format)),
            1 => Ok(forms.remove(0)),
            _ => Err(ApiError::invalid(
                forms[1].1,
                format!("{} and {} both say what the answer is", forms[0].1, forms[1].1),
            )),
        }
    }
}

fn first<'a>(value: &'a Value, names: &[&str]) -> &'a Value {
    names.iter().map(|name| &value[*name]).find(|v| !v.is_null()).unwrap_or(&Value::Null)
}

fn text(field: &str, value: &Value) -> Result<String, ApiError> {
    let text = value.as_str().filter(|text| !text.is_empty());
    text.map(str::to_owned).ok_or_else(|| ApiError::invalid(field, format!("{field} must be a text")))
}

fn lark(field: &str, value: &Value) -> Result<Form, ApiError> {
    let source = text(field, value)?;
    if source.contains("::=") {
        return Err(ApiError::invalid(
            field,
            format!("{field}: grammars are in Lark (start: ..); this one is in GBNF"),
        ));
    }
    Ok(Form::Lark(source))
}

fn one_of(field: &str, value: &Value) -> Result<Form, ApiError> {
    let texts = value.as_array().map(|all| all.iter().map(Value::as_str).collect::<Option<Vec<&str>>>());
    match texts {
        Some(Some(texts)) if !texts.is_empty() => {
            let texts: Vec<String> = texts.into_iter().map(|text| Value::from(text).to_string()).collect();
            Ok(Form::Lark(format!("start: {}", texts.join(" | "))))
        }
        _ => Err(ApiError::invalid(field, format!("{field}: a choice is a list of texts"))),
    }
}
