//! Random schedules of the pool against a scripted disk: reads end in any order, late, torn or failed, and every expert that is handed over is
//! nevertheless the one that was asked for, until it is released; what is not handed over has failed with an error.
//!
//! A model checker by random walk: a schedule is a seed. `SLUICE_SCHEDULES` says how many.

use std::path::Path;

use fastrand::Rng;

use sluice_experts::{
    Error, ExpertOptions, ExpertPool, ExpertStats, FetchId, Keep, LayerLayout, Next, Policy, SlotClass, TierMove,
    no_faster,
};
use sluice_store::host_memory;
use sluice_store::load::ALIGNMENT;
use sluice_store::requests::{Completion, ReadQueue, ReadRequest};

/// True in `percent` of a hundred cases.
fn chance(random: &mut Rng, percent: u64) -> bool {
    random.u64(..100) < percent
}

/// What the disk holds from this page on: every byte of a page is told from those of its neighbours.
fn page_bytes(page: u64) -> [u8; 8] {
    (page + 1).wrapping_mul(0xd6e8_feb8_6659_fd93).to_le_bytes()
}

/// Whether the memory holds what the disk holds from `offset` on: looked at sparsely, since what goes wrong goes wrong by whole requests.
fn is_right(offset: u64, bytes: &[u8]) -> bool {
    let right = |i: usize| bytes[i] == page_bytes((offset + i as u64) / ALIGNMENT as u64)[(offset as usize + i) % 8];
    (0..bytes.len()).step_by(509).chain(bytes.len().checked_sub(1)).all(right)
}

/// A disk that completes reads at random times.
struct Scripted {
    random: Rng,
    waiting: Vec<ReadRequest>,
    /// Percent of the reads that fail; that are complete at each poll.
    failing: u64,
    done: u64,
}

// SAFETY: the memory of the reads in it is lent to whoever holds it.
unsafe impl Send for Scripted {}

impl Scripted {
    /// Writes to a part of the memory: what the disk holds, or anything, as long as the read is not over.
    fn write(&mut self, read: &ReadRequest, sound: bool) {
        let room = read.len.next_multiple_of(ALIGNMENT);
        // SAFETY: memory that was lent until the read is over.
        let memory = unsafe { std::slice::from_raw_parts_mut(read.memory, room) };
        for (page, bytes) in memory.chunks_exact_mut(ALIGNMENT).enumerate() {
            let held = page_bytes(read.offset / ALIGNMENT as u64 + page as u64);
            if sound {
                bytes.as_chunks_mut::<8>().0.iter_mut().for_each(|b| *b = held);
            } else {
                bytes.fill(0xee);
            }
        }
    }
}

impl ReadQueue for Scripted {
    unsafe fn push(&mut self, read: ReadRequest) {
        // In most cases the memory is overwritten at once.
        if chance(&mut self.random, 80) {
            self.write(&read, false);
        }
        self.waiting.push(read);
    }

    fn submit(&mut self) {}

    fn in_flight(&self) -> usize {
        self.waiting.len()
    }

    fn notes(&self) -> &[String] {
        &[]
    }

    fn is_ring(&self) -> bool {
        false
    }

    fn reap(&mut self, wait: bool, each: &mut dyn FnMut(Completion)) {
        let mut over = 0;
        while !self.waiting.is_empty() && (chance(&mut self.random, self.done) || wait && over == 0) {
            let i = self.random.usize(..self.waiting.len());
            let read = self.waiting.swap_remove(i);
            let fails = chance(&mut self.random, self.failing);
            self.write(&read, !fails);
            let cause = || std::io::Error::from_raw_os_error(5);
            let error =
                || sluice_store::Error::Read { path: "disk".into(), tensor: None, offset: read.offset, cause: cause() };
            each(Completion { tag: read.tag, error: fails.then(error) });
            over += 1;
        }
    }
}

/// Where each array of each expert lies: `[layer][expert][array]`.
type Places = Vec<Vec<Vec<std::ops::Range<u64>>>>;

/// Some layers of some sizes, each with experts of one to three arrays.
fn layers(random: &mut Rng) -> (Vec<LayerLayout>, Places) {
    let mut at = 0;
    let (mut layers, mut places) = (Vec::new(), Vec::new());
    for _ in 0..1 + random.usize(..4) {
        let mut layer = LayerLayout::default();
        let mut of_layer = Vec::new();
        // Sizes that differ by more than a sixteenth are classes of their own.
        let sizes: Vec<u64> = (0..1 + random.usize(..3)).map(|_| [600, 3000, 9000][random.usize(..3)]).collect();
        for _ in 0..2 + random.usize(..11) {
            let mut of_expert = Vec::new();
            for size in &sizes {
                // Next to each other, or apart.
                at += if chance(random, 50) { 0 } else { 50_000 };
                of_expert.push(at..at + size);
                at += size;
            }
            layer.add(sizes.len(), of_expert.iter().enumerate().map(|(i, r)| (0, r.clone(), i)).collect());
            of_layer.push(of_expert);
        }
        layers.push(layer);
        places.push(of_layer);
    }
    (layers, places)
}

/// A layer that takes its turn: what it asked for, and what it was answered.
struct Turn {
    fetch: FetchId,
    layer: usize,
    wanted: Vec<u32>,
    ordered: bool,
    answered: Vec<bool>,
}

struct Schedule {
    random: Rng,
    pool: ExpertPool,
    places: Places,
    /// Fetches that are not over.
    turns: Vec<Turn>,
    /// (Turn's fetch, layer, position, expert) of who was handed over and not released.
    held: Vec<(FetchId, usize, usize, usize)>,
    /// What the faster tier holds, by class and slot: an expert's arrays.
    fast: Vec<Vec<Arrays>>,
    /// Moves whose copies are not done.
    moving: Vec<(TierMove, Arrays)>,
    failing: bool,
    wrong: Option<String>,
}

type Arrays = Vec<Vec<u8>>;

impl Schedule {
    fn new(seed: u64, sound: bool) -> Schedule {
        let mut random = Rng::with_seed(seed);
        let (layers, places) = layers(&mut random);
        let most = 1 + random.usize(..6);
        let (failing, done) = (if sound { 0 } else { [1, 5, 30][random.usize(..3)] }, [10, 50, 90][random.usize(..3)]);
        let keep = if chance(&mut random, 70) { Keep::Slots } else { Keep::PageCache };
        let pinned = (0..random.usize(..4)).map(|_| (random.usize(..places.len()), random.usize(..13))).collect();
        let fast = [0, 0, 1, 4, 40][random.usize(..5)];
        let faster = |classes: &[SlotClass]| classes.iter().map(|c| fast.min(c.experts)).collect::<Vec<_>>();
        let mut options = ExpertOptions {
            keep,
            policy: Policy::ALL[random.usize(..3)],
            pinned,
            request: ALIGNMENT * (1 + random.usize(..3)),
            budget: 0,
            ..ExpertOptions::default()
        };
        // The least that will do, and sometimes more.
        let fits = |layers: &[LayerLayout], options: &ExpertOptions| {
            let copy = layers.to_vec();
            let disk = Scripted { random: Rng::with_seed(seed), waiting: Vec::new(), failing, done };
            ExpertPool::with_queue(
                copy,
                Box::new(disk),
                most,
                options,
                (&mut host_memory, &faster),
                Path::new("memory"),
            )
        };
        let least = match fits(&layers, &options) {
            Err(Error::ExpertBudget { needed, .. }) => needed,
            _ => panic!("a budget of nothing is refused"),
        };
        options.budget = least + [0, 0, 20_000, 200_000][random.usize(..4)];
        let pool = fits(&layers, &options).unwrap();
        assert!(pool.bytes() as u64 <= options.budget, "{} bytes of {}", pool.bytes(), options.budget);
        let fast = faster(&pool.slot_classes()).into_iter().map(|n| vec![Arrays::new(); n]).collect();
        let (turns, held, moving) = (Vec::new(), Vec::new(), Vec::new());
        Schedule { random, pool, places, turns, held, fast, moving, failing: !sound, wrong: None }
    }

    fn experts(&self, layer: usize) -> usize {
        self.places[layer].len()
    }

    /// The experts that were handed over are those that were asked for.
    fn check(&mut self, when: &str) {
        for &(fetch, layer, position, expert) in &self.held {
            for (array, place) in self.places[layer][expert].iter().enumerate() {
                let there = match self.pool.fast_slot(fetch, position) {
                    Some(slot) => &self.fast[self.pool.class_of_layer(layer)][slot][array],
                    None => self.pool.array(fetch, position, array),
                };
                if !is_right(place.start, there) {
                    self.wrong = Some(format!("{when}: layer {layer} expert {expert} array {array}"));
                }
            }
        }
    }

    /// Experts of the layer that had the last turn come to the faster tier, and others fall.
    fn rise(&mut self, layer: usize) {
        let falls = chance(&mut self.random, 80);
        for _ in 0..self.random.usize(..4) {
            let to_room = chance(&mut self.random, 20);
            let moved = if to_room { self.pool.promote_into_free_slot() } else { self.pool.promote(layer, falls) };
            let Some(moved) = moved else { break };
            assert!(moved.demoted.is_none() || !to_room);
            assert!(falls || moved.demoted.is_none());
            let parts = (0..self.places[moved.layer][moved.expert].len())
                .map(|a| self.pool.array_range(moved.layer, moved.expert, a));
            let risen = parts.map(|part| self.pool.promoted_bytes(&moved, part).to_vec()).collect();
            let fallen = std::mem::replace(&mut self.fast[self.pool.class_of_layer(moved.layer)][moved.to], risen);
            self.moving.push((moved, fallen));
        }
        if chance(&mut self.random, 50) {
            self.land();
        }
    }

    fn land(&mut self) {
        for (moved, fallen) in self.moving.drain(..) {
            if let Some((layer, expert)) = moved.demoted {
                for (array, bytes) in fallen.iter().enumerate() {
                    let part = self.pool.array_range(layer, expert, array);
                    self.pool.demoted_bytes_mut(&moved, part).copy_from_slice(bytes);
                }
            }
            self.pool.finish_promotion(moved);
        }
    }

    /// Something is borrowed for a while.
    fn borrow(&mut self, layer: usize) {
        let expert = self.random.usize(..self.experts(layer));
        let Some(borrowed) = self.pool.pin(layer, expert) else { return };
        self.predict(layer);
        for (array, place) in self.places[layer][expert].iter().enumerate() {
            let part = self.pool.array_range(layer, expert, array);
            if !is_right(place.start, self.pool.pinned_bytes(&borrowed, part)) {
                self.wrong = Some(format!("borrowed: layer {layer} expert {expert} array {array}"));
            }
        }
        self.pool.unpin(borrowed);
    }

    fn predict(&mut self, layer: usize) {
        let n = self.experts(layer);
        let guessed: Vec<u32> = (0..self.random.usize(..4)).map(|_| self.random.usize(..n) as u32).collect();
        self.pool.predict(layer, &guessed);
    }

    /// A layer's turn begins.
    fn begin(&mut self, layer: usize) {
        let n = self.experts(layer);
        let count = if chance(&mut self.random, 30) { n } else { 1 + self.random.usize(..n.min(6)) };
        let mut wanted: Vec<u32> = (0..n as u32).collect();
        while wanted.len() > count {
            let gone = self.random.usize(..wanted.len());
            wanted.remove(gone);
        }
        let tokens = vec![1; wanted.len()];
        self.land();
        let ordered = chance(&mut self.random, 40);
        let fetch = self.pool.fetch(layer, &wanted, &tokens, ordered);
        let answered = vec![false; wanted.len()];
        self.turns.push(Turn { fetch, layer, wanted, ordered, answered });
    }

    /// Takes a wave of experts of one of the turns, as a backend does; a turn that is over goes.
    fn wave(&mut self) {
        let which = self.random.usize(..self.turns.len());
        let next = (self.turns[which].layer + 1) % self.places.len();
        let wave = 1 + self.random.usize(..4);
        let turn = &mut self.turns[which];
        let mut over = false;
        // 1. some that are there, or one that is waited for
        while self.held.len() < wave && !over {
            let wait = self.held.is_empty();
            match self.pool.next(turn.fetch, wait) {
                Next::Expert(i) => {
                    assert!(!std::mem::replace(&mut turn.answered[i], true), "handed over twice");
                    assert!(!turn.ordered || turn.answered[..i].iter().all(|a| *a), "out of order");
                    self.held.push((turn.fetch, turn.layer, i, turn.wanted[i] as usize));
                }
                Next::Failed(i) => {
                    assert!(!std::mem::replace(&mut turn.answered[i], true), "answered twice");
                    assert!(self.failing, "nothing fails in this schedule");
                    let error = self.pool.take_error(turn.fetch, i);
                    assert!(matches!(*error, sluice_store::Error::Read { .. }), "{error}");
                }
                Next::Later => {
                    assert!(!wait);
                    break;
                }
                Next::Over => over = true,
            }
        }
        // 2. computed with, while the disk goes on
        self.check("handed over");

        if chance(&mut self.random, 20) {
            self.predict(next);
        }
        if chance(&mut self.random, 5) {
            self.pool.warm_up();
        }
        self.check("computing");
        for (fetch, _, position, _) in std::mem::take(&mut self.held) {
            self.pool.release(fetch, position);
        }
        if over {
            let turn = self.turns.swap_remove(which);
            assert!(turn.answered.iter().all(|a| *a), "an expert was forgotten");
            if self.turns.is_empty() {
                self.rise(turn.layer);
            }
            if chance(&mut self.random, 30) {
                self.predict(next);
            }
            if chance(&mut self.random, 30) {
                self.borrow(next);
            }
        }
    }
}

fn schedules() -> u64 {
    std::env::var("SLUICE_SCHEDULES").ok().and_then(|n| n.parse().ok()).unwrap_or(20_000)
}

/// What goes wrong in a schedule with so many layers' turns at once, if anything does.
fn schedule(seed: u64, sound: bool, at_once: usize) -> Option<String> {
    let mut schedule = Schedule::new(seed, sound);
    let layers = schedule.places.len();
    for turn in 0..(1 + schedule.random.usize(..12)) * layers {
        schedule.begin(turn % layers);
        while schedule.turns.len() >= at_once {
            schedule.wave();
            if schedule.wrong.is_some() {
                return schedule.wrong;
            }
        }
        if chance(&mut schedule.random, 50) {
            schedule.predict((turn + 1) % layers);
        }
    }
    while !schedule.turns.is_empty() {
        schedule.wave();
    }
    schedule.wrong
}

#[test]
fn every_expert_is_the_right_one_or_has_failed_with_an_error() {
    // Half of them one layer's turn after the other, the others up to five at once.
    let at_once = |seed: u64| (seed / 3 % 10).saturating_sub(4).max(1) as usize;
    let went = |seed: u64| {
        std::panic::catch_unwind(|| schedule(seed, seed.is_multiple_of(3), at_once(seed)))
            .unwrap_or(Some("panicked".into()))
    };
    let wrong: Vec<(u64, String)> = (0..schedules()).filter_map(|seed| Some((seed, went(seed)?))).collect();
    assert!(wrong.is_empty(), "{} schedules went wrong, such as {:?}", wrong.len(), &wrong[..wrong.len().min(5)]);
}

/// One layer of experts of one array each.
fn store_of(experts: usize, bytes: u64, options: &ExpertOptions) -> Result<ExpertPool, Error> {
    let mut layer = LayerLayout::default();
    (0..experts as u64).for_each(|e| layer.add(1, vec![(0, e * bytes..(e + 1) * bytes, 0)]));
    let disk = Scripted { random: Rng::with_seed(1), waiting: Vec::new(), failing: 0, done: 50 };
    ExpertPool::with_queue(vec![layer], Box::new(disk), 1, options, (&mut host_memory, &no_faster), Path::new("memory"))
}

#[test]
fn an_expert_of_many_requests_comes_when_the_last_is_over() {
    // More than 16 bits count, of a page each.
    let pages = (1 << 16) + 3;
    let options = ExpertOptions { request: 1, ..ExpertOptions::default() };
    let mut pool = store_of(1, pages * ALIGNMENT as u64, &options).unwrap();
    let fetch = pool.fetch(0, &[0], &[1], false);
    assert_eq!(pool.next(fetch, true), Next::Expert(0));
    assert_eq!(pool.take_stats().reads, pages);
    assert!(is_right(0, pool.array(fetch, 0, 0)));
}

#[test]
fn fetches_that_want_the_same_expert_share_one_read() {
    let mut pool = store_of(4, 3 * ALIGNMENT as u64, &ExpertOptions::default()).unwrap();
    let [a, b] = [[0, 2], [2, 3]].map(|wanted| pool.fetch(0, &wanted, &[1, 1], true));
    let mut positions = Vec::new();
    for fetch in [b, a, b, a] {
        let Next::Expert(i) = pool.next(fetch, true) else { panic!("nothing fails") };
        positions.push((fetch, i));
    }
    assert_eq!(positions, [(b, 0), (a, 0), (b, 1), (a, 1)]);
    // Expert 2 stays until both have given it back.
    pool.release(a, 1);
    assert!(is_right(2 * 3 * ALIGNMENT as u64, pool.array(b, 0, 0)));
    assert_eq!(pool.take_stats().read_bytes, 3 * 3 * ALIGNMENT as u64);
}

#[test]
fn memory_that_is_free_is_filled() {
    let page = ALIGNMENT as u64;
    let mut pool = store_of(40, 3 * page, &ExpertOptions::default()).unwrap();
    let fetch = pool.fetch(0, &[5], &[1], false);
    assert_eq!(pool.next(fetch, true), Next::Expert(0));
    assert!(pool.warm_up(), "there is more");
    pool.release(fetch, 0);
    while pool.warm_up() {}
    // One slot stays free for what a token wants.
    let ExpertStats { warmed_up: filled, read_bytes, .. } = pool.take_stats();
    assert_eq!((filled, read_bytes, pool.is_reading()), (38, 39 * 3 * page, false));
    let wanted = [0, 5, 30];
    let fetch = pool.fetch(0, &wanted, &[1; 3], false);
    for (position, expert) in wanted.iter().enumerate() {
        assert_eq!(pool.next(fetch, false), Next::Expert(position));
        assert!(is_right(u64::from(*expert) * 3 * page, pool.array(fetch, position, 0)));
    }
    assert_eq!(pool.take_stats().read_bytes, 0);
}

#[test]
fn what_no_memory_holds_is_an_error() {
    // Two experts of 2^62 bytes in a sparse file.
    let error = store_of(2, 1 << 62, &ExpertOptions::default()).err().unwrap();
    assert!(matches!(error, Error::Store(sluice_store::Error::Io { .. })), "{error}");
    let budget = 1 << 30;
    let error = store_of(2, 1 << 62, &ExpertOptions { budget, ..ExpertOptions::default() }).err().unwrap();
    assert!(matches!(error, Error::ExpertBudget { .. }), "{error}");
}

#[test]
fn bookkeeping_stays_within_the_budget_however_many_experts_a_file_has() {
    // A number for each pair of these would be 40 GB.
    let (experts, budget) = (100_000, 64 << 20);
    let pool = store_of(experts, 8, &ExpertOptions { budget, ..ExpertOptions::default() }).unwrap();
    assert!(pool.bytes() as u64 <= budget, "{} bytes", pool.bytes());
}
