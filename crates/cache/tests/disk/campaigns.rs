//! The cache for long: processes that are killed, bytes that change at random, and many requests for few prefixes. Short here; the variables of the environment make
//! them long.

use std::collections::{BTreeMap, HashMap};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fastrand::Rng;
use sluice_cache::BlockHash;
use sluice_cache::disk::{
    DiskCache, Error, FileKey, Key, LEAST_INDEX, Label, NewEntry, Order, PAGE, Place, STATE, Settings, Storage, Stored,
    slot_bytes,
};
use tempfile::TempDir;

use crate::simulated::Simulated;

const MODEL: u64 = 9;

fn times(variable: &str, few: u64) -> u64 {
    std::env::var(variable).ok().and_then(|n| n.parse().ok()).unwrap_or(few)
}

/// A prefix of some blocks, all of whose contents follow from its number.
#[derive(Clone, Copy)]
struct Prefix {
    number: u64,
    blocks: u32,
    bytes: usize,
}

impl Prefix {
    fn hash(&self, block: u32) -> BlockHash {
        blake3::hash(format!("{} {block}", self.number).as_bytes()).as_bytes()[..16].try_into().unwrap()
    }

    fn path(&self) -> Vec<Key> {
        (0..self.blocks).map(|b| (MODEL, self.hash(b))).collect()
    }

    fn tokens(&self, block: u32) -> Vec<u32> {
        (0..8).map(|t| self.number as u32 ^ (block << 8) ^ t).collect()
    }

    /// Every third block has a state.
    fn parts(&self, block: u32) -> Vec<(u32, Vec<u8>)> {
        let mut random = Rng::with_seed(self.number << 20 | u64::from(block));
        let mut bytes = |n: usize| {
            let mut bytes = vec![0; n];
            random.fill(&mut bytes);
            bytes
        };
        let mut parts = vec![(0, bytes(self.bytes))];
        if block % 3 == 2 {
            parts.push((STATE, bytes(2 * self.bytes)));
        }
        parts
    }

    fn label<'a>(&self, block: u32, part: u32, bytes: u64, tokens: &'a [u32]) -> Label<'a> {
        let before = block.checked_sub(1).map_or([0; 16], |b| self.hash(b));
        Label { part, bytes, model: MODEL, hash: self.hash(block), before, position: 8 * block, tokens }
    }

    fn store(&self, cache: &mut DiskCache) -> Result<Stored, Error> {
        let tokens: Vec<Vec<u32>> = (0..self.blocks).map(|b| self.tokens(b)).collect();
        let parts: Vec<Vec<(u32, Vec<u8>)>> = (0..self.blocks).map(|b| self.parts(b)).collect();
        let borrowed: Vec<Vec<(u32, &[u8])>> =
            parts.iter().map(|all| all.iter().map(|(n, bytes)| (*n, bytes.as_slice())).collect()).collect();
        let new: Vec<NewEntry> = (0..self.blocks)
            .map(|b| {
                let Label { hash, before, position, tokens, .. } = self.label(b, 0, 0, &tokens[b as usize]);
                NewEntry { hash, before, position, tokens, parts: &borrowed[b as usize] }
            })
            .collect();
        cache.store(MODEL, &new)
    }

    /// How many blocks, from the first on, are there, and how many of them are right. Wrong bytes under a right label fail the test.
    fn read(&self, cache: &mut DiskCache) -> Result<(u32, u32), Error> {
        let tokens: Vec<Vec<u32>> = (0..self.blocks).map(|b| self.tokens(b)).collect();
        let (mut wanted, mut expected) = (Vec::new(), Vec::new());
        let mut there = 0;
        for block in 0..self.blocks {
            let Some(entry) = cache.find(&(MODEL, self.hash(block)))? else { break };
            there += 1;
            for (part, bytes, place) in &entry.parts {
                wanted.push((self.label(block, *part, *bytes, &tokens[block as usize]), *place));
                expected.push((block, *part));
            }
        }
        let mut right = there;
        let parts: Vec<Vec<(u32, Vec<u8>)>> = (0..there).map(|b| self.parts(b)).collect();
        cache.reads(&wanted)?.for_each(Order::AsRead, |i, came| {
            let (block, part) = expected[i];
            match came {
                Ok(bytes) => {
                    let content = parts[block as usize].iter().find(|(n, _)| *n == part);
                    assert!(
                        content.is_some_and(|(_, content)| content[..] == bytes[..]),
                        "wrong bytes under a right label"
                    );
                }
                Err(_) => right = right.min(block),
            }
        });
        Ok((there, right))
    }
}

/// Stores and reads at random until it is killed, and says when each step is over.
#[test]
#[ignore = "run by the test below, which kills it"]
fn stores_and_reads_until_it_is_killed() {
    let folder = std::env::var_os("SLUICE_FOLDER").unwrap();
    let mut random = Rng::with_seed(times("SLUICE_SEED", 0));
    let settings = Settings { quota: Some(KILLED_QUOTA), ..Settings::default() };
    println!("opening");
    let mut cache = DiskCache::open_folder(Path::new(&folder), settings.clone()).unwrap();
    assert_eq!(cache.cleared(), None);
    loop {
        let prefix = killed_prefix(random.u64(..40));
        match random.u8(..20) {
            0..=9 => {
                let stored = prefix.store(&mut cache).unwrap();
                println!("stored {} {}", prefix.number, stored.present);
            }
            10..=15 => {
                let (there, right) = prefix.read(&mut cache).unwrap();
                assert_eq!(there, right, "a block is wrong");
            }
            16 => cache.touch(&prefix.path()).unwrap(),
            17 => cache.remove(&prefix.path()).unwrap(),
            18 => _ = cache.shrink().unwrap(),
            _ => {
                drop(cache);
                cache = DiskCache::open_folder(Path::new(&folder), settings.clone()).unwrap();
                assert_eq!(cache.cleared(), None);
            }
        }
    }
}

const KILLED_QUOTA: u64 = 5 << 20;

fn killed_prefix(number: u64) -> Prefix {
    Prefix { number, blocks: 2 + number as u32 % 5, bytes: 5000 + 3000 * (number as usize % 3) }
}

fn bytes_in(folder: &Path) -> u64 {
    // A file may go while it is looked at.
    let files = std::fs::read_dir(folder).into_iter().flatten().flatten();
    files.filter_map(|e| e.metadata().ok()).map(|m| m.len()).sum()
}

#[test]
fn a_process_that_is_killed_at_any_instant_leaves_a_cache_that_opens_and_is_right() {
    let kills = times("SLUICE_KILLS", 8);
    let dir = TempDir::new().unwrap();
    let folder = dir.path().join("cache");
    let mut random = Rng::with_seed(times("SLUICE_SEED", 1));
    let (mut found, mut most) = (0, 0);
    for kill in 0..kills {
        // 1. A process under load, until it is killed
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "campaigns::stores_and_reads_until_it_is_killed", "--ignored", "--nocapture"]);
        child.env("SLUICE_FOLDER", &folder).env("SLUICE_SEED", random.u32(..).to_string());
        let mut child = child.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut said = BufReader::new(child.stdout.take().unwrap()).lines();
        // Not before it is about to open: sometimes at once, mostly some steps later.
        let _ = said.by_ref().find(|line| line.as_ref().is_ok_and(|line| line.ends_with("opening")));
        let steps = if random.u8(..5) == 0 { 0 } else { random.usize(..40) };
        for _ in said.by_ref().take(steps) {
            most = most.max(bytes_in(&folder));
        }
        let until = Instant::now() + Duration::from_micros(random.u64(..30_000));
        while Instant::now() < until {
            most = most.max(bytes_in(&folder));
        }
        child.kill().unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), None, "kill {kill}: {}", String::from_utf8_lossy(&output.stderr));
        most = most.max(bytes_in(&folder));
        // 2. What it has left
        let quota = Some(KILLED_QUOTA);
        let mut cache = DiskCache::open_folder(&folder, Settings { quota, ..Settings::default() }).unwrap();
        assert!(cache.cleared().is_none() || found == 0, "kill {kill}: {:?}", cache.cleared());
        assert_eq!(cache.inconsistencies().unwrap(), [] as [String; 0], "kill {kill}");
        let entries = cache.len();
        for number in 0..40 {
            let (there, right) = killed_prefix(number).read(&mut cache).unwrap();
            assert_eq!(there, right, "kill {kill}: a block of {number} is wrong");
            found += u64::from(right);
        }
        let verified = cache.verify(|_, _| {}).unwrap();
        assert_eq!((verified.wrong, verified.unreachable), (0, 0), "kill {kill}");
        assert_eq!((cache.len(), cache.counts().wrong), (entries, 0), "kill {kill}");
        assert_eq!(cache.notes(), [] as [String; 0]);
    }
    assert!(most <= KILLED_QUOTA, "{most} bytes");
    assert!(found > 0);
    println!("{kills} kills, {found} blocks found and right, at most {most} of {KILLED_QUOTA} bytes");
}

/// A random change of a file as disks and people make them; older contents may come back.
fn damage(bytes: &mut Vec<u8>, old: &[u8], random: &mut Rng) {
    let len = bytes.len();
    if len == 0 {
        return;
    }
    match random.u8(..10) {
        0 => bytes.truncate(random.usize(..len)),
        1 => bytes.resize(len + random.usize(1..10_000), 0),
        // Slots, or pages, change places.
        2 => bytes.rotate_left(PAGE * random.usize(..len / PAGE + 1) % len),
        3 => {
            let page = PAGE.min(len);
            let pages = len / page;
            let (a, b) = (random.usize(..pages) * page, random.usize(..pages) * page);
            let first = bytes[a..a + page].to_vec();
            bytes.copy_within(b..b + page, a);
            bytes[b..b + page].copy_from_slice(&first);
        }
        // What lay there once.
        4 => *bytes = old.to_vec(),
        5 => {
            let at = random.usize(..len) / PAGE * PAGE;
            let end = (at + PAGE).min(len).min(old.len()).max(at);
            if end <= old.len() {
                bytes[at..end].copy_from_slice(&old[at..end]);
            }
        }
        6 => {
            let at = random.usize(..len);
            let end = (at + random.usize(1..20_000)).min(len);
            bytes[at..end].fill(random.u8(..));
        }
        _ => (0..1 << random.u8(..8)).for_each(|_| {
            let at = random.usize(..len);
            bytes[at] ^= 1 << random.u8(..8);
        }),
    }
}

#[test]
fn no_random_corruption_gives_wrong_bytes_or_ends_the_process() {
    let corruptions = times("SLUICE_CORRUPTIONS", 150);
    let from = times("SLUICE_SEED", 0);
    let prefix = |number: u64| Prefix { number, blocks: 3, bytes: 3000 + 4000 * (number as usize % 2) };
    let (mut cleared, mut missed, mut refused) = (0, 0, 0);
    for seed in from..from + corruptions {
        let mut random = Rng::with_seed(seed);
        let key = if seed % 3 == 0 { FileKey::parse(&[7; 32]) } else { None };
        let settings = Settings { quota: Some(6 << 20), key, ..Settings::default() };
        // 1. A cache, and what lay in its files half way
        let disk = Simulated::default();
        let open = |disk: &Simulated| DiskCache::open(Arc::new(disk.clone()), settings.clone());
        let mut cache = open(&disk).unwrap();
        (0..4).for_each(|n| _ = prefix(n).store(&mut cache).unwrap());
        drop(cache);
        let mut old: HashMap<String, Vec<u8>> = HashMap::new();
        for (name, _) in disk.list().unwrap() {
            disk.damage(&name, |bytes| _ = old.insert(name.clone(), bytes.clone()));
        }
        let mut cache = open(&disk).unwrap();
        cache.remove(&prefix(1).path()).unwrap();
        (4..8).for_each(|n| _ = prefix(n).store(&mut cache).unwrap());
        // Sometimes its end was none.
        if random.u8(..4) == 0 {
            std::mem::forget(cache)
        } else {
            drop(cache)
        }
        // 2. Changes behind its back
        for _ in 0..random.usize(1..4) {
            let files: Vec<String> = disk.list().unwrap().into_iter().map(|(name, _)| name).collect();
            let slabs = random.bool();
            let of = files.iter().filter(|n| n.ends_with(".slab") == slabs).collect::<Vec<_>>();
            let Some(name) = random.choice(&of) else { continue };
            let before = old.get(*name).cloned().unwrap_or_default();
            disk.damage(name, |bytes| damage(bytes, &before, &mut random));
        }
        // 3. What it gives is right (`read` sees to it), or nothing; also once more after that
        let mut all = 0;
        for _ in 0..3 {
            let mut cache = match open(&disk) {
                Ok(cache) => cache,
                Err(e) => panic!("seed {seed}: {e:?}"),
            };
            cleared += u64::from(cache.cleared().is_some());
            let mut use_it = || -> Result<(), Error> {
                for n in 0..8 {
                    all += prefix(n).read(&mut cache)?.1;
                }
                let _ = prefix(9).store(&mut cache)?;
                let (there, right) = prefix(9).read(&mut cache)?;
                assert_eq!(there, right, "seed {seed}: what was stored just now");
                cache.verify(|_, _| {})?;
                while cache.shrink()? {}
                Ok(())
            };
            // An index that is found wrong in use is over, and looked through at the next start.
            refused += u64::from(use_it().is_err());
        }
        missed += u64::from(all < 3 * 7 * 3);
        // 4. In the end it works again
        let mut cache = open(&disk).unwrap_or_else(|e| panic!("seed {seed}: {e:?}"));
        let stored = prefix(20).store(&mut cache).unwrap_or_else(|e| panic!("seed {seed}: {e:?}"));
        assert_eq!((stored.present, prefix(20).read(&mut cache).unwrap()), (3, (3, 3)), "seed {seed}");
    }
    println!("{corruptions} corruptions: {missed} with misses, {cleared} cleared, {refused} ended in use, none wrong");
    assert!(missed > corruptions / 4, "{missed}");
}

/// What the best of all caches that evict the least recently used would hit, of so many blocks.
fn ideal(requests: &[usize], prefixes: &[Prefix], room: u64) -> u64 {
    let (mut used, mut inside, mut hits): (BTreeMap<usize, usize>, HashMap<usize, usize>, u64) = Default::default();
    let mut bytes = 0;
    let weight = |p: usize| prefixes[p].blocks as u64;
    for (now, &p) in requests.iter().enumerate() {
        match inside.insert(p, now) {
            Some(before) => {
                hits += weight(p);
                used.remove(&before);
            }
            None => bytes += weight(p),
        }
        used.insert(now, p);
        while bytes > room {
            let (_, oldest) = used.pop_first().unwrap();
            inside.remove(&oldest);
            bytes -= weight(oldest);
        }
    }
    hits
}

#[test]
fn with_a_quota_for_twenty_of_fifty_prefixes_hits_are_those_of_the_least_recently_used() {
    let count = times("SLUICE_REQUESTS", 600) as usize;
    let mut random = Rng::with_seed(4);
    let prefixes: Vec<Prefix> = (0..50).map(|number| Prefix { number, blocks: 8, bytes: 20_000 }).collect();
    let slot = slot_bytes(20_000);
    let states = slot_bytes(40_000);
    // Two of eight blocks have a state.
    let twenty = 20 * (8 * slot + 2 * states);
    let disk = Simulated::default();
    let quota = LEAST_INDEX + (80 << 10) + twenty;
    let settings = Settings { quota: Some(quota), ..Settings::default() };
    let mut cache = DiskCache::open(Arc::new(disk.clone()), settings).unwrap();
    // Some are asked for more often than others, as people do.
    let requests: Vec<usize> = (0..count).map(|_| (random.f64() * random.f64() * 50.0) as usize).collect();
    let (mut hits, mut written) = (0, 0);
    for &p in &requests {
        let prefix = prefixes[p];
        let (there, right) = prefix.read(&mut cache).unwrap();
        assert_eq!(there, right);
        hits += u64::from(there);
        cache.touch(&prefix.path()[..there as usize]).unwrap();
        if there < prefix.blocks {
            written += prefix.store(&mut cache).unwrap().bytes;
        }
    }
    assert!(disk.peak() <= quota, "{} of {quota}", disk.peak());
    let best = ideal(&requests, &prefixes, 20 * 8);
    let all = 8 * count as u64;
    println!(
        "{count} requests: {hits} of {all} blocks hit, {best} of an ideal cache; at most {} of {quota} bytes; {written} written, {} moved",
        disk.peak(),
        cache.counts().moved
    );
    assert!(hits * 10 >= best * 9, "{hits} of {best}");
    assert_eq!(cache.inconsistencies().unwrap(), [] as [String; 0]);
}

/// What reading gives from the disk of the folder that TMPDIR names, plain and encrypted, one after the other.
#[test]
#[ignore = "measures"]
fn how_fast_slots_are_read() {
    for round in 0..6 {
        let dir = TempDir::new().unwrap();
        let key = if round % 2 == 1 { FileKey::parse(&[1; 32]) } else { None };
        let kind = if key.is_some() { "encrypted" } else { "plain" };
        let settings = Settings { quota: Some(2 << 30), key, ..Settings::default() };
        let mut cache = DiskCache::open_folder(dir.path(), settings).unwrap();
        let part = vec![5; 1_835_008];
        let hash = |i: u32| blake3::hash(&i.to_le_bytes()).as_bytes()[..16].try_into().unwrap();
        for i in 0..512 {
            let parts: &[(u32, &[u8])] = &[(0, &part)];
            let new = NewEntry { hash: hash(i), before: [0; 16], position: 0, tokens: &[1], parts };
            assert_eq!(cache.store(MODEL, &[new]).unwrap().new, 1);
        }
        let wanted: Vec<(Label, Place)> = (0..512)
            .map(|i| {
                let (part, bytes, place) = cache.find(&(MODEL, hash(i))).unwrap().unwrap().parts[0];
                let hash = hash(i);
                (Label { part, bytes, model: MODEL, hash, before: [0; 16], position: 0, tokens: &[1] }, place)
            })
            .collect();
        let mut into = vec![0; part.len()];
        for _ in 0..2 {
            let begun = Instant::now();
            let reads = cache.reads(&wanted).unwrap();
            reads.for_each(Order::AsRequested, |_, bytes| into.copy_from_slice(&bytes.unwrap()));
            let bytes = 512.0 * part.len() as f64;
            println!("{kind}: {:.2} GB/s", bytes / begun.elapsed().as_secs_f64() / 1e9);
        }
    }
}
