//! Replays a recorded step on another backend.

use sluice_backend::{Backend, Caches, Operations, Resources};

use super::Checker;
use super::recording::{Made, Operation, Recording};

impl Recording {
    /// Replays the step on a new backend.
    ///
    /// # Errors
    /// What differs from the recording.
    pub fn replay(&self, fresh: Box<dyn Backend>) -> Result<(), String> {
        // Handles are numbered in the order in which they are made, so they are the same again.
        let mut checker = Checker::new(fresh);
        for made in &self.made {
            replay_setup(&mut checker, made.clone()).map_err(|e| format!("{e:#}"))?;
        }
        for (group, block, bytes) in &self.before.blocks {
            let pool = checker.pool_of(*group);
            checker.write_block(&pool, *block, bytes);
        }
        for (row, state) in &self.before.states {
            let state: Vec<f32> = state.iter().map(|bits| f32::from_bits(*bits)).collect();
            checker.write_state(*row, &state);
        }
        checker.begin(&self.inputs);
        self.operations.iter().for_each(|operation| replay_operation(&mut checker, operation));
        let left = checker.end();
        let logits: Vec<u32> = checker.read_logits(left.logits).iter().map(|x| x.to_bits()).collect();
        if logits != self.logits {
            return Err("logits differ".into());
        }
        if checker.caches(&self.inputs) != self.after {
            return Err("what the caches hold differs".into());
        }
        Ok(())
    }
}

fn replay_setup(to: &mut Checker, made: Made) -> anyhow::Result<()> {
    match made {
        Made::Alloc { class, rows, cols } => to.alloc(class, rows, cols).map(drop),
        Made::Upload { values, to: tensor } => {
            to.upload(&values, tensor);
            Ok(())
        }
        Made::Matrix(source) => to.matrix(source).map(drop),
        Made::Rotary { frequencies, positions } => to.rotary(&frequencies, positions).map(drop),
        Made::Moe { moe, follows } => to.moe(*moe, follows).map(drop),
        Made::AllocKv { layout, blocks } => to.alloc_kv(layout, blocks).map(drop),
        Made::CommitKv { pool, blocks } => to.commit_kv(&pool, blocks),
        Made::AllocStates { rows, len } => to.alloc_states(rows, len),
    }
}

fn replay_operation(to: &mut dyn Operations, operation: &Operation) {
    match operation {
        Operation::Embed { table, out } => to.embed(*table, *out),
        Operation::Project { x, norm, projections } => to.project(*x, *norm, projections),
        Operation::ProjectAdd { x, linear, out } => to.project_add(*x, linear, *out),
        Operation::Attention(layer) => to.attention(layer),
        Operation::LatentAttention(layer) => to.latent_attention(layer),
        Operation::Index(layer) => to.index(layer),
        Operation::Compress(layer) => to.compress(layer),
        Operation::Select(layer) => to.select(layer),
        Operation::CompressedAttention(layer) => to.compressed_attention(layer),
        Operation::DeltaNet(layer) => to.delta_net(layer),
        Operation::ChannelDelta(layer) => to.channel_delta(layer),
        Operation::StateSpace(layer) => to.state_space(layer),
        Operation::Collapse(layer) => to.collapse(layer),
        Operation::EmbedNgrams { table, out } => to.embed_ngrams(table, *out),
        Operation::AddNgrams(layer) => to.add_ngrams(layer),
        Operation::Mlp { x, norm, mlp, residual } => to.mlp(*x, *norm, mlp, *residual),
        Operation::Elementwise(operation) => to.elementwise(operation),
        Operation::Mixture { x, moe, residual } => to.mixture(*x, *moe, *residual),
        Operation::Logits { x, norm, head, softcap } => to.logits(*x, *norm, *head, *softcap),
    }
}
