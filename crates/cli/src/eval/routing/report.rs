//! The figures of `eval routing`, and the forms in which they are given: tables, JSON, CSV, charts.

use std::fmt::Write as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use serde_json::{Value, json};
use sluice_experts::simulate;
use sluice_experts::{Policy, Recording};

use super::chart::{Chart, Series};
use super::statistics::{self, Guesses, share_of_hottest};
use super::tiers::Tiers;

/// Tokens within which used experts are counted.
const WINDOWS: [usize; 5] = [3, 10, 30, 100, 300];
/// Experts in a layer's own cache.
const ENTRIES: [usize; 5] = [8, 16, 32, 64, 128];
/// The hottest part of a layer's experts.
const HOTTEST: [f64; 3] = [0.125, 0.25, 0.5];
/// Slots of the pool, as parts of all experts.
const SIZES: [f64; 10] = [0.0625, 0.125, 0.1875, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 0.9375];

/// All figures.
pub struct Report {
    tokens: usize,
    experts: usize,
    k: usize,
    layers: usize,
    /// (window, by layer: share of the experts used).
    diversity: Vec<(usize, Vec<f64>)>,
    /// By layer.
    overlap: Vec<f64>,
    /// (entries, by layer: hit rate).
    lru_hits: Vec<(usize, Vec<f64>)>,
    /// By layer.
    guesses: Vec<Guesses>,
    /// By layer: share of a token's experts that the layer's router finds in the input of the layer before. The engine counts it; NaN for the first layer.
    lookahead: Vec<f64>,
    /// By layer: uses of each expert.
    uses: Vec<Vec<u64>>,
    pools: Vec<Pool>,
    tiers: Vec<Tiers>,
}

/// Misses of a pool of slots over the whole text.
struct Pool {
    slots: usize,
    /// As [`Policy::ALL`].
    misses: [u64; Policy::ALL.len()],
    belady: u64,
}

impl Pool {
    fn of(&self, policy: Policy) -> u64 {
        Policy::ALL.iter().zip(self.misses).find(|(p, _)| **p == policy).map_or(0, |(_, m)| m)
    }

    /// How much of the gap between LRU and the optimum `policy` closes; `None` if there is no gap.
    fn gap_closed(&self, policy: Policy) -> Option<f64> {
        let (lru, own) = (self.of(Policy::Lru) as f64, self.of(policy) as f64);
        let gap = lru - self.belady as f64;
        (gap > 0.0).then(|| (lru - own) / gap)
    }
}

impl Report {
    /// Computes all figures on `threads` threads. `lookahead`: as in [`Report`].
    pub fn new(recording: &Recording, lookahead: Vec<f64>, threads: usize) -> Report {
        let layers = recording.layers.len();
        let by_layer = |of: &(dyn Fn(usize) -> f64 + Sync)| parallel(layers, threads, of);
        let diversity = WINDOWS.into_iter().filter(|w| *w <= recording.tokens());
        let entries = ENTRIES.into_iter().filter(|n| (recording.k..recording.experts).contains(n));
        Report {
            tokens: recording.tokens(),
            experts: recording.experts,
            k: recording.k,
            layers,
            diversity: diversity
                .map(|w| (w, by_layer(&|l| statistics::diversity(recording, l, w).unwrap_or(0.0))))
                .collect(),
            overlap: by_layer(&|l| statistics::overlap(recording, l)),
            lru_hits: entries.map(|n| (n, by_layer(&|l| statistics::lru_hits(recording, l, n)))).collect(),
            guesses: parallel(layers, threads, |l| statistics::guesses(recording, l)),
            lookahead,
            uses: (0..layers).map(|l| recording.uses(l)).collect(),
            pools: pools(recording, threads),
            tiers: Tiers::of(recording, |n, each| parallel(n, threads, each)),
        }
    }

    fn all(&self) -> usize {
        self.layers * self.experts
    }

    /// Tables for people.
    pub fn to_text(&self) -> String {
        let (experts, k, all) = (self.experts, self.k, self.all());
        let percent = |x: f64| if x.is_nan() { "-".to_owned() } else { format!("{:.1}", 100.0 * x) };
        let mut text = format!(
            "routing of {} tokens: {} layers, {k} of {experts} experts per token; shares in percent\n",
            self.tokens, self.layers
        );
        // Rows by layer, and their mean.
        let by_layer = |columns: &[&Vec<f64>]| -> Vec<Vec<String>> {
            let row = |name: String, of: &dyn Fn(&[f64]) -> f64| {
                std::iter::once(name).chain(columns.iter().map(|c| percent(of(c)))).collect()
            };
            let layers = (0..self.layers).map(|l| row(l.to_string(), &|c: &[f64]| c[l]));
            layers.chain([row("mean".into(), &mean)]).collect()
        };

        // 1. how many, how soon again
        text += "\nexperts of a layer used within so many tokens; those of the token before wanted again";
        _ = writeln!(text, " (by chance {})", percent(k as f64 / experts as f64));
        let header = self.diversity.iter().map(|(w, _)| format!("in {w}")).chain(["again".into()]);
        let columns: Vec<_> = self.diversity.iter().map(|(_, c)| c).chain([&self.overlap]).collect();
        text += &table("layer", header, &by_layer(&columns));
        if !self.lru_hits.is_empty() {
            text += "\nhit rate of a layer's own least-recently-used cache, by its entries\n";
            let columns: Vec<_> = self.lru_hits.iter().map(|(_, c)| c).collect();
            text += &table("layer", self.lru_hits.iter().map(|(n, _)| n.to_string()), &by_layer(&columns));
        }

        // 2. what predicts them, how evenly they are used
        text += "\nexperts guessed right: by the layer before, by the token before, always the hottest, by the router ahead of time\n";
        let guesses: Vec<Vec<f64>> =
            [|g: &Guesses| g.layer_before, |g: &Guesses| g.token_before, |g: &Guesses| g.hottest]
                .map(|f| self.guesses.iter().map(f).collect())
                .into_iter()
                .chain([self.lookahead.clone()])
                .collect();
        let names = ["layer before", "token before", "hottest", "look-ahead"].map(str::to_owned);
        text += &table("layer", names, &by_layer(&guesses.iter().collect::<Vec<_>>()));
        text += "\nuses that go to the hottest part of a layer's experts; experts never used\n";
        let hottest = HOTTEST.map(|part| self.uses.iter().map(|u| share_of_hottest(u, part)).collect::<Vec<f64>>());
        let unused: Vec<f64> = self.uses.iter().map(|u| unused(u) as f64 / experts as f64).collect();
        let header = HOTTEST.map(|part| format!("{} %", part * 100.0)).into_iter().chain(["unused".into()]);
        text += &table("layer", header, &by_layer(&hottest.iter().chain([&unused]).collect::<Vec<_>>()));

        // 3. what a cache could do
        _ = writeln!(
            text,
            "\nmisses per token of one pool of slots for all layers, of {} uses; what of the gap from lru to belady is closed",
            self.layers * k
        );
        let others = || Policy::ALL.into_iter().filter(|p| *p != Policy::Lru);
        let header = ["of all".to_owned()].into_iter().chain(Policy::ALL.map(|p| p.name().to_owned()));
        let header = header.chain(["belady".to_owned()]).chain(others().map(|p| format!("{} closes", p.name())));
        let rows: Vec<Vec<String>> = self
            .pools
            .iter()
            .map(|pool| {
                let per_token = |n: u64| format!("{:.3}", n as f64 / self.tokens as f64);
                let mut row = vec![pool.slots.to_string(), percent(pool.slots as f64 / all as f64)];
                row.extend(pool.misses.map(per_token));
                row.push(per_token(pool.belady));
                row.extend(others().map(|p| pool.gap_closed(p).map_or("-".into(), percent)));
                row
            })
            .collect();
        text += &table("slots", header, &rows);
        text += "\nuses served by two tiers of slots and the disk; what the faster would serve of the hottest experts, were they known\n";
        text + &table("fast slots", Tiers::header(), &self.tiers.iter().map(|t| t.row(percent)).collect::<Vec<_>>())
    }

    pub fn to_json(&self) -> Value {
        let keyed = |rows: &[(usize, Vec<f64>)]| -> serde_json::Map<String, Value> {
            rows.iter()
                .map(|(x, by_layer)| (x.to_string(), json!({"mean": mean(by_layer), "layers": by_layer})))
                .collect()
        };
        let guesses = |of: fn(&Guesses) -> f64| self.guesses.iter().map(of).collect::<Vec<f64>>();
        let pools: Vec<Value> = self
            .pools
            .iter()
            .map(|pool| {
                let each = |of: &dyn Fn(Policy) -> Value| -> serde_json::Map<String, Value> {
                    Policy::ALL.iter().map(|p| (p.name().to_owned(), of(*p))).collect()
                };
                let mut misses = each(&|p| json!(pool.of(p)));
                misses.insert("belady".into(), json!(pool.belady));
                json!({"slots": pool.slots, "misses": misses, "gap_closed": each(&|p| json!(pool.gap_closed(p)))})
            })
            .collect();
        json!({
            "tokens": self.tokens,
            "layers": self.layers,
            "experts": self.experts,
            "experts_per_token": self.k,
            "diversity": keyed(&self.diversity),
            "overlap": {"mean": mean(&self.overlap), "layers": self.overlap},
            "lru_hits": keyed(&self.lru_hits),
            "guessed": {
                "layer_before": guesses(|g| g.layer_before),
                "token_before": guesses(|g| g.token_before),
                "hottest": guesses(|g| g.hottest),
                "lookahead": self.lookahead,
                "chance": self.k as f64 / self.experts as f64,
            },
            "uses": self.uses,
            "pools": pools,
            "tiers": self.tiers.iter().map(Tiers::to_json).collect::<Vec<_>>(),
        })
    }

    /// A row per figure.
    ///
    /// | column | |
    /// |---|---|
    /// | `statistic` | `diversity`, `overlap`, `lru_hits`, `guessed`, `uses`, `misses`, `gap_closed` or `tiers` |
    /// | `layer` | among those that have experts, from 0; `all` for what has no layer |
    /// | `series` | of guesses, what they come from; of misses, the policy; of tiers, who served, experts that rose per token, what the hottest would serve; else empty |
    /// | `x` | tokens of the window, entries of the cache, number of the expert, slots of the pool or of the faster tier; else empty |
    /// | `value` | a share from 0 to 1; of uses and misses, how many |
    pub fn to_csv(&self) -> String {
        let mut csv = "statistic,layer,series,x,value\n".to_owned();
        let mut row = |statistic: &str, layer: &dyn std::fmt::Display, series: &str, x: Option<usize>, value: f64| {
            let x = x.map_or(String::new(), |x| x.to_string());
            if value.is_finite() {
                _ = writeln!(csv, "{statistic},{layer},{series},{x},{value}");
            }
        };
        for (statistic, rows) in [("diversity", &self.diversity), ("lru_hits", &self.lru_hits)] {
            for (x, by_layer) in rows {
                by_layer.iter().enumerate().for_each(|(l, value)| row(statistic, &l, "", Some(*x), *value));
            }
        }
        for l in 0..self.layers {
            row("overlap", &l, "", None, self.overlap[l]);
            let g = &self.guesses[l];
            row("guessed", &l, "layer_before", None, g.layer_before);
            row("guessed", &l, "token_before", None, g.token_before);
            row("guessed", &l, "hottest", None, g.hottest);
            row("guessed", &l, "lookahead", None, self.lookahead[l]);
            self.uses[l].iter().enumerate().for_each(|(e, n)| row("uses", &l, "", Some(e), *n as f64));
        }
        for pool in &self.pools {
            for policy in Policy::ALL {
                row("misses", &"all", policy.name(), Some(pool.slots), pool.of(policy) as f64);
                row("gap_closed", &"all", policy.name(), Some(pool.slots), pool.gap_closed(policy).unwrap_or(f64::NAN));
            }
            row("misses", &"all", "belady", Some(pool.slots), pool.belady as f64);
        }
        for (series, slots, value) in self.tiers.iter().flat_map(Tiers::figures) {
            row("tiers", &"all", series, Some(slots), value);
        }
        csv
    }

    pub fn charts(&self) -> Vec<Chart> {
        let percent = |x: f64| 100.0 * x;
        // Mean, least and most over the layers.
        let spread = |rows: &[(usize, Vec<f64>)]| -> Vec<Series> {
            let of = |name: &str, f: &dyn Fn(&[f64]) -> f64| Series {
                name: name.into(),
                points: rows.iter().map(|(x, by_layer)| (*x as f64, percent(f(by_layer)))).collect(),
            };
            let least = |c: &[f64]| c.iter().copied().fold(f64::INFINITY, f64::min);
            let most = |c: &[f64]| c.iter().copied().fold(0.0, f64::max);
            vec![of("highest layer", &most), of("mean of the layers", &mean), of("lowest layer", &least)]
        };
        let by_layer = |name: &str, values: &mut dyn Iterator<Item = f64>| Series {
            name: name.into(),
            points: values.enumerate().filter(|p| p.1.is_finite()).map(|(l, v)| (l as f64, percent(v))).collect(),
        };
        let chance = self.k as f64 / self.experts as f64;
        let guesses = vec![
            by_layer("by the layer before", &mut self.guesses.iter().map(|g| g.layer_before)),
            by_layer("by the token before", &mut self.guesses.iter().map(|g| g.token_before)),
            by_layer("always the hottest", &mut self.guesses.iter().map(|g| g.hottest)),
            by_layer("by chance", &mut self.guesses.iter().map(|_| chance)),
            by_layer("by the router ahead", &mut self.lookahead.iter().copied()),
        ];
        let uses = |name: &str, layer: usize| {
            let mut uses = self.uses[layer].clone();
            uses.sort_unstable_by(|a, b| b.cmp(a));
            let share = |n: u64| percent(n as f64 / self.tokens as f64);
            let points = uses.into_iter().enumerate().map(|(i, n)| ((i + 1) as f64, share(n))).collect();
            Series { name: format!("{name} layer"), points }
        };
        let mut policies: Vec<Series> = Policy::ALL.map(|p| self.misses_by_size(p.name(), |pool| pool.of(p))).into();
        policies.push(self.misses_by_size("belady", |pool| pool.belady));
        let chart = |name, title: &str, x: &str, y: &str, series| Chart {
            name,
            title: title.into(),
            x: x.into(),
            y: y.into(),
            series,
        };
        let layer = "layer";
        vec![
            chart("policies", "Misses by policy and size", "slots, % of all experts", "misses per token", policies),
            chart("lru", "A cache per layer, least recently used", "entries", "hit rate, %", spread(&self.lru_hits)),
            chart("diversity", "Experts used", "within tokens", "% of a layer's experts", spread(&self.diversity)),
            chart("guesses", "What predicts a token's experts", layer, "% guessed right", guesses),
            chart(
                "popularity",
                "How evenly experts are used",
                "experts by heat",
                "% of tokens that want it",
                vec![uses("first", 0), uses("middle", self.layers / 2), uses("last", self.layers - 1)],
            ),
            chart(
                "overlap",
                "Experts that the next token wants again",
                layer,
                "%",
                vec![
                    by_layer("consecutive tokens", &mut self.overlap.iter().copied()),
                    by_layer("by chance", &mut self.overlap.iter().map(|_| chance)),
                ],
            ),
        ]
    }

    fn misses_by_size(&self, name: &str, misses: impl Fn(&Pool) -> u64) -> Series {
        let x = |pool: &Pool| 100.0 * pool.slots as f64 / self.all() as f64;
        let points = self.pools.iter().map(|p| (x(p), misses(p) as f64 / self.tokens as f64)).collect();
        Series { name: name.into(), points }
    }
}

/// Every policy, and the optimum, for every size that holds a visit's experts.
fn pools(recording: &Recording, threads: usize) -> Vec<Pool> {
    let trace = recording.trace();
    let all = recording.layers.len() * recording.experts;
    let mut sizes: Vec<usize> = SIZES.iter().map(|part| (part * all as f64).round() as usize).collect();
    sizes.retain(|slots| (recording.k..all).contains(slots));
    sizes.dedup();
    let kinds = Policy::ALL.len() + 1;
    let counts = parallel(sizes.len() * kinds, threads, |i| match Policy::ALL.get(i % kinds) {
        Some(policy) => simulate::misses(&trace, sizes[i / kinds], *policy, &[]),
        None => simulate::belady(&trace, sizes[i / kinds]),
    });
    let rows = sizes.iter().zip(counts.chunks_exact(kinds));
    let misses = |row: &[u64]| std::array::from_fn(|i| row[i]);
    rows.map(|(slots, row)| Pool { slots: *slots, misses: misses(row), belady: row[kinds - 1] }).collect()
}

/// `each(0), each(1), ..`, computed by several threads.
fn parallel<T: Send>(n: usize, threads: usize, each: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::with_capacity(n));
    let work = || {
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= n {
                return;
            }
            let result = each(i);
            done.lock().unwrap_or_else(|e| e.into_inner()).push((i, result));
        }
    };
    thread::scope(|scope| {
        (1..threads.min(n)).for_each(|_| _ = scope.spawn(work));
        work();
    });
    let mut done = done.into_inner().unwrap_or_else(|e| e.into_inner());
    done.sort_by_key(|d| d.0);
    done.into_iter().map(|d| d.1).collect()
}

/// Ignoring NaN.
fn mean(values: &[f64]) -> f64 {
    let numbers = || values.iter().filter(|v| !v.is_nan());
    numbers().sum::<f64>() / numbers().count() as f64
}

fn unused(uses: &[u64]) -> usize {
    uses.iter().filter(|n| **n == 0).count()
}

/// Columns as wide as they need, aligned to the right.
fn table(first: &str, header: impl IntoIterator<Item = String>, rows: &[Vec<String>]) -> String {
    let header: Vec<String> = std::iter::once(first.to_owned()).chain(header).collect();
    let lines = || std::iter::once(&header).chain(rows);
    let width = |c: usize| lines().map(|r| r[c].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:>width$}"));
        cells.collect::<Vec<_>>().join("  ") + "\n"
    };
    lines().map(line).collect()
}
