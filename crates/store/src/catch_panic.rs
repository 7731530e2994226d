//! Turns a library's panics into errors. A panic that a file's bytes cause is that file's error, and the rest of the program goes on.

use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::sync::Once;
use std::thread;

thread_local! {
    /// A panic of this thread becomes an error.
    static CAUGHT: Cell<bool> = const { Cell::new(false) };
}

/// Runs `call`. If it panics, nothing is printed, and the error is the panic's message. Values that `call` was changing must be dropped afterwards, or stay
/// valid when half changed.
///
/// # Errors
/// A panic of `call`.
pub fn catch_panic<T>(call: impl FnOnce() -> T) -> Result<T, String> {
    // The hook belongs to the whole process, so it passes all other panics to the one before it. It cannot be changed while this thread unwinds.
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
    done.map_err(|panic| {
        let words = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        words.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default()
    })
}

#[cfg(test)]
mod tests {
    use std::panic::panic_any;
    use std::process::Command;

    use super::*;

    #[test]
    #[ignore = "run by the test below, which looks at what it prints"]
    fn panics() {
        assert_eq!(catch_panic(|| 1), Ok(1));
        assert_eq!(
            catch_panic(|| catch_panic::<()>(|| panic_any("becomes an error"))),
            Ok(Err("becomes an error".to_owned()))
        );
        assert_eq!(catch_panic::<()>(|| panic!("{} an error", "becomes")), Err("becomes an error".to_owned()));
        assert_eq!(catch_panic::<()>(|| panic_any(1)), Err(String::new()));
        assert!(catch_unwind(|| panic_any("somebody's mistake")).is_err());
    }

    #[test]
    fn a_panic_that_becomes_an_error_is_not_printed_and_others_are() {
        let mut child = Command::new(std::env::current_exe().unwrap());
        let child = child.args(["--exact", "catch_panic::tests::panics", "--ignored", "--nocapture"]);
        let output = child.output().unwrap();
        let printed = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{printed}");
        assert!(!printed.contains("becomes an error") && printed.contains("somebody's mistake"), "{printed}");
    }
}
