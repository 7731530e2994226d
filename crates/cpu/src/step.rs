//! Steps on the CPU. Each operation runs at once, as rounds of tasks.

use std::time::Instant;

use sluice_backend::{
    AttentionLayer, Backend, ChannelDeltaLayer, CompressLayer, CompressedLayer, DeltaLayer, Device, Elementwise,
    IndexLayer, IndexNorm, LatentLayer, Linear, Logits, MatrixId, MemoryClass, MemoryUse, Mlp, MoeId, NgramLayer,
    NgramTable, Norm, Operations, Outcome, Phase, Profile, Projection, Routing, RowStats, SelectLayer, StateSpaceLayer,
    StepInputs, StreamLayer, Streamed, Tensor,
};
use sluice_kernels::{affine, elementwise, norm};
use sluice_store::Bytes;

use crate::cpu::Cpu;
use crate::exec::context;
use crate::memory::{Place, RotaryTable, Weight, part};
use crate::moe::{Streaming, experts};
use crate::numa::Replicas;
use crate::numa::affinity::CoreBinding;
use crate::{attention, matmul};

/// Rows of an embedding that are read one by one while the whole matrix is still being read.
const FEW_ROWS: usize = 64;

fn linear_rows(l: &Linear) -> (usize, usize) {
    (l.matrix.number(), l.rows.len())
}

impl Operations for Cpu {
    fn embed(&mut self, table: MatrixId, out: Tensor) {
        let t0 = Instant::now();
        let place = self.place(out);
        let weight = &self.weights[table.number()];
        let tokens = self.inputs.tokens();
        if self.tables.has(table) {
            let tokens = tokens.len();
            self.tables.embed(table, self.isa, &mut self.pool, place);
            self.record(Phase::Embed, t0, std::iter::once((table.number(), tokens)), 0);
            return;
        }
        // Reads a few rows alone. For many it is better to wait for the whole matrix.
        if !weight.is_ready() && tokens.len() <= FEW_ROWS {
            let isa = self.isa;
            self.pool.run(tokens.len(), &|row, _| {
                // SAFETY: this task alone writes this row.
                weight.read_row_now(isa, tokens[row] as usize, unsafe { place.get_mut(row, 0..place.cols) });
            });
            let tokens = tokens.len();
            self.record(Phase::Embed, t0, std::iter::once((table.number(), tokens)), 0);
            return;
        }
        weight.wait();
        // SAFETY: no task is running, and the calling thread is the first.
        let matrix = weight.matrix(unsafe { self.workers.get(0) }.node);
        for (row, &token) in tokens.iter().enumerate() {
            // SAFETY: `&mut self`: no operation is running.
            let out = unsafe { place.get_mut(row, 0..place.cols) };
            affine::dequantize_row(self.isa, &matrix, token as usize, out);
        }
        let tokens = tokens.len();
        self.record(Phase::Embed, t0, std::iter::once((table.number(), tokens)), 0);
    }

    fn project(&mut self, x: Tensor, norm: Option<Norm>, projections: &[Projection]) {
        let t0 = Instant::now();
        let (tokens, x, context) = (x.rows, self.place(x), context!(self));
        let needs = context.needs(projections.iter().map(|p| p.linear.matrix));
        context.wait_for(projections.iter().map(|p| &p.linear));
        self.products.extend(projections.iter().map(|p| context.product(&p.linear, context.place(p.out), false)));
        matmul::encode(context, x, norm.as_ref(), needs, &mut self.encoded);
        self.run_products(tokens);
        self.record(Phase::Project, t0, projections.iter().map(|p| linear_rows(&p.linear)), tokens);
    }

    fn project_add(&mut self, x: Tensor, linear: &Linear, out: Tensor) {
        let t0 = Instant::now();
        let (tokens, x, context) = (x.rows, self.place(x), context!(self));
        context.wait_for([linear]);
        self.products.push(context.product(linear, context.place(out), true));
        let needs = context.needs([linear.matrix]);
        matmul::encode(context, x, None, needs, &mut self.encoded);
        self.run_products(tokens);
        self.record(Phase::Project, t0, std::iter::once(linear_rows(linear)), tokens);
    }

    fn attention(&mut self, layer: &AttentionLayer) {
        let t0 = Instant::now();
        let angles = self.rotary[layer.rotary.number()].place();
        let operands = attention::Operands::new(&context!(self), layer, angles);
        let kv = self.kv[layer.group];
        let blocks = attention::Blocks { layout: kv.layout, bytes: self.buffers[kv.buffer.number()].as_bytes_mut() };
        let exec = (self.isa, &mut self.pool, &mut self.workers);
        let selected = layer.selected.then_some(&self.index);
        self.attention.run(exec, &self.inputs, blocks, operands, (layer, selected));
        self.record(Phase::Attention, t0, std::iter::empty(), 0);
    }

    fn latent_attention(&mut self, layer: &LatentLayer) {
        let t0 = Instant::now();
        let operands = attention::LatentOperands {
            q: self.place(layer.q),
            kv: self.place(layer.kv),
            out: self.place(layer.out),
            norm: (self.place(layer.norm.weight), layer.norm.eps),
            angles: self.rotary[layer.rotary.number()].place(),
        };
        let kv = self.kv[layer.group];
        let blocks = attention::Blocks { layout: kv.layout, bytes: self.buffers[kv.buffer.number()].as_bytes_mut() };
        let context = context!(self, &[]);
        let selected = layer.selected.then_some(&self.index);
        self.latents.run(context, &mut self.attention, &self.inputs, blocks, &operands, (layer, selected));
        let used = [layer.keys.rows(), layer.values].map(|rows| (rows.matrix.number(), layer.heads * rows.rows));
        self.record(Phase::Attention, t0, used.into_iter(), self.inputs.tokens().len());
    }

    fn index(&mut self, layer: &IndexLayer) {
        let t0 = Instant::now();
        let operands = attention::IndexOperands {
            q: self.place(layer.q),
            k: self.place(layer.k),
            weights: layer.weights.map(|weights| self.place(weights)),
            logits: layer.pool_logits().map(|of| [self.place(of.logits), self.place(of.bias)]),
            norm: match layer.norm {
                IndexNorm::Tokens(norm) => [self.place(norm.scale.weight), self.place(norm.bias)],
                IndexNorm::Pools(norm) => [self.place(norm.weight); 2],
            },
            angles: self.rotary[layer.rotary.number()].place(),
        };
        let (kv, row_block) = (self.kv[layer.group], self.kv[layer.rows_group].layout.block_tokens);
        let blocks = attention::Blocks { layout: kv.layout, bytes: self.buffers[kv.buffer.number()].as_bytes_mut() };
        let context = context!(self, &[]);
        self.index.run(context, &self.inputs, blocks, &operands, layer, row_block);
        self.record(Phase::Attention, t0, std::iter::empty(), 0);
    }

    fn compress(&mut self, layer: &CompressLayer) {
        self.make_entries(layer);
    }

    fn select(&mut self, layer: &SelectLayer) {
        self.select_entries(layer);
    }

    fn compressed_attention(&mut self, layer: &CompressedLayer) {
        self.attend_compressed(layer);
    }

    fn delta_net(&mut self, layer: &DeltaLayer) {
        let t0 = Instant::now();
        let states = self.states.expect("a model with recurrent layers has a pool of states");
        self.delta.run(context!(self), &self.inputs, states, layer);
        self.record(Phase::DeltaNet, t0, std::iter::empty(), 0);
    }

    fn channel_delta(&mut self, layer: &ChannelDeltaLayer) {
        let t0 = Instant::now();
        let states = self.states.expect("a model with recurrent layers has a pool of states");
        self.channel_deltas.run(context!(self), &self.inputs, states, layer);
        self.record(Phase::DeltaNet, t0, std::iter::empty(), 0);
    }

    fn state_space(&mut self, layer: &StateSpaceLayer) {
        let t0 = Instant::now();
        let states = self.states.expect("a model with recurrent layers has a pool of states");
        self.state_spaces.run(context!(self), &self.inputs, states, layer);
        self.record(Phase::StateSpace, t0, std::iter::empty(), 0);
    }

    fn collapse(&mut self, layer: &StreamLayer) {
        self.collapse_streams(layer);
    }

    fn embed_ngrams(&mut self, table: &NgramTable, out: Tensor) {
        let t0 = Instant::now();
        let (place, first) = (self.place(out), table.parts[0]);
        match self.tables.has(first) {
            true => self.tables.embed(first, self.isa, &mut self.pool, place),
            false => self.ngrams.embed(context!(self), &self.inputs, table, place),
        }
        let rows = self.inputs.tokens().len() * table.hash.heads();
        self.record(Phase::Embed, t0, std::iter::once((first.number(), rows)), 0);
    }

    fn add_ngrams(&mut self, layer: &NgramLayer) {
        let t0 = Instant::now();
        let states = self.states.expect("a model with recurrent layers has a pool of states");
        self.ngrams.run(context!(self), &self.inputs, states, layer);
        self.record(Phase::DeltaNet, t0, std::iter::empty(), 0);
    }

    fn mlp(&mut self, x: Tensor, norm: Norm, mlp: &Mlp, residual: Tensor) {
        let t0 = Instant::now();
        let (tokens, x, residual) = (x.rows, self.place(x), self.place(residual));
        self.extend_identity_rows(tokens);
        let mut context = context!(self);
        context.wait_for([&mlp.gate, &mlp.up, &mlp.down]);
        let needs = context.needs([mlp.gate.matrix, mlp.up.matrix]);
        matmul::encode(context.reborrow(), x, Some(&norm), needs, &mut self.encoded);
        let identity_rows = &self.identity_rows[..tokens];
        experts::dense_gate_up(context.reborrow(), mlp, &self.encoded, identity_rows, &mut self.hidden);
        let down = context.product(&mlp.down, residual, true);
        matmul::run_products(context, &mut [down], &self.hidden, identity_rows);
        self.record(Phase::Mlp, t0, [&mlp.gate, &mlp.up, &mlp.down].into_iter().map(linear_rows), tokens);
    }

    fn mixture(&mut self, x: Tensor, moe: MoeId, residual: Tensor) {
        let (x, residual) = (self.place(x), self.place(residual));
        let tokens = self.inputs.tokens();
        self.mixture.run(context!(self), (moe.number(), tokens), x, residual, self.profile.as_mut());
    }

    fn mixture_but_experts(&mut self, x: Tensor, moe: MoeId, normed: Tensor, residual: Tensor) -> Routing {
        let (x, normed, residual) = (self.place(x), self.place(normed), self.place(residual));
        self.mixture.run_but_experts(context!(self), (moe.number(), self.inputs.tokens()), x, normed, residual)
    }

    fn elementwise(&mut self, operation: &Elementwise) {
        self.run_elementwise(operation);
    }

    fn logits(&mut self, x: Tensor, norm: Option<Norm>, head: MatrixId, softcap: Option<f32>) {
        let t0 = Instant::now();
        let (x, vocabulary) = (self.place(x), self.weights[head.number()].rows());
        let norm = norm.map(|norm| self.norm_weight(&norm));
        let needs = context!(self).needs([head]);
        // 1. norm and encode the wanted rows
        let rows = self.inputs.wanted();
        let count = rows.len();
        self.encoded.reset(count, x.cols, needs);
        self.workers.reserve(0, x.cols, 0, 0);
        let (writer, isa, workers) = (self.encoded.writer(needs), self.isa, &self.workers);
        self.pool.run(count, &|task, thread| {
            // SAFETY: one borrow, by the task that runs as this thread; x is not written meanwhile; this task alone writes row `task`.
            unsafe {
                let x = x.get(rows[task] as usize, 0..x.cols);
                let Some((weight, eps)) = norm else { return writer.write(isa, task, 0, x) };
                let normed = part(&mut workers.get(thread).row, x.len());
                norm::rms_norm(isa, x, weight, eps, normed);
                writer.write(isa, task, 0, normed);
            }
        });
        self.encoded.lay_out(isa, needs, &mut self.pool);
        // 2. head
        let out = Place::of_slice(part(&mut self.logits, count * vocabulary), vocabulary);
        let linear = Linear { matrix: head, rows: 0..vocabulary, bias: None };
        let context = context!(self);
        context.wait_for([&linear]);
        self.products.push(context.product(&linear, out, false));
        self.run_products(count);
        if let Some(cap) = softcap {
            self.pool.run(count, &|row, _| {
                // SAFETY: this task alone uses this row, and the products are done.
                elementwise::soft_cap(isa, cap, unsafe { out.get_mut(row, 0..vocabulary) });
            });
        }
        self.last_logits = Logits { rows: count, vocabulary };
        self.record(Phase::Head, t0, std::iter::once((head.number(), vocabulary)), count);
    }
}

impl Backend for Cpu {
    fn keeps_states(&self) -> bool {
        true
    }

    fn begin(&mut self, inputs: &StepInputs) {
        // Reuses what earlier steps allocated.
        self.inputs.clone_from(inputs);
        self.binding.iter_mut().for_each(CoreBinding::take);
        self.copy_portion();
        self.began = Instant::now();
        self.pool.use_threads(if self.is_short() { self.tuner.chosen() } else { self.pool.threads() });
        self.attention.begin();
        // Reads begin now, and are waited for where a row is used.
        self.tables.begin(&self.inputs);
        self.last_logits = Logits::default();
        for table in &mut self.rotary {
            table.fill(self.inputs.positions(), &mut self.pool);
        }
    }

    fn end(&mut self) -> Outcome {
        let (mut failed, routed, synchronisations) = self.mixture.end();
        failed.extend(self.tables.take_failed());
        // Steps with drafts take longer, by the number of these.
        if self.is_short() && self.inputs.tokens().len() == self.inputs.sequences() {
            let (pool, waits) = (&self.pool, &mut self.waits);
            self.tuner.step(self.began.elapsed(), |threads| waits.read(pool, threads));
        }
        self.binding.iter_mut().for_each(CoreBinding::leave);
        Outcome { logits: self.last_logits, failed, routed, synchronisations }
    }

    fn read_logits(&mut self, logits: Logits) -> &[f32] {
        assert_eq!(logits, self.last_logits, "logits of the last step");
        &self.logits[..logits.rows * logits.vocabulary]
    }

    fn each_logits(&mut self, logits: Logits, each: &(dyn Fn(usize, usize, &[f32]) + Sync)) {
        assert_eq!(logits, self.last_logits, "logits of the last step");
        let (all, vocabulary) = (&self.logits, logits.vocabulary);
        let one = |row: usize, thread| each(row, thread, &all[row * vocabulary..(row + 1) * vocabulary]);
        self.pool.run(logits.rows, &one);
    }

    fn threads(&self) -> usize {
        self.pool.threads()
    }

    fn take_profile(&mut self) -> Profile {
        self.profile.as_mut().map(std::mem::take).unwrap_or_default()
    }

    fn take_streamed(&mut self) -> Option<Streamed> {
        self.mixture.streaming_mut().map(Streaming::take)
    }

    fn table_stats(&self) -> Option<RowStats> {
        self.tables.stats()
    }

    fn notes(&self) -> Vec<String> {
        let streaming = self.mixture.streaming().into_iter().flat_map(|s| s.store.notes().to_vec());
        let failed = self.replicas.as_ref().and_then(Replicas::failed);
        self.binding_note.iter().chain(failed).cloned().chain(streaming).chain(self.tables.notes().cloned()).collect()
    }

    fn memory(&mut self) -> Vec<MemoryUse> {
        let of = |class| -> usize { self.buffers.iter().filter(|b| b.class == class).map(|b| b.committed).sum() };
        let weights = |mapped: bool| -> usize {
            // Mapped weights no longer count once they are copied, nor those that stay on disk; planes that are in no file do.
            let counts = |w: &Weight, plane: &Bytes| {
                plane.is_mapped() == mapped && !(mapped && w.is_copied()) && !(w.streamed && plane.is_of_file())
            };
            let of = |w: &Weight| w.planes().iter().filter(|plane| counts(w, plane)).map(Bytes::len).sum::<usize>();
            self.weights.iter().map(of).sum()
        };
        let copies = self.replicas.as_ref().map_or(0, Replicas::bytes);
        let scratch = self.encoded.bytes() + self.hidden.bytes() + self.mixture.scratch_bytes();
        let scratch =
            scratch + self.workers.iter_mut().map(|w| w.bytes()).sum::<usize>() + 4 * self.identity_rows.len();
        let scratch = scratch + self.rotary.iter().map(RotaryTable::bytes).sum::<usize>();
        let scratch = scratch
            + self.attention.bytes()
            + self.latents.bytes()
            + self.delta.bytes()
            + self.state_spaces.bytes()
            + self.channel_deltas.bytes()
            + self.ngrams.bytes()
            + self.index.bytes()
            + self.compressed.bytes();
        let bytes = |class| match class {
            MemoryClass::WeightsMapped => of(class) + weights(true),
            MemoryClass::WeightsCopied => of(class) + weights(false) + copies + self.tables.bytes(),
            MemoryClass::Scratch => of(class) + scratch,
            MemoryClass::Experts => self.mixture.streaming().map_or(0, |s| s.store.bytes()),
            MemoryClass::Kv | MemoryClass::State => of(class),
        };
        MemoryClass::ALL.map(|class| MemoryUse { class, device: Device::Host, bytes: bytes(class) }).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sluice_backend::{Activations, Capacity};
    use sluice_kernels::Isa;

    use crate::numa::affinity::{Mask, current};

    #[test]
    fn threads_run_where_they_are_bound() {
        let mask = Mask::of(0).unwrap();
        let all = mask.processors();
        let mut cpu = Cpu::new(Isa::GENERIC, 4, Activations::F32).unwrap();
        let processors: Vec<usize> = all.iter().rev().copied().cycle().take(4).collect();
        cpu.bind_to(&processors.iter().map(|processor| vec![*processor]).collect::<Vec<_>>()).unwrap();
        let empty = StepInputs::new(&[], Capacity { tokens: 0, sequences: 0, blocks: 0 });
        for _ in 0..3 {
            cpu.begin(&empty);
            cpu.pool.use_threads(4);
            // Each task waits for all, so that each thread takes one.
            let together = std::sync::Barrier::new(4);
            cpu.pool.run(4, &|_, thread| {
                together.wait();
                assert_eq!(current(), processors[thread]);
            });
            cpu.end();
            assert!(Mask::of(0).unwrap() == mask, "the caller is bound no longer than a step");
        }
        for (thread, processor) in processors.iter().enumerate().skip(1) {
            let number = cpu.pool.number(thread).unwrap();
            assert_eq!(Mask::of(number).unwrap().processors(), [*processor]);
        }
        cpu.bind_to(&vec![all.clone(); 4]).unwrap();
        assert!(Mask::of(cpu.pool.number(1).unwrap()).unwrap() == mask, "several among which the kernel chooses");
        assert!(cpu.bind_to(&[vec![0], vec![8191]]).is_err());
    }
}
