//! From updates of the engine to text. Each choice has its own detokenizer and stop strings, which may hold back text until its meaning is clear.

use std::sync::Arc;

use anyhow::Result;
use sluice_engine::sampling::Logprobs;
use sluice_engine::text::{AnswerParser, Detokenizer, Piece, Reading, StopStrings, Tokenizer};
use sluice_engine::{DraftCounts, Finish};

use crate::models::runtime::commands::Update;

/// What is added to a choice.
pub struct Delta {
    /// Which choice.
    pub choice: usize,
    /// The text as the model wrote it.
    pub text: String,
    /// The same text, split into thoughts, text and calls.
    pub pieces: Vec<Piece>,
    /// The tokens that were added, with log-probabilities if they were requested.
    pub tokens: Vec<(u32, Option<Logprobs>)>,
    /// Why the choice is complete; `None` while it is not.
    pub finish: Option<Finish>,
    /// A stop string has ended the choice; the engine does not know yet.
    pub stopped: bool,
}

struct AnswerChoice {
    detokenizer: Detokenizer,
    stops: StopStrings,
    /// Splits the text into pieces; `None`: all of it is text.
    parser: Option<AnswerParser>,
    over: bool,
}

/// The choices of one request.
pub struct Answer {
    choices: Vec<AnswerChoice>,
    /// Prompt tokens that were cached.
    pub cached: usize,
    /// Tokens generated so far, of all choices.
    pub generated: usize,
    /// Whether the request said what the answer may be.
    pub is_predicted: bool,
    /// What was drafted for complete choices.
    pub drafted: DraftCounts,
    /// The prompt's embedding, if it was requested: `[hidden]`.
    pub embedding: Option<Vec<f32>>,
}

impl Answer {
    /// Plain text that ends at any of `stops`.
    pub fn new(tokenizer: &Arc<Tokenizer>, choices: usize, stops: &[String]) -> Answer {
        let choice = |_| AnswerChoice {
            detokenizer: Detokenizer::new(Arc::clone(tokenizer), true),
            stops: StopStrings::new(stops.iter().cloned()),
            parser: None,
            over: false,
        };
        Answer {
            choices: (0..choices).map(choice).collect(),
            cached: 0,
            generated: 0,
            is_predicted: false,
            drafted: DraftCounts::default(),
            embedding: None,
        }
    }

    /// Parses the answer to a conversation: from here on, thoughts and calls are told apart from text.
    pub fn parse_with(&mut self, reading: &Reading, tokenizer: &Arc<Tokenizer>) {
        for choice in &mut self.choices {
            choice.detokenizer = reading.detokenizer(tokenizer);
            choice.parser = Some(reading.parser());
        }
    }

    /// How many choices there are.
    pub fn choices(&self) -> usize {
        self.choices.len()
    }

    /// Whether all choices are complete.
    pub fn is_over(&self) -> bool {
        self.choices.iter().all(|c| c.over)
    }

    /// The stop string that has ended a choice, if one has.
    pub fn stopped_by(&self, choice: usize) -> Option<&str> {
        self.choices[choice].stops.stopped_by()
    }

    /// Applies an update. `None`: it adds nothing that a client should see.
    ///
    /// # Errors
    /// When the update says that the request has failed.
    pub fn apply(&mut self, update: Update) -> Result<Option<Delta>> {
        match update {
            Update::Started { cached } => {
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
            Update::Finished { choice: number, reason, drafted } => {
                self.drafted = self.drafted.plus(drafted);
                let choice = &mut self.choices[number];
                if choice.over {
                    return Ok(None);
                }
                choice.over = true;
                // Text that was held back because it might have become a character or a stop string.
                let (mut text, stopped) = choice.stops.push(&choice.detokenizer.flush()?);
                if !stopped {
                    text += &choice.stops.flush();
                }
                let is_cut = stopped || reason != Finish::Stop;
                let (pieces, finish) = (choice.pieces(&text, Some(is_cut)), Some(reason));
                Ok(Some(Delta { choice: number, text, pieces, tokens: Vec::new(), finish, stopped: false }))
            }
            Update::Failed(why) => anyhow::bail!("{why}"),
        }
    }
}

impl AnswerChoice {
    /// Splits text into pieces. `last`: `None` if more may follow, else whether the answer was cut off here.
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
