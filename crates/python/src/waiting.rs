//! Waiting without the interpreter's lock. Signals are looked for meanwhile, so that Ctrl-C ends it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread;
use std::time::Duration;

use pyo3::prelude::*;

use crate::errors::{self, EngineError};

/// How long a signal may wait to be looked at.
pub const LOOK: Duration = Duration::from_millis(50);

/// Does something that may take a while, without the interpreter's lock.
///
/// # Errors
/// Those of `work`, and a panic in it.
pub fn detached<T: Send>(py: Python<'_>, work: impl FnOnce() -> PyResult<T> + Send) -> PyResult<T> {
    py.detach(|| catch_unwind(AssertUnwindSafe(work))).unwrap_or_else(|panic| Err(errors::panicked(&*panic)))
}

/// The same on a thread of its own, while this one looks for signals. If one ends the wait, `give_up` is called, and the thread ends by itself.
///
/// # Errors
/// Those of `work`; a panic in it; an exception that a signal's handler raised, such as `KeyboardInterrupt`.
pub fn on_thread<T: Send + 'static>(
    py: Python<'_>,
    name: &str,
    work: impl FnOnce() -> PyResult<T> + Send + 'static,
    give_up: impl FnOnce(),
) -> PyResult<T> {
    let (sender, mut receiver) = sync_channel(1);
    let done = move || {
        let result = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(errors::panicked(&*panic)));
        let _ = sender.send(result);
    };
    let spawned = thread::Builder::new().name(name.into()).spawn(done);
    spawned.map_err(|e| EngineError::new_err(format!("no thread: {e}")))?;
    loop {
        let waiting = &mut receiver;
        match py.detach(move || waiting.recv_timeout(LOOK)) {
            Ok(result) => return result,
            Err(RecvTimeoutError::Timeout) => {
                if let Err(interrupted) = py.check_signals() {
                    give_up();
                    return Err(interrupted);
                }
            }
            Err(RecvTimeoutError::Disconnected) => return Err(EngineError::new_err("its thread has ended")),
        }
    }
}
