//! Turns panics of a library into errors.
//!
//! The tokenizers library does not check everything in a `tokenizer.json`, and panics later at some text. That is an error of the file, not of this program.

use anyhow::{Result, anyhow};

/// Returns what `call` does, or an error with the message of a panic. Nothing is printed. After an error, data that `call` changed may be half changed.
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
