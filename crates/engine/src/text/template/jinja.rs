//! The template engine, as transformers sets up Jinja: what runs a template, in whichever process.
//!
//! A template runs out of fuel instead of running for ever, writes so much and no more, and runs on a stack of its own, so that values nested without end
//! cannot overflow the caller's. What the engine has no hook for is the memory and the time of one expression: `s ~ s` again and again, a list of two
//! equal lists again and again and then compared. Those are bounded by the process around it ([`super::sandbox`]).

use super::errors::shortened;
use super::tojson::tojson;
use super::{percent, python};
use crate::text::guard::guarded;
use jiff::civil::DateTime;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Value};
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;
use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

/// Instructions that any template may take, and those it may take more for each value in its input.
const FUEL: u64 = 2_000_000;
const FUEL_PER_VALUE: u64 = 2_000;
/// More text than this is not a prompt.
pub(super) const MAX_OUTPUT: usize = 64 << 20;
/// Reserved, not used: only a template that nests values without end comes near it.
pub(super) const STACK: usize = 256 << 20;

/// One rendering.
#[derive(Serialize, Deserialize)]
pub(super) struct Rendering {
    /// Which of the templates.
    pub name: String,
    /// What its clock shows; `None`: the time it is.
    pub time: Option<DateTime>,
    /// The names that it sees, an object.
    pub context: Json,
}

/// Compiled templates. Errors are texts that go on behind `FILE: chat template`.
pub(super) struct Templates {
    env: Environment<'static>,
    clock: Arc<Mutex<Option<DateTime>>>,
}

impl Templates {
    /// `templates` are names and sources. The error is the engine's own, with name and line.
    pub fn compile(templates: &[(String, String)]) -> Result<Self, String> {
        guarded("the template engine", || Ok(Self::compile_unguarded(templates))).map_err(|e| e.to_string())?
    }

    fn compile_unguarded(templates: &[(String, String)]) -> Result<Self, String> {
        let mut env = Environment::new();
        let mut syntax = SyntaxConfig::builder();
        syntax.trim_blocks(true).lstrip_blocks(true);
        env.set_syntax(syntax.build().map_err(|e| e.to_string())?);
        env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        env.set_debug(false);
        python::install(&mut env);
        env.add_filter("tojson", tojson);

        let clock: Arc<Mutex<Option<DateTime>>> = Arc::default();
        let time = clock.clone();
        env.add_function("strftime_now", move |format: String| {
            let fixed = *time.lock().unwrap_or_else(PoisonError::into_inner);
            python::strftime(&format, fixed.unwrap_or_else(|| jiff::Zoned::now().datetime()))
        });
        for (name, source) in templates {
            // As Jinja2 reads a source: every kind of line end is one line feed.
            let source = source.replace("\r\n", "\n").replace('\r', "\n");
            env.add_template_owned(name.clone(), percent::with_filters(&without_generation_tags(&source)))
                .map_err(|e| e.to_string())?;
        }
        Ok(Self { env, clock })
    }

    /// The text that a template writes.
    pub fn run(&self, rendering: &Rendering) -> Result<String, String> {
        *self.clock.lock().unwrap_or_else(PoisonError::into_inner) = rendering.time;
        let rendered = thread::scope(|scope| -> anyhow::Result<_> {
            thread::Builder::new()
                .name("chat-template".into())
                .stack_size(STACK)
                .spawn_scoped(scope, || guarded("the template engine", || Ok(self.render(rendering))))?
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        rendered.map_err(|e| format!(": {}", shortened(e.to_string())))?.map_err(|e| {
            let at = e.line().map(|line| format!(" (line {line})")).unwrap_or_default();
            match e.detail() {
                Some(detail) => format!("{at}: {}", shortened(detail.to_owned())),
                None => format!("{at}: {}", e.kind()),
            }
        })
    }

    fn render(&self, rendering: &Rendering) -> Result<String, minijinja::Error> {
        let mut env = self.env.clone();
        env.set_fuel(Some(FUEL + FUEL_PER_VALUE * count_values(&rendering.context)));
        let failed = |why: &'static str| minijinja::Error::new(minijinja::ErrorKind::WriteFailure, why);
        let mut prompt = Prompt { text: Vec::new(), is_full: false };
        let context = Value::from(Serde(&rendering.context));
        let done = env.get_template(&rendering.name)?.render_captured_to(context, &mut prompt);
        if prompt.is_full {
            return Err(failed("the prompt grows beyond 64 MiB"));
        }
        done?;
        String::from_utf8(prompt.text).map_err(|_| failed("the prompt is no UTF-8"))
    }
}

/// The text being written, up to its limit.
struct Prompt {
    text: Vec<u8>,
    is_full: bool,
}

impl Write for Prompt {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.text.len() + bytes.len() > MAX_OUTPUT {
            self.is_full = true;
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn count_values(value: &Json) -> u64 {
    1 + match value {
        Json::Array(list) => list.iter().map(count_values).sum(),
        Json::Object(map) => map.values().map(count_values).sum(),
        _ => 0,
    }
}

/// `{% generation %}` marks the assistant's own words for training. It prints its body, in a scope of its own: `{% with %}` does the same.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        // `{%}` is no end of itself.
        let Some(end) = tag[2..].find("%}").map(|n| n + 2) else {
            rest = tag;
            break;
        };
        let inside = &tag[2..end];
        let sign = |c: char| c == '-' || c == '+';
        let word = inside.trim_start_matches(sign).trim_end_matches(sign).trim();
        match word {
            "generation" => out.push_str(&format!("{{%{}%}}", inside.replace("generation", "with"))),
            "endgeneration" => out.push_str(&format!("{{%{}%}}", inside.replace("endgeneration", "endwith"))),
            _ => out.push_str(&tag[..end + 2]),
        }
        rest = &tag[end + 2..];
    }
    out.push_str(rest);
    out
}
