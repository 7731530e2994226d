//! How the answers to one prompt are parsed.

use std::sync::Arc;

use serde_json::Value;

use super::harmony::marks::ALL;
use super::parser::AnswerParser;
use super::style::{Calls, Opened, Style};
use super::tools::Tools;
use crate::text::{Detokenizer, ModelText, Tokenizer};

/// What a prompt says about its answers. Makes the parser and detokenizer for each of them.
#[derive(Clone, Debug)]
pub struct Reading {
    style: Style,
    tools: Option<Arc<Tools>>,
    opened: Opened,
}

impl Reading {
    /// For answers to this prompt. `tools`: those that may be called, as templates take them; without any, calls are text.
    pub fn new(text: &ModelText, tools: Option<&Value>, prompt: &[u32]) -> Reading {
        let none = Style { thoughts: false, calls: None, native: true, preserves: false };
        let style = text.template.as_ref().map_or(none, |template| template.style());
        Reading {
            style,
            tools: tools.map(|list| Arc::new(Tools::new(list))),
            opened: style.opened(&text.tokenizer, prompt),
        }
    }

    /// The same for answers to another prompt.
    pub fn after(&self, tokenizer: &Tokenizer, prompt: &[u32]) -> Reading {
        Reading { opened: self.style.opened(tokenizer, prompt), ..self.clone() }
    }

    /// Whether the prompt ends inside a thought.
    pub fn opened(&self) -> Opened {
        self.opened
    }

    /// A parser for one answer.
    pub fn parser(&self) -> AnswerParser {
        AnswerParser::new(self.style, self.tools.clone(), self.opened)
    }

    /// A detokenizer for one answer. It keeps the special tokens that the parser looks for.
    pub fn detokenizer(&self, tokenizer: &Arc<Tokenizer>) -> Detokenizer {
        if self.style.is_harmony() {
            return Detokenizer::keeping(Arc::clone(tokenizer), &ALL);
        }
        if self.style.is_xtml() {
            return Detokenizer::keeping(Arc::clone(tokenizer), Calls::Xtml.marks());
        }
        let marks = self.style.thought_tokens();
        let thoughts = if self.style.thoughts { &marks[..] } else { &[] };
        let calls = if self.tools.is_some() { self.style.calls.map_or(&[][..], |calls| calls.marks()) } else { &[] };
        Detokenizer::keeping(Arc::clone(tokenizer), &[thoughts, calls].concat())
    }
}
