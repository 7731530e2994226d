//! What there is to measure, in the text format of Prometheus. Names are vLLM's where the meaning is the same, so that dashboards work.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use sluice_engine::{Engine, Finish, MemoryClass};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Reason {
    finished_reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Class {
    class: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Named {
    model_name: String,
}

pub struct Metrics {
    registry: Registry,
    running: Gauge<i64, AtomicI64>,
    waiting: Gauge<i64, AtomicI64>,
    kv_usage: Gauge<f64, AtomicU64>,
    prompt_tokens: Counter,
    generation_tokens: Counter,
    prefix_queries: Counter,
    prefix_hits: Counter,
    from_disk: Counter,
    from_memory: Counter,
    computed: Counter,
    disk: [(&'static str, &'static str, Gauge<i64, AtomicI64>); 10],
    spilled: [(&'static str, &'static str, Gauge<i64, AtomicI64>); 4],
    finished: Family<Reason, Counter>,
    first_token: Histogram,
    between_tokens: Histogram,
    whole: Histogram,
    queue: Histogram,
    step: Histogram,
    states: Gauge<i64, AtomicI64>,
    snapshots: Gauge<i64, AtomicI64>,
    prefix_bytes: Gauge<i64, AtomicI64>,
    evicted_blocks: Counter,
    evicted_snapshots: Counter,
    refused: Counter,
    connections: Gauge<i64, AtomicI64>,
    experts_wanted: Counter,
    experts_hit: Counter,
    experts_read_bytes: Counter,
    experts_device_hit: Counter,
    experts_uploaded_bytes: Counter,
    memory: Family<Class, Gauge<i64, AtomicI64>>,
    model: Family<Named, Gauge<i64, AtomicI64>>,
    loads: Counter,
}

/// A connection that is counted.
pub struct Connected(Gauge<i64, AtomicI64>);

impl Drop for Connected {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// Of the prompt cache on disk; zero where there is none.
const DISK: [(&str, &str); 10] = [
    ("sluice:prompt_cache_bytes", "Bytes of the prompt cache on disk"),
    ("sluice:prompt_cache_blocks", "Blocks of tokens in it"),
    ("sluice:prompt_cache_written_bytes", "Bytes written to it since the start"),
    ("sluice:prompt_cache_read_bytes", "Bytes read from it since the start"),
    ("sluice:prompt_cache_prefetched", "Tokens of prompts read from it before anybody asked"),
    ("sluice:prompt_cache_dropped", "Blocks that were not written, since too much was waiting"),
    (
        "sluice:prompt_cache_wrong",
        "Blocks that could not be read or were not what had been written, and were computed instead",
    ),
    ("sluice:prompt_cache_too_dear", "Prompts that were computed since reading would have taken longer"),
    ("sluice:prompt_cache_broken", "1 where an error has ended its use"),
    ("sluice:prompt_cache_unsummed_bytes", "Bytes of the model that are to be summed before it is read or written"),
];

/// Of what a device's caches had no room for; zero where nothing may be kept of it.
const SPILLED: [(&str, &str); 4] = [
    (
        "sluice:kv_spilled_bytes",
        "Bytes of keys, values and states in this machine's memory that a device had no room for",
    ),
    ("sluice:kv_spilled_blocks", "Blocks of tokens that came there since the start"),
    ("sluice:kv_spilled_lost", "Those that found no room there, or had to go again"),
    ("sluice:kv_returned_tokens", "Tokens of prompts that went back from there"),
];

impl Metrics {
    pub fn new() -> Metrics {
        // Seconds, as vLLM divides them.
        let long = || Histogram::new([0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0]);
        let short = || Histogram::new([0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5]);
        let mut m = Metrics {
            registry: Registry::default(),
            running: Gauge::default(),
            waiting: Gauge::default(),
            kv_usage: Gauge::default(),
            prompt_tokens: Counter::default(),
            generation_tokens: Counter::default(),
            prefix_queries: Counter::default(),
            prefix_hits: Counter::default(),
            from_disk: Counter::default(),
            from_memory: Counter::default(),
            computed: Counter::default(),
            disk: DISK.map(|(name, help)| (name, help, Gauge::default())),
            spilled: SPILLED.map(|(name, help)| (name, help, Gauge::default())),
            finished: Family::default(),
            first_token: long(),
            between_tokens: short(),
            whole: long(),
            queue: long(),
            step: short(),
            states: Gauge::default(),
            snapshots: Gauge::default(),
            prefix_bytes: Gauge::default(),
            evicted_blocks: Counter::default(),
            evicted_snapshots: Counter::default(),
            refused: Counter::default(),
            connections: Gauge::default(),
            experts_wanted: Counter::default(),
            experts_hit: Counter::default(),
            experts_read_bytes: Counter::default(),
            experts_device_hit: Counter::default(),
            experts_uploaded_bytes: Counter::default(),
            memory: Family::default(),
            model: Family::default(),
            loads: Counter::default(),
        };
        let r = &mut m.registry;
        r.register("vllm:num_requests_running", "Requests that are being computed", m.running.clone());
        r.register("vllm:num_requests_waiting", "Requests that wait for their turn", m.waiting.clone());
        r.register("vllm:kv_cache_usage_perc", "Share of the blocks that sequences hold, 0 to 1", m.kv_usage.clone());
        r.register("vllm:prompt_tokens", "Tokens of prompts", m.prompt_tokens.clone());
        r.register("vllm:generation_tokens", "Tokens that were generated", m.generation_tokens.clone());
        r.register("vllm:prefix_cache_queries", "Tokens of prompts that were looked for", m.prefix_queries.clone());
        r.register("vllm:prefix_cache_hits", "Tokens of prompts that were there", m.prefix_hits.clone());
        r.register("sluice:prompt_tokens_memory", "Tokens of prompts that were in memory", m.from_memory.clone());
        r.register("sluice:prompt_tokens_disk", "Those that were in the prompt cache on disk", m.from_disk.clone());
        r.register("sluice:prompt_tokens_computed", "Those that were computed", m.computed.clone());
        m.disk.iter().chain(&m.spilled).for_each(|(name, help, gauge)| r.register(*name, *help, gauge.clone()));
        r.register("vllm:request_success", "Choices that came to an end, by reason", m.finished.clone());
        r.register("vllm:time_to_first_token_seconds", "From a request's arrival", m.first_token.clone());
        r.register("vllm:inter_token_latency_seconds", "Between tokens of a choice", m.between_tokens.clone());
        r.register("vllm:e2e_request_latency_seconds", "From arrival to end", m.whole.clone());
        r.register("vllm:request_queue_time_seconds", "From arrival to its first step", m.queue.clone());
        r.register("sluice:step_seconds", "Time of a step", m.step.clone());
        r.register("sluice:states_in_use", "Recurrent states that sequences hold", m.states.clone());
        r.register("sluice:state_snapshots", "Recurrent states kept for prompts to come", m.snapshots.clone());
        r.register("sluice:prefix_bytes", "Keys and values kept for prompts to come", m.prefix_bytes.clone());
        r.register("sluice:prefix_blocks_evicted", "Blocks that the prefix cache gave up", m.evicted_blocks.clone());
        r.register(
            "sluice:state_snapshots_evicted",
            "States that the prefix cache gave up",
            m.evicted_snapshots.clone(),
        );
        r.register("sluice:requests_refused", "Requests that found the queue full", m.refused.clone());
        r.register("sluice:connections", "Connections that are open", m.connections.clone());
        // Where experts are read from disk; zero where all are in memory.
        r.register("sluice:experts_wanted", "Streamed experts that steps used, each once", m.experts_wanted.clone());
        r.register("sluice:experts_hit", "Those of them that were in memory", m.experts_hit.clone());
        r.register("sluice:experts_read_bytes", "Bytes of experts read", m.experts_read_bytes.clone());
        let hit = "Those of them that were in a GPU's memory";
        r.register("sluice:experts_device_hit", hit, m.experts_device_hit.clone());
        let uploaded = "Bytes of experts copied to a GPU's memory";
        r.register("sluice:experts_uploaded_bytes", uploaded, m.experts_uploaded_bytes.clone());
        r.register("sluice:memory_bytes", "Memory by class", m.memory.clone());
        r.register("sluice:model_loaded", "1 for the model that is in memory", m.model.clone());
        r.register("sluice:model_loads", "How often a model was loaded", m.loads.clone());
        m
    }

    /// All of it, as text.
    pub fn text(&self) -> String {
        let mut text = String::new();
        encode(&mut text, &self.registry).expect("writing to a string");
        text
    }

    pub fn begun(&self, prompt: usize, cached: usize, restored: usize, waited: Duration) {
        self.prompt_tokens.inc_by(prompt as u64);
        self.prefix_queries.inc_by(prompt as u64);
        self.prefix_hits.inc_by(cached as u64);
        self.from_disk.inc_by(restored as u64);
        self.from_memory.inc_by(cached.saturating_sub(restored) as u64);
        self.computed.inc_by(prompt.saturating_sub(cached) as u64);
        self.queue.observe(waited.as_secs_f64());
    }

    pub fn first_token(&self, since: Duration) {
        self.generation_tokens.inc();
        self.first_token.observe(since.as_secs_f64());
    }

    pub fn next_token(&self, since: Duration) {
        self.generation_tokens.inc();
        self.between_tokens.observe(since.as_secs_f64());
    }

    pub fn finished(&self, reason: Finish) {
        let finished_reason = match reason {
            Finish::Stop => "stop",
            Finish::Length | Finish::ContextFull => "length",
            Finish::Cancelled => "abort",
            Finish::Failed => "error",
        };
        self.finished.get_or_create(&Reason { finished_reason }).inc();
    }

    pub fn ended(&self, since: Duration) {
        self.whole.observe(since.as_secs_f64());
    }

    pub fn step(&self, time: Duration) {
        self.step.observe(time.as_secs_f64());
    }

    pub fn refused(&self) {
        self.refused.inc();
    }

    /// A connection more, until the result is dropped.
    pub fn connected(&self) -> Connected {
        self.connections.inc();
        Connected(self.connections.clone())
    }

    pub fn requests(&self, waiting: usize, running: usize) {
        self.waiting.set(waiting as i64);
        self.running.set(running as i64);
    }

    pub fn caches(&self, engine: &mut Engine) {
        self.kv_usage.set(engine.kv_usage());
        self.states.set(engine.states_in_use() as i64);
        self.snapshots.set(engine.snapshots() as i64);
        self.prefix_bytes.set(engine.kv_cached() as i64);
        // The engine counts these itself.
        let evicted = engine.evicted();
        self.evicted_blocks.inner().store(evicted.blocks, Ordering::Relaxed);
        self.evicted_snapshots.inner().store(evicted.snapshots, Ordering::Relaxed);
        if let Some(s) = engine.prompt_cache() {
            let broken = u64::from(s.broken.is_some());
            let unsummed = s.summing.map_or(0, |(summed, all)| all - summed);
            let values = [
                s.bytes,
                s.entries,
                s.written_bytes,
                s.read_bytes,
                s.prefetched,
                s.dropped,
                s.wrong,
                s.skipped_slow,
                broken,
                unsummed,
            ];
            self.disk.iter().zip(values).for_each(|((.., gauge), value)| _ = gauge.set(value as i64));
        }
        if let Some(s) = engine.host_tier() {
            let values = [s.bytes, s.blocks, s.lost, s.returned_tokens];
            self.spilled.iter().zip(values).for_each(|((.., gauge), value)| _ = gauge.set(value as i64));
        }
        if let Some(streamed) = engine.take_streamed() {
            self.experts_wanted.inc_by(streamed.stats.wanted);
            self.experts_hit.inc_by(streamed.stats.hits);
            self.experts_read_bytes.inc_by(streamed.stats.read_bytes);
            self.experts_device_hit.inc_by(streamed.stats.fast_hits);
            self.experts_uploaded_bytes.inc_by(streamed.stats.uploaded_bytes);
        }
    }

    /// Which model is in memory now.
    pub fn loaded(&self, name: Option<&str>) {
        self.model.clear();
        match name {
            Some(name) => {
                self.loads.inc();
                self.model.get_or_create(&Named { model_name: name.to_owned() }).set(1);
            }
            None => self.memory.clear(),
        }
    }

    /// Bytes by class, asked of the engine once it is set up.
    pub fn memory(&self, engine: &mut Engine) {
        for class in MemoryClass::ALL {
            let bytes = engine.memory(class) as i64;
            self.memory.get_or_create(&Class { class: class.name() }).set(bytes);
        }
    }
}
