//! `model.safetensors.index.json`: which shard holds which tensor. Untrusted when read; written as Hugging Face does.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::path::Path;

use serde::de::{DeserializeSeed, Error as _, MapAccess, Visitor};

use crate::atomic::AtomicFile;
use crate::error::Error;
use crate::quote::quoted;
use crate::safetensors::MAX_HEADER;
use crate::small::read_small;

pub(crate) const INDEX_NAME: &str = "model.safetensors.index.json";

/// The checked contents of an index.
pub(crate) struct Index {
    /// Plain file names, each once, in order of name.
    pub files: Vec<String>,
    /// Tensor -> position in `files`.
    pub tensors: Vec<(String, usize)>,
}

impl Index {
    /// Reads an index of at most 100 MB. Every file it names is a plain name, without a way out of the folder.
    pub fn read(path: &Path) -> Result<Index, Error> {
        Index::parse(path, &read_small(path, MAX_HEADER)?)
    }

    /// Checks `json`; `path` is for messages.
    pub fn parse(path: &Path, json: &[u8]) -> Result<Index, Error> {
        let bad = |why: String| Error::BadIndex { path: path.to_owned(), why };
        let Raw { weight_map } = serde_json::from_slice(json).map_err(|e| bad(format!("malformed index: {e}")))?;

        if weight_map.tensors.is_empty() {
            return Err(bad("names no tensor".to_owned()));
        }
        let (mut files, mut tensors) = (weight_map.files, weight_map.tensors);
        for (tensor, file) in &tensors {
            let file = &files[*file];
            if !is_plain_name(file) {
                return Err(Error::EscapingName { path: path.to_owned(), tensor: tensor.clone(), file: file.clone() });
            }
        }
        let mut seen = HashSet::with_capacity(tensors.len());
        if let Some((twice, _)) = tensors.iter().find(|(t, _)| !seen.insert(t.as_str())) {
            return Err(bad(format!("tensor {} occurs twice", quoted(twice))));
        }

        // Shards in order of name, whatever order the index mentions them in.
        let mut order: Vec<usize> = (0..files.len()).collect();
        order.sort_by(|&a, &b| files[a].cmp(&files[b]));
        let mut place = vec![0; files.len()];
        for (new, &old) in order.iter().enumerate() {
            place[old] = new;
        }
        files.sort();
        for (_, file) in &mut tensors {
            *file = place[*file];
        }
        Ok(Index { files, tensors })
    }
}

/// Whether `json` is an index, for fuzzing; if so, its files and the number of its tensors.
#[doc(hidden)]
pub fn check_index(json: &[u8]) -> Result<(Vec<String>, usize), Error> {
    Index::parse(Path::new(INDEX_NAME), json).map(|index| (index.files, index.tensors.len()))
}

/// Whether `name` names an entry of a folder itself: no separator, no `.` or `..`, no NUL.
fn is_plain_name(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\\', '\0'])
}

#[derive(serde::Deserialize)]
struct Raw {
    weight_map: WeightMap,
}

/// Tensor -> file, with each file name kept once however many tensors are in it.
struct WeightMap {
    files: Vec<String>,
    tensors: Vec<(String, usize)>,
}

impl<'de> serde::Deserialize<'de> for WeightMap {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<WeightMap, D::Error> {
        WeightMapSeed.deserialize(d)
    }
}

struct WeightMapSeed;

impl<'de> DeserializeSeed<'de> for WeightMapSeed {
    type Value = WeightMap;
    fn deserialize<D: serde::Deserializer<'de>>(self, d: D) -> Result<WeightMap, D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for WeightMapSeed {
    type Value = WeightMap;
    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object from tensor names to file names")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WeightMap, A::Error> {
        let mut places = HashMap::new();
        let (mut files, mut tensors) = (Vec::new(), Vec::new());
        while let Some(tensor) = map.next_key::<String>()? {
            let file = map
                .next_value::<String>()
                .map_err(|e| A::Error::custom(format!("file of tensor {}: {e}", quoted(&tensor))))?;
            let place = *places.entry(file).or_insert_with_key(|file| {
                files.push(file.clone());
                files.len() - 1
            });
            tensors.push((tensor, place));
        }
        Ok(WeightMap { files, tensors })
    }
}

/// The name of shard `number` (from 1) of `count`, as Hugging Face names it: `model-00001-of-00003.safetensors`.
pub fn shard_name(number: usize, count: usize) -> String {
    format!("model-{number:05}-of-{count:05}.safetensors")
}

/// The names of all shards of the set that `name` belongs to, if it is named like a shard.
pub(crate) fn siblings(name: &str) -> Option<impl Iterator<Item = String>> {
    let (rest, count) = name.strip_suffix(".safetensors")?.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    let five_digits = |s: &str| s.len() == 5 && s.bytes().all(|b| b.is_ascii_digit());
    if !five_digits(number) || !five_digits(count) {
        return None;
    }
    let numbers = 1..=count.parse::<usize>().ok()?;
    Some(numbers.map(move |n| format!("{stem}-{n:05}-of-{count}.safetensors")))
}

/// Writes `model.safetensors.index.json` into `folder`, as `transformers` does (indented, sorted by name), under a temporary
/// name that is renamed. `weight_map`: tensor -> file name. `total_size`: bytes of all tensors, without headers.
pub fn write_index(folder: &Path, weight_map: &BTreeMap<String, String>, total_size: u64) -> Result<(), Error> {
    #[derive(serde::Serialize)]
    struct Metadata {
        total_size: u64,
    }
    #[derive(serde::Serialize)]
    struct File<'a> {
        metadata: Metadata,
        weight_map: &'a BTreeMap<String, String>,
    }
    let index = File { metadata: Metadata { total_size }, weight_map };
    let mut json = serde_json::to_vec_pretty(&index).expect("strings and a number are always JSON");
    json.push(b'\n');
    let mut file = AtomicFile::create(&folder.join(INDEX_NAME))?;
    file.write_all(&json)?;
    file.commit()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn siblings_of_a_shard_are_the_whole_set() {
        let all: Vec<_> = siblings(&shard_name(2, 3)).unwrap().collect();
        assert_eq!(all, [shard_name(1, 3), shard_name(2, 3), shard_name(3, 3)]);
        for other in ["model.safetensors", "a-of-b.safetensors", "x-1-of-2.safetensors", "model-00001-of-00002.bin"] {
            assert!(siblings(other).is_none(), "{other}");
        }
    }

    #[test]
    fn only_plain_names_are_plain() {
        for name in ["", ".", "..", "../x", "/x", "a/b", "a\\b", "a\0"] {
            assert!(!is_plain_name(name), "{name:?}");
        }
        assert!(is_plain_name("model-00001-of-00002.safetensors") && is_plain_name("..x"));
    }
}
