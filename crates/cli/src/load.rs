//! From a folder to what can answer: the weights on this thread, the text side (tokenizer, template, defaults) on another.

use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Error, Result, bail};
use sluice_engine::text::{ChatTemplate, GenerationDefaults, Tokenizer, stop_ids};
use sluice_engine::{Engine, Options};

use crate::{folders, terminal};

/// Everything between people's text and token ids.
pub struct Text {
    pub tokenizer: Arc<Tokenizer>,
    pub template: Option<ChatTemplate>,
    pub defaults: GenerationDefaults,
    pub stop_ids: Vec<u32>,
}

/// A model that is ready.
pub struct Loaded {
    pub engine: Engine,
    pub text: Text,
    pub weights_time: Duration,
    pub text_time: Duration,
}

/// Loads the model in `folder`, and says in one line what of it was left out.
///
/// # Errors
/// What is wrong with a file of the folder; the message names it.
pub fn model(folder: &Path, options: Options) -> Result<Loaded> {
    let begun = Instant::now();
    let text_folder = folder.to_owned();
    let text = thread::Builder::new()
        .name("text".into())
        .spawn(move || text(&text_folder).map(|text| (text, begun.elapsed())))?;
    // The weights' error first: of a folder that is not there at all, the tokenizer is the least part.
    let engine = engine(folder, options)?;
    let weights_time = begun.elapsed();
    let (text, text_time) = text.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
    Ok(Loaded { engine, text, weights_time, text_time })
}

/// Loads the weights only.
pub fn engine(folder: &Path, options: Options) -> Result<Engine> {
    let chosen_experts = options.experts_per_token;
    let engine = Engine::open(folder, options).map_err(|e| naming(folder, e))?;
    if chosen_experts.is_some() && engine.spec().experts.is_none() {
        bail!("{}: --experts-per-token, but this model has no experts", folder.display());
    }
    if !engine.skipped().is_empty() {
        terminal::note(&format!("left out, not part of the text model: {}", engine.skipped().join(", ")));
    }
    let (asked, made_for) = (engine.max_context(), engine.spec().max_context);
    if asked > made_for {
        terminal::note(&format!(
            "a context of {asked} tokens is more than the {made_for} that this model was made for"
        ));
    }
    Ok(engine)
}

/// Loads the tokenizer only.
pub fn tokenizer(folder: &Path) -> Result<Tokenizer> {
    Tokenizer::load(folder, folders::tokenizer_cache().as_deref()).map_err(|e| naming(folder, e))
}

fn text(folder: &Path) -> Result<Text> {
    let tokenizer = tokenizer(folder)?;
    let load = || {
        Ok(Text {
            template: ChatTemplate::load(folder)?,
            defaults: GenerationDefaults::load(folder)?,
            stop_ids: stop_ids(folder, Some(&tokenizer))?,
            tokenizer: Arc::new(tokenizer),
        })
    };
    load().map_err(|e| naming(folder, e))
}

/// The error with the model's folder in front, unless it names it already.
pub fn naming(folder: &Path, error: Error) -> Error {
    let name = folder.display().to_string();
    if format!("{error:#}").contains(&name) { error } else { error.context(name) }
}
