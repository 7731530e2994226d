//! Names of objects. All hashes in them are keyed with the store's secret.

use crate::disk::Key;
use crate::prefix::BlockHash;

/// The folder of this format. It has the number of the slots' format, since objects are slots.
pub(crate) const FORMAT: &str = "v2";
/// The secret of all that share the store.
pub(crate) const SECRET: &str = "v2/secret";

/// An object that holds one part of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PartName {
    /// Fingerprint of the model.
    pub model: u64,
    /// Hash of the entry before it.
    pub before: BlockHash,
    /// Hash of the entry.
    pub hash: BlockHash,
    /// Tokens of the entry.
    pub tokens: u32,
    /// Number of the cache group, or [`crate::disk::STATE`].
    pub part: u32,
}

fn hex(hash: &BlockHash) -> String {
    format!("{:032x}", u128::from_be_bytes(*hash))
}

fn unhex(digits: &str) -> Option<BlockHash> {
    let is_hex = digits.len() == 32 && digits.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
    is_hex.then(|| u128::from_str_radix(digits, 16).ok().map(u128::to_be_bytes)).flatten()
}

/// The folder of entries that follow the one with the hash `before`.
pub(crate) fn following(model: u64, before: &BlockHash) -> String {
    format!("{FORMAT}/{model:016x}/{}", hex(before))
}

/// The object that says the name of a model, for people.
pub(crate) fn model(model: u64) -> String {
    format!("{FORMAT}/models/{model:016x}")
}

/// The model whose name this object says.
pub(crate) fn parse_model(name: &str) -> Option<u64> {
    let digits = name.strip_prefix(FORMAT)?.strip_prefix("/models/")?;
    (digits.len() == 16).then(|| u64::from_str_radix(digits, 16).ok()).flatten()
}

impl PartName {
    /// The entry's key.
    pub fn key(&self) -> Key {
        (self.model, self.hash)
    }

    /// The object's name.
    pub fn name(&self) -> String {
        let PartName { model, before, hash, tokens, part } = self;
        format!("{}/{tokens:04}-{}.{part:03}", following(*model, before), hex(hash))
    }

    /// Reads a name; `None` for one of something else.
    pub fn parse(name: &str) -> Option<PartName> {
        let mut pieces = name.strip_prefix(FORMAT)?.strip_prefix('/')?.split('/');
        let (model, before, file) = (pieces.next()?, pieces.next()?, pieces.next()?);
        let (tokens, rest) = file.split_once('-')?;
        let (hash, part) = rest.split_once('.')?;
        let parsed = PartName {
            model: u64::from_str_radix(model, 16).ok()?,
            before: unhex(before)?,
            hash: unhex(hash)?,
            tokens: tokens.parse().ok()?,
            part: part.parse().ok()?,
        };
        (parsed.name() == name).then_some(parsed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_read_as_it_was_made_and_others_are_none() {
        let part = PartName { model: 7, before: [1; 16], hash: [0xfe; 16], tokens: 32, part: 255 };
        let name = part.name();
        assert_eq!(PartName::parse(&name), Some(part));
        assert_eq!(parse_model(&model(7)), Some(7));
        for bad in ["", "v2", SECRET, &model(7), &name[1..], &name[..name.len() - 1], &format!("{name}.0")] {
            assert_eq!(PartName::parse(bad), None, "{bad}");
        }
        assert_eq!(PartName::parse(&name.replace("0032", "+032")), None);
        assert_eq!(PartName::parse(&name.replace('f', "F")), None);
    }
}
