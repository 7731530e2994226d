//! Decides whether reading a prefix is faster than computing it, from measured times of both.

use std::time::Duration;

/// Weight of the newest measurement in the moving average.
const NEWEST: f64 = 0.25;
/// The estimate for reading shrinks by this factor whenever something is not read, so that a disk that was busy once is tried again.
const DECAY: f64 = 0.95;
/// Smaller measurements say little about the cost of a token or a byte.
const MIN_TOKENS: usize = 16;
const MIN_BYTES: u64 = 1 << 20;

/// Bounds of the time that a store may take to give what could be computed instead, and what it may take if nothing was computed yet.
const LEAST_PATIENCE: Duration = Duration::from_secs(1);
const MOST_PATIENCE: Duration = Duration::from_secs(60);
const FIRST_PATIENCE: Duration = Duration::from_secs(10);

/// Where bytes are read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    Disk,
    /// At least in part from the store that replicas share.
    Store,
}

/// Measured seconds; `None` before the first measurement.
#[derive(Debug, Default)]
pub(crate) struct RestoreCosts {
    /// By origin.
    per_byte: [Option<f64>; 2],
    per_token: Option<f64>,
}

/// Updates a moving average.
fn mix(known: &mut Option<f64>, new: f64) {
    *known = Some(known.map_or(new, |old| old + NEWEST * (new - old)));
}

impl RestoreCosts {
    /// Notes a step that computed nothing but these tokens of prompts.
    pub fn note_computed(&mut self, tokens: usize, time: Duration) {
        if tokens >= MIN_TOKENS {
            mix(&mut self.per_token, time.as_secs_f64() / tokens as f64);
        }
    }

    /// Notes the time that it took to read bytes and copy them to their blocks.
    pub fn note_read(&mut self, origin: Origin, bytes: u64, time: Duration) {
        if bytes >= MIN_BYTES {
            mix(&mut self.per_byte[origin as usize], time.as_secs_f64() / bytes as f64);
        }
    }

    /// How long a store may take to give these tokens: as long as it would take to compute them.
    pub fn patience(&self, tokens: usize) -> Duration {
        let computing = self.per_token.map(|token| Duration::from_secs_f64((token * tokens as f64).min(1e6)));
        computing.unwrap_or(FIRST_PATIENCE).clamp(LEAST_PATIENCE, MOST_PATIENCE)
    }

    /// Whether reading these bytes is faster than computing these tokens. Yes where one of the two was never measured.
    pub fn is_reading_faster(&mut self, origin: Origin, bytes: u64, tokens: usize) -> bool {
        let per_byte = &mut self.per_byte[origin as usize];
        let (Some(byte), Some(token)) = (*per_byte, self.per_token) else { return true };
        let is_faster = byte * bytes as f64 <= token * tokens as f64;
        if !is_faster {
            *per_byte = Some(byte * DECAY);
        }
        is_faster
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_quicker_to_compute_is_not_read_until_the_disk_is_tried_again() {
        let mut costs = RestoreCosts::default();
        assert!(costs.is_reading_faster(Origin::Disk, u64::MAX, 1), "nothing is known");
        costs.note_computed(100, Duration::from_millis(100));
        costs.note_read(Origin::Disk, 10 << 20, Duration::from_secs(10));
        // A token takes a millisecond, a megabyte a second.
        assert!(
            costs.is_reading_faster(Origin::Disk, 1 << 20, 1100)
                && !costs.is_reading_faster(Origin::Disk, 1 << 20, 900)
        );
        assert!((0..10).any(|_| costs.is_reading_faster(Origin::Disk, 1 << 20, 900)));
        // Of the store nothing is known yet; it may take as long as computing does.
        assert!(costs.is_reading_faster(Origin::Store, 1 << 20, 900));
        assert_eq!(costs.patience(5000), Duration::from_secs(5));
        assert_eq!((costs.patience(1), costs.patience(1 << 30)), (LEAST_PATIENCE, MOST_PATIENCE));
    }
}
