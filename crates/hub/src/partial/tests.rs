use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::blob::{BLOCK, REQUEST};
use super::record::{HEADER, boot_id, incomplete, read_record};
use super::*;

const SIZE: u64 = (20 << 20) + 5;

fn filled(blob: &Path) -> Partial {
    let partial = Partial::open(blob, SIZE).unwrap();
    partial.reserve().unwrap();
    {
        let (mut first, mut second) = (partial.claim(REQUEST.0).unwrap(), partial.claim(REQUEST.0).unwrap());
        assert_eq!((first.range(), second.range()), ((0, 8 << 20), (8 << 20, 16 << 20)));
        first.write(&[1; 1000]).unwrap();
        second.write(&[2; 500]).unwrap();
    }
    partial
}

#[test]
fn what_was_written_is_there_after_a_kill() {
    let dir = tempfile::tempdir().unwrap();
    let blob = dir.path().join("abc");
    drop(filled(&blob));
    assert_eq!(progress(&blob), Some((1500, SIZE)));
    let again = Partial::open(&blob, SIZE).unwrap();
    assert_eq!((again.written(), again.frontier()), (1500, 1000));
    let mut bytes = [0; 500];
    again.read(&mut bytes, 8 << 20).unwrap();
    assert_eq!(bytes, [2; 500]);
    assert_eq!(again.claim(REQUEST.0).unwrap().range(), (1000, 8 << 20));
}

#[test]
fn after_a_crash_of_the_machine_only_what_was_synced_counts() {
    let dir = tempfile::tempdir().unwrap();
    let blob = dir.path().join("abc");
    let partial = filled(&blob);
    partial.sync().unwrap();
    partial.claim(REQUEST.0).unwrap().write(&[1; 24]).unwrap();
    drop(partial);
    assert_eq!(progress(&blob), Some((1524, SIZE)));
    // Another boot.
    let record = OpenOptions::new().write(true).open(dir.path().join("abc.sluice.progress")).unwrap();
    record.write_all_at(b"another", 32).unwrap();
    assert_eq!(Partial::open(&blob, SIZE).unwrap().written(), 1500);
}

#[test]
fn a_record_that_cannot_be_is_begun_again() {
    let dir = tempfile::tempdir().unwrap();
    let blob = dir.path().join("abc");
    let record = dir.path().join("abc.sluice.progress");
    drop(filled(&blob));
    let good = fs::read(&record).unwrap();
    let with = |at: usize, bytes: &[u8]| {
        let mut bad = good.clone();
        bad[at..at + bytes.len()].copy_from_slice(bytes);
        bad
    };
    let huge = u64::MAX.to_le_bytes();
    for bad in [
        vec![],
        good[..good.len() - 1].to_vec(),
        with(0, b"X"),
        with(16, &huge),
        with(24, &[0; 8]),
        with(24, &1_u64.to_le_bytes()),
        with(HEADER, &huge),
        with(24, &huge),
    ] {
        fs::write(&record, &bad).unwrap();
        assert_eq!(Partial::open(&blob, SIZE).unwrap().written(), 0);
    }
    // Nor is one whose file has another length.
    fs::write(&record, &good).unwrap();
    OpenOptions::new().write(true).open(incomplete(&blob)).unwrap().set_len(SIZE - 1).unwrap();
    assert_eq!(Partial::open(&blob, SIZE).unwrap().written(), 0);
}

#[test]
fn no_record_promises_more_than_the_blob_has() {
    let mut random = fastrand::Rng::with_seed(1);
    let dir = tempfile::tempdir().unwrap();
    let blob = dir.path().join("abc");
    drop(filled(&blob));
    let good = fs::read(dir.path().join("abc.sluice.progress")).unwrap();
    let mut read = 0;
    for _ in 0..20_000 {
        let mut bad = good.clone();
        for _ in 0..random.usize(1..4) {
            let at = random.usize(16..bad.len());
            bad[at] = random.u8(..);
        }
        bad.truncate(random.usize(bad.len() - 2..=bad.len()));
        let Some((size, segment, entries)) = read_record(&bad, &boot_id()) else { continue };
        read += 1;
        assert!(entries.iter().map(|(written, _)| written).sum::<u64>() <= size && segment > 0);
    }
    assert!(read > 0);
}

#[test]
fn a_whole_blob_gets_its_name_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let blob = dir.path().join("abc");
    let partial = Partial::open(&blob, 10).unwrap();
    partial.reserve().unwrap();
    partial.claim(REQUEST.0).unwrap().write(b"0123456789").unwrap();
    assert!(partial.claim(REQUEST.0).is_none() && !blob.exists());
    partial.finish(&blob).unwrap();
    assert_eq!(fs::read(&blob).unwrap(), b"0123456789");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn claims_go_from_segment_to_segment() {
    let dir = tempfile::tempdir().unwrap();
    let partial = Partial::open(&dir.path().join("abc"), SIZE).unwrap();
    let (first, third) = (partial.claim(REQUEST.0).unwrap(), {
        let (_a, b) = (partial.claim(REQUEST.0).unwrap(), partial.claim(REQUEST.0).unwrap());
        b
    });
    let second = first.next().unwrap();
    assert_eq!(second.range().0, 8 << 20);
    assert!(second.next().is_none());
    drop(third);
    partial.reset().unwrap();
    assert_eq!(partial.written(), 0);
}

#[test]
fn what_is_asked_for_comes_first_and_again_if_it_breaks_off() {
    let dir = tempfile::tempdir().unwrap();
    let partial = Partial::open(&dir.path().join("abc"), SIZE).unwrap();
    let (far, near) = (12 << 20..(12 << 20) + 1000, (4 << 20) + 5..(5 << 20) + 5);
    partial.ask(&far, Urgency::Soon);
    partial.ask(&near, Urgency::Now);
    assert!(!partial.has(&near) && partial.has(&(7..7)) && partial.has(&(SIZE..SIZE + 9)));
    let soon = partial.claim_asked(Urgency::Soon, REQUEST.0).unwrap();
    assert_eq!(soon.range(), (12 << 20, (12 << 20) + BLOCK));
    // In pieces, for several connections.
    let mut first = partial.claim_asked(Urgency::Now, 1 << 20).unwrap();
    assert_eq!(first.range(), (4 << 20, 5 << 20));
    let second = partial.claim_asked(Urgency::Now, 1 << 20).unwrap();
    assert_eq!(second.range(), (5 << 20, (5 << 20) + BLOCK));
    assert!(partial.claim_asked(Urgency::Now, 1 << 20).is_none());
    // A connection ends in the middle of a block.
    first.write(&vec![1; 100_000]).unwrap();
    assert_eq!(first.range(), ((4 << 20) + 100_000, 5 << 20));
    drop(first);
    let mut again = partial.claim_asked(Urgency::Now, 1 << 20).unwrap();
    assert_eq!(again.range().0, (4 << 20) + 100_000);
    // What was begun is continued, and what follows is another request.
    let (at, end) = again.range();
    again.write(&vec![1; (end - at) as usize]).unwrap();
    assert!(!partial.has(&near));
    let mut second = second;
    second.write(&vec![1; BLOCK as usize]).unwrap();
    assert!(partial.has(&near) && !partial.has(&(near.start..near.end + BLOCK)));
    // Whatever is there is no longer asked for.
    partial.ask(&near, Urgency::Now);
    drop((again, second));
    assert!(partial.claim_asked(Urgency::Now, 1 << 20).is_none());
    assert_eq!((partial.written(), partial.frontier()), ((1 << 20) + BLOCK, 0));
    // In order, blocks that are there are left out.
    let before = partial.claim(REQUEST.1).unwrap();
    assert_eq!(before.range(), (0, 4 << 20));
    assert_eq!(partial.claim(REQUEST.1).unwrap().range(), ((5 << 20) + BLOCK, 12 << 20));
    partial.give_up("no network");
    assert_eq!(partial.fate(), Some(&Err("no network".to_owned())));
}

#[test]
fn a_record_of_long_blocks_is_continued() {
    let dir = tempfile::tempdir().unwrap();
    let blob = dir.path().join("abc");
    drop(filled(&blob));
    // As earlier versions wrote it: three blocks of 8 MiB.
    let path = dir.path().join("abc.sluice.progress");
    let mut record = fs::read(&path).unwrap()[..HEADER].to_vec();
    record[24..32].copy_from_slice(&(8_u64 << 20).to_le_bytes());
    for written in [1000_u64, 500, 0] {
        record.extend([written, 0].map(u64::to_le_bytes).concat());
    }
    fs::write(&path, record).unwrap();
    let partial = Partial::open(&blob, SIZE).unwrap();
    let claims: Vec<Claim> = std::iter::from_fn(|| partial.claim(REQUEST.0)).collect();
    let ranges: Vec<(u64, u64)> = claims.iter().map(Claim::range).collect();
    assert_eq!(ranges, [(1000, 8 << 20), ((8 << 20) + 500, 16 << 20), (16 << 20, SIZE)]);
}
