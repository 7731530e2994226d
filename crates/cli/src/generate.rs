//! Generates one answer: prompt tokens into the engine, text out of it piece by piece, and statistics.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use sluice_engine::text::{Detokenizer, StopStrings, Tokenizer};
use sluice_engine::{Engine, Event, Finish, Generation, Profile, SequenceId, Streamed};

/// Progress of an answer.
pub enum Piece<'a> {
    /// This many of the prompt's new tokens are computed.
    Reading { done: usize, total: usize },
    /// More text of the answer.
    Text(&'a str),
}

/// Why an answer ended.
#[derive(Clone, Debug, PartialEq)]
pub enum End {
    Engine(Finish),
    /// This stop string.
    StopString(String),
}

impl End {
    /// As `finish_reason` in JSON.
    pub fn name(&self) -> &'static str {
        match self {
            End::Engine(finish) => finish.name(),
            End::StopString(_) => "stop_string",
        }
    }
}

/// A finished answer.
pub struct Answer {
    /// Without special tokens and without the stop string that ended it.
    pub text: String,
    /// All generated tokens, including those after the end of the text.
    pub tokens: Vec<u32>,
    pub end: End,
    /// Tokens that had to be computed before the answer: the prompt's, and earlier ones that were no longer cached.
    pub computed: usize,
    /// Tokens of both that were cached.
    pub cached: usize,
    /// Cached tokens that came from disk.
    pub restored: usize,
    /// Time until the first token.
    pub reading: Duration,
    /// Time from the first token to the last.
    pub generating: Duration,
    pub first_token: Option<Instant>,
    /// Profiles of the prompt and of the answer; empty unless the engine profiles.
    pub profiles: [Profile; 2],
    /// Statistics of streamed experts; `None` without any.
    pub streamed: Option<Streamed>,
}

/// Appends `prompt` to the sequence and generates an answer. `each` gets every piece and may stop the answer.
///
/// # Errors
/// Errors of the engine and of `each`.
pub fn answer(
    engine: &mut Engine,
    id: SequenceId,
    prompt: &[u32],
    generation: Generation,
    stop_strings: &[String],
    tokenizer: &Arc<Tokenizer>,
    each: &mut dyn FnMut(Piece) -> Result<ControlFlow<()>>,
) -> Result<Answer> {
    let mut detokenizer = Detokenizer::new(Arc::clone(tokenizer), true);
    let mut stops = StopStrings::new(stop_strings.iter().cloned());
    let (mut text, mut tokens, mut events) = (String::new(), Vec::new(), Vec::new());
    let (mut computed, mut cached, mut restored, mut first_token, mut last_token) = (0, 0, 0, None, None);
    let mut profiles = [Profile::default(), Profile::default()];
    engine.take_profile();
    engine.take_streamed();
    let begun = Instant::now();
    engine.start(id, prompt, generation)?;
    let whole = engine.tokens(id)?.len();

    let end = 'steps: loop {
        events.clear();
        events.extend_from_slice(engine.step()?);
        for event in &events {
            let flow = match *event {
                Event::Prefill { done, total, .. } => {
                    (cached, restored) = (engine.reused_tokens(id)?, engine.restored_tokens(id)?);
                    computed = whole - cached;
                    each(Piece::Reading { done, total })?
                }
                Event::Token { token, .. } => {
                    last_token = Some(Instant::now());
                    if first_token.is_none() {
                        first_token = last_token;
                        profiles[0] = engine.take_profile();
                    }
                    tokens.push(token);
                    let (shown, stopped) = stops.push(&detokenizer.push(token)?);
                    text.push_str(&shown);
                    let flow = if shown.is_empty() { ControlFlow::Continue(()) } else { each(Piece::Text(&shown))? };
                    if let (true, Some(stop)) = (stopped, stops.stopped_by()) {
                        engine.cancel(id)?;
                        break 'steps End::StopString(stop.to_owned());
                    }
                    flow
                }
                Event::Finished { reason: Finish::Failed, .. } => {
                    return Err(engine.take_failure(id).unwrap_or_else(|| anyhow::anyhow!("the answer failed")));
                }
                Event::Finished { reason, .. } => break 'steps End::Engine(reason),
            };
            // An answer that has just ended is not interrupted.
            let finished = events.iter().any(|e| matches!(e, Event::Finished { .. }));
            if flow.is_break() && !finished {
                engine.cancel(id)?;
                break 'steps End::Engine(Finish::Cancelled);
            }
        }
    };
    // Text that was held back because it might have become a character or a stop string.
    if !matches!(end, End::StopString(_)) {
        let (shown, stopped) = stops.push(&detokenizer.flush()?);
        let rest = if stopped { shown } else { shown + &stops.flush() };
        if !rest.is_empty() {
            text.push_str(&rest);
            let _ = each(Piece::Text(&rest))?;
        }
    }
    if first_token.is_none() {
        profiles[0] = engine.take_profile();
    } else {
        profiles[1] = engine.take_profile();
    }
    let reading = first_token.map_or_else(|| begun.elapsed(), |t| t - begun);
    let generating = last_token.zip(first_token).map_or(Duration::ZERO, |(last, first)| last - first);
    let streamed = engine.take_streamed();
    Ok(Answer { text, tokens, end, computed, cached, restored, reading, generating, first_token, profiles, streamed })
}
