//! Every way in which a safetensors header can lie is an error of its own, and no bytes whatever make the reader panic.

use std::collections::BTreeMap;

use proptest::prelude::*;
use sluice_store::Dtype;
use sluice_store::safetensors::{Header, HeaderError};

/// A file of this header and `data` zeros.
fn file(json: &str, data: usize) -> Vec<u8> {
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend(json.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

fn parse(json: &str, data: usize) -> Result<Header, HeaderError> {
    Header::from_bytes(&file(json, data))
}

/// The message of the refusal, which must be one line.
fn refusal(json: &str, data: usize) -> (HeaderError, String) {
    let error = parse(json, data).unwrap_err();
    let message = error.to_string();
    assert!(!message.contains('\n') && message.len() < 500, "{message}");
    (error, message)
}

/// `refused!(header, data bytes, variant, part of the message)`
macro_rules! refused {
    ($json:expr, $data:expr, $variant:ident, $text:expr) => {
        let (error, message) = refusal($json, $data);
        assert!(matches!(error, HeaderError::$variant { .. }), "{error:?}");
        assert!(message.contains($text), "{message}");
    };
}

#[test]
fn tensors_come_in_the_order_of_their_bytes() {
    let json = r#" "__metadata__":{"format":"pt"},
        "b":{"dtype":"F32","shape":[2,1],"data_offsets":[3,11]},
        "empty":{"dtype":"I64","shape":[4,0,9],"data_offsets":[3,3]},
        "scalar":{"shape":[],"data_offsets":[11,12],"dtype":"BOOL","unknown field":[{}]},
        "a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}   "#;
    let json = format!("{{{json}");
    let header = parse(&json, 12).unwrap();
    let names: Vec<_> = header.tensors.iter().map(|t| t.name.as_str()).collect();
    assert_eq!(names, ["a", "empty", "b", "scalar"]);
    let start = 8 + json.len() as u64;
    assert_eq!(header.tensors[2].range, start + 3..start + 11);
    assert_eq!((header.tensors[2].dtype, &header.tensors[2].shape[..]), (Dtype::F32, &[2, 1][..]));
    assert_eq!(header.metadata, BTreeMap::from([("format".into(), "pt".into())]));
}

#[test]
fn every_dtype_is_known_by_its_name() {
    for dtype in Dtype::ALL {
        let end = dtype.size() * 6;
        let json = format!(r#"{{"x":{{"dtype":"{dtype}","shape":[2,3],"data_offsets":[0,{end}]}}}}"#);
        assert_eq!(parse(&json, end).unwrap().tensors[0].dtype, dtype);
    }
}

#[test]
fn no_tensors_at_all_is_a_valid_file() {
    assert_eq!(parse("{}", 0).unwrap().tensors, []);
    assert!(parse(r#"{"__metadata__":null}"#, 0).unwrap().metadata.is_empty());
}

#[test]
fn file_shorter_than_a_length() {
    for len in 0..8 {
        assert_eq!(Header::from_bytes(&vec![0; len]), Err(HeaderError::TooShort { len: len as u64 }));
    }
}

#[test]
fn git_lfs_pointer() {
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n";
    assert_eq!(Header::from_bytes(pointer), Err(HeaderError::LfsPointer));
}

#[test]
fn header_above_the_limit() {
    for header in [100_000_001, u64::MAX] {
        assert_eq!(Header::from_bytes(&header.to_le_bytes()), Err(HeaderError::TooLarge { header }));
    }
}

#[test]
fn header_beyond_the_file() {
    let mut bytes = file("{}", 0);
    bytes[0] = 3;
    assert_eq!(Header::from_bytes(&bytes), Err(HeaderError::HeaderBeyondFile { header: 3, len: 10 }));
    assert_eq!(Header::parse(b"{}", 9), Err(HeaderError::HeaderBeyondFile { header: 2, len: 9 }));
}

#[test]
fn header_that_is_no_object() {
    for json in ["", "[]", " {}", "null", "<html>"] {
        refused!(json, 0, NotAnObject, "does not begin with '{'");
    }
}

#[test]
fn malformed_json() {
    for json in ["{", "{}x", "{1:2}", "{\"a", "{\"\u{0}\":{}}"] {
        refused!(json, 0, Json, "malformed header");
    }
    assert!(matches!(Header::from_bytes(b"\x05\0\0\0\0\0\0\0{\"\xff\":"), Err(HeaderError::Json { .. })));
}

#[test]
fn malformed_metadata() {
    refused!(r#"{"__metadata__":{"a":1}}"#, 0, Metadata, "expected a string");
    refused!(r#"{"__metadata__":[]}"#, 0, Metadata, "an object of strings");
    refused!(r#"{"__metadata__":{"a":"x","a":"y"}}"#, 0, Metadata, "\"a\" occurs twice");
    refused!(r#"{"__metadata__":{},"__metadata__":{}}"#, 0, Metadata, "occurs twice");
}

#[test]
fn malformed_entries() {
    let entry = |fields: &str| format!(r#"{{"x":{{{fields}}}}}"#);
    for (fields, why) in [
        (r#""shape":[],"data_offsets":[0,1]"#, "missing field `dtype`"),
        (r#""dtype":"U8","data_offsets":[0,1]"#, "missing field `shape`"),
        (r#""dtype":"U8","shape":[1]"#, "missing field `data_offsets`"),
        (r#""dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]"#, "twice"),
        (r#""dtype":8,"shape":[1],"data_offsets":[0,1]"#, "expected a string"),
        (r#""dtype":"U8","shape":[-1],"data_offsets":[0,1]"#, "-1"),
        (r#""dtype":"U8","shape":[1.0],"data_offsets":[0,1]"#, "1.0"),
        (r#""dtype":"U8","shape":1,"data_offsets":[0,1]"#, "a list of dimensions"),
        (r#""dtype":"U8","shape":[18446744073709551616],"data_offsets":[0,1]"#, "u64"),
        (r#""dtype":"U8","shape":[1],"data_offsets":[0]"#, "length 1"),
        (r#""dtype":"U8","shape":[1],"data_offsets":[0,1,2]"#, ""),
        (r#""dtype":"U8","shape":[1],"data_offsets":["0","1"]"#, "expected u64"),
    ] {
        refused!(&entry(fields), 1, Entry, "tensor \"x\": malformed entry");
        refused!(&entry(fields), 1, Entry, why);
    }
    refused!(r#"{"x":[]}"#, 0, Entry, "an object with dtype, shape and data_offsets");
}

#[test]
fn name_used_twice() {
    let one = r#""x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}"#;
    refused!(&format!("{{{one},{one}}}"), 0, DuplicateName, "tensor \"x\": named twice");
}

#[test]
fn unknown_dtype() {
    let json = r#"{"x.weight":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}"#;
    refused!(json, 1, UnknownDtype, "tensor \"x.weight\": unknown dtype \"F4\"");
}

#[test]
fn too_many_dimensions() {
    let shape = |dims| vec!["1"; dims].join(",");
    let json = |dims| format!(r#"{{"x":{{"dtype":"U8","shape":[{}],"data_offsets":[0,1]}}}}"#, shape(dims));
    parse(&json(64), 1).unwrap();
    refused!(&json(65), 1, TooManyDims, "more than 64 dimensions");
}

#[test]
fn size_that_overflows() {
    let json = r#"{"x":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}"#;
    refused!(json, 0, Overflow, "size overflows");
    let json = r#"{"x":{"dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0]}}"#;
    refused!(json, 0, Overflow, "size overflows");
}

#[test]
fn reversed_range() {
    let json = r#"{"x":{"dtype":"U8","shape":[1],"data_offsets":[2,1]}}"#;
    refused!(json, 2, Reversed, "data offsets 2..1 are reversed");
}

#[test]
fn range_that_does_not_fit_the_shape() {
    let json = r#"{"x":{"dtype":"BF16","shape":[3,2],"data_offsets":[0,10]}}"#;
    refused!(json, 10, WrongSize, "BF16 [3, 2] takes 12 bytes, but data offsets 0..10 hold 10");
}

#[test]
fn tensors_that_overlap() {
    let json =
        r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[3,7]}}"#;
    refused!(json, 7, Overlap, "tensor \"b\": data offset 3 lies inside tensor \"a\"");
    let json =
        r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"e":{"dtype":"U8","shape":[0],"data_offsets":[2,2]}}"#;
    refused!(json, 4, Overlap, "tensor \"e\"");
}

#[test]
fn hole_between_tensors() {
    let json =
        r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[1],"data_offsets":[5,6]}}"#;
    refused!(json, 6, Hole, "tensor \"b\": data offset 5 leaves a hole after 4");
}

#[test]
fn file_that_ends_inside_a_tensor() {
    let json = r#"{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}"#;
    refused!(
        json,
        15,
        Truncated,
        "tensor \"a\" ends at data offset 16, but the file's data ends at 15 (1 bytes missing)"
    );
}

#[test]
fn ranges_at_the_end_of_the_number_line() {
    let max = u64::MAX;
    let json = format!(r#"{{"x":{{"dtype":"U8","shape":[{max}],"data_offsets":[0,{max}]}}}}"#);
    refused!(&json, 1, Truncated, "bytes missing");
    let json = format!(r#"{{"x":{{"dtype":"U8","shape":[0],"data_offsets":[{max},{max}]}}}}"#);
    refused!(&json, 0, Hole, "leaves a hole");
}

#[test]
fn bytes_after_the_last_tensor() {
    let json = r#"{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}"#;
    refused!(json, 18, TrailingBytes, "2 bytes after the last tensor");
}

#[test]
fn names_of_any_kind_stay_on_one_line() {
    let name = format!("\\n\\u001b[31m{}", "x".repeat(100_000));
    let json = format!(r#"{{"{name}":{{"dtype":"?\n","shape":[],"data_offsets":[0,0]}}}}"#);
    refused!(&json, 0, UnknownDtype, r#"unknown dtype "?\n""#);
}

#[test]
fn a_hundred_thousand_tensors_take_no_more_each_than_a_quarter_of_them() {
    // The best of three, in seconds.
    let read = |count: usize| {
        let entries: Vec<_> = (0..count)
            .map(|i| {
                let (start, end) = (i * 8, i * 8 + 8);
                let name = format!("model.layers.{}.mlp.experts.{}.gate_proj.weight", i / 512, i % 512);
                format!(r#""{name}":{{"dtype":"BF16","shape":[2,2],"data_offsets":[{start},{end}]}}"#)
            })
            .collect();
        let bytes = file(&format!("{{{}}}", entries.join(",")), 8 * count);
        let times = (0..3).map(|_| {
            let start = std::time::Instant::now();
            assert_eq!(Header::from_bytes(&bytes).unwrap().tensors.len(), count);
            start.elapsed().as_secs_f64()
        });
        times.fold(f64::INFINITY, f64::min)
    };
    let (quarter, whole) = (read(25_000), read(100_000));
    // Quadratic time would be sixteen times as long.
    assert!(whole < 12.0 * quarter, "{whole} s, {quarter} s for a quarter");
}

/// What a caller relies on: in file order, contiguous to the end, each as long as its shape.
fn check_promises(bytes: &[u8]) {
    let Ok(header) = Header::from_bytes(bytes) else { return };
    let mut end = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap());
    for t in &header.tensors {
        assert_eq!(t.range.start, end);
        end = t.range.end;
        assert_eq!(end - t.range.start, t.shape.iter().product::<usize>() as u64 * t.dtype.size() as u64);
    }
    assert_eq!(end, bytes.len() as u64);
}

/// A valid file of some tensors.
fn valid_file() -> impl Strategy<Value = Vec<u8>> {
    let tensor = (0..Dtype::ALL.len(), prop::collection::vec(0usize..5, 0..4));
    prop::collection::vec(tensor, 0..6).prop_map(|tensors| {
        let mut start = 0;
        let entries: Vec<_> = (tensors.iter().enumerate())
            .map(|(i, (dtype, shape))| {
                let dtype = Dtype::ALL[*dtype];
                let end = start + dtype.size() * shape.iter().product::<usize>();
                let entry = format!(r#""t{i}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{start},{end}]}}"#);
                start = end;
                entry
            })
            .collect();
        file(&format!("{{{}}}", entries.join(",")), start)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        check_promises(&bytes);
    }

    #[test]
    fn arbitrary_json_never_panics(json in r#"\{("(a|__metadata__)":(\{("(dtype|shape|data_offsets)":("U8"|\[[0-9],[0-9]\]|\[\]|[0-9]),?){0,4}\}|\[|1),?){0,3}\}?"#, data in 0usize..20) {
        check_promises(&file(&json, data));
    }

    #[test]
    fn valid_headers_are_read(bytes in valid_file()) {
        prop_assert!(Header::from_bytes(&bytes).is_ok());
        check_promises(&bytes);
    }

    #[test]
    fn mutated_headers_never_panic(
        mut bytes in valid_file(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0u8..4), 1..5),
    ) {
        for (place, value, kind) in edits {
            let at = place.index(bytes.len());
            match kind {
                0 => bytes[at] = value,
                // Digits and punctuation keep it JSON more often than not.
                1 => bytes[at] = b"0123456789,[]{}\":"[value as usize % 17],
                2 => bytes.insert(at, b"0123456789"[value as usize % 10]),
                _ => bytes.truncate(at.max(1)),
            }
        }
        check_promises(&bytes);
    }
}
