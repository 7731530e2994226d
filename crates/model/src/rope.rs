//! Rotary embeddings: the frequencies that a `config.json` asks for.
//!
//! Source: `modeling_rope_utils.py` of the transformers library, whose parameter names these are, and the papers it names (YaRN: Peng
//! et al. 2023; LongRoPE: Ding et al. 2024). Frequencies are f32, rounded where the reference rounds, so that angles agree.

use anyhow::{Result, anyhow, bail, ensure};
use serde_json::{Map, Value};
use sluice_backend::RotaryFrequencies;

use crate::config::Config;

/// The default of `rope_theta` in most architectures.
const THETA: f64 = 10000.0;

/// Rotary embedding as a config describes it.
pub struct Rotary {
    /// An angle per position and pair of elements.
    pub frequencies: RotaryFrequencies,
    /// What scores of latent attention are multiplied by besides: the square of YaRN's `mscale` of `mscale_all_dim`.
    pub score_factor: f64,
    /// The context length that YaRN extends the model to, if the config uses it.
    pub extended: Option<usize>,
    /// Parts of the config that are not followed, a line each.
    pub notes: Vec<String>,
}

/// Frequencies of layers of one kind, for architectures where kinds differ: from `rope_parameters.KIND` of newer configs. In older ones `base` names the key of
/// their theta and its default, and `rope_scaling` is that of layers without a window.
///
/// # Errors
/// As for [`rotary`].
pub fn rotary_of_layers(
    config: &Config,
    kind: &str,
    base: (&str, f64),
    head_dim: usize,
    context: usize,
) -> Result<Rotary> {
    let path = config.path().display();
    let mut parameters = Map::new();
    match config.get("rope_parameters") {
        None => {}
        Some(all) => match all.get(kind) {
            Some(Value::Object(own)) => parameters = own.clone(),
            Some(other) => bail!("{path}: rope parameters (`rope_parameters.{kind}`) are {other}, not an object"),
            None if all.as_object().is_some_and(|all| !all.values().any(Value::is_object))
                && kind == "full_attention" =>
            {
                parameters = all.as_object().cloned().unwrap_or_default();
            }
            None => {}
        },
    }
    if kind == "full_attention" && !parameters.contains_key("rope_type") {
        let scaling = config.get("rope_scaling").and_then(Value::as_object).cloned().unwrap_or_default();
        parameters.extend(scaling);
    }
    if !parameters.contains_key("rope_theta") {
        let theta = config.float_or(base.0, base.1, |x| x > 0.0, "a number above 0")?;
        parameters.insert("rope_theta".into(), theta.into());
    }
    if !parameters.contains_key("type") {
        parameters.entry("rope_type").or_insert("default".into());
    }
    let own = serde_json::json!({
        "model_type": config.text_type(), "max_position_embeddings": config.max_positions()?, "rope_parameters": parameters,
    });
    rotary(&Config::parse(config.path().to_owned(), own.to_string().as_bytes())?, head_dim, None, context)
}

/// The rope parameters: `rope_parameters` of newer configs, `rope_scaling` of older ones.
///
/// If a config has both, the reference reads `rope_scaling` only, with theta and the rotated part from beside it or by default. Model cards ask users to add a
/// `rope_scaling` to newer configs; a config that would lose its theta that way is refused.
fn parameters<'a>(
    config: &'a Config,
    (default_partial, default_theta): (Option<f64>, f64),
    notes: &mut Vec<String>,
) -> Result<Option<&'a Map<String, Value>>> {
    let path = config.path().display();
    let object = |key: &str| -> Result<Option<&'a Map<String, Value>>> {
        let Some(v) = config.get(key) else { return Ok(None) };
        let v = v.as_object().ok_or_else(|| anyhow!("{path}: rope parameters (`{key}`) are {v}, not an object"))?;
        if let Some((name, _)) = v.iter().find(|(_, v)| v.is_object()) {
            bail!("{path}: rope parameters for each type of layer (`{key}.{name}`) are not supported");
        }
        Ok(Some(v).filter(|v| !v.is_empty()))
    };
    let (Some(newer), Some(older)) = (object("rope_parameters")?, object("rope_scaling")?) else {
        return Ok(object("rope_scaling")?.or(object("rope_parameters")?));
    };
    if newer == older {
        return Ok(Some(older));
    }
    for (key, default) in [("rope_theta", Some(default_theta)), ("partial_rotary_factor", default_partial)] {
        let Some(default) = default else { continue };
        let beside = config.get(key).and_then(Value::as_f64).unwrap_or(default);
        let of = |p: &Map<String, Value>| p.get(key).and_then(Value::as_f64).unwrap_or(beside);
        ensure!(
            of(newer) == of(older),
            "{path}: `rope_scaling` beside `rope_parameters` would replace all of it, and `{key}` be {} instead of {}: \
             move what `rope_scaling` says into `rope_parameters`",
            of(older),
            of(newer)
        );
    }
    notes.push("config.json: `rope_scaling` is used, and `rope_parameters` beside it is not".to_owned());
    Ok(Some(older))
}

/// Frequencies for heads of `head_dim` elements. `default_partial` is the part of a head that is rotated by default; `None` for architectures that always rotate
/// whole heads. `context` is the most positions that will be used: LongRoPE and dynamic NTK choose by it, once, so that cached positions stay valid.
/// Multimodal sections change nothing for text, whose three position numbers are equal.
///
/// # Errors
/// Parameters that are missing, wrong, or not supported: the message names the key.
pub fn rotary(config: &Config, head_dim: usize, default_partial: Option<f64>, context: usize) -> Result<Rotary> {
    rotary_or(config, head_dim, (default_partial, THETA), context)
}

/// The same for architectures with a default of their own for theta.
///
/// # Errors
/// As for [`rotary`].
pub fn rotary_or(
    config: &Config,
    head_dim: usize,
    (default_partial, default_theta): (Option<f64>, f64),
    context: usize,
) -> Result<Rotary> {
    let mut notes = Vec::new();
    let parameters = parameters(config, (default_partial, default_theta), &mut notes)?;
    let path = config.path().display().to_string();
    let number = |key: &str| -> Result<Option<f64>> {
        let Some(v) = parameters.and_then(|p| p.get(key)).filter(|v| !v.is_null()) else { return Ok(None) };
        let x = v.as_f64().filter(|x| x.is_finite());
        x.map(Some).ok_or_else(|| anyhow!("{path}: rope parameter `{key}` is {v}, expected a number"))
    };
    // Most are divisors: 0 would give infinite frequencies, and negative ones would reverse the rotation.
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
    let mut partial = match positive("partial_rotary_factor")? {
        Some(partial) => partial,
        None => {
            let default = default_partial.unwrap_or(1.0);
            config.float_or("partial_rotary_factor", default, is_part, "a number above 0, at most 1")?
        }
    };
    ensure!(is_part(partial), "{path}: rope parameter `partial_rotary_factor` is {partial}, expected at most 1");
    let kind = parameters.and_then(|p| p.get("rope_type").or_else(|| p.get("type"))).filter(|v| !v.is_null());
    let kind = match kind {
        None => "default",
        Some(v) => v.as_str().ok_or_else(|| anyhow!("{path}: rope parameter `rope_type` is {v}, expected a name"))?,
    };
    // The last pairs of such heads are turned by nothing.
    let is_proportional = kind == "proportional";
    if default_partial.is_none() && partial < 1.0 && !is_proportional {
        // The reference ignores it without a scaling, and fails with one.
        ensure!(
            matches!(kind, "default" | "mrope"),
            "{path}: `partial_rotary_factor` is {partial}, but this architecture rotates whole heads"
        );
        notes.push(format!(
            "config.json: `partial_rotary_factor` {partial} is not followed: this architecture rotates whole heads"
        ));
        partial = 1.0;
    }
    let dim = if is_proportional { head_dim } else { (head_dim as f64 * partial) as usize };
    ensure!(dim >= 2 && dim.is_multiple_of(2), "{path}: {dim} of {head_dim} head dimensions are rotated; must be even");
    let max_positions = config.max_positions()? as f64;
    // As in the reference, a key beside the rope parameters goes before one in them.
    let original = match positive("original_max_position_embeddings")? {
        _ if config.get("original_max_position_embeddings").is_some() => {
            config.size("original_max_position_embeddings")? as f64
        }
        Some(original) => original,
        None => max_positions,
    };

    // theta^(2i / dim), in f32 as the reference computes it.
    let powers = |theta: f64| -> Vec<f32> {
        (0..dim / 2).map(|i| libm::pow(theta as f32 as f64, ((2 * i) as f32 / dim as f32) as f64) as f32).collect()
    };
    let inverse = |theta: f64| -> Vec<f32> { powers(theta).iter().map(|p| 1.0 / p).collect() };

    let (mut extended, mut score_factor) = (None, 1.0);
    let (inv_freq, scaling): (Vec<f32>, f64) = match kind {
        // A multimodal section list alone changes nothing for text.
        "default" | "mrope" => (inverse(theta), 1.0),
        "proportional" => {
            let (turned, factor) = ((head_dim as f64 * partial / 2.0) as usize, positive("factor")?.unwrap_or(1.0));
            let all = inverse(theta).into_iter().enumerate();
            (all.map(|(i, f)| if i < turned { f / factor as f32 } else { 0.0 }).collect(), 1.0)
        }
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
            ensure!(theta > 1.0, "{path}: rope parameter `rope_theta` is {theta}, expected more than 1 for yarn");
            let factor = positive("factor")?.unwrap_or(max_positions / original);
            extended = Some((original * factor).min(f64::from(1 << 24)) as usize);
            let mscale = |scale: f64, m: f64| if scale <= 1.0 { 1.0 } else { 0.1 * m * libm::log(scale) + 1.0 };
            let scaling = match (positive("attention_factor")?, number("mscale")?, number("mscale_all_dim")?) {
                (Some(given), ..) => given,
                (None, Some(m), Some(all)) if m != 0.0 && all != 0.0 => mscale(factor, m) / mscale(factor, all),
                _ => mscale(factor, 1.0),
            };
            score_factor = number("mscale_all_dim")?.map_or(1.0, |all| mscale(factor, all) * mscale(factor, all));
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
        // Early checkpoints of Phi-3 call it `su`.
        "longrope" | "su" => {
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
            let (factor, old) = (needed("factor")? as f32, original as f32);
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
            bail!(
                "{path}: rope type {other:?} is not supported (default, linear, dynamic, yarn, longrope, \
                 llama3, proportional are)"
            )
        }
    };
    let scaling = scaling as f32;
    ensure!(
        inv_freq.iter().all(|f| f.is_finite()) && scaling.is_finite() && score_factor.is_finite(),
        "{path}: the rope parameters (theta {theta}, type {kind:?}) give angles that are not numbers"
    );
    Ok(Rotary { frequencies: RotaryFrequencies { inv_freq, scaling }, score_factor, extended, notes })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(config: &str) -> Result<RotaryFrequencies> {
        let config = Config::parse("config.json".into(), config.as_bytes()).unwrap();
        rotary(&config, 64, Some(1.0), 4096).map(|rotary| rotary.frequencies)
    }

    fn rotary_of(config: &str, partial: Option<f64>) -> Result<Rotary> {
        rotary(&Config::parse("config.json".into(), config.as_bytes()).unwrap(), 64, partial, 4096)
    }

    /// `rope_scaling` would replace `rope_parameters` and lose its theta, which no user wants.
    #[test]
    fn scaling_beside_parameters_counts_where_nothing_is_lost_and_is_refused_where_theta_is() {
        let both = |theta: &str, scaling: &str| {
            format!(
                r#"{{{theta} "rope_parameters": {{"rope_type": "default", "rope_theta": 1e6}}, "rope_scaling": {scaling}}}"#
            )
        };
        let yarn = r#"{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}"#;
        let with_theta =
            r#"{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "rope_theta": 1e6}"#;
        let alone = rotary_of(&format!(r#"{{"rope_parameters": {with_theta}}}"#), None).unwrap();
        assert_eq!(alone.notes, [""; 0]);
        for config in [both(r#""rope_theta": 1e6,"#, yarn), both("", with_theta)] {
            let found = rotary_of(&config, None).unwrap();
            assert_eq!(found.frequencies, alone.frequencies, "{config}");
            assert!(found.notes[0].contains("`rope_scaling` is used, and `rope_parameters`"), "{:?}", found.notes);
        }
        for config in [both("", yarn), both(r#""rope_theta": 1e5,"#, yarn)] {
            let error = rotary_of(&config, None).err().unwrap_or_else(|| panic!("accepted: {config}")).to_string();
            assert!(error.starts_with("config.json: `rope_scaling` beside `rope_parameters`"), "{error}");
            assert!(error.contains("`rope_theta`") && error.contains("1000000"), "{error}");
        }
        // Empty and null count as missing.
        for scaling in ["{}", "null"] {
            assert_eq!(rotary_of(&both("", scaling), None).unwrap().notes, [""; 0]);
        }
        let partial = r#"{"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "rope_scaling": {"type": "linear", "factor": 2}}"#;
        let error = rotary_of(partial, Some(0.25)).err().unwrap().to_string();
        assert!(error.contains("`partial_rotary_factor` be 0.25 instead of 0.5"), "{error}");
    }

    #[test]
    fn yarn_says_how_far_it_extends_the_model() {
        let yarn = |more: &str| format!(r#"{{"max_position_embeddings": 4096, {more}}}"#);
        let scaled = r#""rope_scaling": {"type": "yarn", "factor": 4"#;
        for (config, extended) in [
            (yarn(&format!(r#"{scaled}, "original_max_position_embeddings": 2048}}"#)), Some(8192)),
            // Without an original length, the trained length counts.
            (yarn(&format!("{scaled}}}")), Some(16384)),
            // As in the reference, the key beside goes before the one inside.
            (
                yarn(&format!(
                    r#""original_max_position_embeddings": 1024, {scaled}, "original_max_position_embeddings": 2048}}"#
                )),
                Some(4096),
            ),
            (yarn(r#""rope_scaling": {"type": "linear", "factor": 4}"#), None),
        ] {
            assert_eq!(rotary_of(&config, None).unwrap().extended, extended, "{config}");
        }
    }

    #[test]
    fn heads_that_are_rotated_whole_stay_so_and_it_is_said() {
        let whole = rotary_of("{}", None).unwrap();
        let partial = rotary_of(r#"{"partial_rotary_factor": 0.5}"#, None).unwrap();
        assert_eq!(partial.frequencies, whole.frequencies);
        assert!(whole.notes.is_empty() && partial.notes[0].contains("partial_rotary_factor"), "{:?}", partial.notes);
        let half = rotary_of(r#"{"partial_rotary_factor": 0.5}"#, Some(0.25)).unwrap();
        assert_eq!(half.frequencies.inv_freq.len(), 16);
        let scaled = r#"{"partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 2}}"#;
        let error = rotary_of(scaled, None).err().unwrap().to_string();
        assert!(error.contains("partial_rotary_factor"), "{error}");
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
            (
                r#"{"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}"#.into(),
                "rope_parameters.full_attention",
            ),
        ] {
            let error = of(&config).err().unwrap_or_else(|| panic!("accepted: {config}"));
            let error = error.to_string();
            assert!(error.starts_with("config.json: ") && error.contains(key), "{config}: {error}");
        }
    }
}
