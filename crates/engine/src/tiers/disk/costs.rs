//! Decides whether reading a prefix is faster than computing it, from measured times of both.

use std::time::Duration;

/// Weight of the newest measurement in the moving average.
const NEWEST: f64 = 0.25;
/// The estimate for reading shrinks by this factor whenever something is not read, so that a disk that was busy once is tried again.
const DECAY: f64 = 0.95;
/// Smaller measurements say little about the cost of a token or a byte.
const MIN_TOKENS: usize = 16;
const MIN_BYTES: u64 = 1 << 20;

/// Measured seconds; `None` before the first measurement.
#[derive(Debug, Default)]
pub(crate) struct Costs {
    per_byte: Option<f64>,
    per_token: Option<f64>,
}

/// Updates a moving average.
fn mix(known: &mut Option<f64>, new: f64) {
    *known = Some(known.map_or(new, |old| old + NEWEST * (new - old)));
}

impl Costs {
    /// Notes a step that computed nothing but these tokens of prompts.
    pub fn note_computed(&mut self, tokens: usize, time: Duration) {
        if tokens >= MIN_TOKENS {
            mix(&mut self.per_token, time.as_secs_f64() / tokens as f64);
        }
    }

    /// Notes the time that it took to read bytes and copy them to their blocks.
    pub fn note_read(&mut self, bytes: u64, time: Duration) {
        if bytes >= MIN_BYTES {
            mix(&mut self.per_byte, time.as_secs_f64() / bytes as f64);
        }
    }

    /// Whether reading these bytes is faster than computing these tokens. Yes where one of the two was never measured.
    pub fn is_reading_faster(&mut self, bytes: u64, tokens: usize) -> bool {
        let (Some(byte), Some(token)) = (self.per_byte, self.per_token) else { return true };
        let is_faster = byte * bytes as f64 <= token * tokens as f64;
        if !is_faster {
            self.per_byte = Some(byte * DECAY);
        }
        is_faster
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_quicker_to_compute_is_not_read_until_the_disk_is_tried_again() {
        let mut costs = Costs::default();
        assert!(costs.is_reading_faster(u64::MAX, 1), "nothing is known");
        costs.note_computed(100, Duration::from_millis(100));
        costs.note_read(10 << 20, Duration::from_secs(10));
        // A token takes a millisecond, a megabyte a second.
        assert!(costs.is_reading_faster(1 << 20, 1100) && !costs.is_reading_faster(1 << 20, 900));
        assert!((0..10).any(|_| costs.is_reading_faster(1 << 20, 900)));
    }
}
