//! The prompt cache that replicas share, in a real S3-compatible server: `s3s-fs` (`cargo install s3s-fs@0.14.1 --features binary`, the last that Rust 1.95 compiles), or the program that SLUICE_S3_SERVER names.
//! A proxy in between breaks, stalls, cuts and changes what goes over the wire, and the server is killed and started again.
#![cfg(feature = "cloud")]

mod proxy;
mod server;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use fastrand::Rng;
use sluice_cache::BlockHash;
use sluice_cache::disk::{DiskCache, FileKey, Label, Lookups, NewEntry, Settings};
use sluice_cache::remote::{
    FindInStore, ObjectStore, Remote, RemoteStatus, SharedSecret, StoreContents, StoreError, WantedObject,
};
use sluice_cache::{block_hash, remote};

use proxy::{Fault, Proxy};
use server::{KEY, SECRET, Server};

const PATIENCE: Duration = Duration::from_secs(5);
const MODEL: u64 = 77;
/// Tokens and bytes of a block.
const BLOCK: usize = 32;
const BYTES: usize = 200_000;

fn open(endpoint: &str, secret: &str) -> Arc<dyn ObjectStore> {
    let settings = [
        ("AWS_ENDPOINT_URL", endpoint),
        ("AWS_ACCESS_KEY_ID", KEY),
        ("AWS_SECRET_ACCESS_KEY", secret),
        ("AWS_REGION", "us-east-1"),
    ];
    sluice_objects::open_with("s3://bucket/some/prefix", &settings).unwrap()
}

/// A replica: a folder of its own, and the store.
struct Replica {
    _folder: tempfile::TempDir,
    cache: DiskCache,
    remote: Arc<Remote>,
}

impl Replica {
    fn new(store: Arc<dyn ObjectStore>, key: Option<&FileKey>) -> Replica {
        let folder = tempfile::tempdir().unwrap();
        let remote = Arc::new(Remote::new(store));
        let shared = match remote.secret(key) {
            Ok(SharedSecret::Some(file)) => Some(file),
            _ => None,
        };
        let is_there = shared.is_some();
        let settings =
            Settings { quota: Some(256 << 20), key: key.cloned(), shared_secret: shared, ..Settings::default() };
        let cache = DiskCache::open_folder(folder.path(), settings).unwrap();
        let own = cache.secret_file(key).unwrap();
        if is_there || matches!(remote.offer_secret(&own, key), Ok(SharedSecret::Some(file)) if file.is_same(&own)) {
            remote.set_joined();
        }
        remote.start_uploads(cache.lookups(), own, key.cloned());
        remote.note_model(MODEL, "a model");
        Replica { _folder: folder, cache, remote }
    }

    fn status(&self) -> RemoteStatus {
        self.remote.status()
    }

    fn path(&self, tokens: &[u32]) -> Vec<BlockHash> {
        let (secret, mut path) = (self.cache.secret(), vec![self.cache.lookups().root(b"salt")]);
        for block in tokens.chunks_exact(BLOCK) {
            path.push(block_hash(&secret, path.last().unwrap(), block));
        }
        path
    }

    /// Stores all whole blocks of a prompt, on disk and then in the store.
    fn store(&mut self, tokens: &[u32]) {
        let path = self.path(tokens);
        for (i, block) in tokens.chunks_exact(BLOCK).enumerate() {
            let bytes = bytes_of(block);
            let entry = NewEntry {
                hash: path[i + 1],
                before: path[i],
                position: (i * BLOCK) as u32,
                tokens: block,
                parts: &[(0, &bytes)],
            };
            self.cache.store(MODEL, &[entry]).unwrap();
            self.remote.offer([(MODEL, path[i + 1])]);
        }
    }

    /// What the store has of a prompt: (its blocks that were found, those that were read). Each is compared with what was stored.
    fn restore(&self, tokens: &[u32]) -> (usize, usize) {
        let path = self.path(tokens);
        let query = FindInStore {
            secret: self.cache.secret(),
            model: MODEL,
            path: &path,
            tokens,
            block_tokens: BLOCK,
            groups: vec![(None, BYTES as u64)],
            state_bytes: 0,
            from: 0,
            least: 1,
        };
        let found = self.remote.find(&query);
        let all: Vec<usize> = (1..path.len()).filter(|i| found.entries.contains_key(&path[*i])).collect();
        let wanted: Vec<WantedObject> = all
            .iter()
            .map(|i| WantedObject {
                label: Label {
                    part: 0,
                    bytes: BYTES as u64,
                    model: MODEL,
                    hash: path[*i],
                    before: path[i - 1],
                    position: ((i - 1) * BLOCK) as u32,
                    tokens: &[],
                },
                tokens: tokens[(i - 1) * BLOCK..i * BLOCK].to_vec(),
            })
            .collect();
        let mut read = 0;
        let lookups: Lookups = self.cache.lookups();
        let never = Arc::new(AtomicBool::new(false));
        self.remote.fetch(&lookups, wanted, PATIENCE, &never, |i, part| {
            let block = all[i] - 1;
            assert!(part[..] == bytes_of(&tokens[block * BLOCK..][..BLOCK])[..], "wrong bytes were believed");
            read += 1;
        });
        (all.len(), read)
    }
}

/// What a model would have made of these tokens.
fn bytes_of(tokens: &[u32]) -> Vec<u8> {
    let mut bytes = vec![0; BYTES];
    Rng::with_seed(tokens.iter().fold(7, |seed, t| seed * 31 + u64::from(*t))).fill(&mut bytes);
    bytes
}

fn prompt(seed: u64, blocks: usize) -> Vec<u32> {
    let mut random = Rng::with_seed(seed);
    (0..blocks * BLOCK).map(|_| random.u32(..50_000)).collect()
}

#[test]
fn the_store_does_what_it_says() {
    let Some(server) = Server::start() else { return };
    let store = open(&server.endpoint(), SECRET);
    assert_eq!(store.url(), "s3://bucket/some/prefix");
    assert_eq!(store.get("a/b", 10, PATIENCE).unwrap(), None);
    assert_eq!(store.size("a/b", PATIENCE).unwrap(), None);
    store.put("a/b", b"first", PATIENCE).unwrap();
    store.put("a/b", b"second", PATIENCE).unwrap();
    assert_eq!(store.get("a/b", 6, PATIENCE).unwrap().unwrap(), b"second");
    assert_eq!(store.get("a/b", 5, PATIENCE), Err(StoreError::TooLarge(6)));
    assert_eq!(store.size("a/b", PATIENCE).unwrap(), Some(6));
    assert!(store.create("a/c", b"own", PATIENCE).unwrap());
    assert!(!store.create("a/c", b"another", PATIENCE).unwrap());
    assert_eq!(store.get("a/c", 9, PATIENCE).unwrap().unwrap(), b"own");
    let large: Vec<u8> = (0..9_000_000u32).map(|i| (i >> 3) as u8).collect();
    store.put("large", &large, PATIENCE).unwrap();
    assert!(store.get("large", 1 << 30, PATIENCE).unwrap().unwrap() == large);
    let mut found = Vec::new();
    store
        .list("a", PATIENCE, &mut |name, size| {
            found.push((name.to_owned(), size));
            true
        })
        .unwrap();
    found.sort();
    assert_eq!(found, [("a/b".to_owned(), 6), ("a/c".to_owned(), 3)]);
    // Credentials that are wrong are refused, and named by nobody.
    let stranger = open(&server.endpoint(), "not-the-secret");
    let refused = stranger.get("a/b", 10, PATIENCE).unwrap_err();
    assert!(matches!(refused, StoreError::Denied(_)), "{refused:?}");
    let said = format!("{refused} {refused:?} {:?}", stranger.put("x", b"x", PATIENCE).unwrap_err());
    assert!(!said.contains(KEY) && !said.contains("not-the-secret") && !said.contains("ignature"), "{said}");
}

#[test]
fn a_replica_restores_what_another_stored_in_clear_and_sealed() {
    let Some(server) = Server::start() else { return };
    for key in [None, FileKey::parse(&[5; 32])] {
        server.clear();
        let mut first = Replica::new(open(&server.endpoint(), SECRET), key.as_ref());
        let all = prompt(1, 40);
        first.store(&all);
        first.remote.flush(Duration::from_secs(60));
        let stored = first.status();
        assert_eq!((stored.stored, stored.queued, stored.errors), (40, 0, 0), "{stored:?}");
        // Another replica, which has nothing
        let second = Replica::new(open(&server.endpoint(), SECRET), key.as_ref());
        assert_eq!(second.restore(&all), (40, 40));
        assert_eq!(second.restore(&prompt(2, 40)), (0, 0));
        let mut parted = all.clone();
        parted[25 * BLOCK + 3] += 1;
        assert_eq!(second.restore(&parted), (25, 25));
        assert_eq!(second.status().wrong, 0);
        // Its objects are not stored twice
        first.remote.offer((1..41).map(|i| (MODEL, first.path(&all)[i])));
        first.remote.flush(Duration::from_secs(60));
        assert_eq!(first.status().stored, 40);
        let contents = StoreContents::list(&*open(&server.endpoint(), SECRET), 1000, PATIENCE).unwrap();
        let model = &contents.models[&MODEL];
        assert_eq!((model.entries, model.tokens, &*model.name), (40, 40 * BLOCK as u64, "a model"));
        assert!(contents.has_secret && contents.others == 0);
        if key.is_some() {
            // Without the key, or with another, nobody joins.
            let remote = Arc::new(Remote::new(open(&server.endpoint(), SECRET)));
            for other in [None, FileKey::parse(&[6; 32])] {
                assert!(matches!(remote.secret(other.as_ref()), Err(remote::JoinError::Secret(_))));
            }
        }
    }
}

#[test]
fn whatever_happens_on_the_way_nothing_wrong_is_believed_and_nobody_waits_long() {
    let Some(mut server) = Server::start() else { return };
    let proxy = Proxy::start(server.port());
    let mut first = Replica::new(open(&proxy.endpoint(), SECRET), None);
    let all = prompt(3, 24);
    first.store(&all);
    first.remote.flush(Duration::from_secs(60));
    assert_eq!(first.status().stored, 24);
    let seed = std::env::var("SLUICE_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(1);
    let rounds = std::env::var("SLUICE_STORE_FAULTS").ok().and_then(|n| n.parse().ok()).unwrap_or(8);
    let mut random = Rng::with_seed(seed);
    for round in 0..rounds {
        let fault = Fault::ALL[random.usize(..Fault::ALL.len())];
        let second = Replica::new(open(&proxy.endpoint(), SECRET), None);
        // The fault begins at any instant of the look-up or the read.
        let delay = Duration::from_micros(random.u64(..20_000));
        let restored = std::thread::scope(|scope| {
            let begins = scope.spawn(|| {
                std::thread::sleep(delay);
                match fault {
                    Fault::Killed => server.kill(),
                    _ => proxy.set(fault),
                }
            });
            let started = Instant::now();
            let restored = second.restore(&all);
            let took = started.elapsed();
            assert!(took < Duration::from_secs(8), "round {round}, {fault:?}: {took:?}");
            begins.join().unwrap();
            restored
        });
        assert!(restored.1 <= restored.0 && restored.0 <= 24, "round {round}, {fault:?}: {restored:?}");
        // And while something is stored
        let mut third = Replica::new(open(&proxy.endpoint(), SECRET), None);
        third.store(&prompt(100 + round, 3));
        let started = Instant::now();
        third.remote.flush(Duration::from_millis(500));
        third.remote.close();
        assert!(started.elapsed() < Duration::from_secs(2), "round {round}, {fault:?}");
        // When all is well again, everything that was stored whole is there
        proxy.set(Fault::None);
        if fault == Fault::Killed {
            server.restart();
        }
        let fourth = Replica::new(open(&proxy.endpoint(), SECRET), None);
        assert_eq!(fourth.restore(&all), (24, 24), "round {round}, {fault:?}: {:?}", fourth.status());
    }
}
