//! Logits processors that are functions of Python.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use sluice_engine::sampling::{LogitsProcessor, ProcessorFailed};

use crate::arrays::Array;

/// Calls `run(tokens, logits)` with arrays, which writes its result to `logits`.
pub struct Processor {
    run: Py<PyAny>,
    /// What was raised first.
    raised: Mutex<Option<PyErr>>,
}

impl fmt::Debug for Processor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Processor")
    }
}

impl Processor {
    pub fn new(run: Py<PyAny>) -> Processor {
        Processor { run, raised: Mutex::default() }
    }

    /// What was raised in it, if something was.
    pub fn take_raised(&self) -> Option<PyErr> {
        self.raised.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn call(&self, py: Python<'_>, tokens: &[u32], logits: &mut [f32]) -> PyResult<()> {
        // A new one each time: whoever keeps a view of it keeps its numbers.
        let array = Py::new(py, Array::of_floats(vec![logits.len()], logits.iter().copied()))?;
        self.run.call1(py, (Array::of_tokens(tokens), array.clone_ref(py)))?;
        array.get().get(logits);
        Ok(())
    }
}

impl LogitsProcessor for Processor {
    fn process(&self, tokens: &[u32], logits: &mut [f32]) -> Result<(), ProcessorFailed> {
        // At the interpreter's end there is nobody left to call.
        let called = Python::try_attach(|py| self.call(py, tokens, logits));
        match called {
            Some(Ok(())) => Ok(()),
            Some(Err(e)) => {
                self.raised.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(e);
                Err(ProcessorFailed)
            }
            None => Err(ProcessorFailed),
        }
    }
}
