//! From a folder to what can answer: the weights on this thread, the text side (tokenizer, template, defaults) on another.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Error, Result, bail};
use sluice_backend::{Activations, Isa};
use sluice_cpu::Cpu;
use sluice_engine::text::{ChatTemplate, ModelText, Tokenizer};
use sluice_engine::{Checkpoint, Config, Engine, Loading, Options, Placement, refused_by_device};

use crate::device::{self, Device, DeviceArg};
use crate::engine_args::EngineArgs;
use crate::progress::Progress;
use crate::{folders, machine, prompt_cache_args, terminal, units};

/// A model that is ready.
pub struct Loaded {
    pub engine: Engine,
    pub text: ModelText,
    pub weights_time: Duration,
    pub text_time: Duration,
}

/// Loads the model in `folder`, and says in one line what of it was left out.
///
/// # Errors
/// What is wrong with a file of the folder; the message names it.
pub fn model(folder: &Path, args: &EngineArgs, options: Options) -> Result<Loaded> {
    let begun = Instant::now();
    let text_folder = folder.to_owned();
    let text = thread::Builder::new()
        .name("text".into())
        .spawn(move || text(&text_folder).map(|text| (text, begun.elapsed())))?;
    let join = || text.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    // Under a limit, what is left for weights is known once the tokenizer has what it needs.
    let limited = options.memory_budget.is_some() || machine::cgroup().is_some();
    let (engine, text, weights_time) = if limited {
        let text = join();
        let begun = Instant::now();
        (engine(folder, args, options), text, begun.elapsed())
    } else {
        let engine = engine(folder, args, options);
        let weights_time = begun.elapsed();
        (engine, join(), weights_time)
    };
    // The weights' error first: for a folder that does not exist, a message about the tokenizer would mislead.
    let mut engine = engine?;
    let (text, text_time) = text?;
    prompt_cache_args::say(&mut engine);
    Ok(Loaded { engine, text, weights_time, text_time })
}

/// Loads the weights only: they may still be on their way when this returns.
pub fn engine(folder: &Path, args: &EngineArgs, options: Options) -> Result<Engine> {
    let (chosen_experts, wanted_context) = (options.experts_per_token, options.max_context);
    let (asked, chosen) = (args.device(), args.device().chosen());
    if asked.is_host() && options.device_memory.is_some() {
        bail!("--gpu-memory is of a GPU's memory, and none was asked for: --device cuda, or auto");
    }
    let open = |device: &Device, mut options: Options| {
        options.load.ahead = !device.is_host();
        Engine::open_on(folder, options, &|options| device.backend(options))
    };
    let mut device = chosen;
    let opened = loop {
        match open(&device, options.clone()) {
            Err(small) if *asked == DeviceArg::Auto && refused_by_device(&small) => {
                device = device.and_another().unwrap_or_else(device::host);
                terminal::note(&format!("device: {device} instead: {small:#}"));
            }
            opened => break opened,
        }
    };
    let engine = opened.map_err(|e| naming(folder, e))?;
    if engine.device().is_some() && engine.placed().placement != Placement::Mapped && !args.verbose() {
        terminal::note(&format!("experts: {}: {}", engine.placed().placement.name(), engine.placed().reason));
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
            terminal::note(&format!("experts: {}: {}", engine.placed().placement.name(), engine.placed().reason));
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
    Ok(engine)
}

/// Waits until all weights are there, and copied where nodes of memory are to have copies, behind a progress line where that takes long.
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

/// Says what reading the weights fell back on, a line each.
pub fn say_notes(engine: &Engine) {
    engine.fallbacks().iter().for_each(|note| terminal::note(note));
}

/// Loads the tokenizer only.
pub fn tokenizer(folder: &Path) -> Result<Tokenizer> {
    Tokenizer::load(folder, folders::tokenizer_cache().as_deref()).map_err(|e| naming(folder, e))
}

fn text(folder: &Path) -> Result<ModelText> {
    let text = ModelText::load(folder, folders::tokenizer_cache().as_deref()).map_err(|e| naming(folder, e))?;
    if let Some(note) = text.template.as_ref().and_then(ChatTemplate::note) {
        terminal::note(note);
    }
    text.defaults.notes.iter().for_each(|note| terminal::note(note));
    Ok(text)
}

/// Refuses what [`model`] would refuse, with the same words, but reads no weight. A folder may lack a tokenizer: without one there is still `eval logits`.
pub fn check(folder: &Path, config: &Config, checkpoint: &Checkpoint) -> Result<()> {
    let check = || -> Result<()> {
        let mut backend = Cpu::new(Isa::from_env()?, 1, Activations::Int8)?;
        sluice_model::check(checkpoint, config, &mut backend)?;
        Ok(())
    };
    check().map_err(|e| naming(folder, e))?;
    if folder.join("tokenizer.json").exists() { text(folder).map(|_| ()) } else { Ok(()) }
}

/// The error with the model's folder in front, unless it names it already.
pub fn naming(folder: &Path, error: Error) -> Error {
    let name = folder.display().to_string();
    if format!("{error:#}").contains(&name) { error } else { error.context(name) }
}
