//! Headers of GGUF files: what is read of honest ones, and that hostile ones are refused by name.

#[path = "../../../tests/gguf.rs"]
mod writer;

use std::path::Path;

use sluice_model::source::gguf::{Array, Header, Value};
use writer::{F32, Gguf};

fn read(bytes: &[u8]) -> Result<Header, String> {
    Header::from_bytes(bytes, Path::new("x.gguf")).map_err(|e| format!("{e:#}"))
}

fn refused(bytes: &[u8], parts: &[&str]) {
    let error = read(bytes).expect_err("refused");
    for part in ["x.gguf"].iter().chain(parts) {
        assert!(error.contains(part), "{error} lacks {part}");
    }
}

fn plain() -> Gguf {
    let mut file = Gguf::new("llama");
    file.u32("llama.block_count", 1);
    file
}

#[test]
fn values_have_the_types_of_the_file() {
    let mut file = plain();
    file.f32("f", 0.1).flag("yes", true).string("s", "\u{e9}").i32("i", -3);
    file.strings("many", &[&b"a"[..], b"", b"\xff\x00"]).i32s("numbers", &[1, -1]).f32s("scores", &[0.5]);
    file.array("nested", 9, &[[&4u32.to_le_bytes()[..], &0u64.to_le_bytes()].concat()]);
    file.floats("t", &[2, 3], F32, &[1.0; 6]).floats("u", &[1], F32, &[2.0]);
    let header = read(&file.bytes()).unwrap();
    let m = &header.metadata;
    assert_eq!(m.float("f").unwrap().map(|x| x as f32), Some(0.1));
    assert_eq!((m.flag("yes").unwrap(), m.string("s").unwrap()), (Some(true), Some("\u{e9}")));
    assert_eq!(m.get("i"), Some(&Value::Signed(-3)));
    assert_eq!((m.unsigned("llama.block_count").unwrap(), m.unsigned("none").unwrap()), (Some(1), None));
    let many: Vec<&[u8]> = m.strings("many").unwrap().unwrap().iter().collect();
    assert_eq!(many, [&b"a"[..], b"", b"\xff\x00"]);
    assert_eq!(m.integers("numbers").unwrap(), Some(vec![1, -1]));
    assert_eq!(m.floats("scores").unwrap(), Some(vec![0.5]));
    assert_eq!(m.get("nested"), Some(&Value::Array(Array::Nested(1))));
    assert_eq!(m.iter().next().unwrap().0, "general.architecture");
    for (key, error) in [("i", m.unsigned("i").err()), ("s", m.flag("s").err()), ("f", m.string("f").err())] {
        let error = error.expect("of another type").to_string();
        assert!(error.starts_with(&format!("x.gguf: key {key:?} is not")), "{error}");
    }
    let found: Vec<_> = header.tensors.iter().map(|t| (&*t.name, &t.shape[..], t.range.end - t.range.start)).collect();
    assert_eq!(found, [("t", &[2, 3][..], 24), ("u", &[1][..], 4)]);
    assert_eq!(header.tensors[0].range.start % 32, 0);
}

#[test]
fn files_of_another_kind_are_named() {
    refused(b"", &["reach beyond the end of the file"]);
    refused(b"PK\x03\x04 and more", &["not a GGUF file", "PK"]);
    let mut old = plain();
    old.version = 1;
    refused(&old.bytes(), &["version 1 is not supported"]);
    let mut bytes = plain().bytes();
    bytes[4..8].reverse();
    refused(&bytes, &["big-endian"]);
}

#[test]
fn counts_and_sizes_are_checked_before_memory_is_taken() {
    let with = |at: usize, count: u64| {
        let mut bytes = plain().bytes();
        bytes[at..at + 8].copy_from_slice(&count.to_le_bytes());
        bytes
    };
    for count in [1 << 40, u64::MAX] {
        refused(&with(8, count), &["tensors at offset 24 reach beyond the end of the file"]);
        refused(&with(16, count), &["keys at offset 24 reach beyond the end of the file"]);
        // The length of the first key, and then of its value.
        refused(&with(24, count), &["a key of"]);
        refused(&with(24 + 8 + 20 + 4, count), &["key \"general.architecture\"", "reach beyond the end of the file"]);
    }
    for kind in [0u32, 5, 8, 9, 12] {
        let mut file = plain();
        file.raw("tokens", 9, &[&kind.to_le_bytes()[..], &(1u64 << 61).to_le_bytes()].concat());
        refused(&file.bytes(), &["key \"tokens\"", "reach beyond the end of the file"]);
    }
    let mut deep = plain();
    deep.raw("deep", 9, &[9u32.to_le_bytes().to_vec(), 1u64.to_le_bytes().to_vec()].concat().repeat(100));
    refused(&deep.bytes(), &["key \"deep\"", "arrays within arrays"]);
}

#[test]
fn keys_that_contradict_are_named() {
    let mut twice = plain();
    twice.u32("llama.block_count", 2);
    refused(&twice.bytes(), &["llama.block_count", "is there twice"]);
    for alignment in [0, 3, 24] {
        let mut file = plain();
        file.u32("general.alignment", alignment);
        refused(&file.bytes(), &["general.alignment", "power of two"]);
    }
    let mut unknown = plain();
    unknown.raw("x", 13, &[]);
    refused(&unknown.bytes(), &["key \"x\"", "unknown type 13"]);
    let mut neither = plain();
    neither.raw("x", 7, &[2]);
    refused(&neither.bytes(), &["key \"x\"", "boolean of value 2"]);
}

#[test]
fn tensors_that_cannot_be_are_named() {
    let with = |name: &str, shape: &[usize], kind: u32, bytes: usize| {
        let mut file = plain();
        file.tensor("first", &[8], F32, vec![0; 32]).tensor(name, shape, kind, vec![0; bytes]);
        file
    };
    refused(&with("first", &[1], F32, 4).bytes(), &["\"first\"", "is there twice"]);
    refused(&with("t", &[1 << 40, 1 << 40], F32, 4).bytes(), &["\"t\"", "overflows"]);
    refused(&with("t", &[4, (1 << 62) + 1, 8], F32, 128).bytes(), &["\"t\"", "overflows"]);
    refused(&with("t", &[3, 0], F32, 4).bytes(), &["\"t\"", "at least 1"]);
    refused(&with("t", &[1, 1, 1, 1, 1], F32, 4).bytes(), &["\"t\"", "5 dimensions"]);
    refused(&with("t", &[1], 77, 4).bytes(), &["\"t\"", "unknown type 77"]);
    refused(&with("t", &[33], 2, 36).bytes(), &["\"t\"", "33", "whole blocks of Q4_0"]);
    refused(&with("t", &[9], F32, 4).bytes(), &["\"t\"", "reach beyond the end of the file"]);
    // Offsets: the last eight bytes of the table, which ends before the padding.
    let moved = |offset: u64| {
        let file = with("tensor", &[8], F32, 32);
        let mut bytes = file.bytes();
        let at = bytes.windows(6).rposition(|w| w == b"tensor").unwrap() + 6 + 4 + 8 + 4;
        bytes[at..at + 8].copy_from_slice(&offset.to_le_bytes());
        bytes
    };
    read(&moved(32)).unwrap();
    refused(&moved(16), &["\"tensor\"", "lies inside tensor \"first\""]);
    refused(&moved(1 << 40), &["\"tensor\"", "reach beyond the end of the file"]);
    refused(&moved(u64::MAX - 31), &["\"tensor\"", "overflows"]);
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let mut file = plain();
    file.strings("tokenizer.ggml.tokens", &["a", "b"]).floats("t", &[4], F32, &[0.0; 4]);
    let bytes = file.bytes();
    read(&bytes).unwrap();
    for len in 0..bytes.len() {
        read(&bytes[..len]).expect_err("cut");
    }
}
