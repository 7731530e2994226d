//! Turns token ids into text, one at a time. It never shows half a character, and all pieces together are exactly the text of decoding all tokens at once.
//!
//! With a byte-level decoder a token is a run of bytes, so only the bytes of an unfinished character are held back. Other decoders may look at a token's
//! neighbours: the first piece of a word brings a space, and byte tokens make characters together. There the last tokens are decoded twice, with and without the
//! new one, and the difference is the new text, as in vLLM and TGI.

use super::byte_level::append_bytes;
use super::tokenizer::Tokenizer;
use anyhow::Result;
use std::sync::Arc;

/// Tokens that are held back at most. Text that ends in U+FFFD for good would otherwise be held back for ever.
const MAX_PENDING: usize = 16;

/// Turns a stream of token ids into a stream of text.
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    skip_special: bool,
    /// Special tokens that stay in the text.
    kept: Vec<u32>,
    /// Byte-level decoders: bytes of an unfinished character (at most 3 between calls).
    bytes: Vec<u8>,
    /// Other decoders: the text of `ids[..shown]` was returned, and `ids[shown..]` waits for a whole character.
    ids: Vec<u32>,
    shown: usize,
}

impl Detokenizer {
    /// A stream that starts at a text's first token. `skip_special` leaves special tokens out of the text.
    pub fn new(tokenizer: Arc<Tokenizer>, skip_special: bool) -> Self {
        Self { tokenizer, skip_special, kept: Vec::new(), bytes: Vec::new(), ids: Vec::new(), shown: 0 }
    }

    /// A stream that leaves out special tokens, except for those with these names, which answer parsers look for.
    pub fn keeping(tokenizer: Arc<Tokenizer>, names: &[&str]) -> Self {
        let kept = names.iter().filter_map(|name| tokenizer.id(name)).filter(|id| tokenizer.is_special(*id)).collect();
        Self { kept, ..Self::new(tokenizer, true) }
    }

    /// The text that the next token completes; empty if a character is still unfinished.
    ///
    /// # Errors
    /// When a decoder other than the byte-level one fails.
    pub fn push(&mut self, id: u32) -> Result<String> {
        if self.tokenizer.is_byte_level() {
            if !(self.skip_special && !self.kept.contains(&id) && self.tokenizer.is_special(id))
                && let Some(token) = self.tokenizer.token(id)
            {
                append_bytes(&mut self.bytes, &token);
            }
            return Ok(take_whole_characters(&mut self.bytes));
        }

        if self.kept.contains(&id) {
            let text = self.flush()?;
            return Ok(text + &self.tokenizer.token(id).unwrap_or_default());
        }
        self.ids.push(id);
        let text = self.new_text()?;
        let waiting = self.ids.len() - self.shown;
        if text.is_empty() || (text.ends_with(char::REPLACEMENT_CHARACTER) && waiting < MAX_PENDING) {
            return Ok(String::new());
        }
        // The tokens shown just now are the context of the next ones.
        self.ids.drain(..self.shown);
        self.shown = self.ids.len();
        Ok(text)
    }

    /// The end of the text, with U+FFFD for an unfinished character. Afterwards the stream can be used for another text.
    ///
    /// # Errors
    /// Those of [`Detokenizer::push`].
    pub fn flush(&mut self) -> Result<String> {
        let text = if self.tokenizer.is_byte_level() {
            String::from_utf8_lossy(&self.bytes).into_owned()
        } else {
            self.new_text()?
        };
        self.bytes.clear();
        self.ids.clear();
        self.shown = 0;
        Ok(text)
    }

    /// Text of the tokens since `shown`, read with their context.
    fn new_text(&self) -> Result<String> {
        let before = self.tokenizer.decode(&self.ids[..self.shown], self.skip_special)?;
        let mut with = self.tokenizer.decode(&self.ids, self.skip_special)?;
        // A decoder whose later tokens change earlier text cannot be streamed exactly: return the end of the longer text.
        let mut cut = before.len().min(with.len());
        while !with.is_char_boundary(cut) {
            cut -= 1;
        }
        Ok(with.split_off(cut))
    }
}

/// Removes whole characters from the front of `bytes`, with U+FFFD for bytes that cannot become one.
fn take_whole_characters(bytes: &mut Vec<u8>) -> String {
    let mut text = String::new();
    let mut done = 0;
    while done < bytes.len() {
        match std::str::from_utf8(&bytes[done..]) {
            Ok(rest) => {
                text.push_str(rest);
                done = bytes.len();
            }
            Err(e) => {
                let valid = done + e.valid_up_to();
                text.push_str(&String::from_utf8_lossy(&bytes[done..valid]));
                done = valid;
                let Some(bad) = e.error_len() else { break }; // the last character is unfinished
                text.push(char::REPLACEMENT_CHARACTER);
                done += bad;
            }
        }
    }
    bytes.drain(..done);
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::path::Path;
    use std::sync::OnceLock;

    fn demo() -> Arc<Tokenizer> {
        static DEMO: OnceLock<Arc<Tokenizer>> = OnceLock::new();
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
        DEMO.get_or_init(|| Arc::new(Tokenizer::load(&folder, None).unwrap())).clone()
    }

    fn stream(tokenizer: &Arc<Tokenizer>, ids: &[u32], skip_special: bool) -> String {
        let mut detokenizer = Detokenizer::new(tokenizer.clone(), skip_special);
        let mut text: String = ids.iter().map(|id| detokenizer.push(*id).unwrap()).collect();
        text.push_str(&detokenizer.flush().unwrap());
        text
    }

    #[test]
    fn half_a_character_is_never_shown() {
        let tokenizer = demo();
        let text = "naïve 日本 👩‍🚀 ok";
        let ids = tokenizer.encode(text, false).unwrap();
        assert!(ids.len() > text.chars().count() / 2);
        let mut detokenizer = Detokenizer::new(tokenizer, false);
        let mut shown = String::new();
        for id in ids {
            let piece = detokenizer.push(id).unwrap();
            assert!(!piece.contains(char::REPLACEMENT_CHARACTER));
            shown.push_str(&piece);
        }
        assert_eq!(shown, text);
        assert_eq!(detokenizer.flush().unwrap(), "");
    }

    /// A tokenizer like SentencePiece's: the first piece of a word brings a space, and missing characters are made of bytes.
    fn sentence_pieces() -> Arc<Tokenizer> {
        let folder = tempfile::tempdir().unwrap();
        let vocab = ["▁the", "▁cat", "s", "<0xC3>", "<0xA9>", "</s>", "▁", "é!"];
        let vocab: serde_json::Map<_, _> = vocab.iter().zip(0..).map(|(t, i)| (t.to_string(), i.into())).collect();
        let file = serde_json::json!({
            "added_tokens": [{"id": 5, "content": "</s>", "special": true, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false}],
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ]},
            "model": {"type": "BPE", "byte_fallback": true, "vocab": vocab, "merges": []},
        });
        std::fs::write(folder.path().join("tokenizer.json"), file.to_string()).unwrap();
        Arc::new(Tokenizer::load(folder.path(), None).unwrap())
    }

    #[test]
    fn spaces_and_bytes_of_other_decoders_are_kept() {
        let tokenizer = sentence_pieces();
        assert!(!tokenizer.is_byte_level());
        let mut detokenizer = Detokenizer::new(tokenizer.clone(), true);
        let pieces = [0, 1, 2, 6, 3, 4, 5, 7].map(|id| detokenizer.push(id).unwrap());
        assert_eq!(pieces, ["the", " cat", "s", " ", "", "é", "", "é!"]);
        assert_eq!(stream(&tokenizer, &[0, 3], true), "the\u{FFFD}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]
        // The first 300 ids hold all single bytes, so that broken characters are common.
        #[test]
        fn pieces_are_the_text_decoded_at_once(
            ids in prop::collection::vec(prop_oneof![0u32..300, 0u32..16500], 0..60),
            skip in any::<bool>(),
        ) {
            let tokenizer = demo();
            prop_assert_eq!(stream(&tokenizer, &ids, skip), tokenizer.decode(&ids, skip).unwrap());
        }
    }
}
