//! The cache over real files: what is stored comes back, from another process' point of view too, and nobody else looks in.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use fastrand::Rng;
use sluice_cache::BlockHash;
use sluice_cache::disk::{
    DiskCache, Entry, Error, FileKey, Label, Miss, NewEntry, Order, Place, STATE, Settings, Stored, slot_bytes,
};
use tempfile::TempDir;

const MODEL: u64 = 5;
const QUOTA: u64 = 64 << 20;

fn settings(quota: u64) -> Settings {
    Settings { quota: Some(quota), ..Settings::default() }
}

fn key(byte: u8) -> Option<FileKey> {
    FileKey::parse(&[byte; 32])
}

/// A chain of blocks of one conversation; each has a part of `bytes`, and the last a state of more.
struct Chain {
    seed: u64,
    bytes: usize,
}

impl Chain {
    fn hash(&self, i: u32) -> BlockHash {
        let mut hash = [0; 16];
        hash[..8].copy_from_slice(&self.seed.to_le_bytes());
        hash[8..12].copy_from_slice(&i.to_le_bytes());
        hash
    }

    fn tokens(&self, i: u32) -> Vec<u32> {
        (0..16).map(|t| self.seed as u32 + 16 * i + t).collect()
    }

    fn parts(&self, i: u32) -> Vec<(u32, Vec<u8>)> {
        let mut random = Rng::with_seed(self.seed << 32 | u64::from(i));
        let mut bytes = |n: usize| {
            let mut bytes = vec![0; n];
            random.fill(&mut bytes);
            bytes
        };
        let mut parts = vec![(0, bytes(self.bytes))];
        if i % 4 == 3 {
            parts.push((STATE, bytes(3 * self.bytes + 5)));
        }
        parts
    }

    /// Stores `blocks` blocks in batches, as an engine does: each is made durable by itself, which is what takes long.
    fn store(&self, cache: &mut DiskCache, blocks: u32) -> Result<Stored, Error> {
        let mut all = Stored::default();
        let tokens: Vec<Vec<u32>> = (0..blocks).map(|i| self.tokens(i)).collect();
        let parts: Vec<Vec<(u32, Vec<u8>)>> = (0..blocks).map(|i| self.parts(i)).collect();
        let borrowed: Vec<Vec<(u32, &[u8])>> =
            parts.iter().map(|parts| parts.iter().map(|(n, bytes)| (*n, bytes.as_slice())).collect()).collect();
        let new = |i: u32| {
            let before = i.checked_sub(1).map_or([0xff; 16], |b| self.hash(b));
            let (tokens, parts) = (&tokens[i as usize], &borrowed[i as usize]);
            NewEntry { hash: self.hash(i), before, position: 16 * i, tokens, parts }
        };
        let batches: Vec<NewEntry> = (0..blocks).map(new).collect();
        for batch in batches.chunks(8) {
            let stored = cache.store(MODEL, batch)?;
            all.present += stored.present;
            all.new += stored.new;
            all.bytes += stored.bytes;
        }
        Ok(all)
    }

    /// Reads `blocks` blocks, as one batch, and says how many are right from the first on; what comes under a right label is right.
    fn read(&self, cache: &mut DiskCache, blocks: u32, order: Order) -> usize {
        let tokens: Vec<Vec<u32>> = (0..blocks).map(|i| self.tokens(i)).collect();
        let mut wanted = Vec::new();
        let mut expected = Vec::new();
        for i in 0..blocks {
            let Some(entry) = cache.find(&(MODEL, self.hash(i))).unwrap() else { break };
            for ((part, bytes, place), (_, content)) in entry.parts.iter().zip(self.parts(i)) {
                let before = entry.before;
                let hash = self.hash(i);
                let (position, tokens) = (16 * i, tokens[i as usize].as_slice());
                wanted
                    .push((Label { part: *part, bytes: *bytes, model: MODEL, hash, before, position, tokens }, *place));
                expected.push((i, content));
            }
        }
        let reads = cache.reads(&wanted).unwrap();
        assert_eq!(reads.len(), expected.len());
        let came = Mutex::new(vec![None; expected.len()]);
        let sequence = Mutex::new(Vec::new());
        // From another thread, as an engine does it.
        std::thread::scope(|scope| {
            scope.spawn(|| {
                reads.for_each(order, |i, part| {
                    sequence.lock().unwrap().push(i);
                    let right =
                        part.map(|bytes| assert!(bytes[..] == expected[i].1[..], "wrong bytes under the right label"));
                    let before = came.lock().unwrap()[i].replace(right.is_ok());
                    assert_eq!(before, None, "part {i} came twice");
                });
            });
        });
        let came = came.into_inner().unwrap();
        assert!(came.iter().all(Option::is_some));
        if order == Order::AsRequested {
            assert!(sequence.into_inner().unwrap().is_sorted());
        }
        let wrong = expected.iter().zip(&came).find(|(_, right)| **right == Some(false));
        wrong.map_or(expected.last().map_or(0, |(i, _)| i + 1), |((i, _), _)| *i) as usize
    }
}

fn modes(folder: &Path) -> Vec<(String, u32)> {
    let mut modes = vec![(".".to_owned(), fs::metadata(folder).unwrap().permissions().mode() & 0o777)];
    for entry in fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let mode = entry.metadata().unwrap().permissions().mode() & 0o777;
        modes.push((entry.file_name().into_string().unwrap(), mode));
    }
    modes
}

#[test]
fn what_was_stored_comes_back_from_real_files_in_any_order_and_after_a_restart() {
    let dir = TempDir::new().unwrap();
    for key in [None, key(1)] {
        let folder = dir.path().join(if key.is_some() { "sealed" } else { "plain" });
        let settings = Settings { quota: Some(QUOTA), key, ..Settings::default() };
        let chains = [Chain { seed: 1, bytes: 10_000 }, Chain { seed: 2, bytes: 70_000 }];
        let mut secret = None;
        for start in 0..2 {
            let mut cache = DiskCache::open_folder(&folder, settings.clone()).unwrap();
            assert_eq!((cache.cleared(), *secret.get_or_insert(cache.secret())), (None, cache.secret()));
            for chain in &chains {
                let stored = chain.store(&mut cache, 40).unwrap();
                assert_eq!((stored.present, stored.new, stored.bytes > 0), (40, 40 * (1 - start), start == 0));
                for order in [Order::AsRequested, Order::AsRead] {
                    assert_eq!(chain.read(&mut cache, 45, order), 40);
                }
            }
            assert_eq!((cache.counts().read, cache.counts().wrong), (200, 0));
            assert_eq!(cache.notes(), [] as [String; 0]);
            assert_eq!(cache.verify(|_, _| {}).unwrap().wrong, 0);
        }
        for (name, mode) in modes(&folder) {
            assert_eq!(mode, if name == "." { 0o700 } else { 0o600 }, "{name}");
        }
    }
}

#[test]
fn a_folder_can_be_looked_at_while_its_owner_writes() {
    let dir = TempDir::new().unwrap();
    let folder = dir.path().join("c");
    assert!(matches!(DiskCache::look_at(&folder, None), Err(Error::NoCache { .. })));
    // Evicts, compacts and removes slabs all the while.
    let mut cache = DiskCache::open_folder(&folder, settings(24 << 20)).unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writing = scope.spawn(|| {
            for seed in 1..=60 {
                let chain = Chain { seed, bytes: if seed % 20 < 10 { 60_000 } else { 9_000 } };
                chain.store(&mut cache, 8).unwrap();
            }
            over.store(true, Ordering::Release);
        });
        let mut looks = 0;
        while !over.load(Ordering::Acquire) || looks == 0 {
            match DiskCache::look_at(&folder, None) {
                Ok(mut seen) => {
                    assert_eq!(seen.inconsistencies().unwrap(), [] as [String; 0]);
                    assert_eq!(seen.notes(), [] as [String; 0]);
                    let entries = seen.stat().unwrap().models.values().map(|m| m.entries).sum::<u64>();
                    assert!(entries <= 60 * 8);
                    looks += 1;
                }
                Err(e) => assert!(matches!(e, Error::InUse { .. }), "{e}"),
            }
        }
        writing.join().unwrap();
    });
    let now = cache.stat().unwrap();
    let files = modes(&folder);
    let seen = DiskCache::look_at(&folder, None).unwrap().stat().unwrap();
    assert_eq!((seen.slabs, seen.quota), (now.slabs, now.quota));
    assert_eq!(seen.models[&MODEL].entries, now.models[&MODEL].entries);
    assert!(now.models[&MODEL].entries > 0);
    assert_eq!(modes(&folder), files);
}

#[test]
fn a_folder_has_one_owner_and_is_one_of_ours() {
    let dir = TempDir::new().unwrap();
    let folder = dir.path().join("a/b");
    let cache = DiskCache::open_folder(&folder, settings(QUOTA)).unwrap();
    let other = DiskCache::open_folder(&folder, settings(QUOTA)).err().unwrap();
    assert!(matches!(other, Error::InUse { .. }), "{other}");
    assert!(matches!(DiskCache::clear_folder(&folder), Err(Error::InUse { .. })));
    assert!(matches!(DiskCache::clear_folder(dir.path()), Err(Error::NoCache { .. })));
    drop(cache);
    DiskCache::open_folder(&folder, settings(QUOTA)).unwrap();
    let foreign = DiskCache::open_folder(&dir.path().join("a"), settings(QUOTA)).err().unwrap();
    assert!(matches!(foreign, Error::NotACache { .. }), "{foreign}");
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
    DiskCache::open_folder(&folder, Settings::default()).unwrap();
    assert_eq!(modes(&folder)[0].1, 0o700);
    let little = DiskCache::open_folder(&folder, settings(1000)).err().unwrap();
    assert!(matches!(little, Error::Quota { quota: 1000, .. }), "{little}");
}

#[test]
fn a_damaged_secret_clears_the_cache_and_a_wrong_key_clears_nothing() {
    let dir = TempDir::new().unwrap();
    let with = |key| DiskCache::open_folder(dir.path(), Settings { quota: Some(QUOTA), key, ..Settings::default() });
    let chain = Chain { seed: 1, bytes: 10_000 };
    let mut cache = with(key(1)).unwrap();
    let secret = cache.secret();
    chain.store(&mut cache, 8).unwrap();
    drop(cache);
    assert!(matches!(with(key(2)), Err(Error::WrongKey)));
    assert!(matches!(with(None), Err(Error::KeyWanted)));
    assert_eq!(chain.read(&mut with(key(1)).unwrap(), 8, Order::AsRequested), 8);
    let path = dir.path().join("secret");
    let whole = fs::read(&path).unwrap();
    for damaged in [&whole[..50], &[]] {
        fs::write(&path, damaged).unwrap();
        let mut cache = with(key(1)).unwrap();
        assert!(cache.cleared().unwrap().contains("secret is damaged") && cache.secret() != secret);
        assert_eq!((cache.len(), chain.read(&mut cache, 8, Order::AsRequested)), (0, 0));
        chain.store(&mut cache, 8).unwrap();
    }
    fs::remove_file(&path).unwrap();
    // Without a secret nothing was sealed: this one is plain.
    let cache = with(None).unwrap();
    assert!(cache.cleared().unwrap().contains("secret is gone") && cache.is_empty());
    drop(cache);
    assert!(matches!(with(key(1)), Err(Error::NotEncrypted)));
}

#[test]
fn nothing_outside_of_an_encrypted_slot_says_what_was_asked() {
    let dir = TempDir::new().unwrap();
    let settings = Settings { quota: Some(QUOTA), key: key(1), ..Settings::default() };
    let chain = Chain { seed: 0x1234_5678, bytes: 10_000 };
    chain.store(&mut DiskCache::open_folder(dir.path(), settings).unwrap(), 8).unwrap();
    let needles = (0..8).flat_map(|i| {
        let tokens: Vec<u8> = chain.tokens(i)[..4].iter().flat_map(|t| t.to_le_bytes()).collect();
        [tokens, chain.parts(i)[0].1[..32].to_vec()]
    });
    let needles: Vec<Vec<u8>> = needles.collect();
    for entry in fs::read_dir(dir.path()).unwrap() {
        let path = entry.unwrap().path();
        let bytes = fs::read(&path).unwrap();
        for needle in &needles {
            assert!(!bytes.windows(needle.len()).any(|w| w == needle), "{}", path.display());
        }
    }
}

/// Runs another test of this file in a process of its own, which may limit itself.
fn in_a_process(test: &str, folder: &Path, limit: &str) {
    let program = std::env::current_exe().unwrap();
    let run = format!("{limit}; exec \"$0\" --exact folders::{test} --ignored --nocapture");
    let mut command = Command::new("sh");
    command.arg("-c").arg(run).arg(program).env("SLUICE_FOLDER", folder);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
#[ignore = "run by the test below, with a limit to the length of files"]
fn stores_until_no_file_may_grow() {
    let folder = std::env::var_os("SLUICE_FOLDER").unwrap();
    let mut cache = DiskCache::open_folder(Path::new(&folder), settings(1 << 30)).unwrap();
    let error = (0..1000).find_map(|seed| Chain { seed, bytes: 100_000 }.store(&mut cache, 8).err());
    assert!(matches!(error, Some(Error::Io { .. } | Error::Index(_))), "{error:?}");
    for seed in 0..3 {
        let chain = Chain { seed, bytes: 100_000 };
        assert!(matches!(chain.store(&mut cache, 8), Err(Error::Disabled)));
        assert!(matches!(cache.find(&(MODEL, chain.hash(0))), Err(Error::Disabled)));
    }
}

#[test]
fn a_file_that_may_not_grow_is_an_error_once_and_what_was_stored_is_right_afterwards() {
    let dir = TempDir::new().unwrap();
    let chain = Chain { seed: 7_000_000, bytes: 10_000 };
    chain.store(&mut DiskCache::open_folder(dir.path(), settings(1 << 30)).unwrap(), 8).unwrap();
    // 512 bytes each: slabs of this quota are 63 MB.
    in_a_process("stores_until_no_file_may_grow", dir.path(), "trap '' XFSZ; ulimit -f 20000");
    let mut cache = DiskCache::open_folder(dir.path(), settings(1 << 30)).unwrap();
    assert_eq!(cache.cleared(), None);
    assert_eq!(cache.inconsistencies().unwrap(), [] as [String; 0]);
    assert_eq!(cache.verify(|_, _| {}).unwrap().wrong, 0);
    assert_eq!(chain.read(&mut cache, 8, Order::AsRequested), 8);
}

#[test]
fn a_folder_that_vanishes_ends_the_writing_and_nothing_wrong_is_read() {
    let dir = TempDir::new().unwrap();
    let folder = dir.path().join("cache");
    let mut cache = DiskCache::open_folder(&folder, settings(QUOTA)).unwrap();
    let chain = Chain { seed: 1, bytes: 10_000 };
    chain.store(&mut cache, 8).unwrap();
    fs::remove_dir_all(&folder).unwrap();
    // The files are open: they are there until this process lets go.
    assert_eq!(chain.read(&mut cache, 8, Order::AsRequested), 8);
    let error = (2..1000).find_map(|seed| Chain { seed, bytes: 10_000 * seed as usize }.store(&mut cache, 8).err());
    assert!(matches!(error, Some(Error::Io { doing: "growing", .. })), "{error:?}");
    assert!(matches!(chain.store(&mut cache, 9), Err(Error::Disabled)));
    drop(cache);
    assert!(!folder.exists());
    assert!(DiskCache::open_folder(&folder, settings(QUOTA)).unwrap().is_empty());
}

#[test]
fn a_folder_that_may_not_be_written_to_is_an_error_that_names_it() {
    let error = DiskCache::open_folder(Path::new("/proc/sluice"), settings(QUOTA)).err().unwrap();
    assert!(error.to_string().starts_with("/proc/sluice: cannot make the folder"), "{error}");
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "x").unwrap();
    assert!(matches!(DiskCache::open_folder(&file, settings(QUOTA)), Err(Error::Folder { .. })));
}

#[test]
fn a_slab_that_is_cut_or_changed_is_a_miss_that_is_said_counted_and_removed() {
    let dir = TempDir::new().unwrap();
    let chain = Chain { seed: 1, bytes: 10_000 };
    let mut cache = DiskCache::open_folder(dir.path(), settings(QUOTA)).unwrap();
    chain.store(&mut cache, 8).unwrap();
    let entry = cache.find(&(MODEL, chain.hash(2))).unwrap().unwrap();
    let (_, _, place) = entry.parts[0];
    let slab = dir.path().join(format!("{:08}.slab", place.slab));
    let mut bytes = fs::read(&slab).unwrap();
    bytes[place.slot as usize * slot_bytes(10_000) as usize + 77] ^= 1;
    fs::write(&slab, &bytes).unwrap();
    assert_eq!(chain.read(&mut cache, 8, Order::AsRequested), 2);
    assert_eq!(cache.counts().wrong, 1);
    let notes = cache.notes();
    assert!(notes.len() == 1 && notes[0].contains("has lost an entry"), "{notes:?}");
    assert_eq!(cache.find(&(MODEL, chain.hash(2))).unwrap(), None);
    // It is stored anew, and what followed it is found again.
    assert_eq!(chain.store(&mut cache, 8).unwrap().new, 1);
    assert_eq!(chain.read(&mut cache, 8, Order::AsRead), 8);
    drop(cache);
    fs::write(&slab, &bytes[..bytes.len() - 1]).unwrap();
    let mut cache = DiskCache::open_folder(dir.path(), settings(QUOTA)).unwrap();
    assert!(cache.notes()[0].contains("is gone or cut"));
    assert_eq!(chain.read(&mut cache, 8, Order::AsRequested), 0);
    assert_eq!(cache.inconsistencies().unwrap(), [] as [String; 0]);
}

#[test]
fn a_smaller_need_gives_files_back_and_a_smaller_quota_keeps_what_was_used_last() {
    let dir = TempDir::new().unwrap();
    let mut cache = DiskCache::open_folder(dir.path(), settings(QUOTA)).unwrap();
    let chains: Vec<Chain> = (1..=20).map(|seed| Chain { seed, bytes: 100_000 }).collect();
    for chain in &chains {
        chain.store(&mut cache, 16).unwrap();
    }
    assert_eq!(cache.counts().evicted, 0);
    // Every chain but one in five goes: what is left lies scattered.
    for (i, chain) in chains.iter().enumerate().filter(|(i, _)| i % 5 != 0) {
        cache.remove(&(0..16).map(|b| (MODEL, chain.hash(b))).collect::<Vec<_>>()).unwrap();
        assert_eq!(chain.read(&mut cache, 16, Order::AsRequested), 0, "{i}");
    }
    let before = cache.bytes();
    while cache.shrink().unwrap() {}
    assert!(cache.bytes() < before / 3, "{} of {before}", cache.bytes());
    assert!(cache.counts().moved > 0);
    let on_disk: u64 = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().metadata().unwrap().len()).sum();
    assert!(on_disk < cache.bytes() + (5 << 20));
    for chain in chains.iter().step_by(5) {
        assert_eq!(chain.read(&mut cache, 16, Order::AsRead), 16);
    }
    assert_eq!(cache.inconsistencies().unwrap(), [] as [String; 0]);
    let last = &chains[5];
    cache.touch(&(0..16).map(|b| (MODEL, last.hash(b))).collect::<Vec<_>>()).unwrap();
    drop(cache);
    let small = 13 << 20;
    let mut cache = DiskCache::open_folder(dir.path(), settings(small)).unwrap();
    let on_disk: u64 = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().metadata().unwrap().len()).sum();
    assert!(on_disk <= small, "{on_disk}");
    assert_eq!(last.read(&mut cache, 16, Order::AsRequested), 16);
    assert_eq!(cache.inconsistencies().unwrap(), [] as [String; 0]);
}

#[test]
fn the_days_limit_ends_the_writing_and_is_said_once() {
    let dir = TempDir::new().unwrap();
    let limited = Settings { quota: Some(QUOTA), daily_limit: Some(200_000), ..Settings::default() };
    let mut written = 0;
    for start in 0..2 {
        let mut cache = DiskCache::open_folder(dir.path(), limited.clone()).unwrap();
        for seed in 0..4 {
            written += Chain { seed, bytes: 20_000 }.store(&mut cache, 8).unwrap().bytes;
        }
        assert!(written > 150_000 && written <= 200_000, "start {start}: {written}");
        assert!(cache.counts().refused > 0);
        let notes = cache.notes();
        assert!(notes.len() == 1 && notes[0].contains("in a day: 200000 bytes"), "{notes:?}");
    }
}

#[test]
fn what_is_about_to_be_read_is_not_evicted_and_goes_when_that_is_over() {
    let dir = TempDir::new().unwrap();
    let mut cache = DiskCache::open_folder(dir.path(), settings(7 << 20)).unwrap();
    let chain = Chain { seed: 1, bytes: 20_000 };
    chain.store(&mut cache, 8).unwrap();
    let tokens: Vec<Vec<u32>> = (0..8).map(|i| chain.tokens(i)).collect();
    let wanted: Vec<(Label, Place)> = (0..8)
        .map(|i| {
            let hash = chain.hash(i);
            let Entry { before, position, parts, .. } = cache.find(&(MODEL, hash)).unwrap().unwrap();
            let (part, bytes, place) = parts[0];
            let tokens = tokens[i as usize].as_slice();
            (Label { part, bytes, model: MODEL, hash, before, position, tokens }, place)
        })
        .collect();
    let others = |cache: &mut DiskCache, seeds: std::ops::Range<u64>| {
        seeds.for_each(|seed| _ = Chain { seed, bytes: 20_000 }.store(cache, 8).unwrap());
    };
    let reads = cache.reads(&wanted).unwrap();
    others(&mut cache, 10..40);
    assert!(cache.counts().evicted > 50);
    let mut came = 0;
    reads.for_each(Order::AsRequested, |i, part| {
        assert!(part.unwrap()[..] == chain.parts(i as u32)[0].1[..]);
        came += 1;
    });
    assert_eq!(came, 8);
    others(&mut cache, 40..60);
    assert_eq!(cache.find(&(MODEL, chain.hash(7))).unwrap(), None);
    // Places of what was evicted since: nothing is read, and nothing is wrong with that.
    cache.reads(&wanted).unwrap().for_each(Order::AsRead, |_, part| assert!(matches!(part, Err(Miss::Gone))));
    assert_eq!(cache.counts().wrong, 0);
}

/// The first part of each block that is there, with its tokens.
fn first_parts<'a>(cache: &mut DiskCache, chain: &Chain, tokens: &'a [Vec<u32>]) -> Vec<(Label<'a>, Place)> {
    let of = |(i, tokens): (u32, &'a Vec<u32>)| {
        let hash = chain.hash(i);
        let Entry { before, position, parts, .. } = cache.find(&(MODEL, hash)).unwrap()?;
        let (part, bytes, place) = parts[0];
        Some((Label { part, bytes, model: MODEL, hash, before, position, tokens }, place))
    };
    (0..).zip(tokens).map_while(of).collect()
}

#[test]
fn who_wants_no_more_parts_is_handed_none() {
    let dir = TempDir::new().unwrap();
    let mut cache = DiskCache::open_folder(dir.path(), settings(QUOTA)).unwrap();
    let chain = Chain { seed: 1, bytes: 600_000 };
    chain.store(&mut cache, 8).unwrap();
    let tokens: Vec<Vec<u32>> = (0..8).map(|i| chain.tokens(i)).collect();
    let wanted = first_parts(&mut cache, &chain, &tokens);
    for order in [Order::AsRead, Order::AsRequested] {
        let reads = cache.reads(&wanted).unwrap();
        reads.cancel_flag().store(true, Ordering::Relaxed);
        reads.for_each(order, |_, _| panic!("nobody wants this"));
    }
    assert_eq!(chain.read(&mut cache, 8, Order::AsRequested), 8);
    assert_eq!(cache.entries_in_use(), 0);
}

#[test]
fn who_takes_parts_may_panic_and_the_cache_goes_on() {
    let dir = TempDir::new().unwrap();
    let mut cache = DiskCache::open_folder(dir.path(), settings(QUOTA)).unwrap();
    let chain = Chain { seed: 1, bytes: 600_000 };
    chain.store(&mut cache, 40).unwrap();
    let tokens: Vec<Vec<u32>> = (0..40).map(|i| chain.tokens(i)).collect();
    let wanted = first_parts(&mut cache, &chain, &tokens);
    for order in [Order::AsRead, Order::AsRequested] {
        let reads = cache.reads(&wanted).unwrap();
        let each = std::panic::AssertUnwindSafe(|| reads.for_each(order, |_, _| panic!("the engine's")));
        let panic = std::panic::catch_unwind(each).unwrap_err();
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"the engine's"));
    }
    assert_eq!(chain.read(&mut cache, 40, Order::AsRequested), 40);
    assert_eq!(cache.entries_in_use(), 0);
}
