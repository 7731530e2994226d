//! Loads a model: the weights on this thread, the text side (tokenizer, template, defaults) on another.

use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use sluice_backend::{Activations, Isa};
use sluice_cpu::Cpu;
use sluice_engine::text::{ChatTemplate, ModelText, Tokenizer};
use sluice_engine::{Engine, Loading, ModelSource, ModelTensors, Options, Placement, Unified, source};
pub use sluice_front::naming;

use crate::engine_args::EngineArgs;
use crate::progress::Progress;
use crate::{folders, prompt_cache_args, terminal, units};
use sluice_front::machine;

/// A loaded model.
pub struct Loaded {
    /// The engine; weights may still be loading.
    pub engine: Engine,
    /// Tokenizer, chat template and defaults.
    pub text: ModelText,
    /// Time until the engine was ready.
    pub weights_time: Duration,
    /// Time for the text side.
    pub text_time: Duration,
}

/// Loads the model in `folder`, and reports in one line which tensors were left out.
///
/// # Errors
/// Anything wrong with a file of the folder; the message names it.
pub fn model(folder: &Path, args: &EngineArgs, options: Options) -> Result<Loaded> {
    let begun = Instant::now();
    let source = source::open(folder).map_err(|e| naming(folder, e))?;
    let of_text = Arc::clone(&source);
    let text = thread::Builder::new()
        .name("text".into())
        .spawn(move || text(&*of_text).map(|text| (text, begun.elapsed())))?;
    let join = || text.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    // With a memory limit, the tokenizer loads first: what it takes is not left for weights.
    let limited = options.memory_budget.is_some() || machine::cgroup().is_some();
    let (engine, text, weights_time) = if limited {
        let text = join();
        let begun = Instant::now();
        (engine_of(&source, args, options), text, begun.elapsed())
    } else {
        let engine = engine_of(&source, args, options);
        let weights_time = begun.elapsed();
        (engine, join(), weights_time)
    };
    // The weights' error first: for a missing folder, a message about the tokenizer would be misleading.
    let mut engine = engine?;
    let (text, text_time) = text?;
    if let Some(model) = engine.options().draft_model.as_deref() {
        check_vocabulary(&text.tokenizer, model)?;
    }
    prompt_cache_args::say(&mut engine);
    Ok(Loaded { engine, text, weights_time, text_time })
}

/// Loads only the weights; they may still be loading when this returns.
pub fn engine(folder: &Path, args: &EngineArgs, options: Options) -> Result<Engine> {
    engine_of(&source::open(folder).map_err(|e| naming(folder, e))?, args, options)
}

fn engine_of(source: &Arc<dyn ModelSource>, args: &EngineArgs, options: Options) -> Result<Engine> {
    let folder = source.path();
    let (chosen_experts, wanted_context) = (options.experts_per_token, options.max_context);
    if args.device().is_host() && options.device_memory.is_some() {
        bail!("--gpu-memory is of a GPU's memory, and none was asked for: --device cuda, or auto");
    }
    if args.device().is_host() && options.unified == Unified::On {
        bail!("--unified is of a GPU, and none was asked for: --device cuda, or auto");
    }
    let engine = sluice_front::open(source, options, args.device(), &terminal::note)?;
    if engine.device().is_some() && engine.placement().placement != Placement::Mapped && !args.verbose() {
        terminal::note(&format!("experts: {}: {}", engine.placement().placement.name(), engine.placement().reason));
    }
    if chosen_experts.is_some() && engine.model().experts().is_none() {
        bail!("{}: --experts-per-token, but this model has no experts", folder.display());
    }
    engine.model().notes.iter().for_each(|line| terminal::note(line));
    if !engine.skipped().is_empty() {
        terminal::note(&format!("left out, not part of the text model: {}", engine.skipped().join(", ")));
    }
    if args.verbose() {
        for file in engine.loading().into_iter().flat_map(Loading::files) {
            let (size, mode) = (units::bytes(file.bytes), file.mode.name());
            terminal::note(&format!("{}: {size}, {mode}: {}", file.name, file.reason));
        }
        if engine.model().experts().is_some() {
            terminal::note(&format!("experts: {}: {}", engine.placement().placement.name(), engine.placement().reason));
        }
    }
    let (asked, made_for) = (engine.max_context(), engine.model().max_context);
    if asked < wanted_context.unwrap_or(made_for) {
        terminal::note(&format!("the memory limit leaves room for a context of {asked} tokens"));
    }
    if asked > made_for {
        terminal::note(&format!(
            "a context of {asked} tokens is more than the {made_for} that this model was made for"
        ));
    }
    if let Some(drafts) = engine.draft_context().filter(|context| *context < asked) {
        terminal::note(&format!(
            "--draft-model: its context is {drafts} tokens of {asked}; behind them it guesses nothing"
        ));
    }
    Ok(engine)
}

/// Waits until all weights are loaded, and copied if memory nodes have copies. Shows a progress line if it takes long.
pub fn finish(engine: &mut Engine) -> Result<()> {
    if let Some(loading) = engine.loading() {
        let mut line = Progress::after_loading(Some(loading.progress()), "loading", "MB", 0);
        let done = loading.finish();
        line.finish();
        done?;
    }
    while engine.copy_weights() {}
    say_notes(engine);
    Ok(())
}

/// Reports each fallback in reading the weights.
pub fn say_notes(engine: &Engine) {
    engine.fallbacks().iter().for_each(|note| terminal::note(note));
}

/// Checks that a model that drafts has the vocabulary of `tokenizer`.
fn check_vocabulary(tokenizer: &Tokenizer, model: &Path) -> Result<()> {
    let other = self::tokenizer(model)?;
    if let Some((id, here, there)) = tokenizer.difference(&other) {
        bail!("--draft-model {}: another vocabulary: token {id} is {there:?} there and {here:?} here", model.display());
    }
    Ok(())
}

/// Loads only the tokenizer.
pub fn tokenizer(folder: &Path) -> Result<Tokenizer> {
    let load = || Tokenizer::load(&*source::open(folder)?, folders::tokenizer_cache().as_deref());
    load().map_err(|e| naming(folder, e))
}

fn text(source: &dyn ModelSource) -> Result<ModelText> {
    let text = ModelText::load(source, folders::tokenizer_cache().as_deref()).map_err(|e| naming(source.path(), e))?;
    for note in text.template.iter().flat_map(ChatTemplate::notes) {
        terminal::note(note);
    }
    text.defaults.notes.iter().for_each(|note| terminal::note(note));
    Ok(text)
}

/// Checks everything that [`model`] checks, with the same messages, without reading weights. A folder may lack a tokenizer, since `eval logits` needs none.
pub fn check(source: &dyn ModelSource, tensors: &ModelTensors) -> Result<()> {
    let folder = source.path();
    let check = || -> Result<()> {
        let mut backend = Cpu::new(Isa::from_env()?, 1, Activations::Int8)?;
        sluice_model::check(tensors, &mut backend)?;
        Ok(())
    };
    check().map_err(|e| naming(folder, e))?;
    if source.has("tokenizer.json") { text(source).map(|_| ()) } else { Ok(()) }
}
