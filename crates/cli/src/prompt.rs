//! Makes one prompt of words on the command line, piped text and messages.

use std::ffi::OsString;
use std::io::{IsTerminal, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::Args;
use serde_json::{Map, Value};
use sluice_engine::source;
use sluice_engine::text::{ChatTemplate, Dialogue, Message, ModelText, Prompt, Tokenizer};

use crate::{hub, terminal};

/// How messages become the prompt; shared by `run` and `chat`.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Prompt")]
pub struct PromptArgs {
    /// Use the text as it is, without the chat template. Control tokens in it, such as <|im_end|>, are then parsed as control tokens, while without --raw they are plain
    /// text
    #[arg(long)]
    raw: bool,
    /// The system message
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    pub system: Option<String>,
    /// A variable for the chat template, such as enable_thinking=false; may be given several times
    #[arg(long = "template-arg", value_name = "KEY=JSON", value_parser = template_arg)]
    template_args: Vec<(String, Value)>,
}

fn template_arg(text: &str) -> Result<(String, Value)> {
    let (key, value) = text.split_once('=').filter(|(key, _)| !key.is_empty()).context("expected KEY=JSON")?;
    let value = serde_json::from_str(value)
        .map_err(|e| anyhow!("{value:?} is not JSON ({e}); a text needs quotes: '{key}=\"..\"'"))?;
    Ok((key.to_owned(), value))
}

impl PromptArgs {
    /// Whether messages go through a template: not with `--raw`, and not if the checkpoint has none, which is reported.
    pub fn has_template(&self, text: &ModelText) -> bool {
        if text.template.is_none() && !self.raw {
            terminal::note("this model has no chat template: the text goes in as it is");
        }
        text.template.is_some() && !self.raw
    }

    /// The prompt for `messages`, up to where the answer begins, and the points where similar conversations may diverge. The messages' content is plain text, except with
    /// `--raw`.
    pub fn rendering<'a>(&'a self, text: &'a ModelText, messages: &[Message]) -> Rendering<'a> {
        let template = text.template.as_ref().filter(|_| !self.raw);
        let messages = messages.iter().map(Message::to_json).collect();
        let extra = self.template_args.iter().cloned().collect();
        Rendering { template, tokenizer: &text.tokenizer, messages, extra, raw: self.raw }
    }

    /// Reports control tokens in `text` that `--raw` parses as such.
    pub fn say_raw_tokens(&self, tokenizer: &Tokenizer, text: &str) {
        let found: Vec<&str> =
            tokenizer.control_tokens().iter().map(String::as_str).filter(|t| text.contains(t)).collect();
        if self.raw && !found.is_empty() {
            terminal::note(&format!("--raw: taken as control tokens, not as text: {}", found.join(", ")));
        }
    }
}

/// A conversation, ready to be rendered.
pub struct Rendering<'a> {
    template: Option<&'a ChatTemplate>,
    tokenizer: &'a Tokenizer,
    messages: Vec<Value>,
    extra: Map<String, Value>,
    raw: bool,
}

impl Rendering<'_> {
    fn dialogue(&self) -> Dialogue<'_> {
        let Rendering { template, tokenizer, messages, extra, .. } = self;
        Dialogue { template: *template, tokenizer, messages, tools: None, extra }
    }

    /// The rendered prompt.
    pub fn prompt(&self) -> Result<Prompt> {
        let prompt = self.dialogue().prompt()?;
        Ok(if self.raw { Prompt::from(prompt.text().to_owned()) } else { prompt })
    }

    /// As [`Dialogue::snapshot_points`].
    pub fn snapshot_points(&self, tokens: &[u32]) -> Vec<usize> {
        self.dialogue().snapshot_points(tokens)
    }
}

/// The model and the prompt from `-m MODEL`, `-p PROMPT`, up to two words, and standard input. `None` for the model means the default.
///
/// # Errors
/// When there is no prompt; when a word looks like a model's path that does not exist; when there are too many words.
pub fn from_command_line(
    model: Option<PathBuf>,
    prompt: Option<OsString>,
    words: Vec<OsString>,
) -> Result<(Option<PathBuf>, String)> {
    let stdin = std::io::stdin();
    let piped = !stdin.is_terminal();
    let (model, word) = match prompt {
        Some(prompt) => (model_alone(model, words)?, Some(prompt)),
        None => sort_words(model, words, piped)?,
    };
    let mut text = match word {
        Some(word) => word.into_string().map_err(|w| anyhow!("the prompt is not UTF-8: {w:?}"))?,
        None => String::new(),
    };
    if piped {
        let mut input = String::new();
        stdin.lock().read_to_string(&mut input).context("standard input")?;
        join_piped(&mut text, &input);
    }
    ensure!(!text.trim().is_empty(), "there is no prompt: `sluice run \"Once upon a time\"`, or pipe a text in");
    Ok((model, text))
}

/// The model, if the prompt was given by a flag.
fn model_alone(model: Option<PathBuf>, words: Vec<OsString>) -> Result<Option<PathBuf>> {
    let mut words = words.into_iter();
    match (model, words.next(), words.next()) {
        (model, None, _) => Ok(model),
        (None, Some(word), None) => Ok(Some(word.into())),
        (_, Some(first), second) => {
            let extra = second.filter(|_| Path::new(&first).is_dir()).unwrap_or(first);
            bail!("the prompt is in --prompt, so what is {extra:?}? (quote a prompt of several words)")
        }
    }
}

/// Decides which of the words are the model and the prompt.
fn sort_words(
    model: Option<PathBuf>,
    words: Vec<OsString>,
    piped: bool,
) -> Result<(Option<PathBuf>, Option<OsString>)> {
    let hint = quoted_hint(model.is_some(), &words);
    if words.len() > 2 {
        bail!("{} words instead of one PROMPT, or MODEL and PROMPT: {hint}", words.len());
    }
    let mut words = words.into_iter();
    match (model, words.next(), words.next()) {
        (Some(_), Some(_), Some(second)) => bail!("with --model there is one PROMPT, so what is {second:?}? {hint}"),
        (model @ Some(_), word, _) => Ok((model, word)),
        (None, Some(first), Some(second)) => {
            let path = Path::new(&first);
            // An empty name has its own error later.
            let is_model = path.exists() || hub::may_be_name(path);
            ensure!(first.is_empty() || is_model, "{}: no such folder or file ({hint})", path.display());
            Ok((Some(first.into()), Some(second)))
        }
        (None, Some(only), None) => {
            let path = Path::new(&only);
            let is_name = hub::is_surely_name(path) && !hub::is_below_a_folder(path);
            let is_model = source::is_model(path) || hub::is_cached(path) || is_name;
            if (piped && (path.is_dir() || is_name)) || is_weights(path) {
                return Ok((Some(path.to_owned()), None));
            }
            ensure!(!is_model, "{}: this is a model; what is the prompt? (`sluice run MODEL PROMPT`)", path.display());
            ensure!(!looks_like_a_path(path), "{}: no such folder or file", path.display());
            Ok((None, Some(only)))
        }
        (None, None, _) => Ok((None, None)),
    }
}

/// A hint for users who typed a prompt as several words.
fn quoted_hint(model_is_named: bool, words: &[OsString]) -> String {
    let words: Vec<_> = words.iter().map(|w| w.to_string_lossy()).collect();
    let (model, prompt) = match &words[..] {
        [model, prompt @ ..]
            if !model_is_named
                && !prompt.is_empty()
                && (Path::new(&**model).exists() || hub::is_surely_name(Path::new(&**model))) =>
        {
            (format!("{model} "), prompt)
        }
        all => (String::new(), all),
    };
    format!("a prompt of several words needs quotes: sluice run {model}\"{}\"", prompt.join(" "))
}

/// Whether a path is a weight file; the loader has its own error for those.
fn is_weights(path: &Path) -> bool {
    let known = path.extension().and_then(|e| e.to_str()).is_some_and(|e| ["safetensors", "gguf"].contains(&e));
    known && path.is_file() || source::is_gguf(path)
}

/// Whether a word was meant as a path with a typo in its last part: "models/dmeo" if there is a folder "models", but not "and/or" and not a sentence.
fn looks_like_a_path(path: &Path) -> bool {
    let Some(text) = path.to_str() else { return true };
    let explicit = ["/", "./", "../"].iter().any(|p| text.starts_with(p));
    !text.contains(char::is_whitespace) && !path.exists() && (explicit || hub::is_below_a_folder(path))
}

/// Appends a blank line and the piped text, without the line end that `echo` adds.
fn join_piped(prompt: &mut String, input: &str) {
    let input = input.strip_suffix('\n').unwrap_or(input);
    let input = input.strip_suffix('\r').unwrap_or(input);
    if !prompt.is_empty() && !input.is_empty() {
        prompt.push_str("\n\n");
    }
    prompt.push_str(input);
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn sorted(model: Option<&str>, words: &[&str], piped: bool) -> Result<(Option<PathBuf>, Option<OsString>)> {
        sort_words(model.map(Into::into), words.iter().map(Into::into).collect(), piped)
    }

    #[test]
    fn one_word_is_the_prompt_unless_it_is_a_folder_and_text_is_piped() {
        let src = concat!(env!("CARGO_MANIFEST_DIR"), "/src");
        assert_eq!(sorted(None, &["Once upon a time"], false).unwrap(), (None, Some("Once upon a time".into())));
        assert_eq!(sorted(None, &["and/or"], true).unwrap(), (None, Some("and/or".into())));
        assert_eq!(sorted(None, &[src], true).unwrap(), (Some(src.into()), None));
        assert_eq!(sorted(None, &[src], false).unwrap(), (None, Some(src.into())));
        assert_eq!(sorted(None, &[], true).unwrap(), (None, None));
    }

    #[test]
    fn a_model_alone_is_no_prompt() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("snapshots")).unwrap();
        for model in [dir.path().to_str().unwrap(), "Qwen/Qwen3-0.6B", "hf:org/name"] {
            let refused = sorted(None, &[model], false).unwrap_err().to_string();
            assert!(refused.contains("this is a model"), "{refused}");
        }
        assert_eq!(sorted(None, &["org/name-8B:q4_0"], true).unwrap(), (Some("org/name-8B:q4_0".into()), None));
    }

    #[test]
    fn a_model_can_be_named_in_two_ways() {
        let src = concat!(env!("CARGO_MANIFEST_DIR"), "/src");
        assert_eq!(sorted(None, &[src, "hi"], true).unwrap(), (Some(src.into()), Some("hi".into())));
        assert_eq!(sorted(Some("a/b"), &["hi"], false).unwrap(), (Some("a/b".into()), Some("hi".into())));
        assert_eq!(sorted(Some("a/b"), &[], true).unwrap(), (Some("a/b".into()), None));
        sorted(Some("a/b"), &["hi", "there"], false).unwrap_err();
    }

    #[test]
    fn several_words_are_told_to_be_quoted() {
        let src = concat!(env!("CARGO_MANIFEST_DIR"), "/src");
        let in_src = format!("sluice run {src} \"Hello world\"");
        for (model, words, hint) in [
            (None, &["Hello", "world"][..], "sluice run \"Hello world\""),
            (None, &["Hello", "my", "world"], "sluice run \"Hello my world\""),
            (None, &[src, "Hello", "world"], &in_src),
            (Some(src), &["Hello", "world"], "sluice run \"Hello world\""),
        ] {
            let error = sorted(model, words, false).unwrap_err().to_string();
            assert!(error.contains(hint), "{error}");
        }
    }

    #[test]
    fn a_mistyped_path_is_not_a_prompt() {
        let wrong = concat!(env!("CARGO_MANIFEST_DIR"), "/scr");
        let error = sorted(None, &[wrong], false).unwrap_err().to_string();
        assert_eq!(error, format!("{wrong}: no such folder or file"));
    }

    #[test]
    fn piped_text_follows_the_prompt_after_a_blank_line() {
        for (prompt, input, whole) in [("Sum up:", "a\nb\n", "Sum up:\n\na\nb"), ("", "hi\r\n", "hi"), ("hi", "", "hi")]
        {
            let mut text = prompt.to_owned();
            join_piped(&mut text, input);
            assert_eq!(text, whole);
        }
    }

    #[test]
    fn template_arguments_are_json() {
        assert_eq!(template_arg("enable_thinking=false").unwrap(), ("enable_thinking".into(), json!(false)));
        assert!(template_arg("style=short").unwrap_err().to_string().contains("needs quotes"));
        template_arg("enable_thinking").unwrap_err();
    }
}
