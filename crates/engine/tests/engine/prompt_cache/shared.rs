//! The prompt cache that replicas share: an engine with an empty folder goes on from what another has computed, and whatever the store does, answers are those of an
//! engine that computes all of it, and nobody waits long.

use std::path::Path;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use sluice_cache::remote::{FolderStore, ObjectStore, RemoteStatus, StoreError};
use sluice_engine::{Engine, Options};

use super::{cached, cold};
use crate::support::{MODELS, ask, folder, generation, tokens};

/// What a store does wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Fault {
    #[default]
    None,
    /// Nothing answers.
    Down,
    /// Every call takes far too long, whatever its deadline.
    Hangs,
    /// Objects come in half.
    Truncates,
    /// A bit is another one.
    Lies,
    /// Nothing more can be stored.
    IsFull,
    /// Objects that were there a moment ago are not.
    Loses,
    /// One call in three fails.
    Flickers,
    /// Gives another object than the one that was asked for.
    Swaps,
}

/// A folder that does wrong.
#[derive(Debug)]
struct Faulty {
    folder: FolderStore,
    fault: Mutex<Fault>,
    calls: AtomicU64,
    last: Mutex<Vec<u8>>,
}

impl Faulty {
    fn new(home: &Path) -> Arc<Faulty> {
        let folder = FolderStore::new(&home.join("store"));
        Arc::new(Faulty { folder, fault: Mutex::default(), calls: AtomicU64::new(0), last: Mutex::default() })
    }

    fn set(&self, fault: Fault) {
        *self.fault.lock().unwrap() = fault;
    }

    fn begin(&self) -> Result<Fault, StoreError> {
        let fault = *self.fault.lock().unwrap();
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        match fault {
            Fault::Down => Err(StoreError::Failed("no connection".into())),
            Fault::Flickers if call.is_multiple_of(3) => Err(StoreError::Failed("HTTP 503".into())),
            Fault::Hangs => {
                thread::sleep(Duration::from_secs(8));
                Err(StoreError::Timeout)
            }
            fault => Ok(fault),
        }
    }
}

impl ObjectStore for Faulty {
    fn url(&self) -> &str {
        self.folder.url()
    }

    fn get(&self, name: &str, max: u64, patience: Duration) -> Result<Option<Vec<u8>>, StoreError> {
        let fault = self.begin()?;
        let Some(mut bytes) = self.folder.get(name, max, patience)? else { return Ok(None) };
        // The secret is a matter of its own.
        if name.ends_with("secret") {
            return Ok(Some(bytes));
        }
        match fault {
            Fault::Truncates => bytes.truncate(bytes.len() / 2),
            Fault::Lies => {
                let at = bytes.len() / 3;
                bytes[at] ^= 4;
            }
            Fault::Loses => return Ok(None),
            Fault::Swaps => std::mem::swap(&mut bytes, &mut *self.last.lock().unwrap()),
            _ => {}
        }
        Ok(Some(bytes))
    }

    fn size(&self, name: &str, patience: Duration) -> Result<Option<u64>, StoreError> {
        self.begin()?;
        self.folder.size(name, patience)
    }

    fn put(&self, name: &str, bytes: &[u8], patience: Duration) -> Result<(), StoreError> {
        if self.begin()? == Fault::IsFull {
            return Err(StoreError::Failed("HTTP 507".into()));
        }
        self.folder.put(name, bytes, patience)
    }

    fn create(&self, name: &str, bytes: &[u8], patience: Duration) -> Result<bool, StoreError> {
        self.begin()?;
        self.folder.create(name, bytes, patience)
    }

    fn list(
        &self,
        folder: &str,
        patience: Duration,
        take: &mut dyn FnMut(&str, u64) -> bool,
    ) -> Result<(), StoreError> {
        self.begin()?;
        self.folder.list(folder, patience, take)
    }
}

/// The options of a replica with a folder of its own.
fn replica(home: &Path, name: &str, store: &Arc<Faulty>, key: bool) -> Options {
    let mut options = cached(home);
    let cache = options.prompt_cache.as_mut().unwrap();
    cache.folder = home.join(name);
    cache.store = Some(Arc::clone(store) as Arc<dyn ObjectStore>);
    if key {
        // One for each: others may be reading theirs.
        let path = home.join(format!("key-of-{name}"));
        std::fs::write(&path, [7; 32]).unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        cache.key_file = Some(path);
    }
    options
}

fn status(engine: &Engine) -> RemoteStatus {
    engine.prompt_cache().unwrap().store.unwrap()
}

#[test]
fn a_replica_that_never_saw_a_prompt_restores_it() {
    for (i, model) in MODELS.iter().enumerate() {
        let home = tempfile::tempdir().unwrap();
        let store = Faulty::new(home.path());
        let open = |name: &str| Engine::open(&folder(model), replica(home.path(), name, &store, i % 2 == 1)).unwrap();
        let mut first = open("first");
        let mut prompt = tokens(&first, 290, 1);
        let has_states = first.model().state_len() > 0;
        ask(&mut first, &prompt[..180], generation(1));
        let (answer, ..) = ask(&mut first, &prompt, generation(6));
        first.save().unwrap();
        let stored = status(&first);
        assert!(stored.joined && stored.stored >= 9 && stored.errors == 0, "{model}: {stored:?}");
        drop(first);
        // What its own folder gives of it, but that the store gives whole blocks alone.
        let mut first = open("first");
        let from_disk = ask(&mut first, &prompt, generation(6)).2;
        assert!(from_disk >= 180 && status(&first).read == 0, "{model}: {from_disk}");
        let expected = if has_states { from_disk } else { from_disk / 32 * 32 };
        drop(first);
        // 1. The same prompt
        let mut second = open("second");
        let (again, _, restored) = ask(&mut second, &prompt, generation(6));
        assert_eq!(again, answer, "{model}");
        let read = status(&second);
        assert!(restored >= expected && read.hits == 1 && read.wrong == 0, "{model}: {restored} {expected} {read:?}");
        // 2. What came from the store is on the own disk now, and is not stored again
        second.save().unwrap();
        assert!(second.prompt_cache().unwrap().stored >= expected as u64 / 32, "{model}");
        drop(second);
        let mut again = open("second");
        let (same, _, restored) = ask(&mut again, &prompt, generation(6));
        assert_eq!(same, answer, "{model}");
        // Of states the newest are written.
        assert!(has_states || status(&again).read == 0, "{model}");
        assert!(restored >= expected, "{model}");
        drop(again);
        // 3. One that parts from it in the middle
        let words = Engine::open(&folder(model), cold()).unwrap().model().vocabulary as u32;
        prompt[200..].iter_mut().for_each(|t| *t = (*t + 1) % words);
        let mut third = open("third");
        let (parted, ..) = ask(&mut third, &prompt, generation(6));
        let mut all = Engine::open(&folder(model), cold()).unwrap();
        assert_eq!(parted, ask(&mut all, &prompt, generation(6)).0, "{model}");
    }
}

#[test]
fn whatever_the_store_does_answers_stay_right_and_nobody_waits_long() {
    let mut cold = Engine::open(&folder("qwen3"), cold()).unwrap();
    let prompt = tokens(&cold, 300, 5);
    let answer = ask(&mut cold, &prompt, generation(4)).0;
    let all = [
        Fault::Down,
        Fault::Hangs,
        Fault::Truncates,
        Fault::Lies,
        Fault::IsFull,
        Fault::Loses,
        Fault::Flickers,
        Fault::Swaps,
    ];
    for fault in all {
        let home = tempfile::tempdir().unwrap();
        let store = Faulty::new(home.path());
        let open = |name: &str| Engine::open(&folder("qwen3"), replica(home.path(), name, &store, false)).unwrap();
        // 1. While it is stored
        if matches!(fault, Fault::IsFull | Fault::Flickers | Fault::Down) {
            store.set(fault);
        }
        let mut first = open("first");
        let started = Instant::now();
        assert_eq!(ask(&mut first, &prompt, generation(4)).0, answer, "{fault:?}");
        first.save().unwrap();
        assert!(started.elapsed() < Duration::from_secs(15), "{fault:?}");
        let (written, notes) = (status(&first), first.take_prompt_cache_notes());
        if matches!(fault, Fault::IsFull) {
            assert!(written.stored == 0 && written.errors >= 3 && written.writes_paused, "{written:?}");
            assert!(notes.iter().any(|n| n.contains("cannot be written to: HTTP 507")), "{notes:?}");
        }
        drop(first);
        // 2. While it is read
        store.set(Fault::None);
        let mut second = open("second");
        store.set(fault);
        let started = Instant::now();
        assert_eq!(ask(&mut second, &prompt, generation(4)).0, answer, "{fault:?}");
        assert!(started.elapsed() < Duration::from_secs(7), "{fault:?}: {:?}", started.elapsed());
        let read = status(&second);
        match fault {
            Fault::Truncates | Fault::Lies | Fault::Swaps => assert!(read.wrong > 0, "{fault:?}: {read:?}"),
            Fault::Hangs => assert!(read.given_up == 1 && read.read == 0, "{fault:?}: {read:?}"),
            _ => {}
        }
        // 3. What was wrong is stored again
        store.set(Fault::None);
        second.save().unwrap();
        drop(second);
        let mut third = open("third");
        assert_eq!(ask(&mut third, &prompt, generation(4)).0, answer, "{fault:?}");
        if matches!(fault, Fault::Truncates | Fault::Lies | Fault::Loses | Fault::Swaps | Fault::None) {
            let whole = status(&third);
            assert!(whole.read >= 9 && whole.wrong == 0, "{fault:?}: {whole:?}");
        }
    }
}

#[test]
fn a_store_that_is_down_at_the_start_is_joined_when_it_answers() {
    let home = tempfile::tempdir().unwrap();
    let store = Faulty::new(home.path());
    store.set(Fault::Down);
    let mut engine = Engine::open(&folder("qwen3"), replica(home.path(), "first", &store, false)).unwrap();
    let prompt = tokens(&engine, 300, 6);
    ask(&mut engine, &prompt, generation(2));
    engine.save().unwrap();
    assert!(!status(&engine).joined && status(&engine).queued > 0);
    store.set(Fault::None);
    let started = Instant::now();
    while status(&engine).queued > 0 {
        assert!(started.elapsed() < Duration::from_secs(20), "{:?}", status(&engine));
        thread::sleep(Duration::from_millis(20));
    }
    assert!(status(&engine).joined && status(&engine).stored >= 9);
}

#[test]
fn replicas_that_begin_at_once_share_one_secret_and_another_key_is_refused() {
    let home = tempfile::tempdir().unwrap();
    let store = Faulty::new(home.path());
    thread::scope(|scope| {
        for i in 0..4 {
            let (store, home) = (&store, home.path());
            scope.spawn(move || {
                let options = replica(home, &format!("at-once-{i}"), store, true);
                let engine = Engine::open(&folder("qwen3"), options).unwrap();
                assert!(status(&engine).joined);
            });
        }
    });
    let secret = |i: u32| std::fs::read(home.path().join(format!("at-once-{i}/secret"))).unwrap();
    assert!((1..4).all(|i| secret(i) == secret(0)));
    let refused = Engine::open(&folder("qwen3"), replica(home.path(), "no-key", &store, false)).err().unwrap();
    assert!(format!("{refused:#}").contains("the prompt cache is encrypted"), "{refused:#}");
}
