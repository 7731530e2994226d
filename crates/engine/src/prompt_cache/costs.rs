//! Whether reading a prefix is quicker than computing it, by what both were seen to take.

use std::time::Duration;

/// How much the newest measurement says.
const NEWEST: f64 = 0.25;
/// Each time that something is not read, what reading takes is thought to be less by so much: a disk that was busy once is tried again some day.
const FORGIVEN: f64 = 0.95;
/// Fewer tokens of a prompt, or bytes, say little about what one of them takes.
const FEW_TOKENS: usize = 16;
const FEW_BYTES: u64 = 1 << 20;

/// Seconds, as far as they are known.
#[derive(Debug, Default)]
pub(crate) struct Costs {
    per_byte: Option<f64>,
    per_token: Option<f64>,
}

fn mix(known: &mut Option<f64>, new: f64) {
    *known = Some(known.map_or(new, |old| old + NEWEST * (new - old)));
}

impl Costs {
    /// A step that computed nothing but these tokens of prompts has taken so long.
    pub fn computed(&mut self, tokens: usize, time: Duration) {
        if tokens >= FEW_TOKENS {
            mix(&mut self.per_token, time.as_secs_f64() / tokens as f64);
        }
    }

    /// So many bytes were read and put in their place in so long.
    pub fn read(&mut self, bytes: u64, time: Duration) {
        if bytes >= FEW_BYTES {
            mix(&mut self.per_byte, time.as_secs_f64() / bytes as f64);
        }
    }

    /// Whether to read so many bytes instead of computing so many tokens. What is not known yet is tried.
    pub fn is_worth(&mut self, bytes: u64, tokens: usize) -> bool {
        let (Some(byte), Some(token)) = (self.per_byte, self.per_token) else { return true };
        let worth = byte * bytes as f64 <= token * tokens as f64;
        if !worth {
            self.per_byte = Some(byte * FORGIVEN);
        }
        worth
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_quicker_to_compute_is_not_read_until_the_disk_is_tried_again() {
        let mut costs = Costs::default();
        assert!(costs.is_worth(u64::MAX, 1), "nothing is known");
        costs.computed(100, Duration::from_millis(100));
        costs.read(10 << 20, Duration::from_secs(10));
        // A token takes a millisecond, a megabyte a second.
        assert!(costs.is_worth(1 << 20, 1100) && !costs.is_worth(1 << 20, 900));
        assert!((0..10).any(|_| costs.is_worth(1 << 20, 900)));
    }
}
