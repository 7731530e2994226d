//! Every way of reading gives the bytes of the file, whatever its layout, and says so when it cannot.

mod arriving;
mod changes;

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, mpsc};

use proptest::prelude::*;

use sluice_store::load::{self, Chunk, Filled, OpenCheckpoint, Piece, ReadAhead, Staging};
use sluice_store::{
    Bytes, Checkpoint, Dtype, Error, LoadMode, LoadOptions, Loading, TensorPlan, Writer, drop_cached, host_memory,
    resident_bytes, shard_name,
};
use tempfile::TempDir;

const MODES: [LoadMode; 4] = [LoadMode::Auto, LoadMode::Mmap, LoadMode::Pread, LoadMode::Direct];

fn options(mode: LoadMode) -> LoadOptions {
    LoadOptions { mode, ..LoadOptions::default() }
}

/// Opens the checkpoint in a folder, later.
fn opening(folder: &Path) -> impl FnOnce() -> Result<OpenCheckpoint, Error> + Send + 'static {
    let folder = folder.to_owned();
    move || OpenCheckpoint::safetensors(&folder)
}

/// Bytes that differ from place to place.
fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

/// A folder of shards with a tensor of each of these lengths.
fn folder_of(shards: &[Vec<usize>]) -> TempDir {
    // Not on a tmpfs: there is no reading past its page cache.
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for (n, lengths) in shards.iter().enumerate() {
        let name = |i: usize| format!("{n}.{i}");
        let plans: Vec<_> = lengths
            .iter()
            .enumerate()
            .map(|(i, len)| TensorPlan { name: name(i), dtype: Dtype::U8, shape: vec![1, *len] })
            .collect();
        let path = folder.path().join(shard_name(n + 1, shards.len()));
        // The header's length moves all that follows: every alignment comes.
        let metadata = BTreeMap::from([("pad".to_owned(), "x".repeat(lengths.iter().sum::<usize>() % 13))]);
        let mut writer = Writer::create(&path, &plans, &metadata).unwrap();
        for (i, len) in lengths.iter().enumerate() {
            writer.append(&name(i), &noise(*len, (n * 100 + i) as u64)).unwrap();
        }
        writer.finish().unwrap();
    }
    folder
}

/// What the file holds for each tensor, by plain reads.
fn expected(folder: &Path, checkpoint: &Checkpoint) -> Vec<Vec<u8>> {
    let read = |t: &sluice_store::Tensor| {
        let (file, offset) = checkpoint.place(&t.name).unwrap();
        let mut bytes = vec![0; t.bytes.len()];
        File::open(folder.join(file)).unwrap().read_exact_at(&mut bytes, offset).unwrap();
        bytes
    };
    checkpoint.tensors().iter().map(read).collect()
}

fn start(checkpoint: &Checkpoint, loading: &Loading) {
    loading.start(checkpoint.tensors().iter().map(|t| &t.bytes));
}

/// What has come of each view of a load whose bytes go elsewhere.
type Arrived = Arc<Mutex<Vec<Vec<Option<u8>>>>>;

/// Has these views delivered, in this order, and every byte once: `take` says what comes of it. Others stay.
fn deliver(
    (views, stays): (&[&Bytes], &[&Bytes]),
    loading: &Loading,
    take: impl Fn() -> io::Result<()> + Send + Sync + 'static,
) -> (Arrived, Vec<usize>) {
    let arrived: Arrived = Arc::new(Mutex::new(views.iter().map(|view| vec![None; view.len()]).collect()));
    let all = Arc::clone(&arrived);
    let others = loading.deliver(views, stays, &mut host_memory, move |pieces: &[Piece]| {
        let mut all = all.lock().unwrap();
        for piece in pieces {
            for (to, byte) in all[piece.view][piece.offset..].iter_mut().zip(piece.bytes) {
                assert!(to.replace(*byte).is_none(), "view {} came twice", piece.view);
            }
        }
        take()
    });
    (arrived, others.unwrap())
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut all: Vec<_> = fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    all.sort();
    all
}

fn make_cold(folder: &Path) {
    for path in files(folder) {
        let file = File::open(path).unwrap();
        file.sync_all().unwrap();
        drop_cached(&file, 0, 0).unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn every_reader_gives_the_bytes_of_the_file(
        shards in prop::collection::vec(prop::collection::vec(prop_oneof![Just(0usize), 1usize..40, 1usize..60_000], 1..7), 1..5),
        request in prop_oneof![Just(4096usize), Just(16384), Just(1 << 20)],
        (depth, rings, threads) in (1usize..9, 1usize..3, 1usize..5),
        cold in any::<bool>(),
        reversed in any::<bool>(),
    ) {
        let folder = folder_of(&shards);
        for mode in MODES {
            if cold {
                make_cold(folder.path());
            }
            let options = LoadOptions { request: Some(request), depth, rings, threads, ..options(mode) };
            let (checkpoint, loading) = load::open(folder.path(), &options).unwrap();
            let expected = expected(folder.path(), &checkpoint);
            let order: Vec<_> = checkpoint.tensors().iter().map(|t| &t.bytes).collect();
            if reversed {
                loading.start(order.iter().rev().copied());
            } else {
                loading.start(order);
            }
            // Read while it is being loaded: a view waits for itself.
            for (tensor, expected) in checkpoint.tensors().iter().zip(&expected) {
                prop_assert!(*tensor.bytes == expected[..], "{mode:?} {}", tensor.name);
            }
            loading.finish().unwrap();
            prop_assert!(checkpoint.tensors().iter().all(|t| t.bytes.is_ready()));
            let (there, wanted) = loading.progress().bytes();
            prop_assert_eq!(there, wanted);
        }
    }

    #[test]
    fn what_is_delivered_is_what_the_files_hold_every_byte_once(
        shards in prop::collection::vec(prop::collection::vec(prop_oneof![Just(0usize), 1usize..40, 1usize..60_000], 1..7), 1..5),
        request in prop_oneof![Just(4096usize), Just(16384), Just(1 << 20)],
        (depth, rings, threads) in (1usize..9, 1usize..3, 1usize..5),
        (cold, reversed, looked_at) in (any::<bool>(), any::<bool>(), any::<bool>()),
    ) {
        let folder = folder_of(&shards);
        for mode in MODES {
            if cold {
                make_cold(folder.path());
            }
            let options = LoadOptions { request: Some(request), depth, rings, threads, ..options(mode) };
            let (checkpoint, loading) = load::open(folder.path(), &options).unwrap();
            let expected = expected(folder.path(), &checkpoint);
            let foreign = Bytes::from(vec![1, 2, 3]);
            let mut views: Vec<&Bytes> = checkpoint.tensors().iter().map(|t| &t.bytes).collect();
            if reversed {
                views.reverse();
            }
            views.push(&foreign);
            let (arrived, others) = deliver((&views, &[]), &loading, || Ok(()));
            if looked_at {
                // Somebody wants them here too, while they are on their way.
                for (tensor, expected) in checkpoint.tensors().iter().zip(&expected).step_by(2) {
                    prop_assert!(*tensor.bytes == expected[..], "{mode:?} {} here", tensor.name);
                }
            }
            loading.finish().unwrap();
            let (there, wanted) = loading.progress().bytes();
            prop_assert_eq!(there, wanted);
            prop_assert!(others.last() == Some(&(views.len() - 1)));
            // Vectors that are read at once are not this load's any more.
            let arrived = arrived.lock().unwrap();
            for (view, bytes) in views.iter().enumerate().filter(|(view, _)| !others.contains(view)) {
                let came: Option<Vec<u8>> = arrived[view].iter().copied().collect();
                prop_assert!(came.as_deref() == Some(&***bytes), "{mode:?} view {view} of {}", bytes.len());
            }
            // And afterwards.
            for (tensor, expected) in checkpoint.tensors().iter().zip(&expected) {
                prop_assert!(*tensor.bytes == expected[..], "{mode:?} {} afterwards", tensor.name);
            }
            loading.check().unwrap();
        }
    }

    #[test]
    fn a_ring_of_staging_buffers_sees_every_chunk_once(
        len in 1usize..300_000, size in prop_oneof![Just(4096usize), Just(8192), Just(65536)], buffers in 1usize..6,
    ) {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = folder.path().join("x");
        let bytes = noise(len, 7);
        fs::write(&path, &bytes).unwrap();
        let chunks = (0..len).step_by(size).map(|at| Chunk { file: 0, offset: at as u64, len: size.min(len - at) });
        let seen = Mutex::new(vec![None; len.div_ceil(size)]);
        // Some buffers are given back only later, by another thread, as when a device has copied them.
        let (copies, copied) = mpsc::channel::<Filled>();
        let copying = std::thread::spawn(move || copied.into_iter().for_each(drop));
        let staging = Staging::new(chunks, buffers, size, &mut host_memory, |filled: Filled| {
            let before = seen.lock().unwrap()[filled.chunk().offset as usize / size].replace(filled.to_vec());
            assert!(before.is_none());
            if len % 2 == 0 {
                copies.send(filled).unwrap();
            }
        });
        staging.unwrap().read(&[&path], &LoadOptions { depth: 3, ..LoadOptions::default() }).unwrap();
        drop(copies);
        copying.join().unwrap();
        let seen: Vec<u8> = seen.into_inner().unwrap().into_iter().flat_map(Option::unwrap).collect();
        prop_assert!(seen == bytes);
    }
}

#[test]
fn tensors_beyond_4_gib_are_where_they_belong() {
    // The first tensor is a hole in the file and nobody asks for it.
    let hole = (4u64 << 30) + 12_345;
    let tail = noise(70_001, 3);
    let header = format!(
        r#"{{"hole":{{"dtype":"U8","shape":[1,{hole}],"data_offsets":[0,{hole}]}},"tail":{{"dtype":"U8","shape":[1,70001],"data_offsets":[{hole},{}]}}}}"#,
        hole + 70_001
    );
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut file = File::create(folder.path().join("model.safetensors")).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.write_all_at(&tail, 8 + header.len() as u64 + hole).unwrap();
    for mode in [LoadMode::Mmap, LoadMode::Pread, LoadMode::Direct] {
        let (checkpoint, loading) = load::open(folder.path(), &options(mode)).unwrap();
        let tensor = checkpoint.tensor("tail").unwrap();
        loading.start([&tensor.bytes]);
        assert!(*tensor.bytes == tail[..], "{mode:?}");
        loading.finish().unwrap();
        // What was not asked for can be had.
        assert!(checkpoint.tensor("hole").unwrap().bytes.slice(5 << 20..6 << 20).iter().all(|b| *b == 0));
    }
}

#[test]
fn buffered_reads_leave_the_page_cache_as_it_was() {
    let folder = folder_of(&[vec![9 << 20]]);
    let path = files(folder.path()).remove(0);
    make_cold(folder.path());
    let (checkpoint, loading) = load::open(folder.path(), &options(LoadMode::Pread)).unwrap();
    let file = File::open(&path).unwrap();
    let cached = || resident_bytes(&file, 0, file.metadata().unwrap().len()).unwrap();
    // The header, what the kernel read ahead of it, and what it would not drop.
    let before = cached();
    start(&checkpoint, &loading);
    loading.finish().unwrap();
    drop(loading);
    let after = cached();
    // The kernel keeps a page that is on its way between lists, and pages of its cache may be large.
    assert!(after <= before + (2 << 20), "{before} bytes before, {after} after");
    // What was there before stays.
    fs::read(&path).unwrap();
    let before = resident_bytes(&file, 0, 8 << 20).unwrap();
    let (checkpoint, loading) = load::open(folder.path(), &options(LoadMode::Pread)).unwrap();
    start(&checkpoint, &loading);
    loading.finish().unwrap();
    assert_eq!(resident_bytes(&file, 0, 8 << 20).unwrap(), before);
}

#[test]
fn what_a_map_delivers_is_in_the_page_cache_afterwards() {
    let folder = folder_of(&[vec![9 << 20, 70_000]]);
    make_cold(folder.path());
    let (checkpoint, loading) = load::open(folder.path(), &options(LoadMode::Mmap)).unwrap();
    let views: Vec<&Bytes> = checkpoint.tensors().iter().map(|t| &t.bytes).collect();
    deliver((&views, &[]), &loading, || Ok(()));
    loading.finish().unwrap();
    let file = File::open(&files(folder.path())[0]).unwrap();
    let len = file.metadata().unwrap().len();
    assert!(resident_bytes(&file, 0, len).unwrap() >= len);
}

#[test]
fn some_views_are_delivered_and_others_stay() {
    // Many share a chunk.
    let folder = folder_of(&[vec![5000, 300_000, 17, 40_000, 2_000_000, 9000], vec![70_000, 1, 600_000]]);
    for mode in MODES {
        for cold in [false, true] {
            if cold {
                make_cold(folder.path());
            }
            let options = LoadOptions { request: Some(1 << 18), ..options(mode) };
            let (checkpoint, loading) = load::open(folder.path(), &options).unwrap();
            let expected = expected(folder.path(), &checkpoint);
            let all: Vec<&Bytes> = checkpoint.tensors().iter().map(|t| &t.bytes).collect();
            let part = |odd| all.iter().copied().skip(odd).step_by(2).collect::<Vec<&Bytes>>();
            let (arrived, others) = deliver((&part(0), &part(1)), &loading, || Ok(()));
            loading.finish().unwrap();
            for (view, wanted) in expected.iter().step_by(2).enumerate().filter(|(view, _)| !others.contains(view)) {
                let came: Option<Vec<u8>> = arrived.lock().unwrap()[view].iter().copied().collect();
                assert!(came.as_ref() == Some(wanted), "{mode:?} view {view}");
            }
            for (view, wanted) in part(1).into_iter().zip(expected.iter().skip(1).step_by(2)) {
                assert!(view.is_ready() && **view == wanted[..], "{mode:?}: what stays");
            }
            loading.check().unwrap();
            // What was delivered is read once more where it is used, and handed over no more.
            assert!(all.iter().zip(&expected).all(|(view, wanted)| ***view == wanted[..]), "{mode:?}: afterwards");
            loading.check().unwrap();
        }
    }
}

#[test]
fn files_are_read_ahead_where_they_will_be_mapped_and_there_is_room() {
    let folder = folder_of(&[vec![65 << 20], vec![66 << 20]]);
    let total: u64 = files(folder.path()).iter().map(|path| fs::metadata(path).unwrap().len()).sum();
    let device = fs::metadata(folder.path()).unwrap().dev();
    // A disk that reads past the page cache so many times as fast as into a map.
    let disk = |times: f64| {
        let path = folder.path().join(format!("disk-{times}.json"));
        let speeds = format!(r#"{{"direct": {}, "mapped": 1e9}}"#, times * 1e9);
        let key = format!("{}:{}", libc::major(device), libc::minor(device));
        fs::write(&path, format!(r#"{{"{key}": {speeds}}}"#)).unwrap();
        LoadOptions { disk_speeds_file: Some(path), ..options(LoadMode::Auto) }
    };
    let mapped = options(LoadMode::Mmap);
    let cases = [
        ("asked for", mapped.clone(), true),
        ("room", LoadOptions { copy_budget: Some(total), ..mapped.clone() }, true),
        ("no room", LoadOptions { copy_budget: Some(total - 1), ..mapped }, false),
        ("copied", options(LoadMode::Pread), false),
        ("past the page cache", options(LoadMode::Direct), false),
        ("an unknown disk", options(LoadMode::Auto), false),
        ("about as fast", disk(1.05), true),
        ("faster", disk(1.3), false),
    ];
    for (case, options, expected) in cases {
        make_cold(folder.path());
        ReadAhead::begin(opening(folder.path()), &options).wait();
        let cached = |path: &PathBuf| {
            let file = File::open(path).unwrap();
            resident_bytes(&file, 0, file.metadata().unwrap().len()).unwrap()
        };
        let shards =
            files(folder.path()).into_iter().filter(|path| path.extension().is_some_and(|e| e == "safetensors"));
        let cached: u64 = shards.map(|path| cached(&path)).sum();
        // Headers are read in any case, and what the kernel reads ahead of them. Of what was read it may have dropped a page again.
        let (least, most) = if expected { (total - total / 64, u64::MAX) } else { (0, total / 2) };
        assert!((least..=most).contains(&cached), "{case}: {cached} of {total} bytes");
    }
    // Who does not wait ends it.
    make_cold(folder.path());
    drop(ReadAhead::begin(opening(folder.path()), &options(LoadMode::Mmap)));
    // A folder without a model is told by who loads it.
    ReadAhead::begin(opening(Path::new("nowhere")), &options(LoadMode::Mmap)).wait();
}

#[test]
fn a_load_that_is_given_up_leaves_nothing_running() {
    let folder = folder_of(&[vec![20 << 20]]);
    make_cold(folder.path());
    for mode in MODES {
        let (checkpoint, loading) = load::open(folder.path(), &options(mode)).unwrap();
        start(&checkpoint, &loading);
        drop(loading);
    }
}

#[test]
fn vectors_are_there_at_once() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let plans = [
        TensorPlan { name: "norm".into(), dtype: Dtype::U8, shape: vec![5000] },
        TensorPlan { name: "matrix".into(), dtype: Dtype::U8, shape: vec![1000, 5000] },
        TensorPlan { name: "conv".into(), dtype: Dtype::U8, shape: vec![600, 1, 4] },
    ];
    let path = folder.path().join("model.safetensors");
    let mut writer = Writer::create(&path, &plans, &BTreeMap::new()).unwrap();
    let (norm, conv) = (noise(5000, 1), noise(2400, 2));
    writer.append("norm", &norm).unwrap();
    writer.append("matrix", &noise(5_000_000, 3)).unwrap();
    writer.append("conv", &conv).unwrap();
    writer.finish().unwrap();
    make_cold(folder.path());
    for mode in [LoadMode::Mmap, LoadMode::Pread, LoadMode::Direct] {
        let (checkpoint, _loading) = load::open(folder.path(), &options(mode)).unwrap();
        let ready = |name: &str| checkpoint.tensor(name).unwrap().bytes.is_ready();
        assert!(ready("norm") && ready("conv") && !ready("matrix"), "{mode:?}");
        assert!(*checkpoint.tensor("norm").unwrap().bytes == norm[..]);
        assert!(*checkpoint.tensor("conv").unwrap().bytes == conv[..]);
        let matrix = checkpoint.tensor("matrix").unwrap().bytes;
        // A row by itself, and then all of it by waiting, without a start.
        let mut row = vec![0; 5000];
        matrix.slice(10_000..15_000).read_now(&mut row).unwrap();
        assert!(*matrix == noise(5_000_000, 3)[..] && row == matrix[10_000..15_000]);
    }
}

#[test]
fn a_tensor_at_an_odd_offset_is_copied_for_who_needs_alignment_and_no_other_is() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let plan = |name: &str, dtype, shape: &[usize]| TensorPlan { name: name.into(), dtype, shape: shape.to_vec() };
    let plans = [
        plan("even", Dtype::F32, &[100, 100]),
        plan("bytes", Dtype::U8, &[3, 1001]),
        plan("odd", Dtype::F32, &[100, 100]),
    ];
    let mut writer = Writer::create(&folder.path().join("model.safetensors"), &plans, &BTreeMap::new()).unwrap();
    let values = noise(40_000, 9);
    writer.append("even", &values).unwrap();
    writer.append("bytes", &noise(3003, 8)).unwrap();
    writer.append("odd", &values).unwrap();
    writer.finish().unwrap();
    for mode in MODES {
        let (checkpoint, loading) = load::open(folder.path(), &options(mode)).unwrap();
        start(&checkpoint, &loading);
        let address = |b: &sluice_store::Bytes| b.as_ptr() as usize;
        let (even, odd) = (checkpoint.tensor("even").unwrap(), checkpoint.tensor("odd").unwrap());
        assert_eq!(address(&even.aligned().unwrap()), address(&even.bytes));
        let copy = odd.aligned().unwrap();
        assert_ne!(address(&copy), address(&odd.bytes));
        assert!(address(&copy) % 4 == 0 && *copy == values[..] && !copy.is_mapped());
    }
}
