//! How a model family writes thoughts and calls.

use super::harmony::marks::{CHANNEL, MESSAGE};
use super::marks::{CALL, THINK, THOUGHT};
use crate::text::tokenizer::Tokenizer;

/// How calls are written, between `<tool_call>` and `</tool_call>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Calls {
    /// `{"name": .., "arguments": {..}}`: Hermes, Qwen2.5, Qwen3.
    Json,
    /// `<function=NAME>`, then each of `<parameter=NAME>`, value, `</parameter>` on lines of their own: Qwen3-Coder, Qwen3-Next, Qwen3.5.
    Xml,
    /// A message to the tool, in the harmony format: gpt-oss.
    Harmony,
}

impl Calls {
    /// Line ends that the family writes between text and a call.
    pub(super) fn newlines(self) -> usize {
        match self {
            Calls::Json => 1,
            Calls::Xml => 2,
            Calls::Harmony => 0,
        }
    }
}

/// How a model writes thoughts and calls, and what its template does with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Style {
    /// Answers may begin with thoughts, between `<think>` and `</think>`, or in a channel of their own.
    pub thoughts: bool,
    /// How it writes calls; `None`: in an unknown way, so that calls are text.
    pub calls: Option<Calls>,
    /// Whether the template writes tools and calls. If not, they are written into the messages.
    pub native: bool,
    /// Whether the template keeps the thoughts of earlier answers if `preserve_thinking` is set.
    pub preserves: bool,
}

/// Whether the prompt ends inside a thought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opened {
    /// It does not mention thoughts.
    No,
    /// It has begun a thought, which the answer continues.
    Yes {
        /// Whether a line end follows the mark.
        line: bool,
    },
    /// It has begun and ended a thought, so the answer has none.
    Closed,
}

/// Tokens at a prompt's end that are searched: enough for `<think>` and white space, even if it is spelled out.
const TAIL: usize = 16;

impl Style {
    /// The style of a model with these templates, which contain the instructions that it was trained with.
    pub fn from_templates<'a>(templates: impl Iterator<Item = &'a str> + Clone) -> Style {
        let has = |part: &str| templates.clone().any(|t| t.contains(part));
        if has(CHANNEL) && has(MESSAGE) {
            return Style { thoughts: true, calls: Some(Calls::Harmony), native: true, preserves: false };
        }
        let calls = if has("<arg_key>") {
            None
        } else if has(CALL) {
            Some(if has("<function=") { Calls::Xml } else { Calls::Json })
        } else if has("tools") {
            None
        } else {
            Some(Calls::Json)
        };
        Style { thoughts: has(THINK) || has(THOUGHT), calls, native: has("tools"), preserves: has("preserve_thinking") }
    }

    /// Whether it writes everything in the harmony format.
    pub fn is_harmony(&self) -> bool {
        self.calls == Some(Calls::Harmony)
    }

    /// Whether a prompt of these tokens ends inside a thought.
    pub fn opened(&self, tokenizer: &Tokenizer, prompt: &[u32]) -> Opened {
        if !self.thoughts || self.is_harmony() {
            return Opened::No;
        }
        let tail = &prompt[prompt.len().saturating_sub(TAIL)..];
        let text = tokenizer.decode(tail, false).unwrap_or_default();
        let said = text.trim_end();
        if said.ends_with(THINK) {
            Opened::Yes { line: text[said.len()..].contains('\n') }
        } else if said.ends_with(THOUGHT) {
            Opened::Closed
        } else {
            Opened::No
        }
    }
}
