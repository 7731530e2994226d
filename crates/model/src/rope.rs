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
    // Most are factors and lengths, which divide: 0 would make infinities of frequencies, and less than 0 turn them round.
    let positive = |key: &str| -> Result<Option<f64>> {
        let x = number(key)?;
        ensure!(
            x.is_none_or(|x| x > 0.0),
            "{path}: rope parameter `{key}` is {}, expected a number above 0",
            x.unwrap_or(0.0)
        );
        Ok(x)
    };
    let needed = |key: &str| positive(key)?.ok_or_else(|| anyhow!("{path}: rope parameter `{key}` is missing"));
    let theta = match positive("rope_theta")? {
        Some(theta) => theta,
        None => config.float_or("rope_theta", default_theta, |x| x > 0.0, "a number above 0")?,
    };
    let is_part = |x: f64| x > 0.0 && x <= 1.0;
    let partial = match positive("partial_rotary_factor")? {
        Some(partial) => partial,
        None => config.float_or("partial_rotary_factor", default_partial, is_part, "a number above 0, at most 1")?,
    };
    ensure!(is_part(partial), "{path}: rope parameter `partial_rotary_factor` is {partial}, expected at most 1");
    let dim = (head_dim as f64 * partial) as usize;
    ensure!(dim >= 2 && dim.is_multiple_of(2), "{path}: {dim} of {head_dim} head dimensions are rotated; must be even");
    let max_positions = config.size_or("max_position_embeddings", 32768)? as f64;
    let original = match positive("original_max_position_embeddings")? {
        None if config.get("original_max_position_embeddings").is_some() => {
            Some(config.size("original_max_position_embeddings")? as f64)
        }
        found => found,
    };
    let original_needed =
        || original.ok_or_else(|| anyhow!("{path}: rope parameter `original_max_position_embeddings` is missing"));

    // theta^(2i / dim), in f32 as the reference computes it.
    let powers = |theta: f64| -> Vec<f32> {
        (0..dim / 2).map(|i| libm::pow(theta as f32 as f64, ((2 * i) as f32 / dim as f32) as f64) as f32).collect()
    };
    let inverse = |theta: f64| -> Vec<f32> { powers(theta).iter().map(|p| 1.0 / p).collect() };

    let kind = parameters.and_then(|p| p.get("rope_type").or_else(|| p.get("type"))).filter(|v| !v.is_null());
    let kind = match kind {
        None => "default",
        Some(v) => v.as_str().ok_or_else(|| anyhow!("{path}: rope parameter `rope_type` is {v}, expected a name"))?,
    };
    let (inv_freq, scaling): (Vec<f32>, f64) = match kind {
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
            ensure!(theta > 1.0, "{path}: rope parameter `rope_theta` is {theta}, expected more than 1 for yarn");
            let factor = positive("factor")?.unwrap_or(max_positions / original);
            let mscale = |scale: f64, m: f64| if scale <= 1.0 { 1.0 } else { 0.1 * m * libm::log(scale) + 1.0 };
            let scaling = match (positive("attention_factor")?, number("mscale")?, number("mscale_all_dim")?) {
                (Some(given), ..) => given,
                (None, Some(m), Some(all)) if m != 0.0 && all != 0.0 => mscale(factor, m) / mscale(factor, all),
                _ => mscale(factor, 1.0),
            };
            // As in the reference, 0 is the default.
            let beta = |key: &str, default| match number(key)? {
                None | Some(0.0) => Ok(default),
                Some(b) if b > 0.0 => Ok(b),
                Some(b) => Err(anyhow!("{path}: rope parameter `{key}` is {b}, expected 0 or more")),
            };
            let (fast, slow) = (beta("beta_fast", 32.0)?, beta("beta_slow", 1.0)?);
            // The dimension that turns `rotations` times over the original context.
            let correction = |rotations: f64| {
                dim as f64 * libm::log(original / (rotations * 2.0 * std::f64::consts::PI)) / (2.0 * libm::log(theta))
            };
            let (mut low, mut high) = (correction(fast), correction(slow));
            let truncate = match parameters.and_then(|p| p.get("truncate")).filter(|v| !v.is_null()) {
                None => true,
                Some(v) => v
                    .as_bool()
                    .ok_or_else(|| anyhow!("{path}: rope parameter `truncate` is {v}, expected true or false"))?,
            };
            if truncate {
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
            let factor = positive("factor")?.unwrap_or(max_positions / original);
            let scaling = match positive("attention_factor")? {
                Some(given) => given,
                None if factor <= 1.0 => 1.0,
                None => (1.0 + libm::log(factor) / libm::log(original)).sqrt(),
            };
            let key = if context as f64 > original { "long_factor" } else { "short_factor" };
            let list = parameters.and_then(|p| p.get(key)).and_then(Value::as_array);
            let above_zero = |v: &Value| v.as_f64().filter(|x| *x > 0.0);
            let list: Option<Vec<f64>> = list.and_then(|l| l.iter().map(above_zero).collect());
            let list =
                list.ok_or_else(|| anyhow!("{path}: rope parameter `{key}` is not a list of numbers above 0"))?;
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
    let scaling = scaling as f32;
    ensure!(
        inv_freq.iter().all(|f| f.is_finite()) && scaling.is_finite(),
        "{path}: the rope parameters (theta {theta}, type {kind:?}) give angles that are not numbers"
    );
    Ok(RotaryFrequencies { inv_freq, scaling })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(config: &str) -> Result<RotaryFrequencies> {
        frequencies(&Config::parse("config.json".into(), config.as_bytes()).unwrap(), 64, 1.0, 10000.0, 4096)
    }

    #[test]
    fn parameters_that_give_no_angles_are_errors_that_name_them() {
        let yarn = |more: &str| {
            format!(
                r#"{{"rope_parameters": {{"rope_type": "yarn", "original_max_position_embeddings": 4096, "factor": 4, {more}}}}}"#
            )
        };
        assert!(of(&yarn(r#""beta_fast": 0"#)).unwrap().inv_freq.iter().all(|f| f.is_finite()));
        for (config, key) in [
            (yarn(r#""factor": 0"#), "factor"),
            (yarn(r#""factor": -4"#), "factor"),
            (yarn(r#""attention_factor": -1"#), "attention_factor"),
            (yarn(r#""original_max_position_embeddings": 0"#), "original_max_position_embeddings"),
            (yarn(r#""beta_slow": -1"#), "beta_slow"),
            (yarn(r#""truncate": 1"#), "truncate"),
            (yarn(r#""rope_theta": 1"#), "rope_theta"),
            (r#"{"rope_theta": 0}"#.into(), "rope_theta"),
            (r#"{"rope_theta": -1e4}"#.into(), "rope_theta"),
            (r#"{"rope_theta": 1e-300}"#.into(), "theta"),
            (r#"{"partial_rotary_factor": 1.5}"#.into(), "partial_rotary_factor"),
            (r#"{"rope_scaling": {"rope_type": "linear", "factor": 0}}"#.into(), "factor"),
            (r#"{"rope_scaling": {"type": "dynamic", "factor": -2}}"#.into(), "factor"),
            (r#"{"rope_scaling": {"type": 3}}"#.into(), "rope_type"),
            (r#"{"rope_scaling": 3}"#.into(), "rope parameters"),
        ] {
            let error = of(&config).err().unwrap_or_else(|| panic!("accepted: {config}"));
            let error = error.to_string();
            assert!(error.starts_with("config.json: ") && error.contains(key), "{config}: {error}");
        }
    }
}
