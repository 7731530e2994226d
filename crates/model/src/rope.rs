//! Rotary embeddings: the frequencies that a `config.json` asks for.
//!
//! Source: `modeling_rope_utils.py` of the transformers library, whose parameter names these are, and the papers it names (YaRN: Peng
//! et al. 2023; LongRoPE: Ding et al. 2024). Frequencies are f32, rounded where the reference rounds, so that angles agree.

use anyhow::{Result, anyhow, bail, ensure};
use serde_json::Value;
use sluice_backend::RotaryFrequencies;

use crate::config::Config;

/// Frequencies for heads of `head_dim`, of which `default_partial` is rotated where the config does not say.
/// `context` is how many positions will be used at most: LongRoPE and dynamic NTK choose by it, once, so that positions that are
/// cached stay valid. Multimodal (interleaved) sections come to the same for text, whose three position numbers are equal.
pub fn frequencies(
    config: &Config,
    head_dim: usize,
    default_partial: f64,
    default_theta: f64,
    context: usize,
) -> Result<RotaryFrequencies> {
    // Newer configs hold everything in `rope_parameters`; older ones have `rope_theta` beside `rope_scaling`.
    let parameters = config.get("rope_parameters").or_else(|| config.get("rope_scaling"));
    let path = config.path().display().to_string();
    if let Some(p) = parameters {
        ensure!(p.is_object(), "{path}: rope parameters are not an object");
    }
    let number = |key: &str| -> Result<Option<f64>> {
        let Some(v) = parameters.and_then(|p| p.get(key)).filter(|v| !v.is_null()) else { return Ok(None) };
        let x = v.as_f64().filter(|x| x.is_finite());
        x.map(Some).ok_or_else(|| anyhow!("{path}: rope parameter `{key}` is {v}, expected a number"))
    };
    let needed = |key: &str| number(key)?.ok_or_else(|| anyhow!("{path}: rope parameter `{key}` is missing"));
    let theta = match number("rope_theta")? {
        Some(theta) => theta,
        None => config.float_or("rope_theta", default_theta)?,
    };
    let partial = match number("partial_rotary_factor")? {
        Some(partial) => partial,
        None => config.float_or("partial_rotary_factor", default_partial)?,
    };
    ensure!(theta > 0.0 && partial > 0.0 && partial <= 1.0, "{path}: rope theta {theta}, partial factor {partial}");
    let dim = (head_dim as f64 * partial) as usize;
    ensure!(dim >= 2 && dim.is_multiple_of(2), "{path}: {dim} of {head_dim} head dimensions are rotated; must be even");
    let max_positions = config.size_or("max_position_embeddings", 32768)? as f64;
    let original = match number("original_max_position_embeddings")? {
        Some(n) => Some(n),
        None => config.get("original_max_position_embeddings").and_then(Value::as_f64),
    };
    let original_needed =
        || original.ok_or_else(|| anyhow!("{path}: rope parameter `original_max_position_embeddings` is missing"));

    // theta^(2i / dim), in f32 as the reference computes it.
    let powers = |theta: f64| -> Vec<f32> {
        (0..dim / 2).map(|i| libm::pow(theta as f32 as f64, ((2 * i) as f32 / dim as f32) as f64) as f32).collect()
    };
    let inverse = |theta: f64| -> Vec<f32> { powers(theta).iter().map(|p| 1.0 / p).collect() };

    let kind = parameters.and_then(|p| p.get("rope_type").or_else(|| p.get("type"))).and_then(Value::as_str);
    let (inv_freq, scaling): (Vec<f32>, f64) = match kind.unwrap_or("default") {
        // A multimodal section list alone changes nothing for text.
        "default" | "mrope" => (inverse(theta), 1.0),
        "linear" => {
            let factor = needed("factor")? as f32;
            (inverse(theta).iter().map(|f| f / factor).collect(), 1.0)
        }
        "dynamic" => {
            let factor = needed("factor")?;
            let length = (context as f64).max(max_positions);
            let stretch = factor * length / max_positions - (factor - 1.0);
            let exponent = dim as f64 / (dim as f64 - 2.0);
            (inverse(theta * libm::pow(stretch, exponent)), 1.0)
        }
        "yarn" => {
            let original = original_needed()?;
            let factor = number("factor")?.unwrap_or(max_positions / original);
            let mscale = |scale: f64, m: f64| if scale <= 1.0 { 1.0 } else { 0.1 * m * libm::log(scale) + 1.0 };
            let scaling = match (number("attention_factor")?, number("mscale")?, number("mscale_all_dim")?) {
                (Some(given), ..) => given,
                (None, Some(m), Some(all)) if m != 0.0 && all != 0.0 => mscale(factor, m) / mscale(factor, all),
                _ => mscale(factor, 1.0),
            };
            let fast = number("beta_fast")?.filter(|b| *b != 0.0).unwrap_or(32.0);
            let slow = number("beta_slow")?.filter(|b| *b != 0.0).unwrap_or(1.0);
            // The dimension that turns `rotations` times over the original context.
            let correction = |rotations: f64| {
                dim as f64 * libm::log(original / (rotations * 2.0 * std::f64::consts::PI)) / (2.0 * libm::log(theta))
            };
            let (mut low, mut high) = (correction(fast), correction(slow));
            if parameters.and_then(|p| p.get("truncate")).and_then(Value::as_bool).unwrap_or(true) {
                (low, high) = (low.floor(), high.ceil());
            }
            let (low, mut high) = (low.max(0.0), high.min(dim as f64 - 1.0));
            if low == high {
                high += 0.001;
            }
            let blended = powers(theta).into_iter().enumerate().map(|(i, power)| {
                let ramp = ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
                let (extrapolated, interpolated) = (1.0 / power, 1.0 / (factor as f32 * power));
                let keep = 1.0 - ramp;
                interpolated * (1.0 - keep) + extrapolated * keep
            });
            (blended.collect(), scaling)
        }
        "longrope" => {
            let original = original_needed()?;
            let factor = number("factor")?.unwrap_or(max_positions / original);
            let scaling = match number("attention_factor")? {
                Some(given) => given,
                None if factor <= 1.0 => 1.0,
                None => (1.0 + libm::log(factor) / libm::log(original)).sqrt(),
            };
            let key = if context as f64 > original { "long_factor" } else { "short_factor" };
            let list = parameters.and_then(|p| p.get(key)).and_then(Value::as_array);
            let list: Option<Vec<f64>> = list.and_then(|l| l.iter().map(Value::as_f64).collect());
            let list = list.ok_or_else(|| anyhow!("{path}: rope parameter `{key}` is not a list of numbers"))?;
            ensure!(
                list.len() == dim / 2,
                "{path}: rope parameter `{key}` has {} entries, not {}",
                list.len(),
                dim / 2
            );
            (powers(theta).iter().zip(list).map(|(p, f)| 1.0 / (f as f32 * p)).collect(), scaling)
        }
        "llama3" => {
            let (factor, old) = (needed("factor")? as f32, original_needed()? as f32);
            let (low, high) = (needed("low_freq_factor")? as f32, needed("high_freq_factor")? as f32);
            let scaled = inverse(theta).into_iter().map(|f| {
                let wavelength = 2.0 * std::f32::consts::PI / f;
                if wavelength > old / low {
                    f / factor
                } else if wavelength < old / high {
                    f
                } else {
                    let smooth = (old / wavelength - low) / (high - low);
                    (1.0 - smooth) * f / factor + smooth * f
                }
            });
            (scaled.collect(), 1.0)
        }
        other => {
            bail!("{path}: rope type {other:?} is not supported (default, linear, dynamic, yarn, longrope, llama3 are)")
        }
    };
    Ok(RotaryFrequencies { inv_freq, scaling: scaling as f32 })
}
