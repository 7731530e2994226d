//! Generates one answer: prompt tokens into the engine, text out of it piece by piece, and statistics.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use sluice_engine::text::{AnswerParser, Detokenizer, ModelText, Piece as Part, Reading, StopStrings, Tokenizer};
use sluice_engine::{DraftStats, Engine, Event, Finish, Generation, Profile, SequenceId, Streamed};

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
    /// The part of the answer that later prompts contain: in the harmony format, the text without the thoughts.
    pub content: String,
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
    /// What was drafted for it, by drafter; empty if drafts are off.
    pub drafted: Vec<DraftStats>,
}

/// How an answer's tokens become text.
pub struct Decoding {
    tokenizer: Arc<Tokenizer>,
    /// For answers in the harmony format and XTML, whose channels are told apart.
    channels: Option<Reading>,
}

impl Decoding {
    /// For answers to prompts that a template makes, or to raw ones.
    pub fn new(text: &ModelText, has_template: bool) -> Decoding {
        let style = text.template.as_ref().map(|template| template.style());
        let has_channels = style.is_some_and(|style| style.is_harmony() || style.is_xtml());
        let channels = (has_template && has_channels).then(|| Reading::new(text, None, &[]));
        Decoding { tokenizer: Arc::clone(&text.tokenizer), channels }
    }

    /// For the answer to a prompt that ends so.
    fn stream(&self, prompt: &[u32]) -> TextStream {
        let channels = self.channels.as_ref().map(|reading| reading.after(&self.tokenizer, prompt));
        let detokenizer = match &channels {
            Some(reading) => reading.detokenizer(&self.tokenizer),
            None => Detokenizer::new(Arc::clone(&self.tokenizer), true),
        };
        let parser = channels.as_ref().map(Reading::parser);
        TextStream { detokenizer, parser, thinks: false, content: String::new() }
    }
}

/// The text of one answer, as it is shown.
struct TextStream {
    detokenizer: Detokenizer,
    parser: Option<AnswerParser>,
    /// A thought is open.
    thinks: bool,
    content: String,
}

impl TextStream {
    /// What of the next part of the text is shown: thoughts between marks. `last`: `None` if more may follow, else whether the answer was cut off here.
    fn shown(&mut self, text: String, last: Option<bool>) -> String {
        let Some(parser) = &mut self.parser else {
            self.content.push_str(&text);
            return text;
        };
        let mut parts = parser.push(&text);
        match last {
            None => {}
            Some(true) => parts.extend(parser.cut()),
            Some(false) => parts.extend(parser.finish()),
        }
        let mut shown = String::new();
        for part in parts {
            match part {
                Part::Thought(thought) => {
                    shown.push_str(if self.thinks { "" } else { "<think>\n" });
                    self.thinks = true;
                    shown.push_str(&thought);
                }
                Part::Text(text) => {
                    shown.push_str(if self.thinks { "\n</think>\n\n" } else { "" });
                    self.thinks = false;
                    shown.push_str(&text);
                    self.content.push_str(&text);
                }
                // No tools are offered.
                Part::Call { .. } | Part::Arguments { .. } => {}
            }
        }
        shown
    }
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
    decoding: &Decoding,
    each: &mut dyn FnMut(Piece) -> Result<ControlFlow<()>>,
) -> Result<Answer> {
    let mut stream = decoding.stream(prompt);
    let mut stops = StopStrings::new(stop_strings.iter().cloned());
    let (mut text, mut tokens, mut events) = (String::new(), Vec::new(), Vec::new());
    let (mut computed, mut cached, mut restored, mut first_token, mut last_token) = (0, 0, 0, None, None);
    let mut profiles = [Profile::default(), Profile::default()];
    engine.take_profile();
    engine.take_streamed();
    let drafts_before = engine.draft_stats();
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
                    let (raw, stopped) = stops.push(&stream.detokenizer.push(token)?);
                    let shown = stream.shown(raw, stopped.then_some(true));
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
    // A step may have given more tokens than were looked at.
    let seen = whole + tokens.len();
    if engine.tokens(id)?.len() > seen {
        engine.truncate(id, seen)?;
    }
    // Text that was held back because it might have become a character or a stop string.
    if !matches!(end, End::StopString(_)) {
        let (raw, stopped) = stops.push(&stream.detokenizer.flush()?);
        let rest = if stopped { raw } else { raw + &stops.flush() };
        let is_cut = stopped || end != End::Engine(Finish::Stop);
        let rest = stream.shown(rest, Some(is_cut));
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
    let before = |now: &DraftStats| drafts_before.iter().find(|before| before.drafter == now.drafter).map(|d| d.counts);
    let since = |now: DraftStats| DraftStats { counts: now.counts.since(before(&now).unwrap_or_default()), ..now };
    let drafted = engine.draft_stats().into_iter().map(since).collect();
    let content = stream.content;
    Ok(Answer {
        text,
        content,
        tokens,
        end,
        computed,
        cached,
        restored,
        reading,
        generating,
        first_token,
        profiles,
        streamed,
        drafted,
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use sluice_engine::text::{Calls, Opened, Style};

    use super::*;

    #[test]
    fn channels_are_shown_as_thoughts_and_text_and_only_text_is_kept() {
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
        let tokenizer = Arc::new(Tokenizer::load(&demo, None).unwrap());
        let style = Style { thoughts: true, calls: Some(Calls::Harmony), native: true, preserves: false };
        let stream = || TextStream {
            detokenizer: Detokenizer::new(Arc::clone(&tokenizer), true),
            parser: Some(AnswerParser::new(style, None, Opened::No)),
            thinks: false,
            content: String::new(),
        };
        let answer = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>So.\n";
        let (mut whole, mut cut) = (stream(), stream());
        assert_eq!(whole.shown(answer.into(), Some(false)), "<think>\nHm.\n</think>\n\nSo.\n");
        assert_eq!(whole.content, "So.\n");
        let mut shown: String = answer.chars().map(|c| cut.shown(c.into(), None)).collect();
        shown += &cut.shown(String::new(), Some(false));
        assert_eq!((shown.as_str(), cut.content.as_str()), ("<think>\nHm.\n</think>\n\nSo.\n", "So.\n"));
        // An answer that was stopped within a header shows nothing.
        assert_eq!(stream().shown("<|channel|>ana".into(), Some(true)), "");
    }
}
