//! From a name to its files: what lies in the cache, and what has to be fetched.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use crate::api::{self, FileFacts, Listing};
use crate::arrival::Arrival;
use crate::cache::{MAX_SMALL, RepoCache};
use crate::client::{Client, Failure};
use crate::error::{Error, Naming, Result};
use crate::lock::Lock;
use crate::name::{Choice, ModelName};
use crate::partial::{self, Partial};
use crate::selection::{self, Selection};
use crate::settings::Settings;
use crate::transfer::{self, Job};
use crate::watch::{Event, Planned, Watch};

/// Files up to this size are fetched whole, into memory.
const SMALL: u64 = 1 << 20;
const CONFIG: &str = "config.json";
const POLL: Duration = Duration::from_millis(100);

/// A model in the cache.
#[derive(Clone, Debug)]
pub struct Model {
    /// Its name; a quantisation is named.
    pub name: String,
    /// The commit.
    pub commit: String,
    /// What to open: a snapshot's folder, or a GGUF file in it.
    pub path: PathBuf,
    /// Its files, named as in the repository, and their bytes.
    pub files: Vec<(String, u64)>,
    /// Bytes that were fetched for it just now.
    pub fetched: u64,
}

impl Model {
    /// Bytes of its files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|(_, bytes)| bytes).sum()
    }

    pub(crate) fn of(cache: &RepoCache, name: &ModelName, commit: &str, selection: &Selection) -> Model {
        let snapshot = cache.snapshot(commit);
        let size = |file: &String| fs::metadata(snapshot.join(file)).map_or(0, |m| m.len());
        let files = selection.small.iter().chain(&selection.weights).map(|file| (file.clone(), size(file))).collect();
        let label = selection.label.as_ref().map(|label| format!(":{label}")).unwrap_or_default();
        Model {
            name: format!("{}{label}", name.repo),
            commit: commit.to_owned(),
            path: selection.entry.as_ref().map_or_else(|| snapshot.clone(), |entry| snapshot.join(entry)),
            files,
            fetched: 0,
        }
    }
}

/// How much of a model to fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// All that it takes to run it.
    Whole,
    /// Config and tokenizer, where they are files of their own: enough for an estimate.
    Config,
}

/// The model in the cache, if so much of it is there. Asks nobody.
pub fn find(settings: &Settings, name: &ModelName, extent: Extent) -> Option<Model> {
    let cache = RepoCache::new(&settings.cache, &name.repo);
    let commit = cache.commit_of(name.revision())?;
    let files = cache.files(&commit);
    let files: Vec<&str> = files.iter().map(String::as_str).collect();
    let whole = selection::select(&files, &name.choice, &mut |file| cache.read(&commit, file)).ok();
    let config = || {
        let has_config = extent == Extent::Config && name.choice == Choice::Usual && files.contains(&"config.json");
        let small = files.iter().filter(|file| selection::is_small(file)).map(|file| (*file).to_owned()).collect();
        has_config.then(|| Selection { small, weights: Vec::new(), entry: None, label: None })
    };
    Some(Model::of(&cache, name, &commit, &whole.or_else(config)?))
}

/// The model, with what was missing fetched.
///
/// # Errors
/// Whatever keeps it from being whole. If the hub cannot be asked and the model is in the cache, that is a note and no error.
pub fn pull(client: &Arc<Client>, name: &ModelName, extent: Extent, watch: &dyn Watch) -> Result<Model> {
    pull_in_use(client, name, extent, watch, None)
}

/// Hears of a model that can be opened while it arrives.
pub type Begun<'a> = &'a mut dyn FnMut(Arrival);

/// [`pull`], where `begun` gets the model as soon as it can be opened: its small files are there by then. It hears of none if nothing large is missing, or if
/// something keeps this process from reading what arrives, which is a note. Wrong bytes are then an error at once.
///
/// # Errors
/// Those of [`pull`].
pub fn pull_in_use(
    client: &Arc<Client>,
    name: &ModelName,
    extent: Extent,
    watch: &dyn Watch,
    begun: Option<Begun>,
) -> Result<Model> {
    let settings = client.settings();
    if settings.offline {
        let absent = || Error::Offline { name: name.to_string(), cache: settings.cache.clone() };
        return find(settings, name, extent).ok_or_else(absent);
    }
    let pull = Pull { client, name, cache: RepoCache::new(&settings.cache, &name.repo), watch };
    // For what is here, an answer that may never come is waited for once.
    let here = find(settings, name, extent);
    let answer = match here {
        None => pull.trying(|| api::list(client, name)),
        Some(_) => api::list(client, name).map_err(|(Failure::Final(e) | Failure::Again(e, _))| e),
    };
    let listing = match (here, answer) {
        (_, Ok(listing)) => listing,
        (Some(model), Err(e)) if e.is_absence() => {
            watch.event(Event::Note(format!("{}; taking what is in the cache", e.brief())));
            return Ok(model);
        }
        (_, Err(e)) => return Err(e),
    };
    pull.fetch(&listing, extent, begun)
}

struct Pull<'a> {
    client: &'a Arc<Client>,
    name: &'a ModelName,
    cache: RepoCache,
    watch: &'a dyn Watch,
}

/// A file that the model needs.
struct Needed {
    file: String,
    facts: FileFacts,
}

impl Pull<'_> {
    fn trying<T>(&self, attempt: impl FnMut() -> Result<T, Failure>) -> Result<T> {
        let waits = |e: &Error, pause: Duration| {
            if pause >= Duration::from_secs(2) {
                self.watch.event(Event::Note(format!("{}: next try in {} s", e.brief(), pause.as_secs())));
            }
        };
        self.client.trying(&|| self.watch.is_stopped(), &waits, attempt)
    }

    fn facts(&self, listing: &Listing, file: &str) -> Result<FileFacts> {
        match listing.files.get(file) {
            Some(Some(facts)) => Ok(facts.clone()),
            _ => self.trying(|| api::facts(self.client, &self.name.repo, &listing.commit, file)),
        }
    }

    /// What is in a small file, from the cache if it is there.
    fn small(&self, listing: &Listing, file: &str, facts: &FileFacts) -> Result<Vec<u8>> {
        if self.cache.has(&listing.commit, file, facts.digest.hex(), facts.size) {
            return self.cache.read(&listing.commit, file);
        }
        let blob = self.cache.blob(facts.digest.hex());
        if !self.cache.has_blob(facts.digest.hex(), facts.size) {
            if facts.size > MAX_SMALL {
                return Err(Error::NoChoice(format!("{file}: {} bytes are too many for such a file", facts.size)));
            }
            let bytes = self.trying(|| api::small_file(self.client, &self.name.repo, &listing.commit, file, facts))?;
            self.cache.write(&blob, &bytes)?;
        }
        self.cache.link(&listing.commit, file, facts.digest.hex())?;
        self.cache.read(&listing.commit, file)
    }

    fn fetch(&self, listing: &Listing, extent: Extent, begun: Option<Begun>) -> Result<Model> {
        // 1. Which files, and what they must be
        let names: Vec<&str> = listing.files.keys().map(String::as_str).collect();
        let mut text = |file: &str| self.small(listing, file, &self.facts(listing, file)?);
        let of_repo = |e: Error| match e {
            Error::NoChoice(what) => Error::NoChoice(format!("{}: {what}", self.name.repo)),
            other => other,
        };
        let mut selection = selection::select(&names, &self.name.choice, &mut text).map_err(of_repo)?;
        if extent == Extent::Config && selection.entry.is_none() {
            selection.weights.clear();
        }
        let wanted = selection.small.iter().chain(&selection.weights);
        let needed: Vec<Needed> = wanted
            .map(|file| Ok(Needed { file: file.clone(), facts: self.facts(listing, file)? }))
            .collect::<Result<_>>()?;
        let all: u64 = needed.iter().map(|needed| needed.facts.size).sum();

        // 2. What is there already
        let mut missing = Vec::new();
        for one in &needed {
            let hex = one.facts.digest.hex();
            if self.cache.has(&listing.commit, &one.file, hex, one.facts.size) {
                continue;
            }
            if self.cache.has_blob(hex, one.facts.size) {
                partial::discard(&self.cache.blob(hex));
                self.cache.link(&listing.commit, &one.file, hex)?;
            } else {
                missing.push(one);
            }
        }
        let model = || Model::of(&self.cache, self.name, &listing.commit, &selection);
        let whole = |fetched: u64| {
            // An incomplete snapshot must not hide a whole one that the reference still names.
            if extent == Extent::Whole || self.cache.commit_of(self.name.revision()).is_none() {
                self.cache.set_reference(self.name.revision(), &listing.commit)?;
            }
            Ok(Model { fetched, ..model() })
        };
        if missing.is_empty() {
            return whole(0);
        }

        // 3. Room for what is not
        let (small, large): (Vec<&Needed>, Vec<&Needed>) = missing.into_iter().partition(|one| one.facts.size <= SMALL);
        let blobs = self.cache.blob("");
        fs::create_dir_all(&blobs).naming(&blobs)?;
        let mut jobs = self.jobs(listing, &large)?;
        // Whoever finds all weights finds the tokenizer too; shards are used in the order of their names.
        jobs.sort_by_key(|job| (selection.weights.contains(&job.file), job.file.clone()));
        let label = selection.label.as_ref().map(|label| format!(":{label}")).unwrap_or_default();
        let missing_bytes = sizes(&small) + jobs.iter().map(|job| job.partial.size()).sum::<u64>();
        let kept: u64 = jobs.iter().map(|job| job.partial.written()).sum();
        let room = Room::new(
            &self.client.settings().cache,
            sizes(&small) + jobs.iter().map(|job| job.partial.room_needed()).sum::<u64>(),
        )?;
        // The config before all else: it says what to expect of the model.
        let config = needed.iter().find(|one| one.file == CONFIG && one.facts.size <= SMALL && room.is_enough());
        if let Some(one) = config {
            self.small(listing, CONFIG, &one.facts)?;
        }
        let config = config.map(|_| self.cache.snapshot(&listing.commit).join(CONFIG));
        self.watch.event(Event::Planned(Planned {
            name: &format!("{}{label}", self.name.repo),
            files: small.len() + jobs.len(),
            bytes: missing_bytes,
            kept,
            all,
            free: room.free,
            cache: &self.client.settings().cache,
            config: config.as_deref(),
        }));
        room.reserve(&jobs)?;

        // 4. The small files first: whoever finds all weights finds these too
        for one in &small {
            if self.watch.is_stopped() {
                return Err(Error::Stopped);
            }
            self.small(listing, &one.file, &one.facts)?;
        }

        // 5. The large ones
        let files: BTreeMap<String, String> =
            large.iter().map(|one| (one.facts.digest.hex().to_owned(), one.file.clone())).collect();
        let mut finished = |job: &Job| self.cache.link(&listing.commit, &files[job.digest.hex()], job.digest.hex());
        if !jobs.is_empty() {
            let arrival = begun.map(|begun| (begun, self.arrival(listing, &selection, &needed, &jobs)));
            let in_use = match arrival {
                Some((begun, Ok(arrival))) => {
                    begun(arrival);
                    true
                }
                Some((_, Err(e))) => {
                    self.watch.event(Event::Note(format!("it is fetched whole before it is used: {e}")));
                    false
                }
                None => false,
            };
            transfer::fetch(
                Arc::clone(self.client),
                jobs,
                all - missing_bytes + sizes(&small),
                in_use,
                self.watch,
                &mut finished,
            )?;
        }
        // Files with the same bytes are one blob, but several links.
        for one in &large {
            if !self.cache.has(&listing.commit, &one.file, one.facts.digest.hex(), one.facts.size) {
                self.cache.link(&listing.commit, &one.file, one.facts.digest.hex())?;
            }
        }
        whole(missing_bytes - kept)
    }

    /// The model as it arrives.
    fn arrival(&self, listing: &Listing, selection: &Selection, needed: &[Needed], jobs: &[Job]) -> Result<Arrival> {
        let arriving: BTreeMap<&str, &Arc<Partial>> = jobs.iter().map(|job| (job.digest.hex(), &job.partial)).collect();
        let files = needed.iter().map(|one| {
            let arriving = arriving.get(one.facts.digest.hex()).copied();
            (&*one.file, selection.weights.contains(&one.file), arriving)
        });
        Arrival::new(&self.cache, &listing.commit, files, selection.entry.as_deref())
    }

    /// Takes the locks of blobs, in one order for all processes, and opens what is there of them.
    fn jobs(&self, listing: &Listing, large: &[&Needed]) -> Result<Vec<Job>> {
        let mut by_blob: BTreeMap<&str, &Needed> = BTreeMap::new();
        for one in large {
            by_blob.entry(one.facts.digest.hex()).or_insert(one);
        }
        let mut jobs = Vec::new();
        for (hex, one) in by_blob {
            let lock = self.lock(one)?;
            // Another process may have fetched it meanwhile.
            if self.cache.has_blob(hex, one.facts.size) {
                self.cache.link(&listing.commit, &one.file, hex)?;
                continue;
            }
            let blob = self.cache.blob(hex);
            jobs.push(Job {
                file: one.file.clone(),
                repo: self.name.repo.to_string(),
                url: api::file_url(self.client, &self.name.repo, &listing.commit, &one.file),
                digest: one.facts.digest.clone(),
                partial: Arc::new(Partial::open(&blob, one.facts.size)?),
                blob,
                lock: Mutex::new(Some(lock)),
                source: Mutex::new(None),
                whole: Mutex::new(()),
                has_no_ranges: AtomicBool::new(false),
            });
        }
        Ok(jobs)
    }

    fn lock(&self, one: &Needed) -> Result<Lock> {
        let hex = one.facts.digest.hex();
        let mut is_told = false;
        loop {
            if let Some(lock) = Lock::take(&self.cache.lock(hex))? {
                return Ok(lock);
            }
            if !is_told {
                self.watch.event(Event::Note(format!("{}: another process is fetching it; waiting", one.file)));
                is_told = true;
            }
            if let Some((done, all)) = partial::progress(&self.cache.blob(hex)) {
                self.watch.event(Event::Progress { done, all });
            }
            if self.watch.is_stopped() {
                return Err(Error::Stopped);
            }
            std::thread::sleep(POLL);
        }
    }
}

fn sizes(files: &[&Needed]) -> u64 {
    files.iter().map(|one| one.facts.size).sum()
}

/// The disk's room.
struct Room {
    folder: PathBuf,
    needed: u64,
    free: u64,
}

impl Room {
    fn new(folder: &Path, needed: u64) -> Result<Room> {
        let disk = rustix::fs::statvfs(folder).naming(folder)?;
        Ok(Room { folder: folder.to_owned(), needed, free: disk.f_bavail.saturating_mul(disk.f_frsize) })
    }

    fn is_enough(&self) -> bool {
        self.needed <= self.free
    }

    /// Takes the room of all files at once, so that a full disk is met now and not after hours.
    fn reserve(&self, jobs: &[Job]) -> Result<()> {
        let full = || Error::Space { folder: self.folder.clone(), needed: self.needed, free: self.free };
        let taken = if self.is_enough() { jobs.iter().try_for_each(|job| job.partial.reserve()) } else { Err(full()) };
        taken.map_err(|e| {
            // Room without bytes in it helps nobody.
            jobs.iter().filter(|job| job.partial.written() == 0).for_each(|job| partial::discard(&job.blob));
            match e {
                Error::Io { cause, .. } if cause.kind() == std::io::ErrorKind::StorageFull => full(),
                other => other,
            }
        })
    }
}
