//! Checkpoints end to end: written by the writer, opened from a folder, and every way in which a folder can disappoint.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use proptest::prelude::*;
use sluice_store::{Checkpoint, Dtype, Error, TensorPlan, Writer, shard_name, write_index};
use tempfile::TempDir;

const INDEX: &str = "model.safetensors.index.json";

fn plan(name: &str, dtype: Dtype, shape: &[usize]) -> TensorPlan {
    TensorPlan { name: name.into(), dtype, shape: shape.to_vec() }
}

/// Writes a file of U8 tensors, each filled with its own value.
fn write(path: &Path, tensors: &[(&str, usize, u8)]) {
    let plans: Vec<_> = tensors.iter().map(|&(name, len, _)| plan(name, Dtype::U8, &[len])).collect();
    let mut writer = Writer::create(path, &plans, &BTreeMap::new()).unwrap();
    for &(name, len, value) in tensors {
        writer.append(name, &vec![value; len]).unwrap();
    }
    writer.finish().unwrap();
}

/// A folder of three shards: a in the first, b and c in the second, d in the third.
fn sharded() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let shard = |n| shard_name(n, 3);
    write(&folder.path().join(shard(1)), &[("a", 5, 1)]);
    write(&folder.path().join(shard(2)), &[("c", 9, 3), ("b", 7, 2)]);
    write(&folder.path().join(shard(3)), &[("d", 1, 4)]);
    let map = [("d", 3), ("a", 1), ("b", 2), ("c", 2)].map(|(t, n)| (t.to_owned(), shard(n)));
    write_index(folder.path(), &BTreeMap::from(map), 22).unwrap();
    folder
}

/// The one line of the error that opening `folder` gives.
fn refusal(folder: &Path) -> String {
    let message = Checkpoint::open(folder).unwrap_err().to_string();
    assert!(!message.contains('\n'), "{message}");
    message
}

#[track_caller]
fn assert_refused(folder: &Path, parts: &[&str]) {
    let message = refusal(folder);
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
}

// What works

#[test]
fn one_file_gives_its_tensors_in_file_order() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let plans = [plan("z", Dtype::F32, &[2, 3]), plan("none", Dtype::BF16, &[0, 4]), plan("a", Dtype::U8, &[])];
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    let mut writer = Writer::create(&path, &plans, &metadata).unwrap();
    let z: Vec<u8> = (0..24).collect();
    writer.append("z", &z[..7]).unwrap();
    writer.append("z", &z[7..]).unwrap();
    writer.append("a", &[99]).unwrap();
    writer.finish().unwrap();

    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert_eq!(checkpoint.folder(), folder.path());
    assert_eq!(checkpoint.metadata(), &metadata);
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["z", "none", "a"]);
    assert_eq!(checkpoint.file_sizes(), [("model.safetensors".to_owned(), fs::metadata(&path).unwrap().len())]);
    let tensor = checkpoint.tensor("z").unwrap();
    assert_eq!((tensor.dtype, &tensor.shape[..], &*tensor.bytes), (Dtype::F32, &[2, 3][..], &z[..]));
    assert!(tensor.bytes.is_mapped());
    assert!(checkpoint.tensor("none").unwrap().bytes.is_empty());
    assert_eq!(&*checkpoint.tensor("a").unwrap().bytes, &[99]);
    assert!(checkpoint.tensor("b").is_none());

    // The offset for messages is where the bytes are, and the data section is aligned.
    let (file, offset) = checkpoint.place("z").unwrap();
    assert_eq!((file, offset % 8), ("model.safetensors", 0));
    assert_eq!(fs::read(&path).unwrap()[offset as usize..][..24], z);
}

#[test]
fn shards_are_joined_by_their_index() {
    let folder = sharded();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["a", "c", "b", "d"]);
    assert_eq!(&*checkpoint.tensor("b").unwrap().bytes, &[2; 7]);
    assert_eq!(checkpoint.place("d").unwrap().0, shard_name(3, 3));
    assert_eq!(checkpoint.file_sizes().len(), 3);
}

#[test]
fn the_index_decides_which_of_two_tensors_is_meant() {
    let folder = sharded();
    write(&folder.path().join(shard_name(1, 3)), &[("b", 4, 88), ("a", 5, 1), ("extra", 2, 9)]);
    write(&folder.path().join("other.safetensors"), &[("b", 4, 99)]);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["a", "c", "b", "d"]);
    assert_eq!(&*checkpoint.tensor("b").unwrap().bytes, &[2; 7]);
}

#[test]
fn the_index_is_written_as_hugging_face_writes_it() {
    let folder = tempfile::tempdir().unwrap();
    let map = [("b", "2.safetensors"), ("a\"", "1.safetensors")].map(|(t, f)| (t.to_owned(), f.to_owned()));
    write_index(folder.path(), &BTreeMap::from(map), 7).unwrap();
    let expected = r#"{
  "metadata": {
    "total_size": 7
  },
  "weight_map": {
    "a\"": "1.safetensors",
    "b": "2.safetensors"
  }
}
"#;
    assert_eq!(fs::read_to_string(folder.path().join(INDEX)).unwrap(), expected);
}

#[test]
fn without_index_the_single_file_comes_first_then_all() {
    let folder = tempfile::tempdir().unwrap();
    write(&folder.path().join("two.safetensors"), &[("b", 2, 2)]);
    write(&folder.path().join("one.safetensors"), &[("a", 1, 1)]);
    fs::write(folder.path().join(".one.safetensors"), "hidden").unwrap();
    fs::write(folder.path().join("config.json"), "{}").unwrap();
    assert_eq!(Checkpoint::open(folder.path()).unwrap().names().collect::<Vec<_>>(), ["a", "b"]);
    write(&folder.path().join("model.safetensors"), &[("c", 1, 1)]);
    assert_eq!(Checkpoint::open(folder.path()).unwrap().names().collect::<Vec<_>>(), ["c"]);
}

/// As who saved a model in shards and then whole leaves it, or has removed only the shards.
#[test]
fn the_single_file_goes_before_an_index_of_other_files_and_it_is_said() {
    let folder = sharded();
    assert_eq!(Checkpoint::open(folder.path()).unwrap().notes(), [""; 0]);
    write(&folder.path().join("model.safetensors"), &[("a", 4, 9)]);
    let opened = |notes: &[&str]| {
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        assert_eq!(checkpoint.file_sizes().len(), 1);
        assert_eq!(&*checkpoint.tensor("a").unwrap().bytes, &[9; 4]);
        assert_eq!(checkpoint.notes().len(), notes.len(), "{:?}", checkpoint.notes());
        for (note, part) in checkpoint.notes().iter().zip(notes) {
            assert!(note.contains(part), "{part:?} is not in: {note}");
        }
    };
    let stale = "model.safetensors is read, and what model.safetensors.index.json names is not";
    opened(&[stale, "not read: \"model-00001-of-00003.safetensors\", \"model-00002-of-00003.safetensors\""]);
    (1..=3).for_each(|n| fs::remove_file(folder.path().join(shard_name(n, 3))).unwrap());
    opened(&[stale]);
    fs::write(folder.path().join(INDEX), "{").unwrap();
    opened(&[stale]);
    // An index of that very file is none of others.
    write_index(folder.path(), &BTreeMap::from([("a".to_owned(), "model.safetensors".to_owned())]), 4).unwrap();
    opened(&[]);
    // What only looks like the file is not taken for it.
    fs::remove_file(folder.path().join("model.safetensors")).unwrap();
    let whole = sharded();
    std::os::unix::fs::symlink("gone", whole.path().join("model.safetensors")).unwrap();
    assert_eq!(Checkpoint::open(whole.path()).unwrap().file_sizes().len(), 3);
}

#[test]
fn adapters_are_named_and_never_taken_for_weights() {
    let folder = tempfile::tempdir().unwrap();
    write(&folder.path().join("adapter_model.safetensors"), &[("base_model.model.a.lora_A.weight", 1, 1)]);
    fs::write(folder.path().join("adapter_config.json"), "{}").unwrap();
    assert_refused(folder.path(), &["no model.safetensors", "is of an adapter"]);
    for weights in ["weights.safetensors", "model.safetensors"] {
        write(&folder.path().join(weights), &[("a", 1, 1)]);
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["a"]);
        let note = &checkpoint.notes()[0];
        assert!(note.contains("adapter_config.json") && note.contains("adapter_model.safetensors"), "{note}");
        assert!(note.contains("not applied"), "{note}");
    }
}

#[test]
fn links_are_followed() {
    let folder = tempfile::tempdir().unwrap();
    write(&folder.path().join("blob"), &[("a", 3, 1)]);
    std::os::unix::fs::symlink("blob", folder.path().join("model.safetensors")).unwrap();
    assert_eq!(&*Checkpoint::open(folder.path()).unwrap().tensor("a").unwrap().bytes, &[1; 3]);
}

#[test]
fn a_file_is_mapped_once_and_as_long_as_one_tensor_lives() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    write(&path, &[("a", 10_000, 1), ("b", 10_000, 2)]);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let text = path.to_str().unwrap();
    let maps = || fs::read_to_string("/proc/self/maps").unwrap().lines().filter(|l| l.ends_with(text)).count();
    assert_eq!(maps(), 1);
    let open = fs::read_dir("/proc/self/fd").unwrap().filter_map(|e| fs::read_link(e.ok()?.path()).ok());
    assert!(!open.into_iter().any(|target| target == path), "the descriptor is still open");

    let part = checkpoint.tensor("b").unwrap().bytes.slice(5000..);
    drop(checkpoint);
    assert_eq!(maps(), 1);
    assert_eq!(&*part, &[2; 5000]);
    part.populate().unwrap();
    drop(part);
    assert_eq!(maps(), 0);
}

// What is missing

#[test]
fn wrong_path() {
    let folder = tempfile::tempdir().unwrap();
    assert_refused(&folder.path().join("nowhere"), &["nowhere: no such folder"]);
}

#[test]
fn a_file_instead_of_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    for (name, hint) in [
        ("model.safetensors", "model.safetensors: not a folder; give the folder that holds this file"),
        ("README", "README: not a folder"),
    ] {
        let path = folder.path().join(name);
        fs::write(&path, "").unwrap();
        assert_refused(&path, &[hint]);
    }
    assert_refused(&folder.path().join("README/x"), &["x: cannot open: Not a directory"]);
}

#[test]
fn a_folder_without_weights_or_with_those_of_another_format() {
    let folder = tempfile::tempdir().unwrap();
    assert_refused(folder.path(), &["no model.safetensors, model.safetensors.index.json or other *.safetensors"]);
    fs::write(folder.path().join("pytorch_model.bin"), "").unwrap();
    assert_refused(folder.path(), &["\"pytorch_model.bin\": PyTorch pickles are not supported; safetensors are"]);
    fs::remove_file(folder.path().join("pytorch_model.bin")).unwrap();
}

#[test]
fn missing_shard() {
    let folder = sharded();
    fs::remove_file(folder.path().join(shard_name(2, 3))).unwrap();
    assert_refused(folder.path(), &["model-00002-of-00003.safetensors: named by the index but not there"]);
    fs::remove_file(folder.path().join(INDEX)).unwrap();
    assert_refused(folder.path(), &["model-00002-of-00003.safetensors: one of a set of shards but not there"]);
}

#[test]
fn dangling_link() {
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink("gone", folder.path().join("model.safetensors")).unwrap();
    assert_refused(folder.path(), &["model.safetensors: a link to a file that is not there"]);
}

#[test]
fn folder_or_pipe_instead_of_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    fs::create_dir(&path).unwrap();
    assert_refused(folder.path(), &["model.safetensors: not a regular file"]);
    fs::remove_dir(&path).unwrap();
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    assert_refused(folder.path(), &["model.safetensors: not a regular file"]);
    fs::rename(&path, folder.path().join(INDEX)).unwrap();
    assert_refused(folder.path(), &["index.json: not a regular file"]);
}

#[test]
fn tensor_that_its_shard_does_not_hold() {
    let folder = sharded();
    write(&folder.path().join(shard_name(2, 3)), &[("c", 9, 3)]);
    assert_refused(folder.path(), &["model-00002-of-00003.safetensors: holds no tensor \"b\", which the index says"]);
    // Elsewhere does not count either.
    write(&folder.path().join(shard_name(3, 3)), &[("d", 1, 4), ("b", 7, 2)]);
    assert_refused(folder.path(), &["model-00002-of-00003.safetensors: holds no tensor \"b\""]);
}

// What lies

#[test]
fn index_that_is_no_index() {
    let folder = sharded();
    for (json, why) in [
        ("", "EOF"),
        ("[]", "malformed index"),
        ("{}", "missing field `weight_map`"),
        (r#"{"weight_map":{"a":1}}"#, "file of tensor \"a\": invalid type"),
        (r#"{"weight_map":["a"]}"#, "an object from tensor names to file names"),
        (r#"{"weight_map":{"a":"x","a":"y"}}"#, "tensor \"a\" occurs twice"),
        (r#"{"weight_map":{}}"#, "names no tensor"),
        (r#"{"weight_map":{},"weight_map":{}}"#, "duplicate field"),
    ] {
        fs::write(folder.path().join(INDEX), json).unwrap();
        assert_refused(folder.path(), &[INDEX, why]);
    }
    fs::File::create(folder.path().join(INDEX)).unwrap().set_len(100_000_001).unwrap();
    assert_refused(folder.path(), &[INDEX, "above the limit"]);
}

#[test]
fn index_that_leads_out_of_the_folder() {
    let folder = sharded();
    for file in ["../secret", "/etc/passwd", "..", ".", "", "a/b.safetensors", "a\\\\b"] {
        fs::write(folder.path().join(INDEX), format!(r#"{{"weight_map":{{"a":"{file}"}}}}"#)).unwrap();
        assert_refused(folder.path(), &[INDEX, "tensor \"a\"", "not a file name in this folder"]);
    }
}

#[test]
fn two_files_with_one_tensor_and_no_index() {
    let folder = tempfile::tempdir().unwrap();
    write(&folder.path().join("x.safetensors"), &[("a", 1, 1)]);
    write(&folder.path().join("y.safetensors"), &[("a", 1, 1)]);
    assert_refused(folder.path(), &["y.safetensors: tensor \"a\" is also in \"x.safetensors\""]);
}

#[test]
fn truncated_at_every_length() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    write(&path, &[("a", 5, 1), ("b", 7, 2)]);
    let whole = fs::read(&path).unwrap();
    for len in 0..whole.len() {
        fs::write(&path, &whole[..len]).unwrap();
        assert_refused(folder.path(), &["model.safetensors: truncated"]);
    }
    assert_refused(folder.path(), &["tensor \"b\" ends at data offset 12", "data ends at 11 (1 bytes missing)"]);
    fs::write(&path, [&whole[..], b"x"].concat()).unwrap();
    assert_refused(folder.path(), &["model.safetensors: 1 bytes after the last tensor"]);
}

#[test]
fn header_that_lies_names_file_and_tensor() {
    let folder = sharded();
    let path = folder.path().join(shard_name(2, 3));
    let mut bytes = fs::read(&path).unwrap();
    let at = bytes.windows(2).position(|w| w == b"U8").unwrap();
    bytes[at] = b'Q';
    fs::write(&path, &bytes).unwrap();
    assert_refused(folder.path(), &["model-00002-of-00003.safetensors: tensor \"c\": unknown dtype \"Q8\""]);
    bytes[at..at + 2].copy_from_slice(b"I8");
    let at = bytes.windows(3).position(|w| w == b"[9]").unwrap();
    bytes[at + 1] = b'8';
    fs::write(&path, &bytes).unwrap();
    assert_refused(folder.path(), &["tensor \"c\": I8 [8] takes 8 bytes, but data offsets 0..9 hold 9"]);
}

// Writing

#[test]
fn writer_holds_to_its_plan() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let plans = [plan("a", Dtype::F16, &[2]), plan("none", Dtype::U8, &[0]), plan("b", Dtype::U8, &[3])];
    let mut writer = Writer::create(&path, &plans, &BTreeMap::new()).unwrap();
    let text = |r: Result<(), Error>| r.unwrap_err().to_string();
    writer.append("a", &[1]).unwrap();
    assert!(text(writer.append("b", &[1])).contains("bytes for tensor \"b\" were written when \"a\" was due"));
    assert!(text(writer.append("a", &[1; 4])).contains("tensor \"a\" has 4 bytes, and more were written"));
    writer.append("a", &[1; 3]).unwrap();
    assert!(text(writer.append("a", &[1])).contains("more were written"));
    writer.append("b", &[1; 2]).unwrap();
    assert!(text(writer.finish()).contains("tensor \"b\" is incomplete: 1 of its 3 bytes were not written"));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);

    let mut writer = Writer::create(&path, &plans[..1], &BTreeMap::new()).unwrap();
    writer.append("a", &[1; 4]).unwrap();
    assert!(text(writer.append("z", &[])).contains("\"z\" were written when nothing more was due"));
    writer.finish().unwrap();
}

#[test]
fn plan_that_no_reader_would_accept() {
    let path = tempfile::tempdir().unwrap().path().join("model.safetensors");
    let text = |plans: &[TensorPlan]| Writer::create(&path, plans, &BTreeMap::new()).unwrap_err().to_string();
    let a = plan("a", Dtype::U8, &[1]);
    assert!(text(&[a.clone(), a]).contains("tensor \"a\": named twice"));
    assert!(text(&[plan("a", Dtype::U8, &[1; 65])]).contains("more than 64 dimensions"));
    assert!(text(&[plan("a", Dtype::F64, &[usize::MAX])]).contains("tensor \"a\": size overflows"));
    let half = plan("a", Dtype::U8, &[usize::MAX]);
    assert!(text(&[half.clone(), half]).contains("size overflows"));
    assert!(text(&[plan("__metadata__", Dtype::U8, &[1])]).contains("__metadata__"));
    assert!(text(&[plan("a", Dtype::U8, &[1 << 50])]).contains("cannot look at"));
}

#[test]
fn file_too_big_for_the_disk_is_refused_before_it_is_begun() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let error = Writer::create(&path, &[plan("a", Dtype::U8, &[1 << 60])], &BTreeMap::new()).unwrap_err();
    assert!(error.to_string().contains("model.safetensors: no space left: needs 11529215"), "{error}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 100, ..ProptestConfig::default() })]

    #[test]
    fn what_is_written_in_any_pieces_is_read_back(
        tensors in prop::collection::vec((".{1,12}", 0..Dtype::ALL.len(), prop::collection::vec(0usize..7, 0..4)), 0..8),
        piece in 1usize..200,
        seed in any::<u8>(),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let plans: Vec<_> = (tensors.iter().enumerate())
            .map(|(i, (name, dtype, shape))| plan(&format!("{i}{name}"), Dtype::ALL[*dtype], shape))
            .collect();
        let content = |i: usize| -> Vec<u8> {
            (0..plans[i].size().unwrap()).map(|n| (n as u8).wrapping_mul(31) ^ seed ^ i as u8).collect()
        };
        let mut writer = Writer::create(&folder.path().join("model.safetensors"), &plans, &BTreeMap::new()).unwrap();
        for (i, plan) in plans.iter().enumerate() {
            for part in content(i).chunks(piece) {
                writer.append(&plan.name, part).unwrap();
            }
        }
        writer.finish().unwrap();

        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        prop_assert_eq!(checkpoint.tensors().len(), plans.len());
        for (i, plan) in plans.iter().enumerate() {
            let tensor = checkpoint.tensor(&plan.name).unwrap();
            prop_assert_eq!((tensor.dtype, &tensor.shape), (plan.dtype, &plan.shape));
            prop_assert_eq!(&*tensor.bytes, &content(i)[..]);
        }
    }
}
