//! Statistics of experts that are read from disk, for people (`--stats`) and for machines (`--json`).

use std::time::Duration;

use serde_json::{Value, json};
use sluice_engine::{Engine, Placement, Streamed};

use crate::units;

/// Where experts are kept and why, and what was counted while `tokens` tokens were computed in the time `all`.
pub fn to_json(engine: &Engine, streamed: Option<&Streamed>, all: Duration, tokens: usize) -> Value {
    let placed = engine.placement();
    let Some(s) = streamed else {
        return json!({"placement": placed.placement.name(), "reason": placed.reason});
    };
    let t = &s.stats;
    let per_token = |n: u64| (tokens > 0).then(|| n as f64 / tokens as f64);
    json!({
        "placement": placed.placement.name(),
        "reason": placed.reason,
        "reader": s.reader,
        "fallbacks": s.notes,
        "slots": s.slots.0,
        "device": s.device_slots.map(|slots| json!({
            "slots": slots,
            "hits": t.fast_hits,
            "hit_rate": rate(t.fast_hits, t.wanted),
            "uploads": t.uploads,
            "uploaded_bytes": t.uploaded_bytes,
            "uploaded_bytes_per_token": per_token(t.uploaded_bytes),
            "uploaded_ahead": t.uploaded_ahead,
            "computed_on_host": t.computed_on_host,
            "rises": t.promotions,
            "falls": t.demotions,
        })),
        "experts": s.slots.1,
        "file_bytes": s.file_bytes,
        "wanted": t.wanted,
        "hits": t.hits,
        "hit_rate": rate(t.hits, t.wanted),
        "wanted_bytes": t.wanted_bytes,
        "read_bytes": t.read_bytes,
        "reads": t.reads,
        "read_bytes_per_token": per_token(t.read_bytes),
        "wanted_bytes_per_token": per_token(t.wanted_bytes),
        "seconds": all.as_secs_f64(),
        "reading_seconds": t.reading.as_secs_f64(),
        "waiting_seconds": t.waiting.as_secs_f64(),
        "computing_seconds": all.saturating_sub(t.waiting).as_secs_f64(),
        "overlap": overlap(s),
        "read_bytes_per_second": bandwidth(s),
        "lookahead": {
            "on": s.looks_ahead,
            "predicted": t.predicted,
            "right": t.predicted_right,
            "used": t.read_ahead,
            "read_in_vain": t.read_unused,
        },
        "filled": t.warmed_up,
    })
}

fn rate(part: u64, of: u64) -> Option<f64> {
    (of > 0).then(|| part as f64 / of as f64)
}

/// The fraction of reading time during which something was computed.
fn overlap(s: &Streamed) -> Option<f64> {
    let reading = s.stats.reading.as_secs_f64();
    (reading > 0.0).then(|| (1.0 - s.stats.waiting.as_secs_f64() / reading).max(0.0))
}

fn bandwidth(s: &Streamed) -> Option<f64> {
    let reading = s.stats.reading.as_secs_f64();
    (reading > 0.0).then(|| s.stats.read_bytes as f64 / reading)
}

/// The same as a line of text.
pub fn to_text(engine: &Engine, streamed: Option<&Streamed>, all: Duration, tokens: usize) -> String {
    let placed = engine.placement();
    let Some(s) = streamed else { return format!("{} ({})", placed.placement.name(), placed.reason) };
    let t = &s.stats;
    let percent = |n: Option<f64>| n.map_or("-".to_owned(), |x| format!("{:.0}%", 100.0 * x));
    let kept = if placed.placement == Placement::Slots {
        format!("{} of {} in slots", s.slots.0, s.slots.1)
    } else {
        "through the page cache".to_owned()
    };
    let kept = match s.device_slots {
        Some(slots) => format!("{slots} in the GPU's memory, {kept}"),
        None => kept,
    };
    let mut parts = vec![
        format!("{} ({}; {}), {kept}", placed.placement.name(), placed.reason, s.reader),
        format!("{} of {} wanted were there", percent(rate(t.hits, t.wanted)), t.wanted),
        format!(
            "{} read{}, {} a token",
            units::bytes(t.read_bytes),
            bandwidth(s).map_or(String::new(), |b| format!(" at {}/s", units::bytes(b as u64))),
            units::bytes(t.read_bytes / tokens.max(1) as u64)
        ),
        format!(
            "waited {:.0} ms, computed {:.0} ms, {} of reading overlapped",
            1e3 * t.waiting.as_secs_f64(),
            1e3 * all.saturating_sub(t.waiting).as_secs_f64(),
            percent(overlap(s))
        ),
    ];
    if s.device_slots.is_some() {
        parts.push(format!(
            "{} were in the GPU's memory, {} copied there ({} a token), {} to stay; the host computed {}",
            percent(rate(t.fast_hits, t.wanted)),
            units::bytes(t.uploaded_bytes),
            units::bytes(t.uploaded_bytes / tokens.max(1) as u64),
            t.promotions,
            t.computed_on_host
        ));
    }
    if t.predicted > 0 {
        parts.push(format!(
            "look-ahead {} right, {} used, {} read in vain",
            percent(rate(t.predicted_right, t.predicted)),
            t.read_ahead,
            t.read_unused
        ));
    }
    if t.warmed_up > 0 {
        parts.push(format!("{} read into free memory", t.warmed_up));
    }
    parts.extend(s.notes.iter().cloned());
    parts.join("; ")
}
