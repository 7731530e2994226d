//! How a model family writes thoughts and calls.

use super::harmony::marks::{ALL, CHANNEL, MESSAGE};
use super::marks::{
    CALL, CALLED, DEEPSEEK_ARGUMENTS, DEEPSEEK_CALL, DEEPSEEK_CALLED, DEEPSEEK_CALLS, DEEPSEEK_CALLS_END, DSML,
    DSML_FUNCTIONS, DSML_FUNCTIONS_END, DSML_TOOLS, DSML_TOOLS_END, GEMMA_CALL, GEMMA_CALLED, GEMMA_CHANNEL,
    GEMMA_QUOTE, GEMMA_THINK, GEMMA_THOUGHT, KEY, KEYED, KIMI_ARGUMENTS, KIMI_CALL, KIMI_CALLED, KIMI_CALLS,
    KIMI_CALLS_END, LIST, LISTED, MINIMAX_CALL, MINIMAX_CALLED, MISTRAL_ARGUMENTS, MISTRAL_CALL, MISTRAL_ID,
    MISTRAL_THINK, MISTRAL_THOUGHT, THINK, THOUGHT, VALUE, VALUED, XTML_CLOSE, XTML_OPEN, XTML_RESPONSE, XTML_SEP,
    XTML_THINK, XTML_THOUGHT, XTML_TOOLS,
};
use crate::text::tokenizer::Tokenizer;

/// How calls are written, between `<tool_call>` and `</tool_call>` unless there are others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Calls {
    /// `{"name": .., "arguments": {..}}`: Hermes, Qwen2.5, Qwen3.
    Json,
    /// `<function=NAME>`, then each of `<parameter=NAME>`, value, `</parameter>` on lines of their own: Qwen3-Coder, Qwen3-Next, Qwen3.5.
    Xml,
    /// A name, then each of `<arg_key>NAME</arg_key>` and `<arg_value>VALUE</arg_value>`: GLM-4.5 to 4.7.
    Keys,
    /// Each of `<invoke name="NAME">`, its parameters in `<parameter name="NAME">VALUE</parameter>`, `</invoke>`, all between `<minimax:tool_call>` and
    /// `</minimax:tool_call>`: MiniMax-M2.
    Invokes,
    /// `[TOOL_CALLS]` and either a list as in [`Calls::List`], or a name, `[ARGS]` and an object: Mistral.
    Mistral,
    /// `[{"name": .., "arguments": {..}}, ..]` after `<|tool_call|>`: Phi-4-mini, Granite 3.
    List,
    /// In a section, each a name and an object between marks: DeepSeek-V3 and R1, whose objects are in a fence, and V3.1.
    DeepSeek,
    /// Each of `<｜DSML｜invoke name="NAME">`, its parameters in `<｜DSML｜parameter name="NAME" string="true|false">VALUE</｜DSML｜parameter>`,
    /// `</｜DSML｜invoke>`, all of them in a block: DeepSeek-V3.2 and V4.
    Dsml(DsmlBlock),
    /// As [`Calls::DeepSeek`] with Kimi's marks, and names such as `functions.NAME:0`: Kimi-K2.
    Kimi,
    /// Tags between tokens, also around thoughts and text. Each call is `<|open|>call tool="NAME" index="1"<|sep|>`, arguments such as
    /// `<|open|>argument key="NAME" type="number"<|sep|>VALUE<|close|>argument<|sep|>`, and `<|close|>call<|sep|>`: Kimi-K3.
    Xtml,
    /// `call:NAME{..}` between `<|tool_call>` and `<tool_call|>`, in a notation with bare names: Gemma 4.
    Gemma,
    /// A message to the tool, in the harmony format: gpt-oss.
    Harmony,
}

/// The block of DSML's calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DsmlBlock {
    /// `<｜DSML｜function_calls>`: DeepSeek-V3.2.
    Functions,
    /// `<｜DSML｜tool_calls>`: DeepSeek-V4.
    Tools,
}

impl DsmlBlock {
    /// What begins and ends it.
    pub(crate) fn marks(self) -> [&'static str; 2] {
        match self {
            DsmlBlock::Functions => [DSML_FUNCTIONS, DSML_FUNCTIONS_END],
            DsmlBlock::Tools => [DSML_TOOLS, DSML_TOOLS_END],
        }
    }
}

impl Calls {
    /// Line ends that the family writes between text and a call.
    pub(super) fn newlines(self) -> usize {
        match self {
            Calls::Json | Calls::Keys | Calls::Invokes => 1,
            Calls::Xml | Calls::Dsml(_) => 2,
            Calls::Mistral | Calls::List | Calls::DeepSeek | Calls::Kimi | Calls::Gemma => 0,
            Calls::Xtml | Calls::Harmony => 0,
        }
    }

    /// What begins calls.
    pub(super) fn mark(self) -> &'static str {
        match self {
            Calls::Json | Calls::Xml | Calls::Keys => CALL,
            Calls::Invokes => MINIMAX_CALL,
            Calls::Mistral => MISTRAL_CALL,
            Calls::List => LIST,
            Calls::DeepSeek => DEEPSEEK_CALLS,
            Calls::Dsml(block) => block.marks()[0],
            Calls::Kimi => KIMI_CALLS,
            Calls::Xtml => XTML_TOOLS,
            Calls::Gemma => GEMMA_CALL,
            Calls::Harmony => CHANNEL,
        }
    }

    /// All marks of calls that may be tokens of their own.
    pub(super) fn marks(self) -> &'static [&'static str] {
        match self {
            Calls::Json | Calls::Xml => &[CALL, CALLED],
            Calls::Keys => &[CALL, CALLED, KEY, KEYED, VALUE, VALUED],
            Calls::Invokes => &[MINIMAX_CALL, MINIMAX_CALLED],
            Calls::Mistral => &[MISTRAL_CALL, MISTRAL_ID, MISTRAL_ARGUMENTS],
            Calls::List => &[LIST, LISTED],
            Calls::DeepSeek => {
                &[DEEPSEEK_CALLS, DEEPSEEK_CALLS_END, DEEPSEEK_CALL, DEEPSEEK_CALLED, DEEPSEEK_ARGUMENTS]
            }
            Calls::Dsml(_) => &[DSML],
            Calls::Kimi => &[KIMI_CALLS, KIMI_CALLS_END, KIMI_CALL, KIMI_CALLED, KIMI_ARGUMENTS],
            Calls::Xtml => &[XTML_OPEN, XTML_CLOSE, XTML_SEP],
            Calls::Gemma => &[GEMMA_CALL, GEMMA_CALLED, GEMMA_QUOTE],
            Calls::Harmony => &ALL,
        }
    }
}

/// How a model writes thoughts and calls, and what its template does with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Style {
    /// Answers may begin with thoughts, between `<think>` and `</think>` or Mistral's marks, or in a channel of their own.
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
        if [XTML_OPEN, XTML_CLOSE, XTML_SEP].into_iter().all(has) {
            return Style { thoughts: true, calls: Some(Calls::Xtml), native: true, preserves: false };
        }
        let calls = if has(DSML) {
            Some(Calls::Dsml(if has("function_calls>") { DsmlBlock::Functions } else { DsmlBlock::Tools }))
        } else if has(GEMMA_CALL) {
            Some(Calls::Gemma)
        } else if has(DEEPSEEK_CALLS) {
            Some(Calls::DeepSeek)
        } else if has(KIMI_CALLS) {
            Some(Calls::Kimi)
        } else if has(KEY) {
            Some(Calls::Keys)
        } else if has(MINIMAX_CALL) {
            Some(Calls::Invokes)
        } else if has(MISTRAL_CALL) {
            Some(Calls::Mistral)
        } else if has(LIST) {
            Some(Calls::List)
        } else if has(CALL) {
            Some(if has("<function=") { Calls::Xml } else { Calls::Json })
        } else if has("tools") {
            None
        } else {
            Some(Calls::Json)
        };
        let thoughts = [THINK, THOUGHT, MISTRAL_THINK, GEMMA_THINK].into_iter().any(has);
        Style { thoughts, calls, native: has("tools"), preserves: has("preserve_thinking") }
    }

    /// What begins and ends thoughts.
    pub(super) fn thought_marks(&self) -> [&'static str; 2] {
        match self.calls {
            Some(Calls::Mistral) => [MISTRAL_THINK, MISTRAL_THOUGHT],
            Some(Calls::Gemma) => [GEMMA_THINK, GEMMA_THOUGHT],
            Some(Calls::Xtml) => [XTML_THINK, XTML_THOUGHT],
            _ => [THINK, THOUGHT],
        }
    }

    /// The tokens of these. XTML's begin and end any tag.
    pub(crate) fn thought_tokens(&self) -> [&'static str; 2] {
        match self.calls {
            Some(Calls::Gemma) => [GEMMA_CHANNEL, GEMMA_THOUGHT],
            Some(Calls::Xtml) => [XTML_OPEN, XTML_CLOSE],
            _ => self.thought_marks(),
        }
    }

    /// Whether thoughts are on lines of their own. Otherwise they are written as they are.
    pub(super) fn has_lines(&self) -> bool {
        !matches!(self.calls, Some(Calls::Dsml(_) | Calls::Kimi | Calls::Xtml | Calls::Mistral))
    }

    /// Line ends between a thought and the text, at most.
    pub(super) fn gap(&self) -> usize {
        if self.has_lines() && self.calls != Some(Calls::Gemma) { 2 } else { 0 }
    }

    /// Whether it writes everything in the harmony format.
    pub fn is_harmony(&self) -> bool {
        self.calls == Some(Calls::Harmony)
    }

    /// Whether it writes everything between XTML's tags.
    pub fn is_xtml(&self) -> bool {
        self.calls == Some(Calls::Xtml)
    }

    /// Whether a prompt of these tokens ends inside a thought.
    pub fn opened(&self, tokenizer: &Tokenizer, prompt: &[u32]) -> Opened {
        if !self.thoughts || self.is_harmony() {
            return Opened::No;
        }
        let tail = &prompt[prompt.len().saturating_sub(TAIL)..];
        let text = tokenizer.decode(tail, false).unwrap_or_default();
        let said = text.trim_end();
        let [think, thought] = self.thought_marks();
        // Behind an XTML thought, the text has to be begun.
        let thought = if self.is_xtml() { XTML_RESPONSE } else { thought };
        if said.ends_with(think) {
            Opened::Yes { line: text[said.len()..].contains('\n') }
        } else if said.ends_with(thought) {
            Opened::Closed
        } else {
            Opened::No
        }
    }
}
