//! Constraints on an answer: a grammar that it must match, and a limit on its thoughts.
//!
//! llguidance compiles grammars over the bytes of the tokenizer's tokens. A [`guide::Guide`] follows the tokens of a sequence, and says which may come next and which
//! must. A thread makes the masks of allowed tokens while the step computes logits. Sequences without a constraint need none of this.

mod calls;
mod grammar;
mod guide;
mod harmony;
mod notation;
mod schema;
mod vocabulary;
mod xtml;

use std::fmt;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use llguidance::Matcher;
use toktrie::SimpleVob;

pub(crate) use grammar::Grammars;
pub use grammar::{GrammarFormat, ToolCallRules};
pub(crate) use guide::{Guide, Masks};
pub use schema::unknown_formats;

use crate::text::harmony_marks::{CHANNEL, END, MESSAGE, START};
use crate::text::marks::{GEMMA_THOUGHT, THOUGHT, XTML_CLOSE, XTML_RESPONSE, XTML_THOUGHT};
use crate::text::{ModelText, Opened, Style, Tokenizer};

/// What an answer has to be.
#[derive(Clone, Debug, Default)]
pub struct ConstraintSpec {
    /// The form of its text. Thoughts before it are not restricted.
    pub format: GrammarFormat,
    /// Tools that may or must be called instead.
    pub called: Option<ToolCallRules>,
    /// Tokens of thoughts, at most. Then the thought is ended.
    pub thinking_budget: Option<usize>,
}

/// A compiled constraint. Any number of sequences can share it: see [`crate::Generation::constraint`].
///
/// ```
/// use serde_json::json;
/// use sluice_engine::text::{ModelText, Opened};
/// use sluice_engine::{Constraint, ConstraintSpec, GrammarFormat};
/// # let folder = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/demo"));
///
/// let text = ModelText::load(folder, None)?;
/// let schema = json!({"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]});
/// let spec = ConstraintSpec { format: GrammarFormat::Schema(schema), ..ConstraintSpec::default() };
/// let constraint = Constraint::new(&text, &spec, Opened::No)?.expect("the answer is restricted");
/// assert!(constraint.allows(&text, r#"{"age": 7}"#)?);
/// assert!(!constraint.allows(&text, r#"{"age": "seven"}"#)?);
/// # anyhow::Ok(())
/// ```
#[derive(Clone)]
pub struct Constraint {
    grammar: Option<Matcher>,
    thought: Option<Thought>,
    /// Answers may have marks, which may be tokens of their own: of calls, or of the harmony format.
    has_marks: bool,
}

/// How thoughts are written, in tokens.
#[derive(Clone)]
struct Thought {
    /// Whether the prompt has begun one.
    opened: bool,
    begin: Option<u32>,
    /// In the harmony format: what must follow `begin` so that a message is a thought.
    channel: Option<u32>,
    end: u32,
    budget: Option<usize>,
    /// Ends a thought that has used up its budget.
    close: Vec<u32>,
    /// The same after a line end.
    close_line: Vec<u32>,
    /// Separates a thought from the text that the grammar is for.
    gap: Vec<u32>,
    /// All tokens except those that end an answer, if text must follow a thought.
    goes_on: Option<SimpleVob>,
    tokenizer: Arc<Tokenizer>,
}

impl fmt::Debug for Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let budget = self.thought.as_ref().map(|thought| thought.budget);
        f.debug_struct("Constraint").field("grammar", &self.grammar.is_some()).field("thought", &budget).finish()
    }
}

impl Constraint {
    /// Compiles a specification. `opened`: whether the prompt ends inside a thought. `None`: nothing is restricted.
    ///
    /// # Errors
    /// A schema or grammar that is too large or cannot be compiled, with the reason; a model whose format of thoughts or calls is unknown.
    pub fn new(text: &ModelText, spec: &ConstraintSpec, opened: Opened) -> Result<Option<Constraint>> {
        let style = text.template.as_ref().map(|template| template.style());
        let is_free = spec.called.is_none() && matches!(spec.format, GrammarFormat::Text);
        if is_free && spec.thinking_budget.is_none() {
            return Ok(None);
        }
        let grammar = if is_free {
            None
        } else {
            let calls = style.and_then(|style| style.calls);
            Some(text.grammars()?.compile(&spec.format, spec.called.as_ref(), calls)?)
        };
        let has_marks = spec.called.is_some() || style.is_some_and(|style| style.is_harmony());
        let thought = match (style.filter(|style| style.thoughts), opened) {
            (None, _) | (_, Opened::Closed) => None,
            // A grammar in the harmony format has the thoughts in it.
            (Some(style), _) if style.is_harmony() && grammar.is_some() => None,
            (Some(style), _) if style.is_harmony() => Thought::harmony(text, spec.thinking_budget)?,
            (Some(style), opened) => Thought::new(text, style, opened, spec.thinking_budget, grammar.is_some())?,
        };
        Ok((grammar.is_some() || thought.is_some()).then_some(Constraint { grammar, thought, has_marks }))
    }

    /// Whether `answer`, without thoughts, is a complete answer. Calls and the harmony format have their marks.
    ///
    /// # Errors
    /// A text that cannot be tokenised; a grammar that grows too large.
    pub fn allows(&self, text: &ModelText, answer: &str) -> Result<bool> {
        let Some(mut matcher) = self.grammar.clone() else { return Ok(true) };
        let tokens =
            if self.has_marks { text.tokenizer.encode(answer, false)? } else { text.tokenizer.encode_plain(answer)? };
        Ok(matcher.try_consume_tokens(&tokens)? == tokens.len() && matcher.is_accepting()?)
    }
}

impl Thought {
    fn new(
        text: &ModelText,
        style: Style,
        opened: Opened,
        budget: Option<usize>,
        more_follows: bool,
    ) -> Result<Option<Thought>> {
        let tokenizer = &text.tokenizer;
        let opened = matches!(opened, Opened::Yes { .. });
        let [begin, end_mark] = style.thought_tokens();
        let Some(end) = tokenizer.id(end_mark) else {
            ensure!(!opened && budget.is_none(), "this model's tokenizer has no token that ends a thought");
            return Ok(None);
        };
        let tokens = |text: &str| tokenizer.encode(text, false).context("the end of a thought");
        // As the family's template ends thoughts. Other marks than `</think>` have no line ends behind them.
        let said = text.template.as_ref().and_then(|template| template.thought_end()).unwrap_or("\n</think>\n\n");
        // Behind an XTML thought, the text begins that the grammar is for.
        let with_text = [XTML_THOUGHT, XTML_RESPONSE].concat();
        let whole = match end_mark {
            THOUGHT => said,
            GEMMA_THOUGHT => "\n<channel|>",
            XTML_CLOSE if more_follows => &with_text,
            XTML_CLOSE => XTML_THOUGHT,
            mark => mark,
        };
        let gap = &whole[whole.find(end_mark).map_or(whole.len(), |at| at + end_mark.len())..];
        let goes_on = more_follows.then(|| {
            let mut all = SimpleVob::alloc_ones(tokenizer.vocab_size());
            let stops = text.stop_ids.iter().filter(|id| (**id as usize) < all.len()).copied().collect::<Vec<u32>>();
            stops.into_iter().for_each(|id| all.disallow_token(id));
            // Nor can a thought begin one of XTML's tags.
            let tag = tokenizer.id(begin).filter(|_| style.is_xtml());
            tag.into_iter().for_each(|id| all.disallow_token(id));
            all
        });
        Ok(Some(Thought {
            opened,
            // XTML's begins any tag, and its templates begin thoughts.
            begin: tokenizer.id(begin).filter(|_| !style.is_xtml()),
            channel: None,
            end,
            budget,
            close: tokens(whole)?,
            close_line: tokens(whole.trim_start_matches('\n'))?,
            gap: tokens(gap)?,
            goes_on,
            tokenizer: Arc::clone(tokenizer),
        }))
    }

    /// In the harmony format: a message in the channel for thoughts. Behind one that is ended the text begins. `None` if the tokenizer has other tokens for this.
    fn harmony(text: &ModelText, budget: Option<usize>) -> Result<Option<Thought>> {
        let tokenizer = &text.tokenizer;
        let id = |mark: &str| tokenizer.id(mark);
        let analysis = tokenizer.encode("analysis", false).context("the channel of thoughts")?;
        let (Some(begin), Some(end), &[channel]) = (id(CHANNEL), id(END), &analysis[..]) else { return Ok(None) };
        let close = tokenizer.encode(&[END, START, "assistant", CHANNEL, "final", MESSAGE].concat(), false);
        let close = close.context("the end of a thought")?;
        Ok(Some(Thought {
            opened: false,
            begin: Some(begin),
            channel: Some(channel),
            end,
            budget,
            close_line: close.clone(),
            close,
            gap: Vec::new(),
            goes_on: None,
            tokenizer: Arc::clone(tokenizer),
        }))
    }

    fn ends_line(&self, token: u32) -> bool {
        self.tokenizer.bytes(token).is_some_and(|bytes| bytes.ends_with(b"\n"))
    }
}
