//! Compiles grammars of answers: JSON, regular expressions, Lark, and calls of tools as a model family writes them.

use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use llguidance::api::TopLevelGrammar;
use llguidance::{Matcher, ParserFactory, TokenParser};
use serde_json::{Value, json};
use toktrie::{InferenceCapabilities, TokEnv};

use super::schema::rewrite;
use super::vocabulary::Vocabulary;
use crate::text::marks::{DSML, XTML_CLOSE, XTML_OPEN};
use crate::text::{Calls, Tokenizer};

/// Bytes of a schema, or of the schemas of all tools, at most.
pub(super) const MAX_SOURCE: usize = 256 << 10;
/// Bytes of a regular expression or a Lark grammar, at most.
const MAX_LARK: usize = 32 << 10;
/// States of the lexer while a grammar is used, at most: some 2 kB each.
const MAX_STATES: usize = 10_000;
/// Bytes of a new lexer, at most.
const MAX_LEXER: usize = 16 << 20;
/// Symbols of a compiled grammar, at most.
const MAX_GRAMMAR: usize = 200_000;
/// Time to compile. A thread that takes longer is abandoned, since it cannot be stopped.
const TIME: Duration = Duration::from_secs(10);
/// While this many abandoned threads run, nothing else is compiled.
const MAX_LATE: usize = 2;
/// Bytes of a compiling thread's stack. They are reserved, and only used by deeply nested grammars.
const STACK: usize = 256 << 20;
/// The form of an answer's text.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum GrammarFormat {
    /// Anything.
    #[default]
    Text,
    /// A JSON object.
    Object,
    /// JSON of this schema.
    Schema(Value),
    /// Text that matches this regular expression (the syntax of Rust's `regex`).
    Regex(String),
    /// Text of this grammar (llguidance's Lark).
    Lark(String),
}

/// Which tools an answer calls.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCallRules {
    /// `[{"type": "function", "function": {"name": .., "parameters": SCHEMA}}]`: the tools that may be called.
    pub tools: Value,
    /// Whether there may be several calls.
    pub several: bool,
    /// Whether there must be a call. Otherwise the answer may have its form instead, or without a form, be text with calls in it.
    pub must: bool,
    /// Tools whose schemas apply to calls within text. The arguments of other tools are free there.
    pub strict: Vec<String>,
}

/// Compiles grammars for a model.
pub struct Grammars {
    factory: Arc<ParserFactory>,
    tokenizer: Arc<Tokenizer>,
    /// Abandoned threads that still compile.
    late: Arc<AtomicUsize>,
}

/// Shared by a compiling thread and its caller, to agree on which of them was first.
#[derive(Default)]
struct Race {
    is_over: bool,
    is_given_up: bool,
}

impl Grammars {
    /// For a tokenizer, and the tokens that end an answer.
    ///
    /// # Errors
    /// A tokenizer that grammars cannot be compiled for.
    pub fn new(tokenizer: &Arc<Tokenizer>, stop_ids: &[u32]) -> Result<Grammars> {
        let vocabulary: TokEnv = Arc::new(Vocabulary::new(tokenizer, stop_ids)?);
        let can = InferenceCapabilities { ff_tokens: true, ..InferenceCapabilities::default() };
        let slices = llguidance::earley::SlicedBiasComputer::general_slices();
        let mut factory = ParserFactory::new(&vocabulary, can, &slices)?;
        factory.quiet();
        let limits = factory.limits_mut();
        limits.max_lexer_states = MAX_STATES;
        limits.max_grammar_size = MAX_GRAMMAR;
        limits.verbose_errors = false;
        Ok(Grammars { factory: Arc::new(factory), tokenizer: Arc::clone(tokenizer), late: Arc::default() })
    }

    /// Compiles the grammar of an answer with this form, or with these calls. It runs in a thread of its own, since grammars may nest deeply.
    ///
    /// # Errors
    /// A grammar that cannot be compiled, or not in time, with the reason.
    pub fn compile(
        &self,
        form: &GrammarFormat,
        called: Option<&ToolCallRules>,
        calls: Option<Calls>,
    ) -> Result<Matcher> {
        let grammar = match (called, form) {
            _ if calls == Some(Calls::Harmony) => TopLevelGrammar::from_lark(self.harmony(form, called)?),
            (Some(called), form) => {
                let calls =
                    calls.context("how this model writes calls is not known: tool_choice can be auto or none")?;
                let is_within_text = !called.must && *form == GrammarFormat::Text;
                let mut source = self.calls(called, calls, is_within_text)?;
                let text = match form {
                    _ if called.must || is_within_text => None,
                    GrammarFormat::Text => bail!("nothing is asked for"),
                    GrammarFormat::Object => Some(format!("%json {}", spaced(&json!({"type": "object"}))?)),
                    GrammarFormat::Schema(schema) => Some(format!("%json {}", spaced(schema)?)),
                    GrammarFormat::Regex(_) | GrammarFormat::Lark(_) => {
                        bail!("an answer of this form cannot call tools")
                    }
                };
                match text {
                    Some(text) if calls == Calls::Xtml => {
                        writeln!(source, "start: calls | text {}\ntext: {text}", self.xtml_end())?;
                    }
                    Some(text) => writeln!(source, "start: calls | text\ntext: {text}")?,
                    None if is_within_text => self.within_text(&mut source, calls, called.several)?,
                    None => writeln!(source, "start: calls")?,
                }
                ensure!(source.len() <= MAX_SOURCE, "the schemas have more than {MAX_SOURCE} bytes");
                TopLevelGrammar::from_lark(source)
            }
            (None, GrammarFormat::Text) => bail!("nothing is asked for"),
            (None, GrammarFormat::Object | GrammarFormat::Schema(_)) if calls == Some(Calls::Xtml) => {
                let object = json!({"type": "object"});
                let schema = if let GrammarFormat::Schema(schema) = form { schema } else { &object };
                ensure!(schema.to_string().len() <= MAX_SOURCE, "the schema has more than {MAX_SOURCE} bytes");
                ensure!(schema.is_object() || schema.is_boolean(), "a schema is an object");
                let text = spaced(schema)?;
                TopLevelGrammar::from_lark(format!("start: text {}\ntext: %json {text}", self.xtml_end()))
            }
            (None, GrammarFormat::Object) => TopLevelGrammar::from_json_schema(spaced(&json!({"type": "object"}))?),
            (None, GrammarFormat::Schema(schema)) => {
                let bytes = schema.to_string().len();
                ensure!(bytes <= MAX_SOURCE, "the schema has {bytes} bytes; {MAX_SOURCE} are accepted");
                ensure!(schema.is_object() || schema.is_boolean(), "a schema is an object");
                TopLevelGrammar::from_json_schema(spaced(schema)?)
            }
            (None, GrammarFormat::Regex(source)) => {
                ensure!(source.len() <= MAX_LARK, "the expression has more than {MAX_LARK} bytes");
                TopLevelGrammar::from_regex(source)
            }
            (None, GrammarFormat::Lark(source)) => {
                ensure!(source.len() <= MAX_LARK, "the grammar has more than {MAX_LARK} bytes");
                TopLevelGrammar::from_lark(source.clone())
            }
        };
        let begun = Instant::now();
        let make = move |factory: &ParserFactory| factory.create_parser(grammar);
        let parser = self.within(TIME, make).map_err(|e| {
            let own = called.and_then(|called| self.wrong_tool(called, TIME.saturating_sub(begun.elapsed())));
            own.unwrap_or_else(|| anyhow!("{}", one_line(&e)))
        })?;
        let bytes = parser.parser.lexer_stats().num_bytes;
        ensure!(bytes <= MAX_LEXER, "the grammar takes {bytes} bytes; {MAX_LEXER} are accepted");
        let matcher = Matcher::new(Ok(parser));
        match matcher.get_error() {
            Some(why) => Err(anyhow!("{}", one_line(&anyhow!(why)))),
            None => Ok(matcher),
        }
    }

    /// Finds the tool whose schema cannot be compiled, and why, if there is time left.
    fn wrong_tool(&self, called: &ToolCallRules, mut time: Duration) -> Option<anyhow::Error> {
        for tool in called.tools.as_array()? {
            let function = tool.get("function").unwrap_or(tool);
            if !called.must && !called.strict.is_empty() && !called.strict.iter().any(|name| function["name"] == **name)
            {
                continue;
            }
            let schema = function["parameters"].as_object().filter(|schema| !schema.is_empty());
            let Some(schema) = schema else { continue };
            let begun = Instant::now();
            let grammar = TopLevelGrammar::from_json_schema(spaced(&as_object(Value::Object(schema.clone()))).ok()?);
            let made = self.within(time, move |factory: &ParserFactory| factory.create_parser(grammar));
            if let Err(e) = made {
                return Some(anyhow!("the parameters of {}: {}", function["name"], one_line(&e)));
            }
            time = time.checked_sub(begun.elapsed())?;
        }
        None
    }

    /// Runs `make` in a thread, and waits for it no longer than `time`.
    fn within(
        &self,
        time: Duration,
        make: impl FnOnce(&ParserFactory) -> Result<TokenParser> + Send + 'static,
    ) -> Result<TokenParser> {
        ensure!(
            self.late.load(Ordering::Relaxed) < MAX_LATE,
            "other grammars that take too long are still being compiled; try again later"
        );
        let (tell, told) = channel();
        let race = Arc::new(Mutex::new(Race::default()));
        let (own, factory, late) = (Arc::clone(&race), Arc::clone(&self.factory), Arc::clone(&self.late));
        let compile = move || {
            let parser = sluice_store::catch_panic(|| make(&factory));
            let _ = tell.send(parser.unwrap_or_else(|_| Err(anyhow!("the grammar cannot be compiled"))));
            let mut race = own.lock().unwrap_or_else(PoisonError::into_inner);
            race.is_over = true;
            if race.is_given_up {
                late.fetch_sub(1, Ordering::Relaxed);
            }
        };
        thread::Builder::new().name("grammar".into()).stack_size(STACK).spawn(compile)?;
        match told.recv_timeout(time) {
            Ok(parser) => parser,
            Err(RecvTimeoutError::Disconnected) => Err(anyhow!("the grammar cannot be compiled")),
            Err(RecvTimeoutError::Timeout) => {
                let mut race = race.lock().unwrap_or_else(PoisonError::into_inner);
                if !race.is_over {
                    race.is_given_up = true;
                    self.late.fetch_add(1, Ordering::Relaxed);
                    bail!("it takes more than {} s to compile", time.as_secs());
                }
                told.try_recv()?
            }
        }
    }

    pub(super) fn is_token(&self, text: &str) -> bool {
        matches!(self.tokenizer.encode(text, false).as_deref(), Ok([_]))
    }

    /// A mark as a single token, or else as a string. DSML's sign in it may be a token, and XTML's around it are.
    pub(super) fn mark(&self, text: &str) -> String {
        match (self.tokenizer.encode(text, false).as_deref(), self.around_dsml(text)) {
            (Ok([id]), _) => format!("<[{id}]>"),
            (_, Some((before, behind))) => format!("{} {} {}", literal(before), self.mark(DSML), literal(behind)),
            _ if text.starts_with(XTML_OPEN) || text.starts_with(XTML_CLOSE) => self.tag(text),
            _ => literal(text),
        }
    }

    /// What is before and behind DSML's sign in a mark, if the sign is a token.
    pub(super) fn around_dsml<'a>(&self, text: &'a str) -> Option<(&'a str, &'a str)> {
        text.split_once(DSML)
            .filter(|(before, behind)| !(before.is_empty() && behind.is_empty()) && self.is_token(DSML))
    }
}

/// A text within a regular expression between slashes.
pub(super) fn expression(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            c if c.is_ascii_punctuation() && !"<>_:\"',;=!@%&~`-#".contains(c) => {
                out.push('\\');
                out.push(c);
            }
            c => out.push(c),
        }
    }
    out
}

/// A string in Lark, which is the same as in JSON.
pub(super) fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

pub(super) fn as_object(mut schema: Value) -> Value {
    if schema.get("type").is_none() && schema.get("anyOf").is_none() && schema.get("$ref").is_none() {
        schema["type"] = "object".into();
    }
    schema
}

/// Makes a schema's JSON have one space after commas and colons and no other white space, as models are trained to write it and templates print it.
///
/// # Errors
/// A schema that is too large.
pub(super) fn spaced(schema: &Value) -> Result<Value> {
    separated(schema, ", ", ": ")
}

/// The same without spaces, as gpt-oss writes arguments.
///
/// # Errors
/// A schema that is too large.
pub(super) fn compact(schema: &Value) -> Result<Value> {
    separated(schema, ",", ":")
}

fn separated(schema: &Value, items: &str, keys: &str) -> Result<Value> {
    let mut schema = rewrite(schema)?;
    if let Some(schema) = schema.as_object_mut()
        && !schema.contains_key("x-guidance")
    {
        let options = json!({"whitespace_flexible": false, "item_separator": items, "key_separator": keys});
        schema.insert("x-guidance".into(), options);
    }
    Ok(schema)
}

/// Error messages of llguidance, and how to say them to somebody who only knows their schema.
const REWORDED: [(&str, &str); 2] = [
    (
        "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf",
        "oneOf whose alternatives may hold at once cannot be kept to: say anyOf",
    ),
    ("Unimplemented keys:", "keywords that cannot be kept to:"),
];

fn one_line(error: &anyhow::Error) -> String {
    let mut text = format!("{error:#}");
    for (own, ours) in REWORDED {
        text = text.replace(own, ours);
    }
    text.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(400).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::mpsc::Sender;

    use super::*;

    type Make = Box<dyn FnOnce(&ParserFactory) -> Result<TokenParser> + Send>;

    #[test]
    fn what_takes_too_long_is_given_up_and_nothing_else_begins_until_it_ends() {
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
        let tokenizer = Arc::new(Tokenizer::load(&demo, None).unwrap());
        let grammars = Grammars::new(&tokenizer, &[2]).unwrap();
        let failed = |time, make: Make| grammars.within(time, make).err().expect("it fails").to_string();
        // 1. Two that do not end
        let slow = || -> (Sender<()>, String) {
            let (end, wait) = channel::<()>();
            let make = move |_: &ParserFactory| {
                let _ = wait.recv();
                bail!("too late")
            };
            (end, failed(Duration::ZERO, Box::new(make)))
        };
        let (all, said): (Vec<Sender<()>>, Vec<String>) = (0..MAX_LATE).map(|_| slow()).unzip();
        assert!(said.iter().all(|why| why.contains("takes more than 0 s")), "{said:?}");
        let quick = || failed(TIME, Box::new(|_: &ParserFactory| bail!("quick")));
        assert!(quick().contains("try again later"));
        // 2. They end
        drop(all);
        while grammars.late.load(Ordering::Relaxed) > 0 {
            thread::yield_now();
        }
        assert_eq!(quick(), "quick");
        // A panic is a reason like any other.
        let panics = failed(TIME, Box::new(|_: &ParserFactory| panic!("no")));
        assert!(panics.contains("cannot be compiled"), "{panics}");
    }
}
