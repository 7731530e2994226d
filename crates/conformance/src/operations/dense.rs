//! Embeddings, projections, dense feed-forward layers, the head.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use sluice_backend::{
    Backend, DRAWN_TOGETHER, Float, Isa, Linear, Logits, MAX_RANKS, Mlp, Projection, Ranked, Scaled, Top, WeightFormat,
    sample,
};

use crate::case::Case;
use crate::weights::unit;

pub fn embeddings(c: &mut Case) {
    let (tokens, vocabulary, cols) = (c.tokens(), c.random.usize(1..200), c.cols());
    let table = c.matrix(vocabulary, cols);
    let rows = tokens + c.random.usize(..3);
    let out = c.tensor(rows, cols);
    c.shape(format!("{tokens} tokens"));
    let inputs = c.inputs(tokens, vocabulary);
    c.backend.begin(&inputs);
    c.backend.embed(table, out.tensor);
    c.backend.end();
    c.see("out", out.whole);
}

pub fn projections(c: &mut Case) {
    let (tokens, cols) = (c.tokens(), c.cols());
    let x = c.tensor(tokens, cols);
    let norm = c.coin().then(|| c.norm(cols));
    c.shape(format!("{tokens} tokens, x {x}, norm {}", norm.is_some()));
    let (mut projections, mut outs) = (Vec::new(), Vec::new());
    for _ in 0..c.random.usize(1..=3) {
        let rows = c.random.usize(1..200);
        let bias = c.once_in(3);
        let linear = c.linear(rows, cols, bias);
        let more = c.random.usize(..3);
        let out = c.tensor(tokens + more, rows);
        c.shape(format!("rows {:?}, bias {bias}, out {out}", linear.rows));
        outs.push(out);
        // The whole at once, or run by run, as matrices have it in which heads are interleaved.
        let cut = if c.once_in(3) { c.random.usize(..rows) } else { 0 };
        for part in [0..cut, cut..rows].into_iter().filter(|part| !part.is_empty()) {
            let (from, bias) = (linear.rows.start, linear.bias.map(|b| b.columns(part.clone())));
            let rows = from + part.start..from + part.end;
            projections
                .push(Projection { linear: Linear { rows, bias, ..linear.clone() }, out: out.tensor.columns(part) });
        }
    }
    let more = c.once_in(3);
    let rows = c.random.usize(1..200);
    let add = c.linear(rows, cols, more);
    let sum = c.tensor(tokens, rows);
    c.shape(format!("added rows {:?}, bias {more}, out {sum}", add.rows));
    c.step(tokens, |b| {
        b.project(x.tensor, norm, &projections);
        b.project_add(x.tensor, &add, sum.tensor);
    });
    for (i, out) in outs.iter().enumerate() {
        c.see(format!("projection {i}"), out.whole);
    }
    c.see("sum", sum.whole);
    c.see("x", x.whole);
}

/// One or two matrices with interleaved heads: the runs of rows of each head follow one another. Mostly all runs, and one token.
pub fn interleaved_heads(c: &mut Case) {
    let tokens = c.one_of(&[1, 1, 1, 1, 2, 5]);
    let cols = if c.coin() { c.one_of(&[256, 512]) } else { 64 * c.random.usize(1..=9) };
    let norm = c.coin().then(|| c.norm(cols));
    if !c.once_in(5) {
        let (bits, scale) = (c.one_of(&[2, 4, 4, 8]), c.one_of(&[Float::F16, Float::Bf16]));
        c.uniform = Some(WeightFormat::Affine { bits, group: 64, scale });
    } else if c.coin() {
        c.uniform = Some(WeightFormat::Float(Float::Bf16));
    } else {
        c.uniform = Some(c.blocks(cols)).filter(|format| c.takes(*format));
    }
    // Mostly as a layer has it.
    let x = if c.once_in(4) { c.tensor(tokens, cols) } else { c.tensor_inside(tokens, cols, [0; 4]) };
    let heads = c.random.usize(2..=6);
    c.shape(format!("{tokens} tokens, x {x}, norm {}, {heads} heads", norm.is_some()));
    let (mut projections, mut outs) = (Vec::new(), Vec::new());
    for _ in 0..c.random.usize(1..=2) {
        let count = if c.once_in(6) { c.one_of(&[1, 5]) } else { c.random.usize(2..=4) };
        let runs: Vec<usize> = (0..count).map(|_| c.one_of(&[1, 2, 4, 8, 16, 40])).collect();
        let period: usize = runs.iter().sum();
        let linear = c.linear(heads * period, cols, false);
        let all: Vec<_> = runs.iter().map(|run| c.tensor(tokens, heads * run)).collect();
        // At times somebody leaves a run out.
        let left_out = if c.once_in(8) { c.random.usize(..runs.len()) } else { runs.len() };
        c.shape(format!("runs {runs:?} of rows {:?} but for {left_out}", linear.rows));
        let mut from = linear.rows.start;
        for head in 0..heads {
            for (i, (run, out)) in runs.iter().zip(&all).enumerate() {
                let rows = from..from + run;
                from += run;
                if i != left_out {
                    let out = out.tensor.columns(head * run..(head + 1) * run);
                    projections.push(Projection { linear: Linear { rows, ..linear.clone() }, out });
                }
            }
        }
        outs.extend(all);
    }
    c.step(tokens, |b| b.project(x.tensor, norm, &projections));
    for (i, out) in outs.iter().enumerate() {
        c.see(format!("run {i}"), out.whole);
    }
}

/// An embedding, projections and a feed-forward layer whose weights are all of one type of GGUF's blocks, or of one format of small floats.
pub fn blocks(c: &mut Case) {
    let format = c.blocks(256);
    if !c.takes(format) {
        return;
    }
    c.uniform = Some(format);
    let (unit, most) = (unit(format), 640 / unit(format));
    let (tokens, hidden, width) = (c.tokens(), unit * c.random.usize(1..=most), unit * c.random.usize(1..=most));
    let (vocabulary, rows) = (c.random.usize(2..200), c.random.usize(1..200));
    let (table, norm) = (c.matrix(vocabulary, hidden), c.norm(hidden));
    let (linear, mlp) = (c.linear(rows, hidden, false), c.mlp(hidden, width));
    let (x, out) = (c.tensor(tokens, hidden), c.tensor(tokens, rows));
    c.shape(format!("{tokens} tokens, {vocabulary} x {hidden}, rows {:?}, mlp of {width}", linear.rows));
    c.step(tokens, |b| {
        b.embed(table, x.tensor);
        b.mlp(x.tensor, norm, &mlp, x.tensor);
        b.project(x.tensor, Some(norm), &[Projection { linear, out: out.tensor }]);
    });
    c.see("x", x.whole);
    c.see("out", out.whole);
}

/// Output projections of a wide layer: long rows, for which a backend may have special kernels.
pub fn long_rows(c: &mut Case) {
    let (tokens, cols) = (c.one_of(&[1, 1, 1, 3]), 128 * c.random.usize(60..=100));
    let rows = 8 * c.random.usize(1..=5);
    if c.once_in(3) {
        c.uniform = Some(c.blocks(cols)).filter(|format| c.takes(*format));
    }
    let add = c.linear(rows, cols, false);
    let (x, sum) = (c.tensor(tokens, cols), c.tensor(tokens, rows));
    c.shape(format!("{tokens} tokens, x {x}, out {sum}"));
    c.step(tokens, |b| b.project_add(x.tensor, &add, sum.tensor));
    c.see("sum", sum.whole);
}

/// Enough tokens and rows for the tiles of the longest prompts, mostly with the most common formats.
pub fn large_tiles(c: &mut Case) {
    let (tokens, rows) = (c.random.usize(70..200), c.random.usize(380..520));
    let mut cols = 256 * c.random.usize(1..=3);
    if c.once_in(3) {
        cols = c.cols();
    } else if c.once_in(3) {
        c.uniform = Some(c.blocks(cols)).filter(|format| c.takes(*format));
    } else {
        let (bits, scale) = (c.one_of(&[4, 4, 8]), c.one_of(&[Float::F16, Float::Bf16]));
        c.uniform = Some(WeightFormat::Affine { bits, group: 64, scale });
    }
    let linear = c.linear(rows, cols, false);
    let (x, out) = (c.tensor(tokens, cols), c.tensor(tokens, rows));
    c.shape(format!("{tokens} tokens, x {x}, rows {:?}, out {out}", linear.rows));
    c.step(tokens, |b| b.project(x.tensor, None, &[Projection { linear, out: out.tensor }]));
    c.see("out", out.whole);
}

/// Projections and a feed-forward layer whose weights are floats of sixteen bits, for one token, a few and many, as large models have them.
pub fn sixteen_bits(c: &mut Case) {
    c.uniform = Some(WeightFormat::Float(c.one_of(&[Float::F16, Float::Bf16, Float::Bf16])));
    let many = c.random.usize(9..=150);
    let tokens = c.one_of(&[1, 1, 1, 2, 3, 5, 8, many, many, many]);
    let unit = c.one_of(&[64, 256]);
    let (hidden, width) = (unit * c.random.usize(1..=1536 / unit), 64 * c.random.usize(1..=20));
    let (norm, mlp) = (c.norm(hidden), c.mlp(hidden, width));
    let (x, sum) = (c.tensor(tokens, hidden), c.tensor(tokens, hidden));
    let (mut projections, mut outs) = (Vec::new(), Vec::new());
    for _ in 0..c.random.usize(1..=3) {
        let (rows, bias) = (c.random.usize(1..300), c.once_in(3));
        let (linear, out) = (c.linear(rows, hidden, bias), c.tensor(tokens, rows));
        c.shape(format!("rows {:?}, bias {bias}, out {out}", linear.rows));
        projections.push(Projection { linear, out: out.tensor });
        outs.push(out);
    }
    let add = c.linear(hidden, hidden, false);
    c.shape(format!("{tokens} tokens, x {x}, mlp of {width}, sum {sum}"));
    let norms = c.coin().then_some(norm);
    c.step(tokens, |b| {
        b.project(x.tensor, norms, &projections);
        b.project_add(x.tensor, &add, sum.tensor);
        b.mlp(sum.tensor, norm, &mlp, x.tensor);
    });
    for (i, out) in outs.iter().enumerate() {
        c.see(format!("projection {i}"), out.whole);
    }
    c.see("sum", sum.whole);
    c.see("x", x.whole);
}

/// Several sequences, mostly with formats that have kernels of their own for them. At times there are more rows than a device takes at once.
pub fn some_tokens(c: &mut Case) {
    let (tokens, cols) = (c.random.usize(2..=64), c.one_of(&[64_usize, 128, 256, 320, 1024, 1152, 1344, 2048, 2560]));
    if !c.once_in(8) {
        let (bits, scale) = (c.one_of(&[4, 4, 8]), c.one_of(&[Float::F16, Float::Bf16]));
        let group = if cols.is_multiple_of(128) { c.one_of(&[64, 64, 128]) } else { 64 };
        c.uniform = Some(WeightFormat::Affine { bits, group, scale });
    }
    let most = if cols <= 256 && c.once_in(2) { 20_000 } else { c.one_of(&[160, 600, 5_000]) };
    let x = c.tensor(tokens, cols);
    let (mut projections, mut outs) = (Vec::new(), Vec::new());
    for _ in 0..c.random.usize(1..=3) {
        let rows = c.random.usize(1..most);
        let bias = c.once_in(3);
        let linear = c.linear(rows, cols, bias);
        let out = c.tensor(tokens, rows);
        outs.push(out);
        let cut = if c.once_in(4) { c.random.usize(..rows) } else { 0 };
        for part in [0..cut, cut..rows].into_iter().filter(|part| !part.is_empty()) {
            let (from, bias) = (linear.rows.start, linear.bias.map(|b| b.columns(part.clone())));
            let rows = from + part.start..from + part.end;
            projections
                .push(Projection { linear: Linear { rows, bias, ..linear.clone() }, out: out.tensor.columns(part) });
        }
    }
    let rows = c.random.usize(1..most);
    let add = c.linear(rows, cols, false);
    let sum = c.tensor(tokens, rows);
    c.shape(format!("{tokens} tokens, x {x}, {} products, added rows {:?}, out {sum}", projections.len(), add.rows));
    c.step(tokens, |b| {
        b.project(x.tensor, None, &projections);
        b.project_add(x.tensor, &add, sum.tensor);
    });
    for (i, out) in outs.iter().enumerate() {
        c.see(format!("projection {i}"), out.whole);
    }
    c.see("sum", sum.whole);
}

impl Case {
    /// A gated layer of `hidden` to `intermediate` and back. Gate and up may be one matrix.
    pub fn mlp(&mut self, hidden: usize, intermediate: usize) -> Mlp {
        let (gate, up) = if self.coin() {
            let both = self.linear(2 * intermediate, hidden, false);
            let from = both.rows.start;
            let up = from + intermediate..from + 2 * intermediate;
            (Linear { rows: from..from + intermediate, ..both.clone() }, Linear { rows: up, ..both })
        } else {
            (self.linear(intermediate, hidden, false), self.linear(intermediate, hidden, false))
        };
        Mlp { gate, up, down: self.linear(hidden, intermediate, false) }
    }
}

pub fn dense_layers(c: &mut Case) {
    let (tokens, hidden, intermediate) = (c.tokens(), c.cols(), c.cols());
    let mut mlp = c.mlp(hidden, intermediate);
    if c.once_in(3) {
        let bias = c.small(hidden, 1.0);
        mlp.down.bias = Some(c.vector(&bias));
    }
    let (x, norm) = (c.tensor(tokens, hidden), c.norm(hidden));
    let residual = if c.coin() { x } else { c.tensor(tokens, hidden) };
    c.shape(format!("{tokens} tokens, x {x}, residual {residual}"));
    c.step(tokens, |b| b.mlp(x.tensor, norm, &mlp, residual.tensor));
    c.see("residual", residual.whole);
}

pub fn logits(c: &mut Case) {
    let (cols, vocabulary) = (c.cols(), c.random.usize(2..300));
    // Some have several blocks that are drawn from.
    let vocabulary = match vocabulary % 32 {
        5 => 71 * vocabulary,
        n if n % 8 == 3 => 11 * vocabulary,
        _ => vocabulary,
    };
    let norm = if c.once_in(4) { None } else { Some(c.norm(cols)) };
    let head = c.matrix(vocabulary, cols);
    let softcap = if c.once_in(3) { Some(c.one_of(&[0.5, 30.0])) } else { None };
    c.shape(format!("soft cap {softcap:?}"));
    for _ in 0..2 {
        let tokens = c.tokens();
        let x = c.tensor(tokens, cols);
        let inputs = c.inputs(tokens, vocabulary);
        c.shape(format!("{tokens} tokens, wanted {:?}", inputs.wanted()));
        c.backend.begin(&inputs);
        if !inputs.wanted().is_empty() {
            c.backend.logits(x.tensor, norm, head, softcap);
        }
        let left = c.backend.end().logits;
        c.see_text("rows", format!("{}", left.rows));
        if left.rows == 0 {
            continue;
        }
        c.see_text("vocabulary", format!("{}", left.vocabulary));
        // Once as a whole, and each row by itself.
        let all = c.backend.read_logits(left).to_vec();
        let threads = c.backend.threads();
        let busy: Vec<AtomicBool> = (0..threads).map(|_| AtomicBool::new(false)).collect();
        let rows = Mutex::new(vec![None; left.rows]);
        c.backend.each_logits(left, &|row, thread, logits| {
            assert!(!busy[thread].swap(true, Ordering::SeqCst), "thread {thread} has two rows at once");
            let before = rows.lock().unwrap()[row].replace(logits.to_vec());
            assert!(before.is_none(), "row {row} twice");
            busy[thread].store(false, Ordering::SeqCst);
        });
        let rows = rows.into_inner().unwrap();
        let each: Vec<f32> = rows.into_iter().flat_map(|row| row.expect("every row")).collect();
        let (tops, best, sums, block) = drawn(&mut *c.backend, left, &all);
        c.see_text("tops", tops);
        c.see_text("likeliest tokens", best);
        c.see_text("sums of weights", sums);
        c.see_floats("a block", DRAWN_TOGETHER, block);
        c.see_floats("all logits", vocabulary, all);
        c.see_floats("each row's logits", vocabulary, each);
    }
}

/// What a backend finds in logits to draw tokens from: the likeliest of each row, its likeliest few, the sums of its weights, its last block. A backend without such a method
/// reads the logits, and they are searched here.
fn drawn(backend: &mut dyn Backend, left: Logits, all: &[f32]) -> (String, String, String, Vec<f32>) {
    let vocabulary = left.vocabulary;
    let top_of = |row: &[f32]| {
        let (highest, has_nan) = sample::highest(Isa::GENERIC, row);
        let token = row.iter().position(|x| *x == highest).filter(|_| highest > f32::NEG_INFINITY);
        let logit = token.map_or(f32::NEG_INFINITY, |t| row[t]);
        (!has_nan).then_some(Top { logit, token: token.map_or(u32::MAX, |t| t as u32) })
    };
    let here: Option<Vec<Top>> = all.chunks_exact(vocabulary).map(top_of).collect();
    let text = |tops: Option<&[Top]>| {
        format!("{:?}", tops.map(|t| t.iter().map(|t| (t.logit.to_bits(), t.token)).collect::<Vec<_>>()))
    };
    let scaled: Vec<Scaled> = here
        .iter()
        .flatten()
        .enumerate()
        .filter(|(_, top)| top.logit.is_finite())
        .map(|(row, top)| Scaled { row, highest: top.logit, scale: 1.0 / (0.5 + row as f64) })
        .collect();
    let last = (vocabulary - 1) / DRAWN_TOGETHER;
    let from = last * DRAWN_TOGETHER;
    let blocks: Vec<(usize, usize)> = (0..left.rows).map(|row| (row, last)).collect();
    // Bytes behind the last logit belong to nobody.
    let whole = |block: &[f32]| {
        block[..vocabulary - from]
            .iter()
            .copied()
            .chain(std::iter::repeat_n(0.0, DRAWN_TOGETHER - (vocabulary - from)))
            .collect::<Vec<_>>()
    };
    // A few, as many as may be, and how many of a row that is: what is likelier comes first, and of equals the first.
    let ranked: Vec<Ranked> = (0..2 * scaled.len())
        .map(|i| Ranked { row: scaled[i / 2].row, rank: [1 + 4 * (i / 2) % 50, MAX_RANKS][i % 2] })
        .collect();
    let in_order = |mut tops: Vec<Top>, rank: usize| {
        tops.sort_by(|a, b| b.logit.partial_cmp(&a.logit).expect("numbers").then(a.token.cmp(&b.token)));
        tops.iter().take(rank).map(|t| (t.logit.to_bits(), t.token)).collect::<Vec<_>>()
    };
    let likeliest = |row: &[f32], rank: usize| {
        in_order((0..).zip(row).map(|(token, logit)| Top { logit: *logit, token }).collect(), rank)
    };
    match backend.device_sampling() {
        Some(device) => {
            let tops = text(device.tops(left));
            let best = device.best(left, &ranked).iter().zip(&ranked).map(|(best, of)| {
                let row = &all[of.row * vocabulary..(of.row + 1) * vocabulary];
                let reach = row.iter().filter(|logit| **logit >= best.bar).count();
                assert!(
                    reach >= of.rank.min(vocabulary),
                    "{reach} tokens reach the bar, of {} that are wanted",
                    of.rank
                );
                assert!(
                    best.found.len() == reach || best.found.is_empty() && reach > 2 * MAX_RANKS,
                    "{reach} reach it"
                );
                if best.found.is_empty() { likeliest(row, of.rank) } else { in_order(best.found.clone(), of.rank) }
            });
            let best = format!("{:?}", best.collect::<Vec<_>>());
            let sums = format!("{:?}", device.sums(left, &scaled));
            (tops, best, sums, device.blocks(left, &blocks).chunks_exact(DRAWN_TOGETHER).flat_map(whole).collect())
        }
        None => {
            let weighed = |of: &Scaled| {
                let row = &all[of.row * vocabulary..(of.row + 1) * vocabulary];
                row.chunks(DRAWN_TOGETHER)
                    .map(|block| sample::total(Isa::GENERIC, block, of.highest, of.scale))
                    .collect::<Vec<u64>>()
            };
            let sums: Vec<u64> = scaled.iter().flat_map(weighed).collect();
            let best = ranked.iter().map(|of| likeliest(&all[of.row * vocabulary..(of.row + 1) * vocabulary], of.rank));
            (
                text(here.as_deref()),
                format!("{:?}", best.collect::<Vec<_>>()),
                format!("{sums:?}"),
                all.chunks_exact(vocabulary).flat_map(|row| whole(&row[from..])).collect(),
            )
        }
    }
}
