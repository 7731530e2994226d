use super::*;

/// A disk whose byte at offset o is a function of o, and which answers in another order than it was asked.
struct Disk {
    requests: Vec<ReadRequest>,
    fails: Option<u64>,
    random: fastrand::Rng,
}

// SAFETY: the memory of requests is lent to the queue.
unsafe impl Send for Disk {}

fn byte(offset: u64) -> u8 {
    (offset.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

impl ReadQueue for Disk {
    unsafe fn push(&mut self, request: ReadRequest) {
        self.requests.push(request);
    }

    fn submit(&mut self) {}

    fn reap(&mut self, wait: bool, each: &mut dyn FnMut(Completion)) {
        if self.requests.is_empty() || !wait && self.random.bool() {
            return;
        }
        let request = self.requests.swap_remove(self.random.usize(..self.requests.len()));
        let error = self.fails.filter(|at| (request.offset..request.offset + request.len as u64).contains(at));
        let error = error.map(|_| Error::Refused { why: "a bad place".into() });
        for i in 0..request.len {
            // SAFETY: lent until this is handed back.
            unsafe { *request.memory.add(i) = byte(request.offset + i as u64) };
        }
        each(Completion { tag: request.tag, error });
    }

    fn in_flight(&self) -> usize {
        self.requests.len()
    }

    fn notes(&self) -> &[String] {
        &[]
    }

    fn is_ring(&self) -> bool {
        false
    }
}

/// A table of 1,000 rows of two planes, with as few slots as there may be.
fn table(fails: Option<u64>) -> RowTable {
    let plane = |offset: u64, row_bytes: usize, at: usize| PlaneRows { file: 0, offset, row_bytes, at };
    let planes = vec![plane(5000, 6000, 0), plane(7_000_123, 70, 12288)];
    let disk = Disk { requests: Vec::new(), fails, random: fastrand::Rng::with_seed(3) };
    RowTable::with_queue(Parts { planes: vec![planes], rows: 1000 }, 1000, 0, Box::new(disk)).unwrap()
}

/// Takes a step, compares every row that comes, and returns the places that failed.
fn step(table: &mut RowTable, rows: &[u32]) -> Vec<u32> {
    table.begin(rows);
    let mut seen = vec![false; rows.len()];
    while table.next_wave() {
        let wave = table.wave();
        for number in 0..wave.len() {
            let (place, planes) = wave.row(number);
            assert!(!std::mem::replace(&mut seen[place], true), "a place twice");
            let row = u64::from(rows[place]);
            for (plane, (offset, len)) in planes.zip([(5000, 6000), (7_000_123, 70)]) {
                let start = offset + row * len;
                assert!(plane.iter().zip(start..).all(|(b, at)| *b == byte(at)), "row {row}");
                assert_eq!(plane.len() as u64, len);
            }
        }
    }
    let failed: Vec<u32> = table.failed().iter().map(|(place, _)| *place).collect();
    assert!(seen.iter().zip(0..).all(|(seen, place)| *seen != failed.contains(&place)), "each place once");
    failed
}

#[test]
fn every_place_of_a_step_gets_its_row_whatever_the_cache_holds() {
    let mut table = table(None);
    assert_eq!(table.capacity(), RowTable::LEAST);
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..200 {
        let (tokens, range) = (random.usize(1..300), random.u32(1..=1000));
        let rows: Vec<u32> = (0..tokens).map(|_| random.u32(..range)).collect();
        assert!(step(&mut table, &rows).is_empty());
    }
    // A row that was just used is there.
    let before = table.stats().read;
    assert!(step(&mut table, &[17]).is_empty() && step(&mut table, &[17, 17]).is_empty());
    assert!(table.stats().read <= before + 1);
}

#[test]
fn a_step_that_is_given_up_leaves_nothing_wrong() {
    let mut table = table(None);
    let rows: Vec<u32> = (0..40).collect();
    table.begin(&rows);
    assert!(step(&mut table, &(100..300).collect::<Vec<u32>>()).is_empty());
    assert!(step(&mut table, &rows).is_empty());
}

#[test]
fn a_row_that_cannot_be_read_fails_its_own_places() {
    // Reads fail at a byte in the second plane of row 10.
    let mut table = table(Some(7_000_123 + 10 * 70 + 3));
    let failed = step(&mut table, &[1, 10, 2, 10, 900]);
    // Neighbours on the same page fail with it.
    assert!(failed.contains(&1) && failed.contains(&3) && !failed.contains(&4));
    assert!(step(&mut table, &[900, 901]).is_empty());
}
