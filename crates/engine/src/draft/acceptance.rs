//! Learns how often drafted tokens come true.

/// Classes of likelihood that drafters sort their tokens into.
pub(crate) const CLASSES: usize = 8;
/// The share of accepted tokens by class before anything is known: a guess, which a few tokens outweigh.
const GUESSES: [f64; CLASSES] = [0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.93];
/// How many tokens a guess counts as.
const GUESS_WEIGHT: f64 = 3.0;
/// The share of all tokens, whatever their class, before anything is known.
const GUESS: f64 = 0.6;
/// What may be hoped for lies above the share that is known by this over the root of the number of tokens: one standard deviation of a coin.
const HOPE: f64 = 0.5;
/// What older tokens count for when another comes: the newest thirty decide.
const KEPT: f64 = 0.97;

/// Tokens of one class.
#[derive(Clone, Copy, Debug, Default)]
struct Tried {
    accepted: f64,
    all: f64,
}

/// The share of drafted tokens that came true, given that those before them did.
#[derive(Clone, Debug)]
pub(crate) struct Acceptance {
    guesses: [f64; CLASSES],
    /// Of all classes together.
    guess: f64,
    tried: [Tried; CLASSES],
}

impl Default for Acceptance {
    fn default() -> Acceptance {
        Acceptance { guesses: GUESSES, guess: GUESS, tried: [Tried::default(); CLASSES] }
    }
}

impl Acceptance {
    /// The chance that a token of this class comes true.
    pub fn chance(&self, class: u8) -> f64 {
        let class = usize::from(class).min(CLASSES - 1);
        let Tried { accepted, all } = self.tried[class];
        (accepted + GUESS_WEIGHT * self.guesses[class]) / (all + GUESS_WEIGHT)
    }

    /// The chance that a token comes true, before its class is known.
    pub fn usual_chance(&self) -> f64 {
        let sum = |of: fn(&Tried) -> f64| self.tried.iter().map(of).sum::<f64>();
        (sum(|t| t.accepted) + GUESS_WEIGHT * self.guess) / (sum(|t| t.all) + GUESS_WEIGHT)
    }

    /// What may be hoped for instead: the less is known, the more.
    pub fn hopeful_chance(&self) -> f64 {
        let known: f64 = self.tried.iter().map(|t| t.all).sum();
        (self.usual_chance() + HOPE / (known + GUESS_WEIGHT).sqrt()).min(1.0)
    }

    /// A token of this class was proposed, and the token in its place is known.
    pub fn learn(&mut self, class: u8, accepted: bool) {
        let tried = &mut self.tried[usize::from(class).min(CLASSES - 1)];
        tried.accepted = tried.accepted * KEPT + f64::from(u8::from(accepted));
        tried.all = tried.all * KEPT + 1.0;
    }

    /// What a new sequence begins with: the shares known here are its guesses.
    pub fn as_guesses(&self) -> Acceptance {
        let guesses = std::array::from_fn(|class| self.chance(class as u8));
        Acceptance { guesses, guess: self.usual_chance(), tried: Default::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_came_true_lately_outweighs_a_guess() {
        let mut acceptance = Acceptance::default();
        let is_guess =
            |acceptance: &Acceptance, class: u8| (acceptance.chance(class) - GUESSES[usize::from(class)]).abs() < 1e-9;
        assert!(is_guess(&acceptance, 0));
        (0..100).for_each(|_| acceptance.learn(0, true));
        assert!(acceptance.chance(0) > 0.9 && is_guess(&acceptance, 1));
        (0..100).for_each(|_| acceptance.learn(0, false));
        assert!(acceptance.chance(0) < 0.1, "{}", acceptance.chance(0));
        let next = acceptance.as_guesses();
        assert!((next.chance(0) - acceptance.chance(0)).abs() < 1e-9);
    }
}
