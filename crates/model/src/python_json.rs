//! JSON as Python writes it: with numbers that JSON does not have.

/// A text with nulls for the numbers that Python writes and JSON does not have.
pub fn without_infinities(text: &[u8]) -> Vec<u8> {
    const WORDS: [&[u8]; 3] = [b"-Infinity", b"Infinity", b"NaN"];
    let (mut out, mut rest, mut quoted) = (Vec::with_capacity(text.len()), text, false);
    while let Some((&byte, behind)) = rest.split_first() {
        if let Some(word) = WORDS.into_iter().find(|word| !quoted && rest.starts_with(word)) {
            out.extend_from_slice(b"null");
            rest = &rest[word.len()..];
            continue;
        }
        // What is escaped ends no string.
        let len = if quoted && byte == b'\\' { rest.len().min(2) } else { 1 };
        quoted ^= byte == b'"';
        out.extend_from_slice(&rest[..len]);
        rest = if len == 1 { behind } else { &rest[len..] };
    }
    out
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use crate::Config;

    #[test]
    fn numbers_that_only_python_writes_are_none() {
        let text = r#"{"limits": [0.0, Infinity, -Infinity], "x": NaN, "text": "a \" Infinity"}"#;
        let config = Config::parse("config.json".into(), text.as_bytes()).unwrap();
        assert_eq!(config.get("limits"), Some(&serde_json::json!([0.0, null, null])));
        assert_eq!(config.get("text").and_then(Value::as_str), Some("a \" Infinity"));
        assert!(config.get("x").is_none());
        let error = Config::parse("config.json".into(), b"{\"x\": Inf}").unwrap_err().to_string();
        assert!(error.contains("config.json: not JSON"), "{error}");
    }
}
