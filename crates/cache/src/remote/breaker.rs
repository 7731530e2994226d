//! Gives a store up for a while that keeps failing, so that requests do not wait for it again and again.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// So many failures in a row end the use of the store for a pause. Each failure after a pause doubles the next one.
const FAILURES: u32 = 3;
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// A switch that failures turn off and time turns on.
#[derive(Debug, Default)]
pub(super) struct Breaker(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    failures: u32,
    pause: Duration,
    off_until: Option<Instant>,
}

impl Breaker {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the store may be asked.
    pub fn is_on(&self) -> bool {
        self.pause().is_zero()
    }

    /// How long the store may not be asked.
    pub fn pause(&self) -> Duration {
        self.state().off_until.map_or(Duration::ZERO, |until| until.saturating_duration_since(Instant::now()))
    }

    /// Notes an answer. Returns whether the store had been given up.
    pub fn succeeded(&self) -> bool {
        let mut state = self.state();
        std::mem::take(&mut *state).failures >= FAILURES
    }

    /// Notes a failure. Returns whether the store is given up now, and was not before.
    pub fn failed(&self) -> bool {
        let mut state = self.state();
        // Those that were under way when the first of them failed count once.
        if state.off_until.is_some_and(|until| Instant::now() < until) {
            return false;
        }
        state.failures += 1;
        if state.failures < FAILURES {
            return false;
        }
        state.pause = (state.pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE);
        state.off_until = Some(Instant::now() + state.pause);
        state.failures == FAILURES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_that_keeps_failing_is_given_up_and_tried_again_later() {
        let breaker = Breaker::default();
        assert!(!breaker.failed() && !breaker.failed() && breaker.is_on());
        assert!(breaker.failed() && !breaker.is_on());
        assert!(!breaker.failed(), "it was given up already");
        let first = breaker.pause();
        assert!(first <= FIRST_PAUSE && first > FIRST_PAUSE / 2);
        // After the pause one failure is enough, and the pause is longer.
        breaker.state().off_until = Some(Instant::now());
        assert!(breaker.is_on() && !breaker.failed() && !breaker.is_on());
        assert!(breaker.pause() > FIRST_PAUSE);
        assert!(breaker.succeeded() && breaker.is_on() && !breaker.succeeded());
    }
}
