//! The template engine, set up as transformers sets up Jinja.
//!
//! Fuel limits how long a template runs, and its output is limited too. It runs on a stack of its own, so that deeply nested values cannot overflow the
//! caller's. The engine cannot limit the memory and time of one expression: `s ~ s` many times over, or comparing lists of two equal lists, nested many
//! times. The process around it does ([`super::sandbox`]).

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

/// Instructions that a template may execute. Each value in its input adds `FUEL_PER_VALUE`.
const FUEL: u64 = 2_000_000;
const FUEL_PER_VALUE: u64 = 2_000;
/// Bytes of a prompt, at most.
pub(super) const MAX_OUTPUT: usize = 64 << 20;
/// Bytes of the stack. They are reserved, and only used by deeply nested values.
pub(super) const STACK: usize = 256 << 20;

/// One rendering.
#[derive(Serialize, Deserialize)]
pub(super) struct Rendering {
    /// The name of the template.
    pub name: String,
    /// The time that it sees; `None`: the current time.
    pub time: Option<DateTime>,
    /// Its variables, an object.
    pub context: Json,
}

/// Compiled templates. Error messages continue after `FILE: chat template`.
pub(super) struct Templates {
    env: Environment<'static>,
    clock: Arc<Mutex<Option<DateTime>>>,
}

impl Templates {
    /// Compiles templates: (name, source). The error is the engine's, with name and line.
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
            // As in Jinja2, all line ends become line feeds.
            let source = source.replace("\r\n", "\n").replace('\r', "\n");
            env.add_template_owned(name.clone(), percent::with_filters(&without_generation_tags(&source)))
                .map_err(|e| e.to_string())?;
        }
        Ok(Self { env, clock })
    }

    /// Renders a template.
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

/// The output, up to its limit.
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

/// Replaces `{% generation %}`, which marks the assistant's words for training. It prints its body in a scope of its own, as `{% with %}` does.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        // `{%}` does not end itself.
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
