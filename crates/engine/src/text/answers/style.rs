//! Which family's way of writing thoughts and calls a model has.

use super::super::tokenizer::Tokenizer;
use super::{CALL, THINK, THOUGHT};

/// How calls are written, between `<tool_call>` and `</tool_call>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Calls {
    /// `{"name": .., "arguments": {..}}`: Hermes, Qwen2.5, Qwen3.
    Json,
    /// `<function=NAME>`, then each of `<parameter=NAME>`, value, `</parameter>` on lines of their own: Qwen3-Coder, Qwen3-Next, Qwen3.5.
    Xml,
}

impl Calls {
    /// Line ends that the family writes between text and a call behind it.
    pub(super) fn newlines(self) -> usize {
        match self {
            Calls::Json => 1,
            Calls::Xml => 2,
        }
    }
}

/// How a model writes what is not plain text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Style {
    /// It may begin with thoughts, between `<think>` and `</think>`.
    pub thoughts: bool,
    /// `None`: in a way that is not known here. Its calls come as text.
    pub calls: Option<Calls>,
    /// The template writes tools and calls itself. Where it knows nothing of them, they are written into the messages.
    pub native: bool,
    /// The template keeps the thoughts of earlier answers where `preserve_thinking` says so.
    pub preserves: bool,
}

/// Whether the prompt has begun the thought that the answer goes on with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opened {
    No,
    /// And whether a line end is behind its mark.
    Yes {
        line: bool,
    },
    /// It was begun and ended: there is none.
    Closed,
}

/// Tokens at a prompt's end in which it is looked for: `<think>` and white space are few, also where `<think>` is spelled.
const TAIL: usize = 16;

impl Style {
    /// By the text of a model's templates: they hold the instructions that the model was trained with.
    pub fn of<'a>(templates: impl Iterator<Item = &'a str> + Clone) -> Style {
        let has = |part: &str| templates.clone().any(|t| t.contains(part));
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

    /// Whether a prompt of these tokens leaves the answer in a thought.
    pub fn opened(&self, tokenizer: &Tokenizer, prompt: &[u32]) -> Opened {
        if !self.thoughts {
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
