//! Panics of a library at the edge, made into errors.
//!
//! The tokenizers library takes a `tokenizer.json` as it is, and some of what can stand in one makes it panic much later, at a text. That is an error of
//! the file, not of this program: nobody should be asked to report it, and whoever has other models under way goes on.

use anyhow::{Result, anyhow};
use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

thread_local! {
    /// A panic of this thread is somebody's error already.
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// What `call` returns, or an error that says with what words `library` panicked in it. Nothing is printed. What `call` had its hands on is to be given up, or to be such
/// that a half-done change of it does no harm.
pub(super) fn guarded<T>(library: &str, call: impl FnOnce() -> Result<T>) -> Result<T> {
    // The hook is the process's, so the one that is there goes on for all other panics.
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            if !GUARDED.get() {
                before(panic);
            }
        }));
    });
    let outer = GUARDED.replace(true);
    let result = panic::catch_unwind(AssertUnwindSafe(call));
    GUARDED.set(outer);
    result.unwrap_or_else(|panic| {
        let words = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let words = words.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        Err(anyhow!("{library} cannot work with it: {words}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error_with_its_words() {
        assert_eq!(guarded("a library", || Ok(1)).unwrap(), 1);
        let error = guarded::<()>("a library", || panic!("no {}", "way")).unwrap_err().to_string();
        assert!(error == "a library cannot work with it: no way", "{error}");
        assert!(!GUARDED.get());
    }
}
