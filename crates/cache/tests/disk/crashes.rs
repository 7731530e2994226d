//! The cache over a disk whose power goes at any instant, that fills up, and whose bytes change: what is found afterwards is right, and nothing is lost on it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use fastrand::Rng;
use sluice_cache::BlockHash;
use sluice_cache::disk::{
    DiskCache, Error, Key, LEAST_INDEX, Label, NewEntry, Order, PAGE, STATE, Settings, Storage, Stored,
};

use crate::simulated::Simulated;

/// The index's file, see `docs/cache-format.md`.
const INDEX: &str = "index.redb";
const BLOCK: u32 = 4;
const MODEL: u64 = 77;

/// A node that tests store: all of it follows from its path, so that anybody can say what it has to be.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Node(Vec<u32>);

impl Node {
    fn random(random: &mut Rng) -> Node {
        // Few words, so that many begin alike.
        Node((0..random.u32(1..=5)).map(|_| random.u32(..3)).collect())
    }

    fn path(&self) -> impl Iterator<Item = Node> {
        (1..=self.0.len()).map(|n| Node(self.0[..n].to_vec()))
    }

    fn hash(&self) -> BlockHash {
        let bytes: Vec<u8> = self.0.iter().flat_map(|t| t.to_le_bytes()).collect();
        blake3::hash(&bytes).as_bytes()[..16].try_into().unwrap()
    }

    fn before(&self) -> BlockHash {
        Node(self.0[..self.0.len() - 1].to_vec()).hash()
    }

    fn key(&self) -> Key {
        (MODEL, self.hash())
    }

    fn tokens(&self) -> Vec<u32> {
        vec![*self.0.last().unwrap(); BLOCK as usize]
    }

    fn position(&self) -> u32 {
        (self.0.len() as u32 - 1) * BLOCK
    }

    /// Two sizes of blocks; every third has a state.
    fn parts(&self) -> Vec<(u32, Vec<u8>)> {
        let mut random = Rng::with_seed(u64::from_le_bytes(self.hash()[..8].try_into().unwrap()));
        let mut bytes = |n: usize| {
            let mut bytes = vec![0; n];
            random.fill(&mut bytes);
            bytes
        };
        let mut parts = vec![(0, bytes(9000)), (1, bytes(3000))];
        if self.hash()[0].is_multiple_of(3) {
            parts.push((STATE, bytes(20_000)));
        }
        parts
    }
}

fn store(cache: &mut DiskCache, node: &Node) -> Result<Stored, Error> {
    let nodes: Vec<Node> = node.path().collect();
    let tokens: Vec<Vec<u32>> = nodes.iter().map(Node::tokens).collect();
    let parts: Vec<Vec<(u32, Vec<u8>)>> = nodes.iter().map(Node::parts).collect();
    let borrowed: Vec<Vec<(u32, &[u8])>> =
        parts.iter().map(|all| all.iter().map(|(n, bytes)| (*n, bytes.as_slice())).collect()).collect();
    let new: Vec<NewEntry> = (0..nodes.len())
        .map(|i| NewEntry {
            hash: nodes[i].hash(),
            before: nodes[i].before(),
            position: nodes[i].position(),
            tokens: &tokens[i],
            parts: &borrowed[i],
        })
        .collect();
    cache.store(MODEL, &new)
}

/// Whether all parts of a node that is found are right; `None` where it is not there.
fn read(cache: &mut DiskCache, node: &Node) -> Result<Option<bool>, Error> {
    let Some(entry) = cache.find(&node.key())? else { return Ok(None) };
    let (tokens, expected) = (node.tokens(), node.parts());
    assert_eq!(entry.parts.len(), expected.len());
    for ((part, bytes, place), (number, content)) in entry.parts.iter().zip(&expected) {
        assert_eq!((*part, *bytes), (*number, content.len() as u64));
        let label = Label {
            part: *part,
            bytes: *bytes,
            model: MODEL,
            hash: node.hash(),
            before: node.before(),
            position: node.position(),
            tokens: &tokens,
        };
        let mut right = None;
        cache.reads(&[(label, *place)])?.for_each(Order::AsRequested, |_, came| {
            right =
                Some(came.map(|bytes| assert!(bytes[..] == content[..], "wrong bytes under the right label")).is_ok());
        });
        if right != Some(true) {
            return Ok(Some(false));
        }
    }
    Ok(Some(true))
}

const QUOTA: u64 = LEAST_INDEX + (1 << 20) + (80 << 10);

fn open(disk: &Simulated) -> Result<DiskCache, Error> {
    DiskCache::open(Arc::new(disk.clone()), Settings { quota: Some(QUOTA), ..Settings::default() })
}

/// Everything that can happen to a cache whose disk does what it promises.
fn step(cache: &mut DiskCache, random: &mut Rng) -> Result<(), Error> {
    let node = Node::random(random);
    match random.u8(..10) {
        0..=5 => _ = store(cache, &node)?,
        6..=7 => assert_ne!(read(cache, &node)?, Some(false), "{node:?}"),
        8 => cache.touch(&node.path().map(|n| n.key()).collect::<Vec<_>>())?,
        _ => cache.remove(&[node.key()])?,
    }
    Ok(())
}

/// What the index names, by what it is; all of it is read.
fn all(cache: &mut DiskCache, told: &str) -> BTreeSet<Key> {
    assert_eq!(cache.inconsistencies().unwrap(), [] as [String; 0], "{told}");
    let keys: BTreeSet<Key> = cache.entries().unwrap().into_iter().map(|(key, _)| key).collect();
    let mut found = BTreeMap::new();
    let mut nodes: Vec<Vec<u32>> = (0..3).map(|t| vec![t]).collect();
    while let Some(node) = nodes.pop() {
        if node.len() < 5 {
            nodes.extend((0..3).map(|t| node.iter().copied().chain([t]).collect()));
        }
        let node = Node(node);
        if keys.contains(&node.key()) {
            assert_eq!(read(cache, &node).unwrap(), Some(true), "{told}: {node:?}");
            found.insert(node.key(), node);
        }
    }
    assert_eq!(found.len(), keys.len(), "{told}: entries that nobody stored");
    for node in found.values() {
        let listed = cache.following(MODEL, node.before()).unwrap();
        assert!(listed.contains(&(BLOCK, node.hash())), "{told}: {node:?}");
        assert!(listed.iter().all(|(_, hash)| keys.contains(&(MODEL, *hash))), "{told}: {node:?}");
    }
    keys
}

fn lose_power(seeds: std::ops::Range<u64>) -> u64 {
    let mut losses = 0;
    for seed in seeds {
        let mut random = Rng::with_seed(seed);
        let mut disk = Simulated::default();
        let mut ever_stored = false;
        for loss in 0..4 {
            let told = format!("seed {seed}, loss {loss}");
            // Sometimes while it is opened.
            let most = if random.u8(..8) == 0 { 20 } else { 400 };
            disk.lose_power_after(random.u64(..most));
            let mut before = None;
            if let Ok(mut cache) = open(&disk) {
                assert_eq!(cache.cleared(), None, "{told}");
                loop {
                    before = Some(cache.entries().unwrap().into_iter().map(|(k, _)| k).collect::<BTreeSet<_>>());
                    let (stored, evicted) = (cache.counts().stored, cache.counts().evicted);
                    ever_stored |= stored > 0;
                    if step(&mut cache, &mut random).is_err() {
                        ever_stored |= cache.counts().stored > 0;
                        // What was there may have been evicted for what was to come.
                        before =
                            before.filter(|_| cache.counts().evicted == evicted && cache.counts().stored == stored);
                        break;
                    }
                }
            }
            assert!(disk.peak() <= QUOTA, "{told}: {} bytes", disk.peak());
            disk = disk.after_power_loss(&mut random);
            let mut cache = open(&disk).unwrap_or_else(|e| panic!("{told}: {e:?}"));
            // A database that was only being made is made anew.
            assert!(cache.cleared().is_none() || !ever_stored, "{told}: {:?}", cache.cleared());
            let found = all(&mut cache, &told);
            // A step that was under way may have removed one, or stored a path.
            if let Some(before) = before {
                let lost = before.difference(&found).count();
                assert!(lost <= 1, "{told}: {lost} of {} are lost", before.len());
            }
            losses += 1;
            drop(cache);
        }
    }
    assert!(losses > 0);
    losses
}

#[test]
fn no_loss_of_power_makes_it_wrong() {
    let n = std::env::var("SLUICE_POWER_LOSSES").ok().and_then(|n| n.parse::<u64>().ok()).unwrap_or(100);
    let losses = lose_power(0..n / 4);
    println!("{losses} losses of power, none wrong");
}

#[test]
fn what_is_stored_is_there_at_the_next_start() {
    let disk = Simulated::default();
    let mut random = Rng::with_seed(5);
    let mut before = BTreeSet::new();
    for start in 0..5 {
        let mut cache = open(&disk).unwrap();
        let found = all(&mut cache, "start");
        assert!(start == 0 || found == before, "{} of {}", found.len(), before.len());
        for _ in 0..100 {
            step(&mut cache, &mut random).unwrap();
        }
        before = cache.entries().unwrap().into_iter().map(|(k, _)| k).collect();
        assert!(before.len() > 5, "{}", before.len());
    }
    assert!(disk.peak() <= QUOTA);
}

#[test]
fn the_ends_of_chains_that_nobody_used_go_first_and_those_being_read_stay() {
    let disk = Simulated::default();
    let mut cache = open(&disk).unwrap();
    let used = Node(vec![0, 0, 0, 0, 0]);
    store(&mut cache, &used).unwrap();
    let held = Node(vec![1, 1]);
    store(&mut cache, &held).unwrap();
    held.path().for_each(|n| cache.pin(&n.key()));
    let mut random = Rng::with_seed(1);
    for _ in 0..300 {
        let mut node = Node::random(&mut random);
        node.0[0] = 2;
        store(&mut cache, &node).unwrap();
        cache.touch(&used.path().map(|n| n.key()).collect::<Vec<_>>()).unwrap();
        for node in used.path().chain(held.path()) {
            assert_eq!(read(&mut cache, &node).unwrap(), Some(true), "{node:?}");
        }
        // Nobody is there without those before it.
        let keys: BTreeSet<Key> = cache.entries().unwrap().into_iter().map(|(k, _)| k).collect();
        for node in node.path().filter(|n| keys.contains(&n.key())) {
            assert!(node.path().all(|n| keys.contains(&n.key())), "{node:?}");
        }
    }
    assert!(cache.counts().evicted > 100, "{:?}", cache.counts());
}

#[test]
fn bytes_that_change_are_a_miss() {
    let mut misses = 0;
    for seed in 0..30 {
        let mut random = Rng::with_seed(seed);
        let disk = Simulated::default();
        let mut cache = open(&disk).unwrap();
        (0..40).for_each(|_| _ = store(&mut cache, &Node::random(&mut random)).unwrap());
        let slabs: Vec<String> =
            disk.list().unwrap().into_iter().map(|(name, _)| name).filter(|n| n.ends_with(".slab")).collect();
        drop(cache);
        for _ in 0..random.usize(1..40) {
            let slab = &slabs[random.usize(..slabs.len())];
            disk.damage(slab, |bytes| {
                let len = bytes.len();
                match random.u8(..8) {
                    0 => bytes.truncate(random.usize(..=len)),
                    // Slots change places.
                    1 => bytes.rotate_left(PAGE * random.usize(..len / PAGE + 1) % len.max(1)),
                    _ if len > 0 => bytes[random.usize(..len)] ^= 1 << random.u8(..8),
                    _ => {}
                }
            });
        }
        let mut cache = open(&disk).unwrap();
        assert_eq!(cache.inconsistencies().unwrap(), [] as [String; 0]);
        for _ in 0..200 {
            let node = Node::random(&mut random);
            if read(&mut cache, &node).unwrap() == Some(false) {
                misses += 1;
                cache.remove(&[node.key()]).unwrap();
                assert_eq!(read(&mut cache, &node).unwrap(), None);
            }
        }
        store(&mut cache, &Node::random(&mut random)).unwrap();
    }
    assert!(misses > 20, "{misses}");
}

#[test]
fn an_index_that_is_none_is_an_error_or_begins_anew_and_serves_nothing_wrong() {
    let (mut anew, mut failed) = (0, 0);
    for seed in 0..200 {
        let disk = Simulated::default();
        let mut random = Rng::with_seed(seed);
        let mut cache = open(&disk).unwrap();
        (0..10).for_each(|_| _ = store(&mut cache, &Node::random(&mut random)).unwrap());
        drop(cache);
        disk.damage(INDEX, |bytes| match seed % 4 {
            0 => bytes.truncate(random.usize(..bytes.len())),
            1 => bytes[..4096].fill(random.u8(..)),
            _ => (0..200).for_each(|_| {
                let at = random.usize(..bytes.len());
                bytes[at] ^= 1 << random.u8(..8);
            }),
        });
        match open(&disk) {
            Ok(mut cache) => {
                anew += usize::from(cache.cleared().is_some());
                // What is read is right or not there (`read` sees to it), until the index turns out to be broken.
                for _ in 0..20 {
                    let node = Node::random(&mut random);
                    if read(&mut cache, &node).is_err() || store(&mut cache, &node).is_err() {
                        failed += 1;
                        break;
                    }
                }
            }
            Err(_) => failed += 1,
        }
    }
    assert!(anew > 20, "{anew} anew, {failed} failed");
}

#[test]
fn on_a_full_disk_the_cache_stays_as_large_as_it_is_or_ends_and_is_right_later() {
    let mut stayed = 0;
    for stored in (1..40).step_by(2) {
        let disk = Simulated::default();
        let mut random = Rng::with_seed(3);
        let mut cache = open(&disk).unwrap();
        (0..stored).for_each(|_| _ = store(&mut cache, &Node::random(&mut random)).unwrap());
        disk.with_room(disk.list().unwrap().iter().map(|(_, len)| len).sum::<u64>() + random.u64(..200_000));
        for _ in 0..100 {
            // The index may find no room: then it is over, and says so each time.
            if store(&mut cache, &Node::random(&mut random)).is_err() {
                assert!(matches!(store(&mut cache, &Node::random(&mut random)), Err(Error::Disabled)));
                break;
            }
        }
        stayed += usize::from(cache.notes().iter().any(|n| n.contains("the disk is full")));
        drop(cache);
        disk.with_room(u64::MAX);
        let mut cache = open(&disk).unwrap();
        assert!(!all(&mut cache, "afterwards").is_empty());
    }
    assert!(stayed > 3, "{stayed}");
}

/// A cache with so many entries that its index has some weight, of parts that are small.
fn filled(disk: &Simulated, entries: u32) -> DiskCache {
    let quota = Some(64 << 20);
    let mut cache = DiskCache::open(Arc::new(disk.clone()), Settings { quota, ..Settings::default() }).unwrap();
    for i in (0..entries).step_by(100) {
        let hashes: Vec<BlockHash> = (i..i + 100).map(|n| Node(vec![n]).hash()).collect();
        let part: &[(u32, &[u8])] = &[(0, &[7; 100])];
        let new = |hash: &BlockHash| NewEntry { hash: *hash, before: [0; 16], position: 0, tokens: &[1], parts: part };
        let new: Vec<NewEntry> = hashes.iter().map(new).collect();
        assert_eq!(cache.store(MODEL, &new).unwrap().new, 100);
    }
    cache
}

fn read_by_opening(disk: &Simulated) -> u64 {
    let before = disk.read().1;
    let quota = Some(64 << 20);
    let cache = DiskCache::open(Arc::new(disk.clone()), Settings { quota, ..Settings::default() }).unwrap();
    assert!(cache.cleared().is_none() && !cache.is_empty());
    let read = disk.read().1 - before;
    // As if it was killed.
    std::mem::forget(cache);
    read
}

#[test]
fn after_a_clean_end_nothing_is_looked_through() {
    let disk = Simulated::default();
    drop(filled(&disk, 200));
    let few = read_by_opening(&disk);
    let disk = Simulated::default();
    drop(filled(&disk, 3000));
    let many = read_by_opening(&disk);
    // What grows is the sums of the index's pages, and the free ones of its regions.
    let size = disk.list().unwrap().into_iter().find(|(name, _)| name == INDEX).unwrap().1;
    assert!(many < few + size / 100, "{few} bytes, {many} bytes of an index of {size}");
    // The same one, whose end was none.
    let after = read_by_opening(&disk);
    assert!(after > 5 * many, "{many} and {after} of {size}");
}

#[test]
fn an_index_that_changed_after_a_clean_end_begins_anew_and_is_not_followed() {
    let mut anew = 0;
    for seed in 0..60 {
        let disk = Simulated::default();
        let mut random = Rng::with_seed(seed);
        drop(filled(&disk, 300));
        disk.damage(INDEX, |bytes| {
            (0..if seed % 2 == 0 { 1 } else { 2000 }).for_each(|_| {
                let at = random.usize(..bytes.len());
                bytes[at] ^= 1 << random.u8(..8);
            });
        });
        for _ in 0..3 {
            let quota = Some(64 << 20);
            let mut cache = DiskCache::open(Arc::new(disk.clone()), Settings { quota, ..Settings::default() }).unwrap();
            anew += usize::from(cache.cleared().is_some());
            if cache.entries().is_ok_and(|entries| entries.len() as u64 == cache.len())
                && (0..300).all(|n| cache.find(&Node(vec![n]).key()).is_ok())
            {
                break;
            }
        }
    }
    assert!(anew >= 30, "{anew}");
}

#[test]
fn what_was_used_is_known_after_a_clean_end() {
    let disk = Simulated::default();
    let mut cache = open(&disk).unwrap();
    let node = Node(vec![0, 1, 2]);
    store(&mut cache, &node).unwrap();
    cache.note_model(MODEL, "a model", "/models/a").unwrap();
    let path: Vec<Key> = node.path().map(|n| n.key()).collect();
    cache.touch(&path).unwrap();
    cache.touch(&path[..2]).unwrap();
    drop(cache);
    let mut cache = open(&disk).unwrap();
    let hits: Vec<u32> = path.iter().map(|key| cache.find(key).unwrap().unwrap().hits).collect();
    assert_eq!(hits, [2, 2, 1]);
    let stat = cache.stat().unwrap();
    let model = &stat.models[&MODEL];
    assert_eq!((model.entries, model.tokens, model.model.hits), (3, 12, 2));
    assert_eq!((model.model.name.as_str(), model.model.path.as_str()), ("a model", "/models/a"));
    assert!(model.model.used > 1_600_000_000 && stat.bytes <= stat.quota);
}

#[test]
fn a_disk_that_cannot_read_gives_misses_or_ends_the_cache_and_nothing_is_lost_for_good() {
    for broken in [".slab", INDEX] {
        let disk = Simulated::default();
        let mut cache = open(&disk).unwrap();
        let nodes: Vec<Node> = (0..3).map(|n| Node(vec![n, 0])).collect();
        nodes.iter().for_each(|node| _ = store(&mut cache, node).unwrap());
        disk.fail_reads(Some(broken));
        let first = read(&mut cache, &nodes[0]);
        if broken == ".slab" {
            assert_eq!(first.unwrap(), Some(false));
            assert!(cache.counts().wrong > 0);
            assert!(cache.notes().iter().all(|n| n.contains("cannot be read")));
            // It is not asked for again.
            assert_eq!(read(&mut cache, &nodes[0]).unwrap(), None);
        } else {
            // What the database has in memory is found all the same; once something had to be read, it is over.
            let errors = (0..200).filter(|n| store(&mut cache, &Node(vec![n % 3, n / 3 % 3, n / 9 % 3, 1])).is_err());
            assert!(errors.count() > 0 || first.is_ok());
        }
        drop(cache);
        disk.fail_reads(None);
        let mut cache = open(&disk).unwrap();
        assert_eq!(cache.cleared(), None);
        assert!(all(&mut cache, broken).contains(&nodes[2].key()));
    }
}
