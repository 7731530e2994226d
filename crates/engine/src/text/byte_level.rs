//! The byte-level alphabet of GPT-2, in which vocabularies write bytes as characters.

/// Appends the bytes of a byte-level token. A token with a character outside the alphabet is an added one, and stands for its own UTF-8.
pub(super) fn append_bytes(bytes: &mut Vec<u8>, token: &str) {
    let start = bytes.len();
    for c in token.chars() {
        match byte_of(c) {
            Some(byte) => bytes.push(byte),
            None => {
                bytes.truncate(start);
                bytes.extend_from_slice(token.as_bytes());
                return;
            }
        }
    }
}

/// The byte of a character: printable Latin-1 stands for itself, and U+0100 and up for the 68 other bytes, ascending.
fn byte_of(c: char) -> Option<u8> {
    Some(match u32::from(c) {
        c @ (0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF) => c as u8,
        c @ 0x100..=0x120 => (c - 0x100) as u8,        // 0x00..=0x20
        c @ 0x121..=0x142 => (c - 0x121 + 0x7F) as u8, // 0x7F..=0xA0
        0x143 => 0xAD,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alphabet_covers_every_byte_once() {
        let mut seen: Vec<u8> = (0..0x200).filter_map(char::from_u32).filter_map(byte_of).collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..=255).collect::<Vec<u8>>());
    }
}
