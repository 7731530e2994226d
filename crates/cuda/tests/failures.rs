//! Whole models on emulated devices (`emulated/build.py`) that request experts in the middle of a step, run out of memory, queue few launches and let kernels overlap. The
//! first test runs all others in a process whose driver is the emulated one.

mod emulated;

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int, c_long, c_uint, c_void};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use sluice_backend::Activations;
use sluice_cuda::{Cuda, HostOffload, Kernel, Pipeline};
use sluice_engine::sampling::SamplingParams;
use sluice_engine::{Engine, Event, Finish, Generation, Options, Placement};

/// A model whose mixtures have the kernels that request experts.
const MODEL: &str = "mlx_qwen3_moe_asking";
const IN_CHILD: &str = "SLUICE_EMULATED_FAILURES";
/// Far more than the tests take: a process that takes longer hangs.
const HANGS: Duration = Duration::from_secs(1800);

#[test]
fn where_the_device_is_emulated() {
    if std::env::var_os(IN_CHILD).is_some() {
        return;
    }
    let Some(mut tests) = emulated::this_program() else { return };
    tests.args(["--skip", "where_the_device_is_emulated", "--test-threads", "1", "--nocapture"]);
    tests.env(IN_CHILD, "1").env_remove("SLUICE_GPU");
    let log = tempfile::NamedTempFile::new().unwrap();
    let [stdout, stderr] = [(); 2].map(|()| Stdio::from(log.reopen().unwrap()));
    let mut child = tests.stdout(stdout).stderr(stderr).spawn().expect("this program runs");
    let began = Instant::now();
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break Some(status),
            None if began.elapsed() > HANGS => {
                child.kill().unwrap();
                child.wait().unwrap();
                break None;
            }
            None => std::thread::sleep(Duration::from_millis(50)),
        }
    };
    let said = std::fs::read_to_string(log.path()).unwrap();
    assert!(status.is_some_and(|s| s.success()), "{}: {said}", if status.is_none() { "hangs" } else { "fails" });
}

#[test]
fn kernels_take_what_the_host_gives_them() {
    let Some(emulated) = Emulated::get() else { return };
    for kernel in Kernel::all() {
        let name = CString::new(&*kernel.name()).unwrap();
        assert_eq!(emulated.parameters(&name), kernel.parameters(), "bytes of what {kernel:?} takes");
    }
}

unsafe extern "C" {
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// Controls of the emulated driver.
struct Emulated {
    fail: unsafe extern "C" fn(c_long) -> c_long,
    queue: unsafe extern "C" fn(c_uint),
    overlap: unsafe extern "C" fn(u64),
    ran: unsafe extern "C" fn(*const c_char) -> c_long,
    parameters: unsafe extern "C" fn(*const c_char) -> c_uint,
}

impl Emulated {
    /// `None` in a process that has no emulated driver.
    fn get() -> Option<Emulated> {
        std::env::var_os(IN_CHILD)?;
        assert!(sluice_cuda::describe(0).unwrap().starts_with("Emulated"));
        let symbol = |name: &CStr| {
            // SAFETY: strings that end with a zero; RTLD_NOW of a library that is loaded already.
            let symbol = unsafe { dlsym(dlopen(c"libcuda.so".as_ptr(), 2), name.as_ptr()) };
            assert!(!symbol.is_null(), "{name:?} of the emulated driver");
            symbol
        };
        // SAFETY: functions of these types in `emulated/driver.cpp`.
        unsafe {
            Some(Emulated {
                fail: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(c_long) -> c_long>(symbol(
                    c"emulated_fail",
                )),
                queue: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(c_uint)>(symbol(c"emulated_queue")),
                overlap: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(u64)>(symbol(c"emulated_overlap")),
                ran: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_char) -> c_long>(symbol(
                    c"emulated_ran",
                )),
                parameters: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_char) -> c_uint>(symbol(
                    c"emulated_parameters",
                )),
            })
        }
    }

    /// Bytes of the struct that a kernel takes.
    fn parameters(&self, kernel: &CStr) -> usize {
        // SAFETY: a string that ends with a zero.
        unsafe { (self.parameters)(kernel.as_ptr()) as usize }
    }

    /// Refuses the n-th allocation from now on.
    fn fail(&self, n: usize) {
        // SAFETY: sets a number.
        unsafe { (self.fail)(n as c_long) };
    }

    /// Refuses none from now on. Whether one was refused.
    fn recover(&self) -> bool {
        // SAFETY: sets a number.
        unsafe { (self.fail)(-1) < 0 }
    }

    fn queue(&self, n: usize) {
        // SAFETY: sets a number.
        unsafe { (self.queue)(n as c_uint) }
    }

    fn overlap(&self, seed: u64) {
        // SAFETY: sets a number.
        unsafe { (self.overlap)(seed) }
    }

    /// How many kernels ran whose name contains `part`.
    fn ran(&self, part: &CStr) -> usize {
        // SAFETY: a string that ends with a zero.
        unsafe { (self.ran)(part.as_ptr()) as usize }
    }
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(MODEL)
}

fn options(chunk: usize) -> Options {
    Options {
        activations: Activations::Int8,
        chunk: Some(chunk),
        threads: 2,
        max_context: Some(200),
        max_sequences: 3,
        ..Options::for_this_machine().unwrap()
    }
}

/// Devices and limits of an engine.
#[derive(Clone, Debug)]
struct Setup {
    devices: Vec<u32>,
    chunk: usize,
    /// Bytes of each device beyond the minimum; `None`: all experts stay on the device.
    more: Option<u64>,
    by_host: bool,
    /// The driver queues few launches.
    few: bool,
}

/// With `few`: the most held launches, and the most commands that a stream queues. Fewer than follow the first request.
const FEW_HELD: usize = 6;
const FEW_QUEUED: usize = 4;
/// Seeds of the random test.
const SEEDS: u64 = 14;
/// The most commands that a driver's stream queues.
const QUEUED: usize = 1024;

/// The smallest sufficient memory, by devices and tokens of a step.
static MIN_MEMORY: Mutex<BTreeMap<(Vec<u32>, usize), u64>> = Mutex::new(BTreeMap::new());

impl Setup {
    fn new(devices: &[u32], chunk: usize, more: Option<u64>) -> Setup {
        Setup { devices: devices.to_vec(), chunk, more, by_host: false, few: false }
    }

    fn open(&self) -> anyhow::Result<Engine> {
        let open = |bytes: Option<u64>| {
            let experts = if self.more.is_some() { Placement::Slots } else { Placement::Auto };
            let options = Options { experts, device_memory: bytes, ..options(self.chunk) };
            let held = if self.few { FEW_HELD } else { usize::MAX };
            let host = HostOffload { isa: options.isa, threads: 2, always: self.by_host };
            Engine::open_on(&folder(), options, &|o| match self.devices[..] {
                [one] => {
                    Ok(Box::new(Cuda::new(one, o.activations)?.with_host_experts(host).with_max_held_launches(held)))
                }
                _ => {
                    let several = Pipeline::new(&self.devices, o.activations, o.threads)?;
                    Ok(Box::new(several.with_host_experts(host).with_max_held_launches(held)))
                }
            })
        };
        match self.more {
            None => open(None),
            Some(more) => {
                let mut known = MIN_MEMORY.lock().unwrap();
                let least = *known.entry((self.devices.clone(), self.chunk)).or_insert_with(|| {
                    let refused = format!("{:#}", open(Some(1 << 20)).err().expect("a megabyte is too little"));
                    let figure = refused.rsplit_once("--gpu-memory ").unwrap().1.split_once('M').unwrap().0;
                    (figure.parse::<f64>().unwrap() * 1e6) as u64
                });
                open(Some(least + more))
            }
        }
    }
}

const DEVICES: [&[u32]; 3] = [&[0], &[0, 0], &[0, 1]];

fn prompt(n: usize, seed: u64) -> Vec<u32> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..n).map(|_| random.u32(..256)).collect()
}

fn logits(engine: &mut Engine, tokens: &[u32]) -> anyhow::Result<Vec<u32>> {
    let mut bits = Vec::new();
    let each = |_: usize, row: &[f32]| {
        bits.extend(row.iter().map(|x| x.to_bits()));
        Ok(())
    };
    engine.score(tokens, true, each)?;
    Ok(bits)
}

/// The CPU's logits.
fn wanted(tokens: &[u32]) -> Vec<u32> {
    logits(&mut Engine::open(&folder(), options(64)).unwrap(), tokens).unwrap()
}

#[test]
fn requests_in_the_middle_of_a_step_give_the_cpus_bits() {
    let Some(emulated) = Emulated::get() else { return };
    let tokens = prompt(12, 1);
    let wanted = wanted(&tokens);
    for devices in DEVICES {
        for (more, by_host) in [(0, false), (0, true), (200_000, false)] {
            let setup = Setup { by_host, ..Setup::new(devices, 1, Some(more)) };
            let before = emulated.ran(c"mailbox");
            let mut engine = setup.open().unwrap();
            assert!(logits(&mut engine, &tokens).unwrap() == wanted, "{setup:?}");
            assert!(emulated.ran(c"mailbox") - before >= tokens.len(), "{setup:?}");
        }
    }
}

/// The last token of a prompt is a step of its own and the first with logits: the second device allocates them while the first waits for experts.
#[test]
fn a_device_that_allocates_does_not_wait_for_one_that_requests() {
    let Some(emulated) = Emulated::get() else { return };
    let prompts = [prompt(65, 2)];
    let wanted = answer(&mut Engine::open(&folder(), options(64)).unwrap(), &prompts);
    for devices in DEVICES {
        let setup = Setup::new(devices, 64, Some(0));
        let mut engine = setup.open().unwrap();
        let before = emulated.ran(c"mailbox");
        assert_eq!(answer(&mut engine, &prompts), wanted, "{setup:?}");
        assert!(emulated.ran(c"mailbox") - before >= 2, "{setup:?}");
    }
}

/// More launches follow a request than the driver queues before it is answered.
#[test]
fn requests_are_answered_before_the_queue_is_full() {
    let Some(emulated) = Emulated::get() else { return };
    let tokens = prompt(8, 5);
    let wanted = wanted(&tokens);
    for devices in DEVICES {
        let setup = Setup { few: true, ..Setup::new(devices, 1, Some(0)) };
        let mut engine = setup.open().unwrap();
        emulated.queue(FEW_QUEUED);
        let got = logits(&mut engine, &tokens);
        emulated.queue(QUEUED);
        assert!(got.unwrap() == wanted, "{setup:?}");
    }
}

/// Each allocation of a step with requests is refused in turn.
#[test]
fn a_step_without_memory_fails_and_the_next_does_not() {
    let Some(emulated) = Emulated::get() else { return };
    // The second step has the last token alone. The first is small: it is computed anew for each allocation.
    let prompts = [prompt(8, 3)];
    let wanted = answer(&mut Engine::open(&folder(), options(7)).unwrap(), &prompts);
    for devices in DEVICES {
        let setup = Setup::new(devices, 7, Some(0));
        for n in 0.. {
            let mut engine = setup.open().unwrap();
            let (_, failed) = answer_with(&mut engine, &prompts, |step| {
                if step == 1 {
                    emulated.fail(n);
                }
            });
            if !emulated.recover() {
                assert_eq!(failed, 0, "{setup:?}");
                assert!(n > 5, "{setup:?}: only {n} allocations");
                break;
            }
            assert_eq!(failed, 1, "{setup:?}, without allocation {n}");
            assert_eq!(answer(&mut engine, &prompts), wanted, "{setup:?}, behind the one without allocation {n}");
        }
    }
}

/// Random failures, schedules and limits.
#[test]
fn a_failure_on_the_device_fails_the_rows_of_its_step() {
    let Some(emulated) = Emulated::get() else { return };
    let (mut failures, began) = (0, Instant::now());
    for seed in 0..SEEDS {
        let mut random = fastrand::Rng::with_seed(seed);
        let setup = Setup {
            devices: DEVICES[random.usize(..3)].to_vec(),
            chunk: [1, 7, 64][random.usize(..3)],
            more: [Some(0), Some(100_000), Some(1 << 20), None][random.usize(..4)],
            by_host: random.bool(),
            few: random.bool(),
        };
        emulated.queue(if setup.few { FEW_QUEUED } else { QUEUED });
        emulated.overlap(if random.bool() { 1 + seed } else { 0 });
        let prompts: Vec<Vec<u32>> =
            (0..2).map(|i| prompt([1, 5, 12, 65][random.usize(..4)], 100 * seed + i)).collect();
        let wanted = answer(&mut Engine::open(&folder(), options(64)).unwrap(), &prompts).0;
        let mut engine = setup.open().unwrap_or_else(|e| panic!("{seed}, {setup:?}: {e:#}"));
        for _ in 0..2 {
            emulated.fail(random.usize(..60));
            let (answers, failed) = answer(&mut engine, &prompts);
            let refused = emulated.recover();
            assert_eq!(failed > 0, refused, "{seed}, {setup:?}: {failed} failed");
            failures += failed;
            for (answer, wanted) in answers.iter().zip(&wanted) {
                assert!(wanted.starts_with(answer), "{seed}, {setup:?}: {answer:?}, {wanted:?}");
            }
            let (answers, failed) = answer(&mut engine, &prompts);
            assert_eq!((answers, failed), (wanted.clone(), 0), "{seed}, {setup:?}: behind a failure");
        }
    }
    emulated.overlap(0);
    emulated.queue(QUEUED);
    assert!(failures > 5, "only {failures} failures in {:?}", began.elapsed());
}

/// Greedy answers to concurrent prompts, and how many failed, all of them in one step.
fn answer(engine: &mut Engine, prompts: &[Vec<u32>]) -> (Vec<Vec<u32>>, usize) {
    answer_with(engine, prompts, |_| {})
}

/// As [`answer`], with a call before each step with its number.
fn answer_with(engine: &mut Engine, prompts: &[Vec<u32>], before: impl Fn(usize)) -> (Vec<Vec<u32>>, usize) {
    let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let ids: Vec<_> = prompts
        .iter()
        .map(|prompt| {
            let id = engine.add_sequence();
            let generation = Generation { sampling: sampling.clone(), max_tokens: 3, ..Generation::default() };
            engine.start(id, prompt, generation).unwrap();
            id
        })
        .collect();
    let (mut said, mut failed) = (vec![Vec::new(); ids.len()], 0);
    for step in 0.. {
        if engine.is_idle() {
            break;
        }
        before(step);
        for event in engine.step().expect("a step").to_vec() {
            match event {
                Event::Token { id, token } => said[ids.iter().position(|i| *i == id).unwrap()].push(token),
                Event::Finished { id, reason: Finish::Failed } => {
                    let why = format!("{:#}", engine.take_failure(id).expect("why it failed"));
                    assert!(why.contains("out of memory"), "{why}");
                    failed += 1;
                }
                _ => {}
            }
        }
    }
    ids.into_iter().for_each(|id| engine.remove_sequence(id));
    (said, failed)
}
