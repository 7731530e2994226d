//! Workloads: prompts from a seed. Their lengths in tokens are exact if the server takes token ids.

use fastrand::Rng;
use serde_json::{Value, json};

/// A prompt and how many tokens to generate after it.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// A string or a list of token ids.
    pub prompt: Value,
    /// Tokens to generate.
    pub output: usize,
}

/// How prompts are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spelling {
    /// As token ids below this one.
    Ids(u32),
    /// As words, about one token each.
    Words,
}

/// The lowest id that is sent: many vocabularies start with control tokens.
const LOWEST: u32 = 256;

impl Spelling {
    /// A prompt of `shared` tokens that all prompts of this seed begin with, and `own` tokens that no other has.
    pub fn prompt(self, seed: u64, number: u64, shared: usize, own: usize) -> Value {
        let (mut common, mut unique) = (Rng::with_seed(seed), Rng::with_seed(mixed(seed, number)));
        match self {
            Spelling::Ids(vocabulary) => {
                let lowest = LOWEST.min(vocabulary / 2);
                let id = |rng: &mut Rng| rng.u32(lowest..vocabulary);
                let mut ids: Vec<u32> = (0..shared).map(|_| id(&mut common)).collect();
                ids.extend((0..own).map(|_| id(&mut unique)));
                json!(ids)
            }
            Spelling::Words => {
                let mut words: Vec<String> = (0..shared).map(|_| word(&mut common)).collect();
                words.extend((0..own).map(|_| word(&mut unique)));
                json!(words.join(" "))
            }
        }
    }
}

/// What all requests have in common.
#[derive(Clone)]
pub struct RequestTemplate {
    /// The model to request.
    pub model: String,
    /// How prompts are written.
    pub spelling: Spelling,
    /// Seed of the workload.
    pub seed: u64,
    /// Tokens of a prompt.
    pub input: usize,
    /// Tokens of an answer.
    pub output: usize,
    pub temperature: f64,
}

impl RequestTemplate {
    /// The body of a request without its prompt.
    pub fn body(&self, output: usize) -> Value {
        json!({"model": self.model, "max_tokens": output, "temperature": self.temperature, "ignore_eos": true})
    }

    /// The body of a completion.
    pub fn completion(&self, call: &Call) -> Value {
        let mut body = self.body(call.output);
        body["prompt"] = call.prompt.clone();
        body
    }
}

/// Derives a seed from a seed and a number.
pub fn mixed(seed: u64, number: u64) -> u64 {
    crate::disk::mix(seed ^ crate::disk::mix(number.wrapping_add(1)))
}

/// An invented word of two syllables.
pub fn word(rng: &mut Rng) -> String {
    let mut letter = |from: &[u8]| char::from(from[rng.usize(..from.len())]);
    (0..4).map(|i| letter(if i % 2 == 0 { b"bdfgklmnprstvz" } else { b"aeiou" })).collect()
}

/// This many words, with a full stop.
pub fn sentence(rng: &mut Rng, words: usize) -> String {
    let all: Vec<String> = (0..words).map(|_| word(rng)).collect();
    all.join(" ") + "."
}

/// A length around a mean, between a quarter and seven quarters of it.
pub fn around(rng: &mut Rng, mean: usize) -> usize {
    rng.usize((mean / 4).max(1)..=(mean * 7 / 4).max(1))
}

/// Seconds from the start at which each of `n` requests arrives: a Poisson process with this rate per second, or all at once without a rate.
pub fn arrivals(seed: u64, n: usize, rate: Option<f64>) -> Vec<f64> {
    let (mut rng, mut at) = (Rng::with_seed(mixed(seed, u64::MAX)), 0.0);
    let mut next = |i: usize| {
        if let Some(rate) = rate.filter(|_| i > 0) {
            at -= (1.0 - rng.f64()).ln() / rate;
        }
        at
    };
    (0..n).map(&mut next).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(prompt: &Value) -> Vec<u64> {
        prompt.as_array().unwrap().iter().map(|t| t.as_u64().unwrap()).collect()
    }

    #[test]
    fn prompts_have_their_lengths_and_share_no_more_than_they_should() {
        let of = |number, shared, own| ids(&Spelling::Ids(1000).prompt(7, number, shared, own));
        let (one, other) = (of(0, 40, 60), of(1, 40, 60));
        assert_eq!((one.len(), other.len()), (100, 100));
        assert_eq!(one.iter().zip(&other).take_while(|(a, b)| a == b).count(), 40);
        assert!(one.iter().all(|id| (256..1000).contains(id)));
        assert_eq!(one, of(0, 40, 60));
        let (one, other) = (of(0, 0, 50), of(1, 0, 50));
        assert_ne!(one[0], other[0]);
        let text = Spelling::Words.prompt(7, 0, 3, 4);
        assert_eq!(text.as_str().unwrap().split(' ').count(), 7);
    }

    #[test]
    fn requests_come_at_the_rate_that_was_asked_for() {
        let at = arrivals(3, 2000, Some(10.0));
        assert_eq!(at[0], 0.0);
        assert!(at.windows(2).all(|w| w[0] <= w[1]));
        assert!((180.0..220.0).contains(&at[1999]), "{}", at[1999]);
        assert_eq!(arrivals(3, 3, None), [0.0; 3]);
    }

    #[test]
    fn lengths_vary_around_their_mean() {
        let mut rng = Rng::with_seed(1);
        let all: Vec<usize> = (0..1000).map(|_| around(&mut rng, 100)).collect();
        assert!(all.iter().all(|n| (25..=175).contains(n)));
        let mean = all.iter().sum::<usize>() as f64 / 1000.0;
        assert!((95.0..105.0).contains(&mean), "{mean}");
        assert_eq!(around(&mut rng, 0), 1);
    }
}
