//! From a request's updates to text: each choice with what holds its characters back, and the strings that end it.

use std::sync::Arc;

use anyhow::Result;
use sluice_engine::Finish;
use sluice_engine::sampling::Logprobs;
use sluice_engine::text::{AnswerParser, Detokenizer, Piece, Reading, StopStrings, Tokenizer};

use crate::runtime::Update;

/// How a choice goes on.
pub struct Delta {
    pub choice: usize,
    /// As the model wrote it.
    pub text: String,
    /// What that means.
    pub pieces: Vec<Piece>,
    /// The tokens that were added to it, with how likely they were where that was asked for.
    pub tokens: Vec<(u32, Option<Logprobs>)>,
    pub finish: Option<Finish>,
    /// A stop string has ended it: the engine is still to be told.
    pub stopped: bool,
}

struct Choice {
    detokenizer: Detokenizer,
    stops: StopStrings,
    /// Makes pieces of the text; `None`: it is text.
    parser: Option<AnswerParser>,
    over: bool,
}

/// The choices of one request.
pub struct Answer {
    choices: Vec<Choice>,
    /// Tokens of the prompt that were there, and tokens that were generated.
    pub cached: usize,
    pub generated: usize,
    /// The vector of the prompt, where that was asked for.
    pub embedding: Option<Vec<f32>>,
}

impl Answer {
    pub fn new(tokenizer: &Arc<Tokenizer>, choices: usize, stops: &[String]) -> Answer {
        let choice = |_| Choice {
            detokenizer: Detokenizer::new(Arc::clone(tokenizer), true),
            stops: StopStrings::new(stops.iter().cloned()),
            parser: None,
            over: false,
        };
        Answer { choices: (0..choices).map(choice).collect(), cached: 0, generated: 0, embedding: None }
    }

    /// Has what comes from here on read as answers to a prompt of a conversation: thoughts and calls are told apart from text.
    pub fn read_as(&mut self, reading: &Reading, tokenizer: &Arc<Tokenizer>) {
        for choice in &mut self.choices {
            choice.detokenizer = reading.detokenizer(tokenizer);
            choice.parser = Some(reading.parser());
        }
    }

    pub fn choices(&self) -> usize {
        self.choices.len()
    }

    /// Whether all choices have come to their end.
    pub fn is_over(&self) -> bool {
        self.choices.iter().all(|c| c.over)
    }

    /// The stop string that has ended a choice.
    pub fn stopped_by(&self, choice: usize) -> Option<&str> {
        self.choices[choice].stops.stopped_by()
    }

    /// What an update adds; `None` where there is nothing to tell.
    ///
    /// # Errors
    /// What went wrong with the request.
    pub fn take(&mut self, update: Update) -> Result<Option<Delta>> {
        match update {
            Update::Begun { cached } => {
                self.cached = cached;
                Ok(None)
            }
            Update::Embedding(vector) => {
                self.embedding = Some(vector);
                Ok(None)
            }
            Update::Token { choice: number, token, logprobs } => {
                let choice = &mut self.choices[number];
                if choice.over {
                    return Ok(None);
                }
                self.generated += 1;
                let (text, stopped) = choice.stops.push(&choice.detokenizer.push(token)?);
                choice.over = stopped;
                let finish = stopped.then_some(Finish::Stop);
                let pieces = choice.pieces(&text, stopped.then_some(true));
                Ok(Some(Delta { choice: number, text, pieces, tokens: vec![(token, logprobs)], finish, stopped }))
            }
            Update::Finished { choice: number, reason } => {
                let choice = &mut self.choices[number];
                if choice.over {
                    return Ok(None);
                }
                choice.over = true;
                // What was held back, because it might have become a character or a stop string.
                let (mut text, stopped) = choice.stops.push(&choice.detokenizer.flush()?);
                if !stopped {
                    text += &choice.stops.flush();
                }
                let is_cut = stopped || reason != Finish::Stop;
                let (pieces, finish) = (choice.pieces(&text, Some(is_cut)), Some(reason));
                Ok(Some(Delta { choice: number, text, pieces, tokens: Vec::new(), finish, stopped: false }))
            }
            Update::Failed { why, .. } => anyhow::bail!("{why}"),
        }
    }
}

impl Choice {
    /// What a part of the text means. `last`: nothing comes behind it, and whether that is since something has cut it off.
    fn pieces(&mut self, text: &str, last: Option<bool>) -> Vec<Piece> {
        match &mut self.parser {
            Some(parser) => {
                let mut pieces = parser.push(text);
                match last {
                    None => {}
                    Some(true) => pieces.extend(parser.cut()),
                    Some(false) => pieces.extend(parser.finish()),
                }
                pieces
            }
            None if text.is_empty() => Vec::new(),
            None => vec![Piece::Text(text.to_owned())],
        }
    }
}
