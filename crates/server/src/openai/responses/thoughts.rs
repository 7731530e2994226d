//! Thoughts that clients carry as `encrypted_content`. Nothing is encrypted: the text itself must come back with the next request, because the server keeps none.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

/// What the content of this server begins with.
const PREFIX: &str = "sluice1.";

/// A thought as `encrypted_content`.
pub fn encode_thought(thought: &str) -> String {
    PREFIX.to_owned() + &STANDARD.encode(thought)
}

/// The thought; `None` if another server has made the content.
pub fn decode_thought(content: &str) -> Option<String> {
    String::from_utf8(STANDARD.decode(content.strip_prefix(PREFIX)?).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thought_comes_back_as_it_went() {
        for thought in ["", "Let me see.\n\n\"é\" 🚀\u{0}"] {
            assert_eq!(decode_thought(&encode_thought(thought)).as_deref(), Some(thought));
        }
        for other in ["", "gAAAAABo", "sluice1.%%%", "sluice1./w=="] {
            assert_eq!(decode_thought(other), None);
        }
    }
}
