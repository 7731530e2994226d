//! Panics of the database, which follow from bytes that somebody changed: an error of the file, which nobody should be asked to report as a mistake of the program.

use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::sync::Once;
use std::thread;

thread_local! {
    /// A panic of this thread becomes an error.
    static CAUGHT: Cell<bool> = const { Cell::new(false) };
}

/// What `call` returns; `None`, and nothing is printed, where it panicked. What it had its hands on is to be given up.
pub(super) fn caught<T>(call: impl FnOnce() -> T) -> Option<T> {
    // The hook is the process's: the one that is there goes on for all other panics. It cannot be changed while this thread unwinds.
    static HOOK: Once = Once::new();
    if !thread::panicking() {
        HOOK.call_once(|| {
            let before = panic::take_hook();
            panic::set_hook(Box::new(move |panic| {
                if !CAUGHT.get() {
                    before(panic);
                }
            }));
        });
    }
    let outer = CAUGHT.replace(true);
    let done = catch_unwind(AssertUnwindSafe(call));
    CAUGHT.set(outer);
    done.ok()
}

#[cfg(test)]
mod tests {
    use std::panic::panic_any;
    use std::process::Command;

    use super::*;

    #[test]
    #[ignore = "run by the test below, which looks at what it prints"]
    fn panics() {
        assert_eq!(caught(|| 1), Some(1));
        assert_eq!(caught(|| caught::<()>(|| panic_any("becomes an error"))), Some(None));
        assert_eq!(caught::<()>(|| panic_any("becomes an error")), None);
        assert!(catch_unwind(|| panic_any("somebody's mistake")).is_err());
    }

    #[test]
    fn a_panic_that_becomes_an_error_is_not_printed_and_others_are() {
        let mut child = Command::new(std::env::current_exe().unwrap());
        let child = child.args(["--exact", "disk::quiet::tests::panics", "--ignored", "--nocapture"]);
        let output = child.output().unwrap();
        let printed = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{printed}");
        assert!(!printed.contains("becomes an error") && printed.contains("somebody's mistake"), "{printed}");
    }
}
