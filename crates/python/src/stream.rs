//! The answers to a prompt, token by token.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use sluice_engine::Finish;
use sluice_engine::text::{Detokenizer, StopStrings, Tokenizer};
use sluice_server::{Ticket, Update};

use crate::errors::{self, EngineError, RequestError};
use crate::inbox::{Inbox, Received};
use crate::processor::Processor;
use crate::request::GenerateRequest;
use crate::waiting::{LOOK, detached};

/// (choice, text that is complete with it, token, log-probability, likeliest tokens, why the choice ended)
type Part = (usize, String, Option<u32>, Option<f64>, Option<Vec<(u32, f64)>>, Option<String>);
/// (text, tokens, a log-probability and the likeliest tokens for each token, why it ended)
type Whole = (String, Vec<u32>, Vec<(f64, Vec<(u32, f64)>)>, String);

struct Choice {
    detokenizer: Detokenizer,
    stops: StopStrings,
    is_over: bool,
}

struct State {
    inbox: Inbox<Update>,
    /// `None` once everything is over, or cancelled.
    ticket: Option<Ticket>,
    choices: Vec<Choice>,
    /// Tokens of the prompt that were cached; known once it has started.
    cached: Option<usize>,
    open: usize,
}

/// What an update means.
enum Step {
    Part(Part),
    Nothing,
    Failed(PyErr),
}

/// The answers to a prompt, as they come. Dropping it cancels what is left.
#[pyclass(frozen, module = "sluice._sluice")]
pub struct Stream {
    state: Mutex<State>,
    processor: Option<Arc<Processor>>,
    process: u32,
    #[pyo3(get)]
    prompt_tokens: usize,
}

impl Stream {
    /// `request` is what the ticket was given for.
    pub fn new(
        inbox: Inbox<Update>,
        ticket: Ticket,
        tokenizer: &Arc<Tokenizer>,
        request: &GenerateRequest,
        prompt: usize,
    ) -> Stream {
        let choice = || Choice {
            detokenizer: Detokenizer::new(Arc::clone(tokenizer), request.skip_special),
            stops: StopStrings::new(request.stops.iter().cloned()),
            is_over: false,
        };
        let choices: Vec<Choice> = (0..request.choices).map(|_| choice()).collect();
        let open = choices.len();
        Stream {
            state: Mutex::new(State { inbox, ticket: Some(ticket), choices, cached: None, open }),
            processor: request.processor.clone(),
            process: std::process::id(),
            prompt_tokens: prompt,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was raised in the logits processor goes before what the engine says of it.
    fn failed(&self, error: PyErr) -> PyErr {
        self.processor.as_ref().and_then(|processor| processor.take_raised()).unwrap_or(error)
    }

    fn check_process(&self) -> PyResult<()> {
        check_process(self.process)
    }

    /// Waits for the next part.
    fn wait(&self, py: Python<'_>) -> PyResult<Option<Part>> {
        self.check_process()?;
        loop {
            // Also where parts come so quickly that nobody ever waits.
            if let Err(interrupted) = py.check_signals() {
                self.cancel();
                return Err(interrupted);
            }
            let step = detached(py, || {
                let mut state = self.state();
                if state.open == 0 {
                    return Ok(None);
                }
                Ok(Some(match state.inbox.wait(LOOK) {
                    Received::Item(update) => state.apply(update),
                    Received::End => state.ended(),
                    Received::NotYet => Step::Nothing,
                }))
            })?;
            match step {
                None => return Ok(None),
                Some(Step::Part(part)) => return Ok(Some(part)),
                Some(Step::Failed(e)) => return Err(self.failed(e)),
                Some(Step::Nothing) => {}
            }
        }
    }
}

/// Checks that this is the process that something belongs to.
///
/// # Errors
/// In a child that was forked.
pub fn check_process(owner: u32) -> PyResult<()> {
    if owner == std::process::id() {
        return Ok(());
    }
    Err(EngineError::new_err("the model was loaded in another process, of which this one is a fork: load it here"))
}

impl State {
    fn ended(&mut self) -> Step {
        self.open = 0;
        self.ticket = None;
        Step::Failed(EngineError::new_err("the engine has ended"))
    }

    fn apply(&mut self, update: Update) -> Step {
        match update {
            Update::Started { cached } => {
                self.cached = Some(cached);
                Step::Nothing
            }
            Update::Token { choice: at, token, logprobs } => {
                let Some(choice) = self.choices.get_mut(at).filter(|choice| !choice.is_over) else {
                    return Step::Nothing;
                };
                let text = match choice.detokenizer.push(token) {
                    Ok(text) => text,
                    Err(e) => return self.failed(errors::engine(&e)),
                };
                let (text, is_stopped) = choice.stops.push(&text);
                if is_stopped {
                    choice.is_over = true;
                    self.ticket.iter().for_each(|ticket| ticket.stop(at));
                    self.close_one();
                }
                let (chosen, top) = logprobs.map(|l| (l.chosen, l.top)).unzip();
                Step::Part((at, text, Some(token), chosen, top, is_stopped.then(|| "stop_string".to_owned())))
            }
            Update::Finished { choice: at, reason, .. } => {
                let Some(choice) = self.choices.get_mut(at).filter(|choice| !choice.is_over) else {
                    return Step::Nothing;
                };
                choice.is_over = true;
                let text = match choice.detokenizer.flush() {
                    Ok(text) => text,
                    Err(e) => return self.failed(errors::engine(&e)),
                };
                let (mut text, is_stopped) = choice.stops.push(&text);
                if !is_stopped {
                    text += &choice.stops.flush();
                }
                self.close_one();
                Step::Part((at, text, None, None, None, Some(Finish::name(reason).to_owned())))
            }
            Update::Embedding(_) => Step::Nothing,
            Update::Failed(why) => self.failed(RequestError::new_err(why)),
        }
    }

    fn failed(&mut self, error: PyErr) -> Step {
        self.open = 0;
        self.ticket = None;
        Step::Failed(error)
    }

    fn close_one(&mut self) {
        self.open = self.open.saturating_sub(1);
        if self.open == 0 {
            self.ticket = None;
        }
    }
}

#[pymethods]
impl Stream {
    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    /// The next part: waits for it without the interpreter's lock.
    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Part>> {
        self.wait(py)
    }

    /// Waits for all of the rest: a result for each choice.
    fn collect(&self, py: Python<'_>) -> PyResult<Vec<Whole>> {
        let count = self.state().choices.len();
        let mut all: Vec<Whole> = (0..count).map(|_| (String::new(), Vec::new(), Vec::new(), String::new())).collect();
        while let Some((choice, text, token, chosen, top, finish)) = self.wait(py)? {
            let whole = &mut all[choice];
            whole.0 += &text;
            whole.1.extend(token);
            whole.2.extend(chosen.map(|chosen| (chosen, top.unwrap_or_default())));
            if let Some(finish) = finish {
                whole.3 = finish;
            }
        }
        Ok(all)
    }

    /// What is there without waiting, and whether that was all.
    fn ready(&self) -> PyResult<(Vec<Part>, bool)> {
        self.check_process()?;
        let mut state = self.state();
        let mut parts = Vec::new();
        while state.open > 0 {
            let step = match state.inbox.take() {
                Received::Item(update) => state.apply(update),
                Received::End => state.ended(),
                Received::NotYet => return Ok((parts, false)),
            };
            match step {
                Step::Part(part) => parts.push(part),
                Step::Nothing => {}
                Step::Failed(e) => return Err(self.failed(e)),
            }
        }
        Ok((parts, true))
    }

    /// A descriptor that can be read when something is ready.
    fn fileno(&self) -> PyResult<i32> {
        self.check_process()?;
        self.state().inbox.descriptor().map_err(|e| EngineError::new_err(e.to_string()))
    }

    /// Ends what is left of it.
    fn cancel(&self) {
        let mut state = self.state();
        state.open = 0;
        state.ticket = None;
    }

    /// Tokens of the prompt that were cached; `None` until it has started.
    #[getter]
    fn cached_tokens(&self) -> Option<usize> {
        self.state().cached
    }
}
