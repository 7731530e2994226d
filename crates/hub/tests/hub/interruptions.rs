//! Connections that end, fall silent, lie; and a caller who stops.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use sluice_hub::Error;

use crate::support::*;

/// Pulls while something is wrong, and checks the result.
#[track_caller]
fn mended(place: &Place, wrong: impl FnOnce(&mut sluice_test_hub::Faults)) -> Heard {
    let content = place.add_gguf("org/m");
    place.hub.faults(wrong);
    let heard = Heard::default();
    let model = place.pull_with("org/m", &heard).unwrap();
    assert!(fs::read(&model.path).unwrap() == content.bytes());
    assert_eq!(place.leftovers(), Vec::<std::path::PathBuf>::new());
    heard
}

#[test]
fn cut_connections_go_on_at_the_byte_where_they_were_cut() {
    let place = Place::new();
    mended(&place, |f| f.cut_after = Some(1_000_000));
    let requests = place.hub.requests();
    let ranges: Vec<_> = requests.iter().filter(|r| r.is_for_bytes).filter_map(|r| r.range).collect();
    // Every range after the first of its segment begins where the one before was cut.
    assert_eq!(ranges.len(), LARGE.div_ceil(1_000_000) + 2, "{ranges:?}");
    let mut firsts: Vec<u64> = ranges.iter().map(|(first, _)| *first).collect();
    firsts.sort_unstable();
    firsts.dedup();
    assert_eq!(firsts.len(), ranges.len());
}

#[test]
fn servers_that_are_busy_are_asked_again() {
    for status in [408, 429, 500, 502, 503, 504] {
        mended(&Place::new(), |f| f.bytes_status = Some((status, 3, None)));
    }
    mended(&Place::new(), |f| f.list_status = Some((503, 2, None)));
}

#[test]
fn a_server_that_asks_to_wait_is_left_alone_for_so_long() {
    let place = Place::new();
    let begun = Instant::now();
    let heard = mended(&place, |f| f.bytes_status = Some((429, 1, Some(1))));
    assert!(begun.elapsed() >= Duration::from_secs(1));
    assert!(
        heard.notes.borrow().iter().any(|note| note.contains("429") && note.contains("waiting 1 s")),
        "{:?}",
        heard.notes
    );
    // Half an hour is longer than anybody wants to wait.
    let place = Place::new();
    place.add_gguf("org/m");
    place.hub.faults(|f| f.list_status = Some((429, 1, Some(1800))));
    let error = place.refused("org/m");
    assert!(error.contains("429") && error.contains("HF_TOKEN"), "{error}");
}

#[test]
fn silent_connections_are_given_up() {
    let begun = Instant::now();
    mended(&Place::new(), |f| f.stall_after = Some((300_000, 2)));
    assert!(begun.elapsed() < Duration::from_secs(20));
}

#[test]
fn a_signed_address_that_expires_is_renewed() {
    let place = Place::new();
    mended(&place, |f| f.signature_uses = Some(1));
    let renewed = place.hub.requests().iter().filter(|r| !r.is_for_bytes && r.path.contains("/resolve/")).count();
    assert!(renewed >= 3, "{renewed}");
}

#[test]
fn a_server_without_ranges_is_read_by_one_connection() {
    mended(&Place::new(), |f| f.no_ranges = true);
    // And goes on where it was cut, since what is there is skipped.
    mended(&Place::new(), |f| (f.no_ranges, f.cut_after, f.cuts) = (true, Some(9_000_000), Some(2)));
}

#[test]
fn wrong_bytes_are_fetched_again_once_and_never_get_a_name() {
    let heard = mended(&Place::new(), |f| f.wrong_bytes = 1);
    assert!(heard.notes.borrow().iter().any(|note| note.contains("wrong bytes")));
    let place = Place::new();
    place.add_gguf("org/m");
    place.hub.faults(|f| f.wrong_bytes = u32::MAX);
    let error = place.refused("org/m");
    assert!(error.contains("m-Q4_K_M.gguf: what arrived is not what the hub announced (SHA-256"), "{error}");
    assert!(place.find("org/m").is_none());
    let blobs = fs::read_dir(place.cache().join("models--org--m/blobs")).unwrap();
    assert_eq!(blobs.count(), 0);
}

#[test]
fn ranges_that_were_not_asked_for_are_not_taken() {
    let place = Place::new();
    place.add_gguf("org/m");
    place.hub.faults(|f| f.wrong_ranges = true);
    let error = place.refused("org/m");
    assert!(error.contains("asked for bytes ") && error.contains("got Some"), "{error}");
    assert!(place.find("org/m").is_none());
}

#[test]
fn sizes_that_are_announced_wrong_end_without_a_file() {
    let place = Place::new();
    place.add_gguf("org/m");
    place.hub.faults(|f| f.larger = 32 << 20);
    let error = place.refused("org/m");
    assert!(error.contains("announced") || error.contains("asked for bytes"), "{error}");
    assert!(place.find("org/m").is_none());
}

#[test]
fn whoever_stops_keeps_what_has_arrived() {
    let place = Place::new();
    let content = place.add_gguf("org/m");
    place.hub.faults(|f| f.slow = Some(Duration::from_millis(2)));
    let stopping = Heard { stop_at: Some(4 << 20), ..Heard::default() };
    assert!(matches!(place.pull_with("org/m", &stopping), Err(Error::Stopped)));
    assert!(place.find("org/m").is_none());
    place.hub.faults(|f| f.slow = None);
    place.hub.requests();
    let heard = Heard::default();
    let model = place.pull_with("org/m", &heard).unwrap();
    assert!(fs::read(&model.path).unwrap() == content.bytes());
    let (bytes, kept) = heard.planned.borrow().unwrap();
    assert!(kept >= 4 << 20, "{kept}");
    assert_eq!((bytes, place.asked_bytes()), (LARGE as u64, LARGE as u64 - kept));
}

#[test]
fn a_server_that_never_has_the_bytes_ends_it_and_keeps_what_is_there() {
    let place = Place::new();
    place.add_gguf("org/m");
    place.hub.faults(|f| (f.cut_after, f.cuts) = (Some(700_000), Some(3)));
    place.hub.faults(|f| f.bytes_status = None);
    let stopping = Heard { stop_at: Some(1), ..Heard::default() };
    place.hub.faults(|f| f.slow = Some(Duration::from_millis(3)));
    let _ = place.pull_with("org/m", &stopping);
    place.hub.faults(|f| f.bytes_status = Some((503, u32::MAX, None)));
    let error = place.refused("org/m");
    assert!(error.contains("503") && error.contains("what is there is kept"), "{error}");
    place.hub.faults(|f| (f.bytes_status, f.slow) = (None, None));
    let heard = Heard::default();
    place.pull_with("org/m", &heard).unwrap();
    assert!(heard.planned.borrow().unwrap().1 > 0);
}

#[test]
fn a_damaged_rest_of_an_earlier_try_is_noticed() {
    let place = Place::new();
    let content = place.add_gguf("org/m");
    place.hub.faults(|f| f.slow = Some(Duration::from_millis(2)));
    let stopping = Heard { stop_at: Some(4 << 20), ..Heard::default() };
    place.pull_with("org/m", &stopping).unwrap_err();
    place.hub.faults(|f| f.slow = None);
    let incomplete =
        place.leftovers().into_iter().find(|path| path.to_string_lossy().ends_with(".incomplete")).unwrap();
    OpenOptions::new().write(true).open(incomplete).unwrap().write_all_at(b"damage", 100).unwrap();
    let model = place.pull("org/m").unwrap();
    assert!(fs::read(&model.path).unwrap() == content.bytes());
}
