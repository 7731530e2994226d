//! The reply to a request in a dialect of the server's.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use sluice_server::{Reply as Running, ReplyPart};

use crate::errors::EngineError;
use crate::inbox::{Inbox, Received};
use crate::stream::check_process;
use crate::waiting::{LOOK, detached};

struct State {
    inbox: Inbox<ReplyPart>,
    /// `None` once it is over, or cancelled. Dropping it cancels the request.
    running: Option<Running>,
}

/// A part: the status and the ignored fields, or bytes.
enum Part {
    Head(u16, String),
    Body(Vec<u8>),
}

/// The reply to a request, as it comes: first a tuple of status and ignored fields, then bytes. Dropping it cancels what is left.
#[pyclass(frozen, module = "sluice._sluice")]
pub struct Reply {
    state: Mutex<State>,
    process: u32,
}

impl Reply {
    pub fn new(mut running: Running) -> Reply {
        let (_, nothing) = tokio::sync::mpsc::unbounded_channel();
        let inbox = Inbox::new(std::mem::replace(&mut running.parts, nothing));
        Reply { state: Mutex::new(State { inbox, running: Some(running) }), process: std::process::id() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn read(part: ReplyPart) -> PyResult<Part> {
    match part {
        ReplyPart::Head(status, ignored) => Ok(Part::Head(status, ignored)),
        ReplyPart::Body(bytes) => Ok(Part::Body(bytes.to_vec())),
        ReplyPart::Failed(why) => Err(EngineError::new_err(why)),
    }
}

fn to_python<'py>(py: Python<'py>, part: Part) -> PyResult<Bound<'py, PyAny>> {
    match part {
        Part::Head(status, ignored) => Ok((status, ignored).into_pyobject(py)?.into_any()),
        Part::Body(bytes) => Ok(PyBytes::new(py, &bytes).into_any()),
    }
}

#[pymethods]
impl Reply {
    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    /// The next part: waits for it without the interpreter's lock.
    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        check_process(self.process)?;
        loop {
            let received = detached(py, || {
                let mut state = self.state();
                if state.running.is_none() {
                    return Ok(Received::End);
                }
                let received = state.inbox.wait(LOOK);
                if matches!(received, Received::End) {
                    state.running = None;
                }
                Ok(received)
            })?;
            match received {
                Received::Item(part) => return to_python(py, read(part)?).map(Some),
                Received::End => return Ok(None),
                Received::NotYet => {
                    if let Err(interrupted) = py.check_signals() {
                        self.cancel();
                        return Err(interrupted);
                    }
                }
            }
        }
    }

    /// What is there without waiting, and whether that was all.
    fn ready<'py>(&self, py: Python<'py>) -> PyResult<(Vec<Bound<'py, PyAny>>, bool)> {
        check_process(self.process)?;
        let mut state = self.state();
        let mut parts = Vec::new();
        while state.running.is_some() {
            match state.inbox.take() {
                Received::Item(part) => parts.push(to_python(py, read(part)?)?),
                Received::NotYet => return Ok((parts, false)),
                Received::End => state.running = None,
            }
        }
        Ok((parts, true))
    }

    /// A descriptor that can be read when something is ready.
    fn fileno(&self) -> PyResult<i32> {
        self.state().inbox.descriptor().map_err(|e| EngineError::new_err(e.to_string()))
    }

    /// Ends what is left of it.
    fn cancel(&self) {
        self.state().running = None;
    }
}
