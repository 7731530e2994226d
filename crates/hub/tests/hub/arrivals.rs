//! Models that are used while they arrive: what is asked for, and in which order it is fetched.

use std::cell::RefCell;
use std::fs;
use std::sync::Arc;

use sluice_hub::{Arrival, Client, Extent, Settings, pull_in_use};

use crate::support::*;

const MEGABYTE: u64 = 1 << 20;

#[test]
fn what_is_asked_for_comes_first_and_draws_nothing_after_it() {
    let place = Place::new();
    let content = place.add_gguf("org/m");
    place.hub.faults(|f| f.bandwidth = Some(30_000_000));
    let settings = Settings { connections: 2, ..place.settings() };
    let asked = 9 * MEGABYTE..11 * MEGABYTE;
    // The model is read through it as long as this lives.
    let arrival: RefCell<Option<Arrival>> = RefCell::new(None);
    let mut begun = |arriving: Arrival| {
        arriving.files[0].ask(&asked, true);
        arrival.borrow_mut().replace(arriving);
    };
    let (client, name) = (Arc::new(Client::new(settings)), place.name("org/m"));
    let model = pull_in_use(&client, &name, Extent::Whole, &Heard::default(), Some(&mut begun)).unwrap();
    assert!(fs::read(&model.path).unwrap() == content.bytes());
    let requests = place.hub.requests();
    let ranges: Vec<(u64, u64)> = requests.iter().filter(|r| r.is_for_bytes).filter_map(|r| r.range).collect();
    let firsts: Vec<u64> = ranges.iter().map(|(first, _)| *first).collect();
    // The beginning of the file, the part, and then the rest in order: what follows the part comes after what is before it.
    let last_asked = firsts.iter().rposition(|at| asked.contains(at)).unwrap();
    let before = firsts[..last_asked].iter().filter(|at| !asked.contains(at) && **at >= MEGABYTE);
    assert_eq!(before.collect::<Vec<_>>(), Vec::<&u64>::new(), "{ranges:?}");
    let after = firsts.iter().position(|at| *at >= asked.end).unwrap();
    let late = firsts[after..].iter().filter(|at| **at < asked.start).count();
    assert!(late < 2, "{late} requests for what comes before: {ranges:?}");
    // No byte twice.
    assert_eq!(ranges.iter().map(|(first, last)| last + 1 - first).sum::<u64>(), content.bytes().len() as u64);
}
