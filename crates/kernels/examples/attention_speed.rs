//! How fast attention, the delta rule and the element-wise kernels are, on one thread: `cargo run --release --example attention_speed`.

use std::hint::black_box;
use std::time::Instant;

use sluice_kernels::attention::{Head, KvShape, KvType, KvView, attend, store_row};
use sluice_kernels::delta::{Run, conv_step, recurrence};
use sluice_kernels::rows::{Rows, RowsMut};
use sluice_kernels::{Isa, elementwise, norm};

/// Seconds per call: the best of seven rounds.
fn best(mut f: impl FnMut()) -> f64 {
    f();
    let start = Instant::now();
    f();
    let calls = (0.02 / start.elapsed().as_secs_f64().max(1e-9)).ceil() as usize;
    let round = |_| {
        let start = Instant::now();
        (0..calls).for_each(|_| f());
        start.elapsed().as_secs_f64() / calls as f64
    };
    (0..7).map(round).fold(f64::INFINITY, f64::min)
}

fn noise(n: usize) -> Vec<f32> {
    (0..n).map(|i| ((i as u32).wrapping_mul(2_654_435_761) >> 8) as f32 / 8_388_608.0 - 1.0).collect()
}

/// `kv_heads` heads over a context in blocks of 32, and so many query tokens at its end, in runs of 64.
fn attention(isa: Isa, kv_type: KvType, kv_heads: usize, group: usize, dim: usize, context: usize, tokens: usize) {
    let (block_tokens, run) = (32, 64);
    let half = kv_type.bytes(kv_heads * block_tokens, dim);
    let shape = KvShape {
        block_bytes: 2 * half,
        k_offset: 0,
        v_offset: half,
        block_tokens,
        kv_heads,
        k_dim: dim,
        v_dim: dim,
        kv_type,
    };
    let blocks = context / block_tokens;
    // Several layers' worth, so that each call reads memory, as a model would.
    let layers = if tokens == 1 { (256 << 20) / (blocks * shape.block_bytes) } else { 1 };
    let (mut row, mut scale) = (vec![0; dim * kv_type.size()], vec![0; kv_type.scale_size()]);
    store_row(isa, kv_type, &noise(dim), &mut row, &mut scale);
    let half: Vec<u8> = [row.repeat(kv_heads * block_tokens), scale.repeat(kv_heads * block_tokens)].concat();
    let bytes = half.repeat(2 * layers * blocks);
    let q = noise(tokens * kv_heads * group * dim);
    let mut out = vec![0.0; q.len()];
    let mut scratch = Vec::new();
    let mut layer = 0;
    let seconds = best(|| {
        layer = (layer + 1) % layers;
        let table: Vec<u32> = (0..blocks).map(|b| (layer * blocks + b) as u32).collect();
        for kv_head in 0..kv_heads {
            let kv = KvView { bytes: &bytes, shape };
            let head = Head { kv, table: &table, kv_head, group, scale: 0.1, window: None, softcap: None, sinks: None };
            scratch.resize(head.scratch_len(tokens.min(run)), 0.0);
            let columns = kv_head * group * dim..(kv_head + 1) * group * dim;
            let stride = kv_heads * group * dim;
            for first in (0..tokens).step_by(run) {
                let rows = first..tokens.min(first + run);
                let q = Rows::dense(&q, stride).columns(columns.clone()).part(rows.clone());
                let out = &mut out[rows.start * stride..rows.end * stride];
                let (_, right) = RowsMut::dense(out, stride).split_columns(columns.start);
                let (mut out, _) = right.split_columns(columns.len());
                attend(isa, &head, q, context - tokens + first, &mut out, &mut scratch);
            }
        }
        black_box(&out);
    });
    let read = (blocks * shape.block_bytes) as f64;
    let seen = context as f64 - (tokens - 1) as f64 / 2.0;
    let flops = 4.0 * (tokens * kv_heads * group * dim) as f64 * seen;
    println!(
        "{isa:8} attention {kv_type:?} {kv_heads} KV heads x {group} of {dim}, {tokens:3} tokens up to {context}: {:9.1} us, {:5.1} GB/s, {:6.1} GFLOP/s",
        seconds * 1e6,
        read / seconds / 1e9,
        flops / seconds / 1e9
    );
}

/// One GatedDeltaNet layer of 32 heads, 128 x 128.
fn delta(isa: Isa, tokens: usize) {
    let (heads, dim) = (32, 128);
    let channels = 3 * heads * dim;
    let x: Vec<f32> = noise(tokens * channels).iter().map(|x| x * 0.08).collect();
    let gates = vec![-0.05; tokens * heads];
    let layers = if tokens == 1 { 32 } else { 1 };
    let mut state = vec![0.0; layers * heads * dim * dim];
    let mut out = vec![0.0; tokens * heads * dim];
    let mut layer = 0;
    let seconds = best(|| {
        layer = (layer + 1) % layers;
        let x = Rows::dense(&x, channels);
        let gates = Rows::dense(&gates, heads);
        for h in 0..heads {
            let part = |i: usize| x.columns((i * heads + h) * dim..(i * heads + h + 1) * dim);
            let run =
                Run { q: part(0), k: part(1), v: part(2), g: gates.columns(h..h + 1), beta: gates.columns(h..h + 1) };
            let state = &mut state[(layer * heads + h) * dim * dim..][..dim * dim];
            let (_, right) = RowsMut::dense(&mut out, heads * dim).split_columns(h * dim);
            let (mut out, _) = right.split_columns(dim);
            recurrence(isa, &mut RowsMut::dense(state, dim), &run, &mut out);
        }
        black_box(&out);
    });
    let bytes = (heads * dim * dim * 8) as f64;
    println!(
        "{isa:8} delta rule, 32 heads of 128 x 128, {tokens:3} tokens: {:9.1} us, {:8.0} tokens/s, {:5.1} GB/s of state",
        seconds * 1e6,
        tokens as f64 / seconds,
        bytes / seconds / 1e9
    );
    let mut out = vec![0.0; tokens * channels];
    let (weight, mut window) = (noise(4 * channels), vec![0.0; 3 * channels]);
    let seconds = best(|| {
        let mut window = RowsMut::dense(&mut window, channels);
        let mut out = RowsMut::dense(&mut out, channels);
        conv_step(isa, Rows::dense(&x, channels), Rows::dense(&weight, channels), None, &mut window, &mut out);
    });
    println!("{isa:8} convolution, {channels} channels, {tokens:3} tokens: {:9.2} us", seconds * 1e6);
}

fn elements(isa: Isa) {
    let n = 8192;
    let (x, w) = (noise(n), noise(n));
    let mut out = vec![0.0; n];
    let swiglu = best(|| elementwise::swiglu(isa, &x, &w, black_box(&mut out)));
    let rms = best(|| norm::rms_norm(isa, &x, &w, 1e-6, black_box(&mut out)));
    let gated = best(|| norm::rms_norm_gated(isa, &x, &w, &w, 1e-6, black_box(&mut out)));
    let ns = |s: f64| s * 1e9 / n as f64;
    println!("{isa:8} ns per element: swiglu {:.3}, rms norm {:.3}, gated norm {:.3}", ns(swiglu), ns(rms), ns(gated));
}

fn main() {
    let only = std::env::args().nth(1);
    for isa in Isa::supported().into_iter().skip(1) {
        if only.as_ref().is_some_and(|only| *only != isa.to_string()) {
            continue;
        }
        for (kv_type, kv_heads, group, dim) in [
            (KvType::Bf16, 8, 1, 128),
            (KvType::Bf16, 8, 2, 128),
            (KvType::Bf16, 4, 8, 128),
            (KvType::Bf16, 2, 8, 256),
            (KvType::F16, 8, 2, 128),
            (KvType::F32, 8, 2, 128),
            (KvType::Int8, 8, 1, 128),
            (KvType::Int8, 8, 2, 128),
            (KvType::Int8, 4, 8, 128),
        ] {
            attention(isa, kv_type, kv_heads, group, dim, 8192, 1);
        }
        attention(isa, KvType::Bf16, 4, 8, 128, 8192, 64);
        attention(isa, KvType::Bf16, 2, 8, 256, 8192, 64);
        attention(isa, KvType::Bf16, 8, 2, 128, 8192, 64);
        attention(isa, KvType::Bf16, 8, 2, 128, 512, 512);
        attention(isa, KvType::Int8, 8, 2, 128, 512, 512);
        delta(isa, 1);
        delta(isa, 64);
        elements(isa);
    }
}
