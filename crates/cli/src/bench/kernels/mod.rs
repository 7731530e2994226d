//! `sluice bench kernels`: each kernel alone, on matrices and caches far larger than the processor's caches where a model's would be.

mod data;

use std::hint::black_box;

use anyhow::{Result, ensure};
use clap::{Args, ValueEnum};
use serde_json::json;
use sluice_backend::Isa;
use sluice_kernels::attention::{AttentionMode, Head, KvView, Run, attend};
use sluice_kernels::delta::{HeadInputs, conv_step, recurrence};
use sluice_kernels::format::{ActivationFormat, Activations, BlockFormat, Float, WeightFormat};
use sluice_kernels::matmul::{self, ROW_BLOCK};
use sluice_kernels::matrix::Matrix;
use sluice_kernels::roofline::Arithmetic;
use sluice_kernels::rows::{Rows, RowsMut};
use sluice_kernels::scratch::Scratch;
use sluice_kernels::{elementwise, norm, route};

use data::{COLS, KINDS, Kind, Random, Tokens, from_a_line, half_block, kind_name, kv_shape, noise, pool};

use super::figures::Figures;
use super::roofline::{Memory, peak, threads, together};
use crate::engine_args::activations_name;

/// Rows of a gate projection of Qwen3-0.6B.
const ROWS: usize = 3072;
/// The least bytes of weights in one pass of one token: more than any cache keeps until the next pass.
const STREAMED: usize = 512 << 20;
/// Tokens of the many-token products.
const MANY: usize = 512;

#[derive(Args, Debug)]
pub struct KernelsArgs {
    /// Threads, one number or several [default: 1 and all cores]
    #[arg(long, value_delimiter = ',', value_name = "N,..")]
    threads: Vec<usize>,
    /// Precision of activations, one or several [default: all]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "TYPE,..")]
    activations: Vec<Precision>,
    /// Only kernels whose name has this in it ("affine4", "attention", "512 tokens")
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Measurements, of which the median counts
    #[arg(long, default_value_t = 5, value_name = "N")]
    rounds: usize,
    /// One line of JSON for each kernel
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Precision {
    F32,
    Bf16,
    Int8,
    Int11,
}

impl Precision {
    fn mode(self) -> Activations {
        match self {
            Precision::F32 => Activations::F32,
            Precision::Bf16 => Activations::Bf16,
            Precision::Int8 => Activations::Int8,
            Precision::Int11 => Activations::Int11,
        }
    }
}

pub fn run(args: &KernelsArgs) -> Result<()> {
    ensure!(args.rounds > 0, "--rounds must be at least 1");
    let mut bench = Bench { isa: Isa::from_env()?, args, memory: Memory::new()? };
    if !args.json {
        println!("{:<44}{:>8}{:>26}{:>26}{:>20}", "kernel", "threads", "reached", "at best", "of it");
    }
    let all = [Precision::Int8, Precision::Bf16, Precision::F32];
    let wanted = if args.activations.is_empty() { &all[..] } else { &args.activations };
    for n in threads(&args.threads)? {
        for (name, format) in formats() {
            // Several precisions may come to the same encoding.
            let mut seen = vec![];
            for mode in wanted.iter().map(|p| p.mode()) {
                let encoding = format.activation_format(mode);
                if seen.contains(&encoding) {
                    continue;
                }
                seen.push(encoding);
                let taken = match encoding {
                    ActivationFormat::F32 => Activations::F32,
                    ActivationFormat::Bf16 => Activations::Bf16,
                    ActivationFormat::Int8 => Activations::Int8,
                    ActivationFormat::Int11 => Activations::Int11,
                };
                bench.product(&format!("{name} x {}", activations_name(taken)), format, mode, n)?;
            }
        }
        for (kv_heads, group, dim) in [(8, 2, 128), (4, 8, 128), (2, 8, 256)] {
            for context in [1024, 8192] {
                for kind in KINDS {
                    bench.attention(kind, kv_heads, group, dim, context, n);
                }
            }
        }
        for kind in KINDS {
            bench.attention_of_prompt(kind, 8, 2, 128, 512, n);
        }
        for tokens in [1, 64] {
            bench.delta(tokens, n);
        }
        bench.vectors(n);
    }
    Ok(())
}

fn formats() -> Vec<(String, WeightFormat)> {
    let affine = [4, 8, 2, 3, 5, 6].map(|bits| {
        let format = WeightFormat::Affine { bits, group: 64, scale: Float::Bf16 };
        (format!("affine{bits}"), format)
    });
    use BlockFormat::{Iq4Xs, Mxfp4, Q4_0, Q4K, Q5_0, Q6K, Q8_0};
    let blocks = [Q8_0, Q4_0, Q4K, Q6K, Iq4Xs, Mxfp4, Q5_0]
        .map(|blocks| (blocks.name().to_lowercase(), WeightFormat::Blocks(blocks)));
    let float = [("bf16", Float::Bf16), ("f16", Float::F16), ("f32", Float::F32)];
    let float = float.map(|(name, float)| (name.to_owned(), WeightFormat::Float(float)));
    affine.into_iter().chain(blocks).chain(float).collect()
}

struct Bench<'a> {
    isa: Isa,
    args: &'a KernelsArgs,
    memory: Memory,
}

/// What limits a kernel.
#[derive(Clone, Copy)]
enum Limit {
    /// So many bytes are read.
    Read(usize),
    /// So many operations (two per multiply-add) are done, in this arithmetic.
    Operations(usize, Arithmetic),
}

impl Bench<'_> {
    fn wants(&self, name: &str) -> bool {
        self.args.only.as_ref().is_none_or(|only| name.contains(only.as_str()))
    }

    /// Rounds of `seconds()`, the limit measured before each.
    fn report(&mut self, name: &str, threads: usize, limit: Limit, mut seconds: impl FnMut() -> f64) {
        let (mut reached, mut best) = (Figures::default(), Figures::default());
        seconds();
        for _ in 0..self.args.rounds {
            let (work, at_best) = match limit {
                Limit::Read(bytes) => (bytes, self.memory.read(self.isa, threads)),
                Limit::Operations(n, arithmetic) => (n, peak(self.isa, threads, arithmetic)),
            };
            reached.push(work as f64 / seconds());
            best.push(at_best);
        }
        let fraction = reached.over(&best);
        if self.args.json {
            let unit = match limit {
                Limit::Read(_) => "bytes_per_second",
                Limit::Operations(..) => "operations_per_second",
            };
            println!(
                "{}",
                json!({
                    "bench": "kernels",
                    "kernel": name,
                    "threads": threads,
                    "isa": self.isa.to_string(),
                    "rounds": self.args.rounds,
                    "unit": unit,
                    "reached": reached.to_json(),
                    "at_best": best.to_json(),
                    "fraction": fraction.to_json(),
                })
            );
            return;
        }
        let (scale, unit) = match limit {
            Limit::Read(_) => (1e9, "GB/s"),
            Limit::Operations(..) => (1e9, "GOPS"),
        };
        let text = |f: &Figures| f.map(|x| x / scale).to_text(1) + " " + unit;
        let percent = fraction.map(|x| 100.0 * x).to_text(0) + "%";
        println!("{name:<44}{threads:>8}{:>26}{:>26}{percent:>20}", text(&reached), text(&best));
    }

    /// A product of a matrix with one token, and with many.
    fn product(&mut self, name: &str, format: WeightFormat, mode: Activations, threads: usize) -> Result<()> {
        let isa = self.isa;
        let one = format!("{name}, 1 token");
        if self.wants(&one) {
            let row = format.planes(COLS)?[0].row_bytes;
            let rows = (STREAMED / row).next_multiple_of(ROWS);
            let parts = Random::new(format, rows)?;
            let x = Tokens::new(isa, 1);
            let w = parts.matrix()?;
            // A quarter at a time: each measurement reads another part, and lasts a few milliseconds.
            let part = rows / 4;
            let mut next = 0;
            self.report(&one, threads, Limit::Read(w.bytes() / rows * part), || {
                let from = next * part;
                next = (next + 1) % 4;
                products(isa, &w.rows_slice(from..from + part), &x, 1, mode, threads)
            });
        }
        let many = format!("{name}, {MANY} tokens");
        if self.wants(&many) {
            let arithmetic = match format.activation_format(mode) {
                ActivationFormat::F32 => Arithmetic::F32,
                ActivationFormat::Bf16 => Arithmetic::Bf16,
                ActivationFormat::Int8 | ActivationFormat::Int11 => Arithmetic::Int8,
            };
            let parts = Random::new(format, ROWS)?;
            let x = Tokens::new(isa, MANY);
            let w = parts.matrix()?;
            self.report(&many, threads, Limit::Operations(2 * ROWS * COLS * MANY, arithmetic), || {
                products(isa, &w, &x, MANY, mode, threads)
            });
        }
        Ok(())
    }

    /// One token's attention in one layer, all KV heads.
    fn attention(&mut self, kind: Kind, kv_heads: usize, group: usize, dim: usize, context: usize, threads: usize) {
        let name = format!("attention {} {kv_heads} x {group} of {dim}, 1 token at {context}", kind_name(kind));
        if !self.wants(&name) {
            return;
        }
        let isa = self.isa;
        let block_tokens = 32;
        let shape = kv_shape(kind, kv_heads, dim, block_tokens);
        let blocks = context / block_tokens;
        // Many layers' worth, so that each call reads memory, as a model's would.
        let layers = (STREAMED / (blocks * shape.block_bytes)).max(2);
        let bytes = pool(&half_block(isa, &shape), 2 * layers * blocks);
        let q = noise(kv_heads * group * dim);
        let per_round = layers / 2;
        let mut from = 0;
        let bytes_read = per_round * blocks * shape.block_bytes;
        self.report(&name, threads, Limit::Read(bytes_read), || {
            from = (from + per_round) % layers;
            let tables: Vec<Vec<u32>> = (0..per_round)
                .map(|i| {
                    let layer = (from + i) % layers;
                    (layer * blocks..(layer + 1) * blocks).map(|b| b as u32).collect()
                })
                .collect();
            together(threads, |t| {
                let mut scratch = Vec::new();
                let mut out = vec![0.0; group * dim];
                for table in &tables {
                    for kv_head in (t..kv_heads).step_by(threads) {
                        let kv = KvView { bytes: from_a_line(&bytes), shape };
                        let head = Head { kv, kv_head, group, scale: 0.1, window: None, softcap: None, sinks: None };
                        scratch.resize(head.scratch_len(1), 0.0);
                        let columns = kv_head * group * dim..(kv_head + 1) * group * dim;
                        let q = Rows::dense(&q, q.len()).columns(columns);
                        let run = Run { table: &table[..], position: context - 1, row: 0, tokens: 1 };
                        let mut out = RowsMut::dense(&mut out, group * dim);
                        attend(isa, &head, &[run], q, &mut out, &mut scratch);
                    }
                }
                black_box(&out);
            })
        });
    }

    /// A whole prompt's attention in one layer, in runs of 64 tokens.
    fn attention_of_prompt(
        &mut self,
        kind: Kind,
        kv_heads: usize,
        group: usize,
        dim: usize,
        tokens: usize,
        threads: usize,
    ) {
        let name = format!("attention {} {kv_heads} x {group} of {dim}, {tokens} tokens", kind_name(kind));
        if !self.wants(&name) {
            return;
        }
        let (isa, block_tokens, run) = (self.isa, 32, 64);
        let shape = kv_shape(kind, kv_heads, dim, block_tokens);
        let blocks = tokens.div_ceil(block_tokens);
        let bytes = pool(&half_block(isa, &shape), 2 * blocks);
        let table: Vec<u32> = (0..blocks as u32).collect();
        let width = group * dim;
        let q = noise(tokens * kv_heads * width);
        // Each score and each weight: a product with every element of a key, and of a value.
        let operations = 4 * kv_heads * width * tokens * (tokens + 1) / 2;
        let arithmetic = if kind.1 == AttentionMode::F32 { Arithmetic::F32 } else { Arithmetic::Int8 };
        self.report(&name, threads, Limit::Operations(operations, arithmetic), || {
            together(threads, |t| {
                let (mut out, mut scratch) = (vec![0.0; run * width], Vec::new());
                for kv_head in (t..kv_heads).step_by(threads) {
                    let kv = KvView { bytes: from_a_line(&bytes), shape };
                    let head = Head { kv, kv_head, group, scale: 0.1, window: None, softcap: None, sinks: None };
                    scratch.resize(head.scratch_len(run), 0.0);
                    let q = Rows::dense(&q, kv_heads * width).columns(kv_head * width..(kv_head + 1) * width);
                    for first in (0..tokens).step_by(run) {
                        let q = q.part(first..tokens.min(first + run));
                        let run = Run { table: &table, position: first, row: 0, tokens: q.rows() };
                        let mut out = RowsMut::dense(&mut out[..q.rows() * width], width);
                        attend(isa, &head, &[run], q, &mut out, &mut scratch);
                    }
                }
                black_box(&out);
            })
        });
    }

    /// The delta rule of one layer of 32 heads, 128 x 128: the state is read (and written) once per token in a step of one.
    fn delta(&mut self, tokens: usize, threads: usize) {
        let name = format!("delta rule 32 of 128 x 128, {tokens} tokens");
        if !self.wants(&name) {
            return;
        }
        let isa = self.isa;
        let (heads, dim) = (32, 128);
        let state_len = heads * dim * dim;
        let layers = if tokens == 1 { STREAMED / (4 * state_len) } else { 1 };
        let x: Vec<f32> = noise(tokens * 3 * heads * dim).iter().map(|x| x * 0.08).collect();
        let gates = vec![-0.05; tokens * heads];
        let mut states = vec![0.0f32; layers * state_len];
        let limit = match tokens {
            1 => Limit::Read(4 * layers * state_len),
            // Each element of the state: a product with k, one with the update, one with q; and the decay.
            n => Limit::Operations(7 * n * state_len, Arithmetic::F32),
        };
        self.report(&name, threads, limit, || {
            let mut parts: Vec<Vec<(usize, &mut [f32])>> = (0..threads).map(|_| vec![]).collect();
            for (i, state) in states.chunks_exact_mut(dim * dim).enumerate() {
                parts[i % threads].push((i % heads, state));
            }
            let parts: Vec<_> = parts.into_iter().map(std::sync::Mutex::new).collect();
            together(threads, |t| {
                let mut out = vec![0.0; tokens * dim];
                let (x, gates) = (Rows::dense(&x, 3 * heads * dim), Rows::dense(&gates, heads));
                for (h, state) in parts[t].lock().expect("one thread takes it").iter_mut() {
                    let part = |i: usize| x.columns((i * heads + *h) * dim..(i * heads + *h + 1) * dim);
                    let gate = gates.columns(*h..*h + 1);
                    let run = HeadInputs { q: part(0), k: part(1), v: part(2), g: gate, beta: gate };
                    recurrence(isa, &mut RowsMut::dense(state, dim), &run, &mut RowsMut::dense(&mut out, dim));
                }
                black_box(&out);
            })
        });
    }
}

/// Kernels of a single vector that stays in the processor's cache, as in a model that reads its weights meanwhile.
impl Bench<'_> {
    fn vectors(&mut self, threads: usize) {
        let isa = self.isa;
        for n in [128, 1024, 4096] {
            let (x, w) = (noise(n), noise(n));
            let count = (1 << 22) / n;
            // A multiply-add and a product with the factor and the weight for each element.
            self.vector(&format!("rms norm of {n}"), count, 4 * n, threads, n, |out| {
                norm::rms_norm(isa, &x, &w, 1e-6, out)
            });
            self.vector(&format!("sum and rms norm of {n}"), count, 5 * n, threads, 2 * n, |out| {
                let (residual, out) = out.split_at_mut(n);
                norm::add_rms_norm(isa, &x, residual, &w, 1e-6, out);
            });
            self.vector(&format!("gated norm of {n}"), count, 4 * n, threads, n, |out| {
                norm::rms_norm_gated(isa, &x, &w, &w, 1e-6, out)
            });
            self.vector(&format!("l2 norm of {n}"), count, 4 * n, threads, n, |out| norm::l2_norm(isa, out, 1e-6, 1.0));
            self.vector(&format!("swiglu of {n}"), count, 4 * n, threads, n, |out| {
                elementwise::swiglu(isa, &x, &w, out)
            });
        }
        for (experts, k) in [(128, 8), (512, 10)] {
            let logits = noise(experts);
            let scoring = route::Scoring::SoftmaxTopK { k, renormalise: true, scales: Vec::new() };
            let count = (1 << 20) / experts;
            self.vector(&format!("routing {k} of {experts}"), count, 4 * experts, threads, experts, |out| {
                out.copy_from_slice(&logits);
                let (mut ids, mut weights) = ([0; 16], [0.0; 16]);
                route::route(isa, &scoring, 0, out, &mut ids[..k], &mut weights[..k]);
                black_box((ids, weights));
            });
        }
        let (channels, taps) = (8192, 4);
        for tokens in [1, 64] {
            let (x, w) = (noise(tokens * channels), noise(taps * channels));
            let name = format!("convolution of {channels}, {tokens} tokens");
            self.vector(
                &name,
                (256 / tokens).max(4),
                2 * taps * tokens * channels,
                threads,
                tokens * channels,
                |out| {
                    let mut window = vec![0.0; (taps - 1) * channels];
                    let (x, w) = (Rows::dense(&x, channels), Rows::dense(&w, channels));
                    conv_step(
                        isa,
                        x,
                        w,
                        None,
                        &mut RowsMut::dense(&mut window, channels),
                        &mut RowsMut::dense(out, channels),
                    );
                },
            );
        }
    }

    /// `count` calls of `kernel`, of so many operations each, on every thread.
    fn vector(
        &mut self,
        name: &str,
        count: usize,
        operations: usize,
        threads: usize,
        len: usize,
        kernel: impl Fn(&mut [f32]) + Sync,
    ) {
        if !self.wants(name) {
            return;
        }
        let limit = Limit::Operations(threads * count * operations, Arithmetic::F32);
        self.report(name, threads, limit, || {
            together(threads, |_| {
                let mut out = vec![1.0; len];
                for _ in 0..count {
                    kernel(&mut out);
                    black_box(&mut out);
                }
            })
        });
    }
}

/// Seconds for `w` times `n` tokens, row blocks distributed to the threads in turn.
fn products(isa: Isa, w: &Matrix, x: &Tokens, n: usize, mode: Activations, threads: usize) -> f64 {
    let block = 4 * ROW_BLOCK;
    let input = x.input(w.format().activation_format(mode));
    let list: Vec<u32> = (0..n as u32).collect();
    let state = || {
        let scratch = Scratch::with_bytes(matmul::scratch_bytes(w.format(), COLS, block, n, mode));
        std::sync::Mutex::new((scratch, vec![0f32; block * n]))
    };
    let states: Vec<_> = (0..threads).map(|_| state()).collect();
    together(threads, |t| {
        let mut state = states[t].lock().expect("one thread takes it");
        let (scratch, tile) = &mut *state;
        for from in (t * block..w.rows()).step_by(block * threads) {
            let rows = from..(from + block).min(w.rows());
            let tile = &mut tile[..rows.len() * n];
            matmul::matmul(isa, w, rows, input, &list, tile, scratch);
        }
        black_box(&tile);
    })
}
