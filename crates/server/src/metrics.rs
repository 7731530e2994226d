//! Metrics in Prometheus's text format. Where the meaning is the same as in vLLM, the name is vLLM's, so that dashboards work.

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
struct ReasonLabel {
    finished_reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ClassLabel {
    class: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ModelLabel {
    model_name: String,
}

/// All metrics.
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
    store: [(&'static str, &'static str, Gauge<i64, AtomicI64>); 11],
    spilled: [(&'static str, &'static str, Gauge<i64, AtomicI64>); 4],
    finished: Family<ReasonLabel, Counter>,
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
    drafts: Counter,
    draft_tokens: Counter,
    draft_accepted: Counter,
    refused: Counter,
    connections: Gauge<i64, AtomicI64>,
    experts_wanted: Counter,
    experts_hit: Counter,
    experts_read_bytes: Counter,
    experts_device_hit: Counter,
    experts_uploaded_bytes: Counter,
    memory: Family<ClassLabel, Gauge<i64, AtomicI64>>,
    shared: Gauge<i64, AtomicI64>,
    model: Family<ModelLabel, Gauge<i64, AtomicI64>>,
    loads: Counter,
}

/// Counts a connection until it is dropped.
pub struct ConnectionGuard(Gauge<i64, AtomicI64>);

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// The prompt cache on disk; zero without one.
const DISK: [(&str, &str); 10] = [
    ("sluice:prompt_cache_bytes", "Bytes of the prompt cache on disk"),
    ("sluice:prompt_cache_blocks", "Blocks of tokens in it"),
    ("sluice:prompt_cache_written_bytes", "Bytes written to it since the start"),
    ("sluice:prompt_cache_read_bytes", "Bytes read from it since the start"),
    ("sluice:prompt_cache_prefetched", "Prompt tokens read from it ahead of requests"),
    ("sluice:prompt_cache_dropped", "Blocks not written because too many writes were waiting"),
    ("sluice:prompt_cache_wrong", "Blocks that were unreadable or corrupt, and were computed instead"),
    ("sluice:prompt_cache_too_dear", "Prompts computed because reading them would have taken longer"),
    ("sluice:prompt_cache_broken", "1 if an error has ended its use"),
    ("sluice:prompt_cache_unsummed_bytes", "Bytes of the model still to be checksummed before it is used"),
];

/// The store that replicas share a prompt cache in; zero without one.
const STORE: [(&str, &str); 11] = [
    ("sluice:prompt_cache_store_hits", "Prompts of which the store had a part that was of use"),
    ("sluice:prompt_cache_store_misses", "Prompts looked for there in vain"),
    ("sluice:prompt_cache_store_read_bytes", "Bytes read from it since the start"),
    ("sluice:prompt_cache_store_stored_bytes", "Bytes stored in it since the start"),
    ("sluice:prompt_cache_store_queued", "Blocks that wait to be stored"),
    ("sluice:prompt_cache_store_dropped", "Blocks not stored: too many waited, or they were evicted first"),
    ("sluice:prompt_cache_store_errors", "Calls that failed"),
    ("sluice:prompt_cache_store_wrong", "Objects that were not what was stored, and were computed instead"),
    ("sluice:prompt_cache_store_given_up", "Look-ups and reads given up because they took too long"),
    ("sluice:prompt_cache_store_reads_paused", "1 while it is not read because it keeps failing"),
    ("sluice:prompt_cache_store_writes_paused", "1 while it is not written because it keeps failing"),
];

/// Keys, values and states moved from a device to host memory; zero without a device.
const SPILLED: [(&str, &str); 4] = [
    ("sluice:kv_spilled_bytes", "Bytes of keys, values and states that moved from a device to host memory"),
    ("sluice:kv_spilled_blocks", "Blocks of tokens moved there since the start"),
    ("sluice:kv_spilled_lost", "Blocks that found no room there or were evicted from there"),
    ("sluice:kv_returned_tokens", "Prompt tokens moved back from there"),
];

impl Metrics {
    /// All zero.
    pub fn new() -> Metrics {
        // Bucket bounds in seconds, the same as vLLM's.
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
            store: STORE.map(|(name, help)| (name, help, Gauge::default())),
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
            drafts: Counter::default(),
            draft_tokens: Counter::default(),
            draft_accepted: Counter::default(),
            refused: Counter::default(),
            connections: Gauge::default(),
            experts_wanted: Counter::default(),
            experts_hit: Counter::default(),
            experts_read_bytes: Counter::default(),
            experts_device_hit: Counter::default(),
            experts_uploaded_bytes: Counter::default(),
            memory: Family::default(),
            shared: Gauge::default(),
            model: Family::default(),
            loads: Counter::default(),
        };
        let r = &mut m.registry;
        r.register("vllm:num_requests_running", "Requests being computed", m.running.clone());
        r.register("vllm:num_requests_waiting", "Requests waiting in the queue", m.waiting.clone());
        r.register("vllm:kv_cache_usage_perc", "Share of KV cache blocks in use, 0 to 1", m.kv_usage.clone());
        r.register("vllm:prompt_tokens", "Prompt tokens", m.prompt_tokens.clone());
        r.register("vllm:generation_tokens", "Generated tokens", m.generation_tokens.clone());
        r.register(
            "vllm:prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache",
            m.prefix_queries.clone(),
        );
        r.register("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache", m.prefix_hits.clone());
        r.register("sluice:prompt_tokens_memory", "Prompt tokens found in memory", m.from_memory.clone());
        r.register(
            "sluice:prompt_tokens_disk",
            "Prompt tokens read from the prompt cache on disk",
            m.from_disk.clone(),
        );
        r.register("sluice:prompt_tokens_computed", "Prompt tokens computed", m.computed.clone());
        m.disk
            .iter()
            .chain(&m.store)
            .chain(&m.spilled)
            .for_each(|(name, help, gauge)| r.register(*name, *help, gauge.clone()));
        r.register("vllm:request_success", "Finished choices by reason", m.finished.clone());
        r.register("vllm:time_to_first_token_seconds", "From arrival to the first token", m.first_token.clone());
        r.register("vllm:inter_token_latency_seconds", "Between tokens of a choice", m.between_tokens.clone());
        r.register("vllm:e2e_request_latency_seconds", "From arrival to the end", m.whole.clone());
        r.register("vllm:request_queue_time_seconds", "From arrival to the first step", m.queue.clone());
        r.register("sluice:step_seconds", "Duration of a step", m.step.clone());
        r.register("sluice:states_in_use", "Recurrent states in use by sequences", m.states.clone());
        r.register("sluice:state_snapshots", "Recurrent states kept for later prompts", m.snapshots.clone());
        r.register("sluice:prefix_bytes", "Bytes of keys and values kept for later prompts", m.prefix_bytes.clone());
        r.register("sluice:prefix_blocks_evicted", "Blocks evicted from the prefix cache", m.evicted_blocks.clone());
        r.register(
            "sluice:state_snapshots_evicted",
            "Recurrent states evicted from the prefix cache",
            m.evicted_snapshots.clone(),
        );
        r.register("vllm:spec_decode_num_drafts", "Drafts that were computed", m.drafts.clone());
        r.register("vllm:spec_decode_num_draft_tokens", "Drafted tokens that were computed", m.draft_tokens.clone());
        let accepted = "Drafted tokens that were drawn as drafted";
        r.register("vllm:spec_decode_num_accepted_tokens", accepted, m.draft_accepted.clone());
        r.register("sluice:requests_refused", "Requests refused because the queue was full", m.refused.clone());
        r.register("sluice:connections", "Open connections", m.connections.clone());
        // Experts read from disk; zero if all are in memory.
        r.register("sluice:experts_wanted", "Streamed experts used, counted once per step", m.experts_wanted.clone());
        r.register("sluice:experts_hit", "Streamed experts found in memory", m.experts_hit.clone());
        r.register("sluice:experts_read_bytes", "Bytes of experts read from disk", m.experts_read_bytes.clone());
        let hit = "Streamed experts found in GPU memory";
        r.register("sluice:experts_device_hit", hit, m.experts_device_hit.clone());
        let uploaded = "Bytes of experts copied to GPU memory";
        r.register("sluice:experts_uploaded_bytes", uploaded, m.experts_uploaded_bytes.clone());
        r.register("sluice:memory_bytes", "Memory by class", m.memory.clone());
        r.register("sluice:memory_shared", "1 if a GPU computes in the host's memory", m.shared.clone());
        r.register("sluice:model_loaded", "1 for the model in memory", m.model.clone());
        r.register("sluice:model_loads", "Number of model loads", m.loads.clone());
        m
    }

    /// All metrics in the OpenMetrics text format.
    pub fn text(&self) -> String {
        let mut text = String::new();
        encode(&mut text, &self.registry).expect("writing to a string");
        text
    }

    /// A request has left the queue. `prompt`, `cached`, `restored`: its tokens, those found in the cache, and those of them read from disk.
    pub fn prompt_started(&self, prompt: usize, cached: usize, restored: usize, waited: Duration) {
        self.prompt_tokens.inc_by(prompt as u64);
        self.prefix_queries.inc_by(prompt as u64);
        self.prefix_hits.inc_by(cached as u64);
        self.from_disk.inc_by(restored as u64);
        self.from_memory.inc_by(cached.saturating_sub(restored) as u64);
        self.computed.inc_by(prompt.saturating_sub(cached) as u64);
        self.queue.observe(waited.as_secs_f64());
    }

    /// A choice has its first token, this long after its request's arrival.
    pub fn first_token(&self, since: Duration) {
        self.generation_tokens.inc();
        self.first_token.observe(since.as_secs_f64());
    }

    /// A choice has another token, this long after the one before.
    pub fn next_token(&self, since: Duration) {
        self.generation_tokens.inc();
        self.between_tokens.observe(since.as_secs_f64());
    }

    /// A choice is complete.
    pub fn finished(&self, reason: Finish) {
        let finished_reason = match reason {
            Finish::Stop => "stop",
            Finish::Length | Finish::ContextFull => "length",
            Finish::Cancelled => "abort",
            Finish::Failed => "error",
        };
        self.finished.get_or_create(&ReasonLabel { finished_reason }).inc();
    }

    /// A request is over, this long after its arrival.
    pub fn request_ended(&self, since: Duration) {
        self.whole.observe(since.as_secs_f64());
    }

    /// A step has taken this long.
    pub fn step(&self, time: Duration) {
        self.step.observe(time.as_secs_f64());
    }

    /// A request found the queue full.
    pub fn refused(&self) {
        self.refused.inc();
    }

    /// Counts one more connection until the result is dropped.
    pub fn connected(&self) -> ConnectionGuard {
        self.connections.inc();
        ConnectionGuard(self.connections.clone())
    }

    /// The number of waiting and running requests.
    pub fn requests(&self, waiting: usize, running: usize) {
        self.waiting.set(waiting as i64);
        self.running.set(running as i64);
    }

    /// Reads the engine's cache counters.
    pub fn caches(&self, engine: &mut Engine) {
        self.kv_usage.set(engine.kv_usage());
        self.states.set(engine.states_in_use() as i64);
        self.snapshots.set(engine.snapshots() as i64);
        self.prefix_bytes.set(engine.kv_cached() as i64);
        // The engine keeps these totals itself.
        let evicted = engine.evicted();
        self.evicted_blocks.inner().store(evicted.blocks, Ordering::Relaxed);
        self.evicted_snapshots.inner().store(evicted.snapshots, Ordering::Relaxed);
        let drafted = engine.draft_stats();
        for (counter, count) in [
            (&self.drafts, drafted.iter().map(|d| d.counts.drafts).sum()),
            (&self.draft_tokens, drafted.iter().map(|d| d.counts.drafted).sum()),
            (&self.draft_accepted, drafted.iter().map(|d| d.counts.accepted).sum()),
        ] {
            counter.inner().store(count, Ordering::Relaxed);
        }
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
            if let Some(s) = s.store {
                let values = [
                    s.hits,
                    s.misses,
                    s.read_bytes,
                    s.stored_bytes,
                    s.queued,
                    s.dropped,
                    s.errors,
                    s.wrong,
                    s.given_up,
                    u64::from(s.reads_paused),
                    u64::from(s.writes_paused),
                ];
                self.store.iter().zip(values).for_each(|((.., gauge), value)| _ = gauge.set(value as i64));
            }
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

    /// Which model is in memory now; `None` if none is.
    pub fn loaded(&self, name: Option<&str>) {
        self.model.clear();
        match name {
            Some(name) => {
                self.loads.inc();
                self.model.get_or_create(&ModelLabel { model_name: name.to_owned() }).set(1);
            }
            None => self.memory.clear(),
        }
    }

    /// Reads the engine's memory use by class.
    pub fn memory(&self, engine: &mut Engine) {
        for class in MemoryClass::ALL {
            let bytes = engine.memory(class) as i64;
            self.memory.get_or_create(&ClassLabel { class: class.name() }).set(bytes);
        }
        self.shared.set(i64::from(engine.device().is_some_and(|device| device.shared)));
    }
}
