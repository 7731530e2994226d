//! Ctrl-C. It ends the program at once with exit code 130. While it is held, it is only recorded, and the holder stops what is running.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use anyhow::{Context, Result};
use signal_hook::consts::SIGINT;
use signal_hook::flag;

/// The exit code after Ctrl-C, as shells have it.
pub const STATUS: u8 = 130;

struct Flags {
    /// Ctrl-C ends the program.
    leaves: Arc<AtomicBool>,
    /// Ctrl-C was pressed while it was held.
    pressed: Arc<AtomicBool>,
    holds: AtomicUsize,
}

static FLAGS: OnceLock<Flags> = OnceLock::new();

/// Makes Ctrl-C end the program with 130.
pub fn install() -> Result<()> {
    let flags = Flags { leaves: Arc::new(AtomicBool::new(true)), pressed: Arc::default(), holds: AtomicUsize::new(0) };
    let handled = flag::register_conditional_shutdown(SIGINT, STATUS.into(), Arc::clone(&flags.leaves))
        .and_then(|_| flag::register(SIGINT, Arc::clone(&flags.pressed)));
    handled.context("cannot handle Ctrl-C")?;
    let _ = FLAGS.set(flags);
    Ok(())
}

/// Makes a second Ctrl-C end the program at once, held or not: for work that is worth waiting for once.
pub fn second_leaves() -> Result<()> {
    let again = Arc::<AtomicBool>::default();
    let handled = flag::register_conditional_shutdown(SIGINT, STATUS.into(), Arc::clone(&again))
        .and_then(|_| flag::register(SIGINT, again));
    handled.map(|_| ()).context("cannot handle Ctrl-C")
}

/// Whether Ctrl-C was pressed while it was held.
pub fn pressed() -> bool {
    FLAGS.get().is_some_and(|f| f.pressed.load(Ordering::SeqCst))
}

/// The same; also resets it.
pub fn take() -> bool {
    FLAGS.get().is_some_and(|f| f.pressed.swap(false, Ordering::SeqCst))
}

/// While one of these exists, Ctrl-C only sets [`pressed`].
pub struct Hold(());

/// Holds Ctrl-C.
pub fn hold() -> Hold {
    if let Some(f) = FLAGS.get() {
        f.holds.fetch_add(1, Ordering::SeqCst);
        // Only this store: a Ctrl-C before it ends the program, and one after it is recorded. Resetting `pressed` here could lose one in between.
        f.leaves.store(false, Ordering::SeqCst);
    }
    Hold(())
}

impl Drop for Hold {
    fn drop(&mut self) {
        if let Some(f) = FLAGS.get()
            && f.holds.fetch_sub(1, Ordering::SeqCst) == 1
        {
            f.leaves.store(true, Ordering::SeqCst);
            // Resets a Ctrl-C that came too late to stop anything; one between the two stores has ended the program.
            f.pressed.store(false, Ordering::SeqCst);
        }
    }
}

/// The error of work that Ctrl-C stopped, when everything has been reported: there is no message, only the exit code.
#[derive(Debug)]
pub struct Interrupted;

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

#[cfg(test)]
mod tests {
    use super::*;

    /// Once a signal no longer ends the program it is recorded, and nothing that `hold` does later may reset it. A second hold stands for those steps.
    #[test]
    fn a_ctrl_c_while_it_is_being_taken_over_is_not_lost() {
        install().unwrap();
        let first = hold();
        signal_hook::low_level::raise(SIGINT).unwrap();
        let second = hold();
        assert!(pressed());
        drop(second);
        assert!(take() && !take());
        signal_hook::low_level::raise(SIGINT).unwrap();
        drop(first);
        // Too late to stop anything: reset, so that it does not stop the next answer.
        let next = hold();
        assert!(!pressed());
        drop(next);
    }
}
