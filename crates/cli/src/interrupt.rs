//! Ctrl-C: leaves at once with exit code 130, except while an answer is given in a conversation; there it stops the answer.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use anyhow::{Context, Result};
use signal_hook::consts::SIGINT;
use signal_hook::flag;

struct Flags {
    /// Ctrl-C ends the program.
    leaves: Arc<AtomicBool>,
    /// Ctrl-C came since `guard` was called.
    pressed: Arc<AtomicBool>,
}

static FLAGS: OnceLock<Flags> = OnceLock::new();

/// From here on Ctrl-C leaves with 130.
pub fn install() -> Result<()> {
    let flags = Flags { leaves: Arc::new(AtomicBool::new(true)), pressed: Arc::default() };
    let handled = flag::register_conditional_shutdown(SIGINT, 130, Arc::clone(&flags.leaves))
        .and_then(|_| flag::register(SIGINT, Arc::clone(&flags.pressed)));
    handled.context("cannot handle Ctrl-C")?;
    let _ = FLAGS.set(flags);
    Ok(())
}

/// Whether Ctrl-C was pressed since the last [`hold`].
pub fn pressed() -> bool {
    FLAGS.get().is_some_and(|f| f.pressed.load(Ordering::Relaxed))
}

/// While this lives, Ctrl-C only sets [`pressed`].
pub struct Hold(());

/// Takes Ctrl-C over from the program's end.
pub fn hold() -> Hold {
    set_leaves(false);
    Hold(())
}

impl Drop for Hold {
    fn drop(&mut self) {
        set_leaves(true);
    }
}

fn set_leaves(leaves: bool) {
    if let Some(f) = FLAGS.get() {
        f.leaves.store(leaves, Ordering::SeqCst);
        f.pressed.store(false, Ordering::SeqCst);
    }
}
