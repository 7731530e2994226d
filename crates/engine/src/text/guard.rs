//! Panics of a library at the edge, made into errors.
//!
//! The tokenizers library takes a `tokenizer.json` as it is, and some of what can stand in one makes it panic much later, at a text. That is an error of
//! the file, not of this program.

use anyhow::{Result, anyhow};

/// What `call` returns, or an error that says with what words `library` panicked in it. Nothing is printed. What `call` had its hands on is to be given up, or to be such
/// that a half-done change of it does no harm.
pub(super) fn guarded<T>(library: &str, call: impl FnOnce() -> Result<T>) -> Result<T> {
    sluice_store::catch_panic(call).unwrap_or_else(|words| Err(anyhow!("{library} cannot work with it: {words}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error_with_its_words() {
        assert_eq!(guarded("a library", || Ok(1)).unwrap(), 1);
        let error = guarded::<()>("a library", || panic!("no {}", "way")).unwrap_err().to_string();
        assert!(error == "a library cannot work with it: no way", "{error}");
    }
}
