//! Follows a sequence's tokens through its constraint.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use anyhow::{Context, Result};
use llguidance::Matcher;
use toktrie::SimpleVob;

use super::{Constraint, Thought};

/// The state of a sequence within its constraint.
pub struct Guide {
    constraint: Arc<Constraint>,
    phase: Phase,
    /// The grammar's state, unless the mask thread has it.
    matcher: Option<Box<Matcher>>,
    /// Receives the mask that is being made. The lock only makes the guide `Sync`, for threads that sample.
    flight: Mutex<Option<Receiver<Made>>>,
    mask: Option<SimpleVob>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The first token says whether there is a thought.
    Start,
    /// The second token says so (the harmony format).
    Channel,
    /// In a thought, with this many tokens left.
    Thought {
        left: usize,
    },
    Grammar,
    /// No more restrictions.
    Free,
}

/// What follows after a token.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Next {
    /// Tokens that must come next. The guide has taken them already.
    pub forced: Vec<u32>,
    /// Nothing can follow: the answer is complete.
    pub is_over: bool,
}

struct Job {
    matcher: Box<Matcher>,
    made: Sender<Made>,
}

struct Made {
    matcher: Box<Matcher>,
    mask: Result<SimpleVob>,
}

impl Job {
    fn run(self) {
        let Job { mut matcher, made } = self;
        let mask = matcher.compute_mask_or_eos();
        // The sequence may have ended meanwhile.
        let _ = made.send(Made { matcher, mask });
    }
}

/// The thread that makes masks. It starts with the first sequence that needs one.
#[derive(Default)]
pub struct Masks {
    jobs: Option<Sender<Job>>,
}

impl Masks {
    fn make(&mut self, job: Job) {
        let jobs = self.jobs.get_or_insert_with(|| {
            let (jobs, received) = channel::<Job>();
            // Without a thread the receiver is dropped, and masks are made by the caller.
            let _ = thread::Builder::new().name("masks".into()).spawn(move || received.into_iter().for_each(Job::run));
            jobs
        });
        if let Err(refused) = jobs.send(job) {
            refused.0.run();
        }
    }
}

impl Guide {
    /// A guide at the beginning of an answer.
    pub fn new(constraint: &Arc<Constraint>, masks: &mut Masks) -> Guide {
        let budget = |thought: &Thought| Phase::Thought { left: thought.budget.unwrap_or(usize::MAX) };
        let phase = match &constraint.thought {
            Some(thought) if thought.opened => budget(thought),
            Some(thought) if thought.begin.is_some() => Phase::Start,
            _ => Phase::Grammar,
        };
        let matcher = constraint.grammar.clone().map(Box::new);
        let mut guide =
            Guide { constraint: Arc::clone(constraint), phase, matcher, flight: Mutex::default(), mask: None };
        guide.prepare(masks);
        guide
    }

    /// Takes a generated token. `forces`: returns tokens that must follow; otherwise the masks allow nothing else.
    ///
    /// # Errors
    /// A grammar that has become too large; a token that it does not allow.
    pub fn push(&mut self, token: u32, masks: &mut Masks, forces: bool) -> Result<Next> {
        self.finish_mask()?;
        self.mask = None;
        let mut next = Next::default();
        self.follow(token, &mut next)?;
        if !next.is_over {
            self.force(token, &mut next, forces)?;
        }
        if !next.is_over {
            self.prepare(masks);
        }
        Ok(next)
    }

    fn follow(&mut self, token: u32, next: &mut Next) -> Result<()> {
        let thought = self.constraint.thought.as_ref();
        match self.phase {
            Phase::Start if thought.is_some_and(|t| t.begin == Some(token)) => {
                let is_thought = thought.is_some_and(|t| t.channel.is_none());
                self.phase = if is_thought { self.thought() } else { Phase::Channel };
                Ok(())
            }
            Phase::Channel => {
                let is_thought = thought.is_some_and(|t| t.channel == Some(token));
                self.phase = if is_thought { self.thought() } else { self.behind_thought() };
                Ok(())
            }
            Phase::Thought { .. } if thought.is_some_and(|t| t.end == token) => {
                self.phase = self.behind_thought();
                if self.phase == Phase::Grammar {
                    next.forced.extend(thought.into_iter().flat_map(|t| &t.gap));
                }
                Ok(())
            }
            Phase::Thought { left } => {
                self.phase = Phase::Thought { left: left.saturating_sub(1) };
                Ok(())
            }
            Phase::Free => Ok(()),
            Phase::Start | Phase::Grammar => {
                self.phase = self.behind_thought();
                let Some(matcher) = &mut self.matcher else { return Ok(()) };
                matcher.consume_token(token)?;
                next.is_over = matcher.is_stopped();
                Ok(())
            }
        }
    }

    /// At the beginning of a thought.
    fn thought(&self) -> Phase {
        let budget = self.constraint.thought.as_ref().and_then(|thought| thought.budget);
        Phase::Thought { left: budget.unwrap_or(usize::MAX) }
    }

    fn behind_thought(&self) -> Phase {
        if self.matcher.is_some() { Phase::Grammar } else { Phase::Free }
    }

    /// Adds tokens that must come next.
    fn force(&mut self, token: u32, next: &mut Next, forces: bool) -> Result<()> {
        if let (Phase::Thought { left: 0 }, Some(thought)) = (self.phase, &self.constraint.thought) {
            next.forced.extend(if thought.ends_line(token) { &thought.close_line } else { &thought.close });
            self.phase = self.behind_thought();
        }
        if self.phase == Phase::Grammar
            && forces
            && let Some(matcher) = &mut self.matcher
        {
            next.forced.extend(matcher.consume_ff_tokens());
            next.is_over = matcher.is_stopped();
            if let Some(why) = matcher.get_error() {
                anyhow::bail!(why);
            }
        }
        Ok(())
    }

    /// Starts to make the mask for the next token.
    fn prepare(&mut self, masks: &mut Masks) {
        if !matches!(self.phase, Phase::Start | Phase::Grammar) || self.mask.is_some() {
            return;
        }
        if let Some(matcher) = self.matcher.take() {
            let (made, flight) = channel();
            *self.flight.get_mut().unwrap_or_else(PoisonError::into_inner) = Some(flight);
            masks.make(Job { matcher, made });
        }
    }

    /// Waits for the mask of the next token.
    ///
    /// # Errors
    /// A grammar that has become too large.
    pub fn finish_mask(&mut self) -> Result<()> {
        let flight = self.flight.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let Some(flight) = flight else { return Ok(()) };
        let Made { matcher, mask } = flight.recv().context("the thread that makes masks has ended")?;
        self.matcher = Some(matcher);
        let mut mask = mask?;
        if let (Phase::Start, Some(begin)) = (self.phase, self.constraint.thought.as_ref().and_then(|t| t.begin))
            && (begin as usize) < mask.len()
        {
            mask.allow_token(begin);
        }
        self.mask = Some(mask);
        Ok(())
    }

    /// The tokens that may come next; `None`: all of them.
    pub fn mask(&self) -> Option<&[u32]> {
        match (&self.phase, &self.constraint.thought) {
            (Phase::Thought { .. }, Some(thought)) => thought.goes_on.as_ref(),
            _ => self.mask.as_ref(),
        }
        .map(SimpleVob::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::text::Tokenizer;

    /// In the harmony format, of a message's first two tokens the second says whether it is a thought.
    #[test]
    fn only_thoughts_have_a_budget_where_every_message_begins_alike() {
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
        let tokenizer = Arc::new(Tokenizer::load(&demo, None).unwrap());
        let (begin, analysis, text, end) = (1, 2, 3, 4);
        let thought = Thought {
            opened: false,
            begin: Some(begin),
            channel: Some(analysis),
            end,
            budget: Some(2),
            close: vec![7, 8],
            close_line: vec![7, 8],
            gap: Vec::new(),
            goes_on: None,
            tokenizer,
        };
        let constraint = Arc::new(Constraint { grammar: None, thought: Some(thought), has_marks: false });
        let forced = |tokens: &[u32]| -> Vec<Vec<u32>> {
            let (mut masks, mut all) = (Masks::default(), Vec::new());
            let mut guide = Guide::new(&constraint, &mut masks);
            for token in tokens {
                all.push(guide.push(*token, &mut masks, true).unwrap().forced);
            }
            all
        };
        let none = Vec::new;
        assert_eq!(forced(&[begin, analysis, 10, 11, 12]), [none(), none(), none(), vec![7, 8], none()]);
        assert_eq!(forced(&[begin, analysis, 10, end, 11, 12, 13]), vec![none(); 7]);
        assert_eq!(forced(&[begin, text, 10, 11, 12, 13]), vec![none(); 6]);
    }
}
