//! Files that are read while their bytes arrive, in any order: every reader waits for what it reads, has it brought first, and learns if it will not come.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use sluice_store::arriving::{self, Arriving, ArrivingHere};
use sluice_store::requests::{ReadQueue, ReadRequest, RequestOptions, Requests, StreamedFiles};
use sluice_store::{Buffer, LoadError};

use super::*;

const BLOCK: usize = 5000;

/// Brings the bytes of a file: first what is waited for, then what is asked for, and perhaps the rest.
#[derive(Debug)]
struct Bringer {
    file: File,
    bytes: Vec<u8>,
    state: Mutex<State>,
    is_over: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    there: Vec<bool>,
    /// Waited for, and asked for.
    asked: [VecDeque<usize>; 2],
    is_checked: bool,
    why: Option<String>,
}

impl Bringer {
    fn blocks(&self, part: &Range<u64>) -> Range<usize> {
        part.start as usize / BLOCK..(part.end as usize).div_ceil(BLOCK).min(self.bytes.len().div_ceil(BLOCK))
    }

    fn bring(&self, brings_rest: bool, fails_after: usize, seed: u64) {
        let mut random = fastrand::Rng::with_seed(seed);
        for brought in 0.. {
            let missing = loop {
                if self.is_over.load(Ordering::Acquire) {
                    return;
                }
                let mut state = self.state.lock().unwrap();
                if state.there.iter().all(|there| *there) {
                    state.is_checked = fails_after == usize::MAX;
                    return;
                }
                if brought == fails_after {
                    state.why = Some("the line is cut".into());
                    return;
                }
                let asked = state.asked.iter_mut().find_map(VecDeque::pop_front);
                let rest: Vec<usize> = (0..state.there.len()).filter(|i| !state.there[*i]).collect();
                match asked.or_else(|| brings_rest.then(|| random.choice(rest)).flatten()) {
                    Some(block) if !state.there[block] => break block,
                    Some(_) => {}
                    None => {
                        drop(state);
                        thread::sleep(Duration::from_micros(100));
                    }
                }
            };
            let range = missing * BLOCK..(missing * BLOCK + BLOCK).min(self.bytes.len());
            self.file.write_all_at(&self.bytes[range.clone()], range.start as u64).unwrap();
            self.state.lock().unwrap().there[missing] = true;
        }
    }
}

impl Arriving for Bringer {
    fn has(&self, part: &Range<u64>) -> Result<bool, String> {
        let state = self.state.lock().unwrap();
        state.why.clone().map_or(Ok(()), Err)?;
        Ok(self.blocks(part).all(|block| state.there[block]))
    }

    fn ask(&self, part: &Range<u64>, waits: bool) {
        let blocks = self.blocks(part);
        self.state.lock().unwrap().asked[usize::from(!waits)].extend(blocks);
    }

    fn is_whole(&self) -> Result<bool, String> {
        let state = self.state.lock().unwrap();
        state.why.clone().map_or(Ok(state.is_checked), Err)
    }
}

/// A folder whose files arrive.
struct Coming {
    folder: TempDir,
    bringers: Vec<Arc<Bringer>>,
    threads: Vec<JoinHandle<()>>,
    _here: Vec<ArrivingHere>,
}

impl Coming {
    /// Of the files of another folder; each fails after so many blocks.
    fn new(of: &Path, brings_rest: bool, fails_after: usize) -> Coming {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let mut coming = Coming { folder, bringers: Vec::new(), threads: Vec::new(), _here: Vec::new() };
        for (seed, path) in files(of).into_iter().enumerate() {
            let bytes = fs::read(&path).unwrap();
            let to = coming.folder.path().join(path.file_name().unwrap());
            let file = OpenOptions::new().read(true).write(true).create_new(true).open(to).unwrap();
            file.set_len(bytes.len() as u64).unwrap();
            let state = State { there: vec![false; bytes.len().div_ceil(BLOCK)], ..State::default() };
            let bringer = Arc::new(Bringer { file, bytes, state: Mutex::new(state), is_over: false.into() });
            coming._here.push(arriving::register(&bringer.file, bringer.clone()).unwrap());
            let own = Arc::clone(&bringer);
            coming.threads.push(thread::spawn(move || own.bring(brings_rest, fails_after, seed as u64)));
            coming.bringers.push(bringer);
        }
        coming
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn bytes_there(&self) -> usize {
        let there = |b: &Arc<Bringer>| b.state.lock().unwrap().there.iter().filter(|there| **there).count() * BLOCK;
        self.bringers.iter().map(there).sum()
    }
}

impl Drop for Coming {
    fn drop(&mut self) {
        self.bringers.iter().for_each(|b| b.is_over.store(true, Ordering::Release));
        self.threads.drain(..).for_each(|thread| thread.join().unwrap());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn every_reader_waits_for_what_it_reads(
        shards in prop::collection::vec(prop::collection::vec(prop_oneof![Just(0usize), 1usize..40, 1usize..60_000], 1..7), 1..4),
        request in prop_oneof![Just(4096usize), Just(16384), Just(1 << 20)],
        (depth, rings, threads) in (1usize..9, 1usize..3, 1usize..5),
        (brings_rest, reversed, delivers) in (any::<bool>(), any::<bool>(), any::<bool>()),
    ) {
        let whole = folder_of(&shards);
        for mode in MODES {
            let coming = Coming::new(whole.path(), brings_rest, usize::MAX);
            let options = LoadOptions { request: Some(request), depth, rings, threads, ..options(mode) };
            let (checkpoint, loading) = load::open(coming.path(), &options).unwrap();
            let expected = expected(whole.path(), &checkpoint);
            let mut views: Vec<&Bytes> = checkpoint.tensors().iter().map(|t| &t.bytes).collect();
            if reversed {
                views.reverse();
            }
            let delivered = delivers.then(|| deliver((&views, &[]), &loading, || Ok(())));
            if !delivers {
                loading.start(views.iter().copied());
            }
            for (tensor, expected) in checkpoint.tensors().iter().zip(&expected).rev() {
                prop_assert!(*tensor.bytes == expected[..], "{mode:?} {}", tensor.name);
            }
            loading.finish().unwrap();
            if let Some((arrived, others)) = delivered {
                for (view, bytes) in views.iter().enumerate().filter(|(view, _)| !others.contains(view)) {
                    let came: Option<Vec<u8>> = arrived.lock().unwrap()[view].iter().copied().collect();
                    prop_assert!(came.as_deref() == Some(&***bytes), "{mode:?} view {view}");
                }
            }
            // Views that nobody loads wait too.
            let looked_at = Checkpoint::open(coming.path()).unwrap();
            for (tensor, expected) in looked_at.tensors().iter().zip(&expected) {
                prop_assert!(*tensor.bytes == expected[..], "{}", tensor.name);
            }
        }
    }
}

#[test]
fn what_is_waited_for_comes_before_the_rest() {
    let whole = folder_of(&[vec![300_000; 40]]);
    for mode in MODES {
        let coming = Coming::new(whole.path(), false, usize::MAX);
        let options = LoadOptions { request: Some(16384), threads: 2, ..options(mode) };
        let (checkpoint, loading) = load::open(coming.path(), &options).unwrap();
        let expected = expected(whole.path(), &checkpoint);
        // Nothing was asked for but the header.
        assert!(coming.bytes_there() < 20_000, "{mode:?}");
        for number in [30, 3, 39, 12] {
            assert!(*checkpoint.tensors()[number].bytes == expected[number][..], "{mode:?} {number}");
        }
        let mut rows = vec![0; 1000];
        checkpoint.tensors()[20].bytes.slice(50_000..51_000).read_now(&mut rows).unwrap();
        assert!(rows == expected[20][50_000..51_000]);
        let there = coming.bytes_there();
        assert!((1_200_000..1_400_000).contains(&there), "{mode:?}: {there} bytes");
        loading.check().unwrap();
    }
}

#[test]
fn a_file_that_has_arrived_is_like_any_other() {
    let whole = folder_of(&[vec![200_000, 300_000]]);
    let coming = Coming::new(whole.path(), true, usize::MAX);
    let (checkpoint, loading) = load::open(coming.path(), &options(LoadMode::Mmap)).unwrap();
    start(&checkpoint, &loading);
    loading.finish().unwrap();
    let begun = Instant::now();
    while coming.bringers[0].is_whole() != Ok(true) {
        assert!(begun.elapsed() < Duration::from_secs(60));
        thread::sleep(Duration::from_millis(1));
    }
    // Now it has the times that it will keep.
    loading.check().unwrap();
    loading.check().unwrap();
    thread::sleep(Duration::from_millis(20));
    coming.bringers[0].file.write_all_at(&[1], 3).unwrap();
    let changed = loading.check().unwrap_err();
    assert!(matches!(changed.error(), Error::Replaced { .. }), "{changed}");
}

#[test]
fn bytes_that_will_not_come_are_an_error_and_never_waited_for() {
    let whole = folder_of(&[vec![300_000; 10]]);
    let is_cut = |e: &LoadError| matches!(e.error(), Error::NotArrived { why, .. } if why == "the line is cut");
    for mode in MODES {
        for delivers in [false, true] {
            let coming = Coming::new(whole.path(), false, 200);
            let (checkpoint, loading) = load::open(coming.path(), &options(mode)).unwrap();
            let views: Vec<&Bytes> = checkpoint.tensors().iter().map(|t| &t.bytes).collect();
            if delivers {
                deliver((&views, &[]), &loading, || Ok(()));
            } else {
                loading.start(views.iter().copied());
            }
            // Whoever waits goes on.
            views.iter().for_each(|view| assert_eq!(view.len(), 300_000));
            views.iter().for_each(|view| view.wait());
            let error = loading.finish().unwrap_err();
            assert!(is_cut(&error) && error.to_string().contains("model"), "{mode:?}: {error}");
            assert!(loading.check().is_err());
        }
    }
    // A header that will not come.
    let coming = Coming::new(whole.path(), false, 0);
    let error = Checkpoint::open(coming.path()).unwrap_err();
    assert!(matches!(error, Error::NotArrived { .. }), "{error}");
    // An error that comes after everything was read: the bytes are not to be used.
    let coming = Coming::new(whole.path(), true, usize::MAX - 1);
    let (checkpoint, loading) = load::open(coming.path(), &options(LoadMode::Mmap)).unwrap();
    start(&checkpoint, &loading);
    loading.finish().unwrap();
    coming.bringers[0].state.lock().unwrap().why = Some("the line is cut".into());
    assert!(is_cut(&loading.check().unwrap_err()));
}

#[test]
fn requests_wait_for_their_bytes() {
    let whole = folder_of(&[vec![300_000; 10]]);
    for (direct, io_uring) in [(true, true), (false, true), (true, false), (false, false)] {
        let options = RequestOptions { direct, depth: 4, io_uring, threads: 2, faults: None };
        for fails_after in [usize::MAX, 60] {
            let coming = Coming::new(whole.path(), false, fails_after);
            let left = |checkpoint: &Checkpoint| checkpoint.names().map(str::to_owned).collect();
            let (checkpoint, loading) =
                load::open_except(coming.path(), &super::options(LoadMode::Mmap), left).unwrap();
            let expected = fs::read(&files(whole.path())[0]).unwrap();
            let mut streamed = StreamedFiles::default();
            let (file, _) = streamed.locate(&checkpoint.tensors()[0].bytes);
            let mut requests = Requests::new(streamed, &options).unwrap();
            let mut buffer = Buffer::zeroed(20 * 65536).unwrap();
            for tag in 0..20 {
                // From the end to the beginning.
                let offset = (19 - tag) as u64 * 135_168;
                let memory = buffer[tag * 65536..].as_mut_ptr();
                // SAFETY: each request has its own part of the buffer, which outlives the queue.
                unsafe { requests.push(ReadRequest { file, offset, len: 40_000, memory, tag: tag as u32 }) };
            }
            requests.submit();
            let mut failed = 0;
            let mut done = Vec::new();
            while requests.in_flight() > 0 {
                requests.reap(true, &mut |completion| match completion.error {
                    None => done.push(completion.tag as usize),
                    Some(error) => {
                        assert!(matches!(error, Error::NotArrived { .. }), "{error}");
                        failed += 1;
                    }
                });
            }
            drop(requests);
            for tag in &done {
                let offset = (19 - tag) * 135_168;
                assert!(buffer[tag * 65536..][..40_000] == expected[offset..offset + 40_000], "{tag}");
            }
            assert_eq!((done.len() + failed, failed > 0), (20, fails_after == 60));
            assert_eq!(loading.check().is_err(), fails_after == 60);
        }
        // Dropped while its bytes are on their way: nobody waits.
        let coming = Coming::new(whole.path(), false, usize::MAX);
        let left = |checkpoint: &Checkpoint| checkpoint.names().map(str::to_owned).collect();
        let (checkpoint, _loading) = load::open_except(coming.path(), &super::options(LoadMode::Mmap), left).unwrap();
        coming.bringers[0].is_over.store(true, Ordering::Release);
        let mut streamed = StreamedFiles::default();
        let (file, _) = streamed.locate(&checkpoint.tensors()[0].bytes);
        let mut requests = Requests::new(streamed, &options).unwrap();
        let mut buffer = Buffer::zeroed(65536).unwrap();
        let memory = buffer.as_mut_ptr();
        // SAFETY: the buffer outlives the queue.
        unsafe { requests.push(ReadRequest { file, offset: 135_168, len: 40_000, memory, tag: 0 }) };
        requests.submit();
        drop(requests);
    }
}
