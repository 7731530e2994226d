//! What single tokens add to a text.

use super::Tokenizer;
use crate::text::byte_level::append_bytes;

impl Tokenizer {
    /// The bytes of a byte-level token, or of a special token's name.
    pub(crate) fn bytes(&self, id: u32) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        append_bytes(&mut bytes, &self.token(id)?);
        Some(bytes)
    }

    /// The bytes that a token adds to a text, even if they are part of a character. A special token adds its name.
    pub fn raw_bytes(&self, id: u32) -> Vec<u8> {
        if self.byte_level {
            return self.bytes(id).unwrap_or_default();
        }
        let text = self.decode(&[id], false).unwrap_or_default();
        let text = self.behind_another(id).unwrap_or(text);
        // Tokens of a single byte are written `<0xE2>`. Decoders without byte fallback return the name instead.
        let byte = self.token(id).filter(|token| *token != text).and_then(|token| {
            let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
            u8::from_str_radix(digits, 16).ok().filter(|_| digits.len() == 2)
        });
        byte.map_or_else(|| text.into_bytes(), |byte| vec![byte])
    }

    /// The text that a token adds behind another one: decoders may cut a space off a text's beginning.
    fn behind_another(&self, id: u32) -> Option<String> {
        let (anchor, alone) = self
            .anchor
            .get_or_init(|| {
                let is_plain =
                    |id: &u32| !self.is_special(*id) && self.token(*id).is_some_and(|token| !token.starts_with('<'));
                let text = |id| self.decode(&[id], false).ok().filter(|text| !text.is_empty());
                (0..self.vocab_size as u32).filter(is_plain).find_map(|id| Some((id, text(id)?)))
            })
            .as_ref()?;
        self.decode(&[*anchor, id], false).ok()?.strip_prefix(alone.as_str()).map(str::to_owned)
    }
}
