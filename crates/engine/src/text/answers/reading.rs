//! How the answers to one prompt are read.

use std::sync::Arc;

use serde_json::Value;

use super::{AnswerParser, CALL, CALLED, Opened, Style, THINK, THOUGHT, Tools};
use crate::text::{Detokenizer, ModelText, Tokenizer};

/// What is known of the answers to a prompt before they come.
#[derive(Clone, Debug)]
pub struct Reading {
    style: Style,
    tools: Option<Arc<Tools>>,
    opened: Opened,
}

impl Reading {
    /// Of answers to this prompt. `tools`: those that may be called, as templates take them; without any, calls are text.
    pub fn new(text: &ModelText, tools: Option<&Value>, prompt: &[u32]) -> Reading {
        let none = Style { thoughts: false, calls: None, native: true, preserves: false };
        let style = text.template.as_ref().map_or(none, |template| template.style());
        Reading {
            style,
            tools: tools.map(|list| Arc::new(Tools::new(list))),
            opened: style.opened(&text.tokenizer, prompt),
        }
    }

    /// Whether the prompt has begun a thought.
    pub fn opened(&self) -> Opened {
        self.opened
    }

    /// For one answer.
    pub fn parser(&self) -> AnswerParser {
        AnswerParser::new(self.style, self.tools.clone(), self.opened)
    }

    /// For one answer: special tokens that mean something are left in.
    pub fn detokenizer(&self, tokenizer: &Arc<Tokenizer>) -> Detokenizer {
        let thoughts = if self.style.thoughts { &[THINK, THOUGHT][..] } else { &[] };
        let calls = if self.tools.is_some() { &[CALL, CALLED][..] } else { &[] };
        Detokenizer::keeping(Arc::clone(tokenizer), &[thoughts, calls].concat())
    }
}
