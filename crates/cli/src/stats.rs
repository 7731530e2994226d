//! Statistics of an answer, for people (`--stats`, `/stats`) and for machines (`--json`). All of it was measured in this run.

use std::time::Duration;

use serde_json::{Value, json};
use sluice_backend::NUMERICS_VERSION;
use sluice_engine::{DraftCounts, DraftStats, Engine, FileReport, MemoryClass, Phase, Profile};

use crate::engine_args::{activations_name, attention_name, kv_type_name};
use crate::generate::Answer;
use crate::{streamed, units};
use sluice_front::machine;

/// What is measured besides the answer itself.
pub struct RunMeasurements {
    /// The model's folder.
    pub model: String,
    /// Time for loading weights.
    pub weights_time: Duration,
    /// Time for loading the text side.
    pub text_time: Duration,
    /// From the start of the program to the first token; `None` if the user typed in between.
    pub first_from_start: Option<Duration>,
    /// From the request (before the template was rendered) to the first token.
    pub first_from_request: Option<Duration>,
    /// Tokens of the whole conversation.
    pub context: usize,
    /// The sampling seed.
    pub seed: u64,
}

/// All statistics under the names of `--json`.
pub fn to_json(engine: &mut Engine, answer: &Answer, m: &RunMeasurements) -> Value {
    let mut memory: serde_json::Map<String, Value> =
        MemoryClass::ALL.iter().map(|c| (c.name().to_owned(), engine.memory(*c).into())).collect();
    let device = device_json(engine);
    let options = engine.options();
    memory.insert("kv_in_use".into(), held(engine).into());
    for (name, line) in [("peak_rss", "VmHWM"), ("rss_anon", "RssAnon"), ("rss_file", "RssFile")] {
        memory.insert(name.into(), machine::own_memory(line).into());
    }
    json!({
        "model": m.model,
        "architecture": engine.model().architecture,
        "load_seconds": m.weights_time.max(m.text_time).as_secs_f64(),
        "load_weights_seconds": m.weights_time.as_secs_f64(),
        "load_text_seconds": m.text_time.as_secs_f64(),
        "loading": loading_json(engine),
        "experts": streamed::to_json(engine, answer.streamed.as_ref(), answer.reading + answer.generating, answer.computed + answer.tokens.len()),
        "first_token_seconds": {
            "from_start": m.first_from_start.map(|t| t.as_secs_f64()),
            "from_request": m.first_from_request.map(|t| t.as_secs_f64()),
        },
        "prompt": {
            "tokens": answer.computed,
            "cached_tokens": answer.cached,
            "cached_on_disk": answer.restored,
            "seconds": answer.reading.as_secs_f64(),
            "tokens_per_second": per_second(answer.computed, answer.reading),
        },
        "generation": {
            "tokens": answer.tokens.len(),
            "seconds": answer.generating.as_secs_f64(),
            // The first token belongs to the prompt's time.
            "tokens_per_second": per_second(answer.tokens.len().saturating_sub(1), answer.generating),
        },
        "drafts": drafts_json(&answer.drafted),
        "context": {"tokens": m.context, "max": engine.max_context()},
        "memory": memory,
        "device": device,
        "prefix_cache": {
            "kv_bytes": engine.kv_cached(),
            "snapshots": engine.snapshots(),
            "blocks_evicted": engine.evicted().blocks,
            "snapshots_evicted": engine.evicted().snapshots,
            "spilled": spilled_json(engine),
        },
        "prompt_cache": prompt_cache_json(engine),
        "seed": m.seed,
        "threads": options.threads,
        "isa": options.isa.to_string(),
        "activations": activations_name(options.activations),
        "kv_type": kv_type_name(engine.kv_type()),
        "attention": attention_name(options.attention_mode()),
        "experts_per_token": engine.model().experts().map(|(_, k)| k),
        "numerics_version": NUMERICS_VERSION,
        "finish_reason": answer.end.name(),
    })
}

/// Memory use by class on a device with memory of its own.
fn device_json(engine: &mut Engine) -> Option<Value> {
    let device = engine.device()?;
    let uses = engine.memory_uses();
    let own = uses.iter().filter(|m| m.device == device.device);
    let classes: serde_json::Map<String, Value> = own.map(|m| (m.class.name().to_owned(), m.bytes.into())).collect();
    Some(json!({"budget": device.budget, "shared": device.shared, "memory": classes}))
}

/// The same as a line of text.
fn device_text(engine: &mut Engine) -> String {
    let Some(device) = engine.device() else { return "the host".to_owned() };
    let uses = engine.memory_uses();
    let own = uses.iter().filter(|m| m.device == device.device && m.bytes > 0);
    let classes = own.map(|m| format!("{} {}", m.class.name().replace('_', " "), units::bytes(m.bytes as u64)));
    let (classes, budget) = (classes.collect::<Vec<_>>().join(", "), units::bytes(device.budget));
    if !device.shared {
        return format!("{classes} of {budget} in the GPU's memory");
    }
    let all: usize = uses.iter().map(|m| m.bytes).sum();
    format!("{classes} of its own; {} with the host's, of {budget} for both", units::bytes(all as u64))
}

fn spilled_json(engine: &Engine) -> Option<Value> {
    let s = engine.host_tier()?;
    Some(json!({
        "budget_bytes": s.budget,
        "bytes": s.bytes,
        "blocks": s.blocks,
        "lost": s.lost,
        "returned_tokens": s.returned_tokens,
    }))
}

fn spilled_text(engine: &Engine) -> String {
    let Some(s) = engine.host_tier() else { return String::new() };
    let (bytes, budget) = (units::bytes(s.bytes), units::bytes(s.budget));
    format!("{bytes} of {budget}; {} blocks came, {} lost, {} tokens went back", s.blocks, s.lost, s.returned_tokens)
}

fn prompt_cache_json(engine: &Engine) -> Option<Value> {
    let s = engine.prompt_cache()?;
    Some(json!({
        "folder": s.folder,
        "quota_bytes": s.quota,
        "bytes": s.bytes,
        "blocks": s.entries,
        "stored": s.stored,
        "written_bytes": s.written_bytes,
        "dropped": s.dropped,
        "read_bytes": s.read_bytes,
        "wrong": s.wrong,
        "too_dear": s.skipped_slow,
        "summing": s.summing.map(|(summed, all)| json!({"summed_bytes": summed, "bytes": all})),
        "broken": s.broken,
        "store": s.store.map(|s| json!({
            "url": s.url, "joined": s.joined, "hits": s.hits, "misses": s.misses, "read": s.read, "read_bytes": s.read_bytes,
            "stored": s.stored, "stored_bytes": s.stored_bytes, "dropped": s.dropped, "errors": s.errors, "wrong": s.wrong,
            "given_up": s.given_up,
        })),
    }))
}

fn prompt_cache_text(engine: &Engine) -> String {
    let Some(s) = engine.prompt_cache() else { return String::new() };
    if let Some((summed, all)) = s.summing {
        return format!("not in use yet: {} of {} of the model are summed", units::bytes(summed), units::bytes(all));
    }
    let (bytes, quota, written, read) =
        (units::bytes(s.bytes), units::bytes(s.quota), units::bytes(s.written_bytes), units::bytes(s.read_bytes));
    let store = s.store.map_or(String::new(), |s| {
        let [read, stored] = [s.read_bytes, s.stored_bytes].map(units::bytes);
        format!("; store: read {read}, stored {stored}, {} errors, wrong {}", s.errors, s.wrong)
    });
    format!(
        "{bytes} of {quota}, {} blocks; written {written}, read {read}, dropped {}, wrong {}{store}",
        s.entries, s.dropped, s.wrong
    )
}

fn per_second(n: usize, time: Duration) -> Option<f64> {
    (n > 0 && !time.is_zero()).then(|| n as f64 / time.as_secs_f64())
}

/// All statistics as lines of text.
pub fn to_text(engine: &mut Engine, answer: &Answer, m: &RunMeasurements) -> String {
    let classes = MemoryClass::ALL.map(|c| {
        let name = c.name().replace('_', " ");
        format!("{name} {}", units::bytes(engine.memory(c) as u64))
    });
    let device = device_text(engine);
    let options = engine.options();
    let ms = |t: Duration| format!("{:.1} ms", t.as_secs_f64() * 1e3);
    let speed = |n, t| per_second(n, t).map_or(String::new(), |s| format!(", {s:.1} tokens/s"));
    let own = |line| machine::own_memory(line).map_or("unknown".to_owned(), units::bytes);
    let first = [(m.first_from_request, "request"), (m.first_from_start, "the program's start")];
    let first: Vec<String> = first.iter().filter_map(|(t, of)| t.map(|t| format!("{} after {of}", ms(t)))).collect();
    let generated = answer.tokens.len();
    let lines = [
        ("model", format!("{} ({})", m.model, engine.model().architecture)),
        ("load", format!("weights {}, text {} beside them", ms(m.weights_time), ms(m.text_time))),
        ("read", loading_text(engine)),
        ("first token", if first.is_empty() { "none".to_owned() } else { first.join(", ") }),
        (
            "prompt",
            format!(
                "{} tokens, {}{}{}",
                answer.computed,
                ms(answer.reading),
                speed(answer.computed, answer.reading),
                match (answer.cached - answer.restored, answer.restored) {
                    (0, 0) => String::new(),
                    (memory, 0) => format!("; {memory} more were there"),
                    (0, disk) => format!("; {disk} more were on disk"),
                    (memory, disk) => format!("; {memory} more were there and {disk} on disk"),
                }
            ),
        ),
        (
            "generation",
            format!(
                "{generated} tokens, {}{}",
                ms(answer.generating),
                speed(generated.saturating_sub(1), answer.generating)
            ),
        ),
        ("drafts", drafts_text(&answer.drafted)),
        ("context", format!("{} of {} tokens", m.context, engine.max_context())),
        ("spilled", spilled_text(engine)),
        ("prompt cache", prompt_cache_text(engine)),
        ("memory", format!("{}; KV in use {}", classes.join(", "), units::bytes(held(engine) as u64))),
        ("device", device),
        (
            "experts",
            streamed::to_text(
                engine,
                answer.streamed.as_ref(),
                answer.reading + answer.generating,
                answer.computed + answer.tokens.len(),
            ),
        ),
        ("resident", format!("peak {}, now {} anonymous, {} of files", own("VmHWM"), own("RssAnon"), own("RssFile"))),
        (
            "engine",
            format!(
                "{} threads, {}, activations {}, KV {}, attention {}, numerics {NUMERICS_VERSION}",
                options.threads,
                options.isa,
                activations_name(options.activations),
                kv_type_name(engine.kv_type()),
                attention_name(options.attention_mode())
            ),
        ),
        ("seed", m.seed.to_string()),
        ("finish", answer.end.name().to_owned()),
    ];
    let lines = lines.iter().map(|(name, value)| format!("{name:<12}{value}"));
    lines.collect::<Vec<_>>().join("\n")
}

/// What was drafted for an answer, by drafter; null without drafts.
fn drafts_json(drafted: &[DraftStats]) -> Option<Value> {
    let one = |d: &DraftStats| {
        let DraftCounts { drafts, drafted, accepted } = d.counts;
        let counts = json!({"drafts": drafts, "draft_tokens": drafted, "accepted_tokens": accepted});
        (d.drafter.to_owned(), counts)
    };
    (!drafted.is_empty()).then(|| Value::Object(drafted.iter().map(one).collect()))
}

/// The same as a line of text.
fn drafts_text(drafted: &[DraftStats]) -> String {
    let one = |d: &DraftStats| {
        let DraftCounts { drafts, drafted, accepted } = d.counts;
        format!("{}: {drafted} tokens in {drafts} drafts, {accepted} of them right", d.drafter)
    };
    if drafted.is_empty() { "off".to_owned() } else { drafted.iter().map(one).collect::<Vec<_>>().join("; ") }
}

/// How each file was read and why, and when everything that a step needs was loaded.
fn loading_json(engine: &Engine) -> Value {
    let Some(loading) = engine.loading() else { return Value::Null };
    let file = |f: &FileReport| json!({"name": f.name, "bytes": f.bytes, "mode": f.mode.name(), "reason": f.reason});
    json!({
        "seconds": loading.time().map(|t| t.as_secs_f64()),
        "files": loading.files().iter().map(file).collect::<Vec<_>>(),
        "fallbacks": loading.notes(),
    })
}

/// The same as text: files with the same mode and reason are grouped.
fn loading_text(engine: &Engine) -> String {
    let Some(loading) = engine.loading() else { return "as it was".to_owned() };
    let mut kinds: Vec<(&FileReport, usize, u64)> = Vec::new();
    for file in loading.files() {
        match kinds.iter_mut().find(|(k, ..)| k.mode == file.mode && k.reason == file.reason) {
            Some((_, files, bytes)) => (*files, *bytes) = (*files + 1, *bytes + file.bytes),
            None => kinds.push((file, 1, file.bytes)),
        }
    }
    let kinds = kinds.into_iter().map(|(kind, files, bytes)| {
        let (name, plural) = (kind.mode.name(), if files == 1 { "" } else { "s" });
        format!("{name} {files} file{plural}, {} ({})", units::bytes(bytes), kind.reason)
    });
    let when = loading.time().map_or("not all of it yet".to_owned(), |t| format!("in {:.1} ms", t.as_secs_f64() * 1e3));
    let all = kinds.chain([when]).chain(loading.notes());
    all.collect::<Vec<_>>().join("; ")
}

/// Time per phase of a layer, as a table; empty if nothing was profiled.
pub fn profile_text(title: &str, profile: &Profile) -> String {
    let total: Duration = Phase::ALL.iter().map(|p| profile.row(*p).time).sum();
    if total.is_zero() {
        return String::new();
    }
    let mut table = format!("{:<12}{:>8}{:>12}{:>8}{:>10}{:>10}\n", title, "calls", "ms", "share", "GB/s", "GMAC/s");
    for phase in Phase::ALL {
        let row = profile.row(phase);
        if row.calls == 0 {
            continue;
        }
        let seconds = row.time.as_secs_f64();
        let rate = |n: u64| if n == 0 { "-".to_owned() } else { format!("{:.2}", n as f64 / seconds.max(1e-9) / 1e9) };
        table += &format!(
            "{:<12}{:>8}{:>12.3}{:>7.1}%{:>10}{:>10}\n",
            phase.name(),
            row.calls,
            seconds * 1e3,
            100.0 * seconds / total.as_secs_f64(),
            rate(row.weight_bytes),
            rate(row.macs)
        );
    }
    table + &format!("{:<12}{:>8}{:>12.3}", "sum", "", total.as_secs_f64() * 1e3)
}

/// The same as JSON.
pub fn profile_json(profile: &Profile) -> Value {
    let rows = Phase::ALL.iter().filter(|p| profile.row(**p).calls > 0).map(|p| {
        let row = profile.row(*p);
        let value = json!({
            "calls": row.calls,
            "seconds": row.time.as_secs_f64(),
            "weight_bytes": row.weight_bytes,
            "macs": row.macs,
        });
        (p.name().to_owned(), value)
    });
    Value::Object(rows.collect())
}

/// Bytes of keys and values in use; those of the answer are kept for the next turn.
fn held(engine: &Engine) -> usize {
    engine.kv_in_use() + engine.kv_cached()
}
