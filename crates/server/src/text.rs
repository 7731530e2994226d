//! Between what people say and token ids: rendering, encoding, and where prompts that begin alike may part.

use std::sync::Arc;

use anyhow::Result;
use serde_json::{Map, Value};
use sluice_engine::text::{ChatTemplate, GenerationDefaults, Prompt, Quoting, Tokenizer};

/// The text side of a model.
pub struct TextSide {
    pub tokenizer: Arc<Tokenizer>,
    pub template: Option<ChatTemplate>,
    pub defaults: GenerationDefaults,
    pub stop_ids: Vec<u32>,
}

/// A conversation as tokens.
pub struct Rendered {
    pub tokens: Vec<u32>,
    /// Places where a copy of a recurrent state is worth keeping.
    pub marks: Vec<usize>,
}

impl TextSide {
    /// The prompt for a conversation, up to where the answer begins. `with_marks`: where others may part from it is found out too, which takes a rendering each.
    ///
    /// # Errors
    /// Those of the template, and of a model that has none.
    pub fn chat(&self, messages: &[Value], extra: &Map<String, Value>, with_marks: bool) -> Result<Rendered> {
        let tokens = self.tokenizer.encode_prompt(&self.render(messages, true, extra)?, false)?;
        let mut marks = vec![tokens.len().saturating_sub(1)];
        if with_marks {
            // After the system prompt, and before the last message of the user.
            let is = |i: usize, role: &str| messages.get(i).is_some_and(|m| m["role"] == role);
            let system = (0..messages.len()).take_while(|i| is(*i, "system") || is(*i, "developer")).count();
            let last_user = (0..messages.len()).rev().find(|i| is(*i, "user"));
            for end in [Some(system), last_user].into_iter().flatten().filter(|end| (1..messages.len()).contains(end)) {
                // A template may refuse a conversation that ends there: then there is no mark.
                let part = self.render(&messages[..end], false, extra);
                let Ok(part) = part.and_then(|part| self.tokenizer.encode_prompt(&part, false)) else { continue };
                marks.push(part.iter().zip(&tokens).take_while(|(a, b)| a == b).count());
            }
        }
        Ok(Rendered { tokens, marks })
    }

    /// What messages say is text: a control token that is spelled in one stays a spelling.
    fn render(&self, messages: &[Value], prompts: bool, extra: &Map<String, Value>) -> Result<Prompt> {
        let Some(template) = &self.template else { anyhow::bail!("this model has no chat template") };
        let contents: Vec<&str> = messages.iter().map(|m| m["content"].as_str().unwrap_or("")).collect();
        let quoting = Quoting::new(self.tokenizer.control_tokens(), &contents)?;
        let quoted = messages.iter().zip(&contents).enumerate().map(|(i, (message, content))| {
            let mut message = message.clone();
            if message["content"].is_string() {
                message["content"] = Value::String(quoting.quote(i, content));
            }
            message
        });
        let list = Value::Array(quoted.collect());
        Ok(quoting.unquote(&template.render(&list, None, prompts, extra)?))
    }
}
