//! What an answer must be: a grammar that it keeps to, and a number of tokens that it thinks for at most.
//!
//! A grammar is compiled by llguidance over the bytes of our own tokenizer's tokens. Of each sequence a [`guide::Guide`] follows the tokens: it says which may come next, and
//! which must. What may come next is found by a thread beside the step that computes the logits. Sequences without a constraint have none of this.

mod grammar;
mod guide;
mod schema;
mod vocabulary;

use std::fmt;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use llguidance::Matcher;
use toktrie::SimpleVob;

pub(crate) use grammar::Grammars;
pub use grammar::{Called, GrammarFormat};
pub(crate) use guide::{Guide, Masks};
pub use schema::unknown_formats;

use crate::text::{ModelText, Opened, Tokenizer};

/// What an answer is asked to be.
#[derive(Clone, Debug, Default)]
pub struct Demand {
    /// What its text is. Thoughts come before it and are free.
    pub form: GrammarFormat,
    /// Tools that are called instead of that, where they must be or may be.
    pub called: Option<Called>,
    /// Tokens of thoughts at most; then the thought is ended.
    pub thinking_budget: Option<usize>,
}

/// What a generation keeps to, compiled; any number of sequences may share it.
#[derive(Clone)]
pub struct Constraint {
    grammar: Option<Matcher>,
    thought: Option<Thought>,
}

/// Where thoughts are, in tokens.
#[derive(Clone)]
struct Thought {
    /// The prompt has begun it.
    opened: bool,
    begin: Option<u32>,
    end: u32,
    budget: Option<usize>,
    /// What ends a thought that has used up its budget, behind a line end or not.
    close: Vec<u32>,
    close_line: Vec<u32>,
    /// What stands between a thought and the text that a grammar is for.
    gap: Vec<u32>,
    /// All tokens but those that end an answer, where more must follow.
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
    /// What `demand` comes to for an answer to a prompt with this end; `None`: nothing.
    ///
    /// # Errors
    /// A schema or grammar that cannot be compiled, with the reason; one that is too large; a model whose thoughts or calls are not known.
    pub fn new(text: &ModelText, demand: &Demand, opened: Opened) -> Result<Option<Constraint>> {
        let style = text.template.as_ref().map(|template| template.style());
        let is_free = demand.called.is_none() && matches!(demand.form, GrammarFormat::Text);
        if is_free && demand.thinking_budget.is_none() {
            return Ok(None);
        }
        let grammar = if is_free {
            None
        } else {
            let calls = style.and_then(|style| style.calls);
            Some(text.grammars()?.compile(&demand.form, demand.called.as_ref(), calls)?)
        };
        let thought = match (style.filter(|style| style.thoughts), opened) {
            (None, _) | (_, Opened::Closed) => None,
            (Some(_), opened) => Thought::new(text, opened, demand.thinking_budget, grammar.is_some())?,
        };
        Ok((grammar.is_some() || thought.is_some()).then_some(Constraint { grammar, thought }))
    }

    /// Whether `answer`, which has no thoughts, is a whole one.
    ///
    /// # Errors
    /// A text that cannot be tokenised; a grammar that has become too large.
    pub fn allows(&self, text: &ModelText, answer: &str) -> Result<bool> {
        let Some(mut matcher) = self.grammar.clone() else { return Ok(true) };
        let tokens = text.tokenizer.encode_plain(answer)?;
        Ok(matcher.try_consume_tokens(&tokens)? == tokens.len() && matcher.is_accepting()?)
    }
}

impl Thought {
    fn new(text: &ModelText, opened: Opened, budget: Option<usize>, more_follows: bool) -> Result<Option<Thought>> {
        let tokenizer = &text.tokenizer;
        let opened = matches!(opened, Opened::Yes { .. });
        let Some(end) = tokenizer.id("</think>") else {
            ensure!(!opened && budget.is_none(), "this model's tokenizer has no token that ends a thought");
            return Ok(None);
        };
        let tokens = |text: &str| tokenizer.encode(text, false).context("the end of a thought");
        let goes_on = more_follows.then(|| {
            let mut all = SimpleVob::alloc_ones(tokenizer.vocab_size());
            let stops = text.stop_ids.iter().filter(|id| (**id as usize) < all.len()).copied().collect::<Vec<u32>>();
            stops.into_iter().for_each(|id| all.disallow_token(id));
            all
        });
        Ok(Some(Thought {
            opened,
            begin: tokenizer.id("<think>"),
            end,
            budget,
            close: tokens("\n</think>\n\n")?,
            close_line: tokens("</think>\n\n")?,
            gap: tokens("\n\n")?,
            goes_on,
            tokenizer: Arc::clone(tokenizer),
        }))
    }

    fn ends_line(&self, token: u32) -> bool {
        self.tokenizer.bytes(token).is_some_and(|bytes| bytes.ends_with(b"\n"))
    }
}
