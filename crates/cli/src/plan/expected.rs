//! One line on how fast a model would be here, before it is fetched: `plan`'s arithmetic, with what is known of a model by then, its config or only its size.

use std::path::Path;

use sluice_model::{Config, Description, Options};
use sluice_store::{MAX_SETTINGS, read_small};

use super::estimate::{Disk, Precision, Split, Token, Weights, hit_rate};
use super::memory;
use super::shape::Shape;
use crate::units;
use sluice_front::machine;

/// A usual disk, for experts that do not fit: NVMe over PCIe 3.
const DISK: Disk = Disk { bandwidth: 3.5e9, latency: 100e-6 };
/// Tokens of the conversation that must fit beside the weights.
const CONTEXT: u64 = 8192;
/// Below so many bytes nobody asks.
const SMALL: u64 = 16 << 20;

/// What to expect.
#[derive(Clone, Debug, PartialEq)]
pub struct Expected {
    pub tokens_per_second: f64,
    /// For people: one clause.
    pub text: String,
}

/// What to expect of a model whose files have `bytes` bytes, from its config if there is one. `None` for a small model, and where nothing is known.
pub fn of(config: Option<&Path>, bytes: u64, name: &str) -> Option<Expected> {
    if bytes < SMALL {
        return None;
    }
    // Measuring takes some memory itself.
    let memory = machine::room().filter(|room| *room >= memory::NEEDED)?;
    let described = config.and_then(|path| {
        let config = Config::parse(path.to_owned(), &read_small(path, MAX_SETTINGS).ok()?).ok()?;
        sluice_model::describe(&config, &Options::default()).ok()
    });
    match described {
        Some(model) => of_described(&model, bytes, memory),
        None => of_size(bytes, active_part(name), memory),
    }
}

fn of_described(model: &Description, bytes: u64, memory: u64) -> Option<Expected> {
    let shape = Shape::of(model);
    let precision = nearest(8.0 * bytes as f64 / shape.parameters().max(1) as f64);
    let products = memory::measure_for(bytes, precision).ok()?;
    let weights = Weights::new(&shape, precision, precision, shape.k);
    let split = Split::new(&shape, &weights, memory, CONTEXT, 2);
    if split.missing > 0 {
        // Weights that do not fit are read from the disk for each token.
        let seconds = weights.resident_read as f64 / products.resident + split.missing as f64 / DISK.bandwidth;
        let text = format!(
            "{} more memory is needed than there is, so the disk is read for each token",
            units::bytes(split.missing)
        );
        return Some(expected(1.0 / seconds, &text));
    }
    if weights.experts == 0 || split.for_experts >= weights.experts {
        let token = Token::new(&weights, 1.0, DISK, products);
        return Some(expected(1.0 / token.seconds, "all of it fits in memory"));
    }
    let part = split.for_experts as f64 / weights.experts as f64;
    let token = Token::new(&weights, hit_rate(part), DISK, products);
    Some(expected(
        1.0 / token.seconds,
        &format!("{:.0} % of its experts fit in memory, the others come from an NVMe disk", 100.0 * part),
    ))
}

/// Only the size is known: a token reads all bytes, or the part that the model's name says.
fn of_size(bytes: u64, active: f64, memory: u64) -> Option<Expected> {
    let precision = Precision { bits: 4, group: 64 };
    let products = memory::measure_for(bytes, precision).ok()?;
    let read = bytes as f64 * active;
    let (seconds, text) = if bytes <= memory {
        (read / products.resident, "all of it fits in memory".to_owned())
    } else {
        let part = memory as f64 / bytes as f64;
        (
            read / products.resident + read * (1.0 - part) / DISK.bandwidth,
            format!("{:.0} % of it fit in memory, the rest comes from an NVMe disk", 100.0 * part),
        )
    };
    Some(expected(1.0 / seconds, &text))
}

fn expected(tokens_per_second: f64, why: &str) -> Expected {
    let digits = if tokens_per_second < 9.95 { 1 } else { 0 };
    Expected {
        tokens_per_second,
        text: format!("about {tokens_per_second:.digits$} tokens/s are expected here: {why}"),
    }
}

/// The precision that so many bits per weight mean: groups of 64 with a scale and a bias of 16 bits take half a bit more.
fn nearest(bits: f64) -> Precision {
    let away = |known: &u64| {
        let stored = *known as f64 + if *known < 16 { 0.5 } else { 0.0 };
        ((stored - bits).abs() * 1e6) as u64
    };
    let bits = [2, 3, 4, 5, 6, 8, 16, 32].into_iter().min_by_key(away).expect("there are some");
    Precision { bits, group: 64 }
}

/// The part of its weights that a token of a mixture reads, by the mixture's name: 3 of 30 for `Qwen3-30B-A3B`.
fn active_part(name: &str) -> f64 {
    let billions = |word: &str, before: &str| word.strip_prefix(before)?.strip_suffix('B')?.parse::<f64>().ok();
    let upper = name.to_ascii_uppercase();
    let words: Vec<&str> = upper.split(['-', '_', ':', '/']).collect();
    let found = |before: &str| words.iter().find_map(|word| billions(word, before)).filter(|n| *n > 0.0);
    match found("A").zip(found("")) {
        Some((active, all)) if active < all => active / all,
        _ => 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mixtures_name_says_what_a_token_reads() {
        assert_eq!(active_part("unsloth/Qwen3-30B-A3B-GGUF:Q4_K_M"), 0.1);
        assert_eq!(active_part("Qwen/Qwen3-235B-A22B"), 22.0 / 235.0);
        for name in ["Qwen/Qwen3-8B-GGUF", "org/A3B", "org/model"] {
            assert_eq!(active_part(name), 1.0, "{name}");
        }
    }

    #[test]
    fn bits_per_weight_mean_a_precision() {
        for (bits, meant) in [(4.5, 4), (4.8, 4), (8.5, 8), (16.0, 16), (15.9, 16), (32.0, 32), (2.6, 2)] {
            assert_eq!(nearest(bits).bits, meant, "{bits}");
        }
    }

    #[test]
    fn what_does_not_fit_is_slower() {
        let [fits, not] = [10 << 30, 1 << 30].map(|memory| of_size(4 << 30, 1.0, memory).unwrap());
        assert!(fits.tokens_per_second > not.tokens_per_second && not.text.contains("25 %"), "{fits:?} {not:?}");
        assert!(fits.text.contains("fits in memory") && fits.text.starts_with("about "), "{fits:?}");
        assert_eq!(of(None, 1 << 20, "org/small"), None);
    }
}
