//! `sluice run [MODEL] PROMPT`: one answer, streamed to standard output.

use std::ffi::OsString;
use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Result, ensure};
use clap::Args;
use serde_json::json;
use sluice_engine::text::Message;
use sluice_engine::{Finish, LoadProgress, Loading};

use crate::engine_args::EngineArgs;
use crate::generate::{self, Decoding, End, Piece};
use crate::hub::DownloadArgs;
use crate::progress::Progress;
use crate::prompt::{self, PromptArgs};
use crate::prompt_cache_args::{self, PromptCacheArgs};
use crate::sampling_args::SamplingArgs;
use crate::stats::{self, RunMeasurements};
use crate::{hub, interrupt, load, terminal};

#[derive(Args)]
#[command(
    override_usage = "sluice run [OPTIONS] [MODEL] PROMPT\n       COMMAND | sluice run [OPTIONS] [MODEL] [PROMPT]"
)]
pub struct RunArgs {
    /// The model's folder (default: the demo model) and the prompt. A single word is the prompt; piped text is appended to it
    #[arg(value_name = "MODEL] [PROMPT")]
    words: Vec<OsString>,
    /// The prompt, as a flag
    #[arg(short = 'p', long = "prompt", value_name = "TEXT")]
    prompt_text: Option<OsString>,
    /// The model's folder, as a flag
    #[arg(short, long, value_name = "MODEL")]
    model: Option<PathBuf>,
    /// Print statistics to standard error: times, speeds, memory, seed; also if Ctrl-C ends the answer
    #[arg(long)]
    stats: bool,
    /// Print the time per phase of a layer to standard error
    #[arg(long)]
    profile: bool,
    /// Print one JSON object (text, tokens, finish reason, stats) instead of streaming
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    prompt: PromptArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    prompt_cache: PromptCacheArgs,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    download: DownloadArgs,
}

/// Recurrent states kept for later starts, if the model has any.
const SNAPSHOTS: usize = 4;

/// Answers one prompt. `start`: when the program started.
pub fn run(args: RunArgs, start: Instant) -> Result<()> {
    // 1. Find the prompt and load the model
    let (model, question) = prompt::from_command_line(args.model, args.prompt_text, args.words)?;
    let folder = hub::started(model.as_deref(), &args.download, &args.engine, &args.prompt_cache)?;
    let mut options = args.engine.answering_options()?;
    options.profile = args.profile;
    options.prompt_cache = args.prompt_cache.options()?;
    options.snapshots = if options.prompt_cache.is_some() { SNAPSHOTS } else { 0 };
    let loaded = load::model(&folder, &args.engine, options)?;
    let (mut engine, text) = (loaded.engine, loaded.text);

    // 2. Render and tokenize
    let request = Instant::now();
    let has_template = args.prompt.has_template(&text);
    let mut messages: Vec<Message> = args.prompt.system.iter().map(|s| Message::new("system", s)).collect();
    messages.push(Message::new("user", question));
    let rendering = args.prompt.rendering(&text, &messages);
    let rendered = rendering.prompt().map_err(|e| load::naming(&folder, e))?;
    args.prompt.say_raw_tokens(&text.tokenizer, rendered.text());
    // A rendered template has its special tokens already.
    let tokens = text.tokenizer.encode_prompt(&rendered, !has_template)?;
    ensure!(!tokens.is_empty(), "the prompt has no tokens");
    ensure!(
        tokens.len() < engine.max_context(),
        "the prompt has {} tokens, which leaves no room for an answer in a context of {} (see --max-context)",
        tokens.len(),
        engine.max_context()
    );

    // 3. Generate
    let mut generation = args.sampling.generation(&text.defaults, &text.stop_ids)?;
    // Where later prompts that begin like this one can continue.
    if engine.prompt_cache().is_some() && engine.model().state_len() > 0 {
        generation.snapshot_points = rendering.snapshot_points(&tokens);
        generation.snapshot_points.push(tokens.len() - 1);
    }
    let seed = generation.sampling.seed;
    let sequence = engine.add_sequence();
    let load = engine.loading().map(Loading::progress);
    // Ctrl-C still prints statistics. A step that waits for weights cannot be stopped, so while they load, and on a second press, Ctrl-C ends the program at once.
    let has_figures = args.json || args.stats || args.profile;
    if has_figures {
        interrupt::second_leaves()?;
    }
    let mut hold = (has_figures && load.as_ref().is_none_or(LoadProgress::is_over)).then(interrupt::hold);
    let mut progress = Progress::after_loading(load, "reading the prompt", "tokens", tokens.len());
    let mut out = io::stdout().lock();
    let streams = !args.json;
    let mut each = |piece: Piece| -> Result<ControlFlow<()>> {
        if has_figures {
            hold.get_or_insert_with(interrupt::hold);
        }
        match piece {
            Piece::Reading { done, total } if done < total => progress.set(done, total),
            Piece::Reading { .. } => {
                hub::first_token();
                progress.finish();
            }
            Piece::Text(shown) if streams => {
                out.write_all(shown.as_bytes())?;
                out.flush()?;
            }
            Piece::Text(_) => {}
        }
        Ok(if interrupt::pressed() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    };
    let stop = args.sampling.stop_strings();
    let decoding = Decoding::new(&text, has_template);
    let answer = generate::answer(&mut engine, sequence, &tokens, generation, stop, &decoding, &mut each)?;
    progress.finish();

    load::say_notes(&engine);

    // 4. Report
    let measured = RunMeasurements {
        model: folder.display().to_string(),
        weights_time: loaded.weights_time,
        text_time: loaded.text_time,
        first_from_start: answer.first_token.map(|t| t - start),
        first_from_request: answer.first_token.map(|t| t - request),
        context: engine.tokens(sequence)?.len(),
        seed,
    };
    if streams {
        if !answer.text.ends_with('\n') {
            writeln!(out)?;
        }
        out.flush()?;
    } else {
        let mut figures = stats::to_json(&mut engine, &answer, &measured);
        // Nobody reads an answer that may be wrong.
        drop(hold.take());
        hub::finish()?;
        if let Some(download) = hub::figures() {
            figures["download"] = download;
        }
        if args.profile {
            let [reading, generating] = answer.profiles.each_ref().map(stats::profile_json);
            figures["profile"] = json!({"prompt": reading, "generation": generating});
        }
        let object = json!({
            "text": answer.text,
            "tokens": answer.tokens,
            "prompt_tokens": tokens.len(),
            "finish_reason": answer.end.name(),
            "stats": figures,
        });
        writeln!(out, "{object}")?;
        out.flush()?;
    }
    if args.profile {
        for (title, profile) in ["prompt", "generation"].iter().zip(&answer.profiles) {
            terminal::say(&stats::profile_text(title, profile));
        }
    }
    if args.stats {
        terminal::say(&stats::to_text(&mut engine, &answer, &measured));
    }
    out.flush()?;
    drop(hold);
    hub::finish()?;
    // The step that failed has reported it, and the answer is printed.
    let _ = engine.save();
    prompt_cache_args::say_notes(&mut engine);
    ensure!(answer.end != End::Engine(Finish::Cancelled), interrupt::Interrupted);
    Ok(())
}
