//! A request that the engine computes, and what comes of it.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use sluice_engine::Generation;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::time::{Instant, timeout_at};

use crate::api::answer::{Answer, Delta};
use crate::api::sampling::SamplingFields;
use crate::http::context::{self, RequestContext};
use crate::http::error::ApiError;
use crate::models::loaded::LoadedModel;
use crate::models::runtime::commands::{Submission, Update};
use crate::models::runtime::thread::Ticket;

/// A request that the engine computes. Dropping it cancels the rest.
pub struct Pending {
    ticket: Ticket,
    updates: UnboundedReceiver<Update>,
    /// The answer so far.
    pub answer: Answer,
    prompt_tokens: usize,
    /// Held so that the model stays in memory until the request is over.
    model: Arc<LoadedModel>,
    /// When the request times out.
    deadline: Option<Instant>,
    /// Gets the token counts at the end.
    context: Option<Arc<RequestContext>>,
    /// Other prompts of the same request; their choices follow this one's.
    pub siblings: Vec<Pending>,
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let Some(context) = &self.context {
            context.add_usage(self.prompt_tokens, self.answer.cached, self.answer.generated);
        }
    }
}

/// Token counts of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of all prompts.
    pub prompt: usize,
    /// Prompt tokens that were cached.
    pub cached: usize,
    /// Prompt tokens that are cached from now on: all that were not, except the last, which is always computed.
    pub written: usize,
    /// Generated tokens of all choices.
    pub generated: usize,
    /// Drafted tokens that came true, and that did not, if the request said what its answer may be.
    pub predicted: Option<(u64, u64)>,
}

/// What happens next to a request.
pub enum Step {
    /// The prompt is being computed.
    Started,
    /// A choice has grown.
    Delta(Delta),
    /// All choices are complete.
    Over,
}

impl Pending {
    /// Hands a prompt to the engine.
    ///
    /// # Errors
    /// An invalid request; a full queue.
    pub fn submit(
        model: &Arc<LoadedModel>,
        prompt: Vec<u32>,
        generation: Generation,
        sampling: &SamplingFields,
    ) -> Result<Pending, ApiError> {
        let (choices, stops) = (sampling.choices()?, sampling.stops()?);
        let (updates, received) = unbounded_channel();
        let prompt_tokens = prompt.len();
        if let Some(bad) = prompt.iter().find(|t| **t as usize >= model.vocabulary) {
            let message = format!("token {bad} is not in the vocabulary of {}", model.vocabulary);
            return Err(ApiError::invalid("prompt", message));
        }
        if prompt_tokens == 0 {
            return Err(ApiError::invalid("prompt", "the prompt has no tokens"));
        }
        let deadline = model.request_timeout.map(|time| Instant::now() + time);
        let salt = sampling.cache_salt.clone().unwrap_or_default().into_bytes();
        let arrived = std::time::Instant::now();
        let submission = Submission { prompt, generation, choices, salt, updates, arrived };
        let ticket = model.engine.submit(submission)?;
        let answer = Answer::new(&model.text.tokenizer, choices, &stops);
        let context = context::current();
        // The body is gone by now; only tokens are left of it.
        context.iter().for_each(|context| context.hold_body_memory(None));
        let (model, siblings) = (Arc::clone(model), Vec::new());
        Ok(Pending { ticket, updates: received, answer, prompt_tokens, model, deadline, context, siblings })
    }

    /// The model that computes the request.
    pub fn model(&self) -> &LoadedModel {
        &self.model
    }

    /// Token counts so far, of all prompts of the request.
    pub fn usage(&self) -> Usage {
        let (prompt, cached, generated) = (self.prompt_tokens, self.answer.cached, self.answer.generated);
        let written = if self.model.keeps_prefixes { prompt.saturating_sub(cached + 1) } else { 0 };
        let drafted = self.answer.drafted;
        let predicted = self.answer.is_predicted.then_some((drafted.accepted, drafted.drafted - drafted.accepted));
        let own = Usage { prompt, cached, written, generated, predicted };
        self.siblings.iter().map(Pending::usage).fold(own, |a, b| Usage {
            prompt: a.prompt + b.prompt,
            cached: a.cached + b.cached,
            written: a.written + b.written,
            generated: a.generated + b.generated,
            predicted: a.predicted,
        })
    }

    /// The next delta; `None` after the last.
    ///
    /// # Errors
    /// When the request times out, or the engine fails.
    pub async fn next(&mut self) -> Result<Option<Delta>, ApiError> {
        loop {
            match self.step().await? {
                Step::Started => {}
                Step::Delta(delta) => return Ok(Some(delta)),
                Step::Over => return Ok(None),
            }
        }
    }

    /// The next step of any of the request's prompts.
    ///
    /// # Errors
    /// As [`Pending::next`].
    pub async fn step(&mut self) -> Result<Step, ApiError> {
        let deadline = self.deadline.filter(|_| !self.siblings.is_empty());
        let Some(deadline) = deadline else { return self.any_step().await };
        // `any_step` creates the steps anew at each poll, and their timers with them. So the deadline is kept here.
        timeout_at(deadline, self.any_step()).await.unwrap_or_else(|_| Err(timed_out()))
    }

    async fn any_step(&mut self) -> Result<Step, ApiError> {
        if self.siblings.is_empty() {
            return self.own_step().await;
        }
        poll_fn(|cx| {
            let mut are_over = true;
            let mut first = self.answer.choices();
            match pin!(self.own_step()).poll(cx) {
                Poll::Ready(Ok(Step::Over)) => {}
                Poll::Pending => are_over = false,
                ready => return ready,
            }
            for pending in &mut self.siblings {
                match pin!(pending.own_step()).poll(cx) {
                    Poll::Ready(Ok(Step::Over)) => {}
                    Poll::Pending => are_over = false,
                    Poll::Ready(Ok(Step::Delta(delta))) => {
                        return Poll::Ready(Ok(Step::Delta(Delta { choice: first + delta.choice, ..delta })));
                    }
                    ready => return ready,
                }
                first += pending.answer.choices();
            }
            if are_over { Poll::Ready(Ok(Step::Over)) } else { Poll::Pending }
        })
        .await
    }

    async fn own_step(&mut self) -> Result<Step, ApiError> {
        while !self.answer.is_over() {
            let update = match self.deadline {
                None => self.updates.recv().await,
                Some(deadline) => timeout_at(deadline, self.updates.recv()).await.map_err(|_| timed_out())?,
            };
            let Some(update) = update else {
                let why = self.model.engine.failure().unwrap_or_else(|| "it was told to".to_owned());
                return Err(ApiError::internal(format!("the engine has ended: {why}")));
            };
            let has_started = matches!(update, Update::Started { .. });
            let delta = self.answer.apply(update).map_err(|e| ApiError::internal(format!("{e:#}")))?;
            if let Some(delta) = delta {
                if delta.stopped {
                    self.ticket.stop(delta.choice);
                }
                return Ok(Step::Delta(delta));
            }
            if has_started {
                return Ok(Step::Started);
            }
        }
        Ok(Step::Over)
    }
}

fn timed_out() -> ApiError {
    ApiError::timed_out("the request took longer than this server allows")
}
