//! The checkpoint's chat template, rendered as `transformers` renders it.
//!
//! A template is a program by whoever published the checkpoint. It sees nothing but the conversation, and runs in a process of its own where it can do no harm
//! ([`sandbox`]). This file finds a checkpoint's templates and gives them their input.

mod errors;
mod filters;
mod jinja;
mod own;
mod percent;
mod printf;
mod python;
mod repr;
mod sandbox;
mod strings;
pub(in crate::text) mod tojson;
mod wordwrap;

use super::answers::Style;
use super::answers::marks::THOUGHT;
use super::files::read_json;
use super::tokenizer::special::SpecialTokens;
use anyhow::{Context, Result, anyhow, bail};
use jiff::civil::DateTime;
use jinja::{Rendering, Templates};
use sandbox::Apart;
pub use sandbox::{Patience, serve_templates};
use serde_json::{Map, Value as Json, json};
use sluice_model::source::{TextFiles, is_missing};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

/// Bytes of a template file, at most. The longest known ones have a tenth of a megabyte.
const MAX_TEMPLATE: u64 = 4 << 20;

/// The file of a model's template, and the folder of further ones.
const JINJA: &str = "chat_template.jinja";
const MORE: &str = "additional_chat_templates";

/// The templates of a checkpoint.
struct Sources {
    /// Their file, for messages.
    file: PathBuf,
    /// (name, text).
    templates: Vec<(String, String)>,
    /// A note for the user if they are not the checkpoint's.
    note: Option<String>,
}

/// Finds the templates of a checkpoint; `None` if it has none. They are in `chat_template.jinja`, with more of them in `additional_chat_templates/`; or in
/// `chat_template` of `tokenizer_config.json`, which is a string or a list of named ones; or in `chat_template.json`. Some model types have one of ours instead.
fn sources(files: &dyn TextFiles) -> Result<Option<Sources>> {
    if let Some(default) = read_text(files, JINJA)? {
        let mut templates = vec![("default".to_owned(), default)];
        for (file, _) in files.list(MORE)? {
            if let Some(name) = file.strip_suffix(".jinja").filter(|name| !name.is_empty())
                && let Some(text) = read_text(files, &format!("{MORE}/{file}"))?
            {
                templates.push((name.to_owned(), text));
            }
        }
        return Ok(Some(Sources { file: files.locate(JINJA), templates, note: None }));
    }
    for name in ["tokenizer_config.json", "chat_template.json"] {
        let file = files.locate(name);
        let json = read_json(files, name)?.unwrap_or(Json::Null);
        if let Some(templates) = named_templates(&json["chat_template"]).with_context(|| file.display().to_string())? {
            return Ok(Some(Sources { file, templates, note: None }));
        }
    }
    let own = |(name, source): (&str, &str)| Sources {
        file: format!("Sluice's {name}.jinja").into(),
        templates: vec![("default".to_owned(), source.to_owned())],
        note: Some(format!("this checkpoint has no chat template: Sluice's own for {name} is used")),
    };
    Ok(own::template(files)?.map(own))
}

/// A compiled chat template, or several with names.
///
/// ```
/// use serde_json::{Map, json};
/// use sluice_engine::text::ChatTemplate;
///
/// let source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}";
/// let template = ChatTemplate::parse(source)?;
/// let messages = json!([{"role": "user", "content": "Hello"}]);
/// assert_eq!(template.render(&messages, None, true, &Map::new())?, "user: Hello\nassistant:");
/// # anyhow::Ok(())
/// ```
pub struct ChatTemplate {
    /// Its file, for messages.
    file: PathBuf,
    names: Vec<String>,
    special_tokens: Map<String, Json>,
    /// A fixed local time for templates; `None`: the current time.
    clock: Mutex<Option<DateTime>>,
    patience: Mutex<Patience>,
    renderer: Renderer,
    style: Style,
    has_efforts: bool,
    writes_calls: bool,
    thought_end: Option<String>,
    notes: Vec<String>,
}

/// Where templates run.
enum Renderer {
    /// In a process of its own, with limits of memory and time.
    Apart(Apart),
    /// In this process. Fuel, stack and output are limited, but a single expression may use any amount of memory.
    Here(Box<Templates>),
}

impl ChatTemplate {
    /// Compiles the template of a checkpoint, if it has one.
    ///
    /// # Errors
    /// A file that cannot be read, or a template that is not valid Jinja. The message names file and line.
    pub fn load(files: impl TextFiles) -> Result<Option<Self>> {
        let Some(Sources { file, templates, note }) = sources(&files)? else { return Ok(None) };
        let mut template = Self::compile(file, templates, SpecialTokens::load(&files)?.names())?;
        template.notes.extend(note);
        Ok(Some(template))
    }

    /// The style of a checkpoint's template, without compiling it.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn style_of(files: impl TextFiles) -> Result<Option<Style>> {
        let found = sources(&files)?;
        Ok(found.map(|found| Style::from_templates(found.templates.iter().map(|(_, source)| source.as_str()))))
    }

    fn compile(file: PathBuf, templates: Vec<(String, String)>, special_tokens: Map<String, Json>) -> Result<Self> {
        let names = templates.iter().map(|(name, _)| name.clone()).collect();
        let style = Style::from_templates(templates.iter().map(|(_, source)| source.as_str()));
        let has_efforts = templates.iter().any(|(_, source)| source.contains("reasoning_effort"));
        let writes_calls = templates.iter().any(|(_, source)| source.contains("tool_calls"));
        let thought_end = templates.iter().filter_map(|(_, source)| thought_end(source)).max_by_key(String::len);
        let wrong = |e: String| anyhow!("{}: chat template: {e}", file.display());
        let mut notes = Vec::new();
        let apart = if sandbox::is_possible() { Some(Apart::start(&templates)) } else { None };
        let renderer = match apart {
            Some(Ok(started)) => Renderer::Apart(started.map_err(wrong)?),
            Some(Err(e)) => {
                notes.push(format!(
                    "the chat template runs in this process, its memory unbounded: no other could be started ({e})"
                ));
                Renderer::Here(Box::new(Templates::compile(&templates).map_err(wrong)?))
            }
            None => Renderer::Here(Box::new(Templates::compile(&templates).map_err(wrong)?)),
        };
        Ok(Self {
            file,
            names,
            special_tokens,
            clock: Mutex::default(),
            patience: Mutex::default(),
            renderer,
            style,
            has_efforts,
            writes_calls,
            thought_end,
            notes,
        })
    }

    /// Compiles the text of a template.
    ///
    /// # Errors
    /// Those of [`ChatTemplate::load`].
    pub fn parse(source: &str) -> Result<Self> {
        Self::compile(JINJA.into(), vec![("default".into(), source.into())], Map::new())
    }

    /// How the model writes thoughts and calls, according to the template's text.
    pub fn style(&self) -> Style {
        self.style
    }

    /// Whether it takes `reasoning_effort`.
    pub fn has_efforts(&self) -> bool {
        self.has_efforts
    }

    /// Whether it writes the calls of earlier answers.
    pub(super) fn writes_calls(&self) -> bool {
        self.writes_calls
    }

    /// What it writes at the end of a thought: `</think>`, and line ends before and behind it. `None`: it does not say.
    pub(crate) fn thought_end(&self) -> Option<&str> {
        self.thought_end.as_deref()
    }

    /// Notes for the user: whether the template is one of ours, and if it does not run in a process of its own.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// An error of the template without its path, for remote clients.
    pub fn told(&self, error: &anyhow::Error) -> String {
        let (said, file) = (format!("{error:#}"), format!("{}: ", self.file.display()));
        said.strip_prefix(&file).map_or(said.clone(), str::to_owned)
    }

    /// Fixes the time that the template sees, as local time: `2026-01-31T12:00:00`. Then a date in the system prompt stays the same, and the prompt's blocks can be
    /// reused.
    pub fn set_time(&self, local_time: &str) -> Result<()> {
        let time = local_time.parse().with_context(|| format!("no date and time: {local_time:?}"))?;
        *self.clock.lock().unwrap_or_else(PoisonError::into_inner) = Some(time);
        Ok(())
    }

    /// Sets how long a rendering may take, if templates run in a process of their own.
    pub fn set_patience(&self, patience: Patience) {
        *self.patience.lock().unwrap_or_else(PoisonError::into_inner) = patience;
    }

    /// Renders a conversation. `messages`: a list of objects with `role` and `content`; `tools`: a list of JSON schemas; `extra`: more variables for the template
    /// (`enable_thinking`, `documents`), which override the standard ones.
    ///
    /// # Errors
    /// Errors that the template raises, mistakes in it, and a template that takes too long or writes too much.
    pub fn render(
        &self,
        messages: &Json,
        tools: Option<&Json>,
        add_generation_prompt: bool,
        extra: &Map<String, Json>,
    ) -> Result<String> {
        // 1. choose a named template
        let name = match &self.names[..] {
            [only] => only,
            names => {
                let wanted = |want: &str| names.iter().find(|name| *name == want);
                let tool_use = if tools.is_some() { wanted("tool_use") } else { None };
                tool_use.or_else(|| wanted("default")).with_context(|| {
                    format!(
                        "{}: several chat templates ({}), none of them named default",
                        self.file.display(),
                        names.join(", ")
                    )
                })?
            }
        };

        // 2. its variables
        let mut context = self.special_tokens.clone();
        context.insert("messages".into(), plain_messages(messages)?);
        context.insert("tools".into(), tools.cloned().unwrap_or(Json::Null));
        context.insert("documents".into(), Json::Null);
        context.insert("add_generation_prompt".into(), add_generation_prompt.into());
        context.extend(extra.clone());

        // 3. run it
        let time = *self.clock.lock().unwrap_or_else(PoisonError::into_inner);
        let rendering = Rendering { name: name.clone(), time, context: Json::Object(context) };
        let rendered = match &self.renderer {
            Renderer::Apart(apart) => {
                let patience = *self.patience.lock().unwrap_or_else(PoisonError::into_inner);
                apart.run(&rendering, patience)
            }
            Renderer::Here(templates) => templates.run(&rendering),
        };
        rendered.map_err(|e| anyhow!("{}: chat template{e}", self.file.display()))
    }
}

/// The most that a template writes at the end of a thought, with the line ends that are in the same text or in one that is appended to it.
fn thought_end(source: &str) -> Option<String> {
    const LINE: &str = "\\n";
    let joined: String = source.split("' ~ '").flat_map(|part| part.split("' + '")).collect();
    let parts: Vec<&str> = joined.split(THOUGHT).collect();
    let ends = parts.windows(2).map(|pair| {
        let line = if pair[0].ends_with(LINE) { "\n" } else { "" };
        let gap = (0..2).take_while(|i| pair[1].get(i * LINE.len()..).is_some_and(|rest| rest.starts_with(LINE)));
        format!("{line}{THOUGHT}{}", "\n".repeat(gap.count()))
    });
    ends.max_by_key(String::len)
}

/// The text of a file, if it is there.
fn read_text(files: &dyn TextFiles, name: &str) -> Result<Option<String>> {
    let bytes = match files.read(name, MAX_TEMPLATE) {
        Ok(bytes) => bytes,
        Err(e) if is_missing(&e) => return Ok(None),
        Err(e) => return Err(e.into()),
    };
    let text = String::from_utf8(bytes).map_err(|e| e.utf8_error());
    text.map(Some).with_context(|| files.locate(name).display().to_string())
}

/// A template, or a list of `{"name": .., "template": ..}`.
fn named_templates(value: &Json) -> Result<Option<Vec<(String, String)>>> {
    match value {
        Json::Null => Ok(None),
        Json::String(source) => Ok(Some(vec![("default".into(), source.clone())])),
        Json::Array(list) if !list.is_empty() => {
            let one = |entry: &Json| {
                let text = |field: &str| entry[field].as_str().map(str::to_owned);
                text("name").zip(text("template")).context("chat_template: an entry without name or template")
            };
            list.iter().map(one).collect::<Result<_>>().map(Some)
        }
        _ => bail!("chat_template is neither a string nor a list of named templates"),
    }
}

/// The messages as transformers passes them: without null fields, and with a message's reasoning under all of its names.
fn plain_messages(messages: &Json) -> Result<Json> {
    let Some(list) = messages.as_array().filter(|list| !list.is_empty()) else {
        bail!("a chat template needs a list with at least one message");
    };
    let mut plain = Vec::with_capacity(list.len());
    for message in list {
        let Some(fields) = message.as_object() else { bail!("a message is not an object: {message}") };
        let mut fields: Map<String, Json> =
            fields.iter().filter(|(_, v)| !v.is_null()).map(|(k, v)| (k.clone(), v.clone())).collect();
        let reasoning =
            ["reasoning_content", "thinking", "reasoning"].iter().find_map(|name| fields.get(*name)).cloned();
        if let Some(reasoning) = reasoning {
            if !fields.contains_key("thinking") {
                fields.shift_insert(0, "thinking".into(), reasoning.clone());
            }
            fields.insert("reasoning_content".into(), reasoning);
        }
        plain.push(Json::Object(fields));
    }
    Ok(json!(plain))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn template(source: &str) -> ChatTemplate {
        ChatTemplate::compile("test.jinja".into(), vec![("default".into(), source.into())], Map::new()).unwrap()
    }

    fn render(source: &str) -> Result<String> {
        let messages = json!([{"role": "user", "content": "Hi"}]);
        template(source).render(&messages, None, true, &Map::new())
    }

    #[test]
    fn raised_exceptions_are_one_line_with_the_place() {
        let error = render("\n{{ raise_exception('roles must alternate') }}").unwrap_err();
        assert_eq!(format!("{error:#}"), "test.jinja: chat template (line 2): roles must alternate");
    }

    #[test]
    fn the_end_of_a_thought_is_what_the_template_writes() {
        for (source, end) in [
            (
                r"{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' + content.split('</think>')[1] }}",
                Some("\n</think>\n\n"),
            ),
            (r"{{ '<think>' ~ '\n' ~ m.reasoning_content ~ '\n' ~ '</think>' ~ '\n\n' }}", Some("\n</think>\n\n")),
            (r"{{ '<think>\n' ~ m.reasoning_content ~ '\n</think>\n' }}", Some("\n</think>\n")),
            (r"<think>{{ m.reasoning_content }}</think>{{ m.content }}", Some("</think>")),
            (r"{{ m.content }}", None),
        ] {
            assert_eq!(template(source).thought_end(), end, "{source}");
        }
    }

    #[test]
    fn hostile_templates_end() {
        for source in [
            "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
            "{% for a in range(90000) %}{{ 'x' * 1000000 }}{% endfor %}",
            "{{ 'x' * 100000000000 }}",
            "{{ range(1000000000) | list | length }}",
        ] {
            assert!(render(source).is_err(), "{source}");
        }
        // Nested as deeply as fuel allows. Dropping it must not overflow the stack.
        let nested = "{% set ns = namespace(x=[]) %}{% for a in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}";
        assert_eq!(render(nested).unwrap(), "");
        assert!(render(&format!("{nested}{{{{ ns.x | tojson }}}}")).is_err());
    }

    #[test]
    fn a_broken_template_names_file_and_line() {
        let dir = tempfile::tempdir().unwrap();
        assert!(ChatTemplate::load(dir.path()).unwrap().is_none());
        fs::write(dir.path().join("chat_template.jinja"), "a\n{% if %}").unwrap();
        let error = format!("{:#}", ChatTemplate::load(dir.path()).err().unwrap());
        assert!(error.contains("chat_template.jinja") && error.contains(":2)"), "{error}");
    }

    #[test]
    fn tool_use_template_is_taken_when_there_are_tools() {
        let dir = tempfile::tempdir().unwrap();
        let config = json!({"chat_template": [
            {"name": "default", "template": "plain {{ bos_token }}"},
            {"name": "tool_use", "template": "tools {{ tools | tojson }}"},
        ], "bos_token": {"content": "<s>"}});
        fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        let template = ChatTemplate::load(dir.path()).unwrap().unwrap();
        let messages = json!([{"role": "user", "content": "Hi"}]);
        assert_eq!(template.render(&messages, None, true, &Map::new()).unwrap(), "plain <s>");
        assert_eq!(
            template.render(&messages, Some(&json!([{"a": 1.0}])), true, &Map::new()).unwrap(),
            "tools [{\"a\": 1.0}]"
        );
    }

    #[test]
    fn unfinished_tags_are_errors() {
        for source in ["{%}", "{%-%}", "{% %}", "{%", "{%generation%}", "a {%}%} b"] {
            assert!(ChatTemplate::parse(source).is_err(), "{source}");
        }
    }

    #[test]
    fn generation_tags_print_their_body() {
        let source =
            "a\n{%- generation -%}\n b {{- messages[0].content }}\n{%+ endgeneration %}\nc {% set generation = 1 %}";
        assert_eq!(render(source).unwrap(), "ab Hi\nc ".replace("ab Hi", "abHi"));
    }
}
