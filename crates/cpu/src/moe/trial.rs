//! Whether looking ahead makes steps faster, by measurement.

use std::time::Duration;

use sluice_backend::Lookahead;

/// Consecutive steps that measure each setting, and steps that then use the faster one.
const TRIED: u32 = 8;
const KEPT: u32 = 128;

/// Whether to look ahead, decided by measurement: some steps without, some with, then many with the faster setting.
pub struct Trial {
    pub mode: Lookahead,
    on: bool,
    /// Steps left in this phase; the first two measure.
    left: u32,
    phase: u8,
    times: [Vec<Duration>; 2],
}

impl Trial {
    pub fn new(mode: Lookahead) -> Trial {
        let times = [(); 2].map(|()| Vec::with_capacity(TRIED as usize));
        Trial { mode, on: mode == Lookahead::On, left: TRIED, phase: 0, times }
    }

    pub fn is_on(&self) -> bool {
        self.on
    }

    /// Counts a step that took `time`.
    pub fn step(&mut self, time: Duration) {
        if self.mode != Lookahead::Auto {
            return;
        }
        if self.phase < 2 {
            self.times[usize::from(self.phase)].push(time);
        }
        self.left -= 1;
        if self.left > 0 {
            return;
        }
        self.phase = (self.phase + 1) % 3;
        self.left = if self.phase == 2 { KEPT } else { TRIED };
        self.on = match self.phase {
            0 => false,
            1 => true,
            _ => {
                let [without, with] = &mut self.times;
                without.sort_unstable();
                with.sort_unstable();
                let better = with[with.len() / 2] < without[without.len() / 2];
                without.clear();
                with.clear();
                better
            }
        };
    }
}
