//! What was asked of a backend, and how it is asked again of another.

use sluice_backend::{
    AttentionLayer, Backend, Caches, DeltaLayer, KvLayout, KvPool, Linear, MatrixId, MatrixSource, MemoryClass, Mlp,
    Moe, MoeId, Norm, Operations, Projection, Resources, RotaryFrequencies, StepInputs, Tensor,
};

use super::Checker;

/// Something that was made known before steps. Handles are the checker's.
#[derive(Clone, Debug)]
pub enum Made {
    Alloc { class: MemoryClass, rows: usize, cols: usize },
    Upload { values: Vec<f32>, to: Tensor },
    Matrix(MatrixSource),
    Rotary { frequencies: RotaryFrequencies, positions: usize },
    Moe { moe: Box<Moe>, follows: Option<MoeId> },
    AllocKv { layout: KvLayout, blocks: usize },
    CommitKv { pool: KvPool, blocks: usize },
    AllocStates { rows: usize, len: usize },
}

/// An operation of a step, with what it was given.
#[derive(Clone, Debug)]
pub enum Operation {
    Embed { table: MatrixId, out: Tensor },
    Project { x: Tensor, norm: Option<Norm>, projections: Vec<Projection> },
    ProjectAdd { x: Tensor, linear: Linear, out: Tensor },
    Attention(AttentionLayer),
    DeltaNet(DeltaLayer),
    Mlp { x: Tensor, norm: Norm, mlp: Mlp, residual: Tensor },
    Mixture { x: Tensor, moe: MoeId, residual: Tensor },
    Logits { x: Tensor, norm: Norm, head: MatrixId },
}

impl Operation {
    pub fn name(&self) -> &'static str {
        match self {
            Operation::Embed { .. } => "embed",
            Operation::Project { .. } => "project",
            Operation::ProjectAdd { .. } => "project_add",
            Operation::Attention(_) => "attention",
            Operation::DeltaNet(_) => "delta_net",
            Operation::Mlp { .. } => "mlp",
            Operation::Mixture { .. } => "mixture",
            Operation::Logits { .. } => "logits",
        }
    }
}

/// What the caches that a step uses hold.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CacheContents {
    pub blocks: Vec<(usize, u32, Vec<u8>)>,
    /// As bits.
    pub states: Vec<(u32, Vec<u32>)>,
}

/// A step: what was made before it, what it was given, and what it left.
#[derive(Clone, Debug)]
pub struct Recording {
    pub made: Vec<Made>,
    pub inputs: StepInputs,
    pub operations: Vec<Operation>,
    pub before: CacheContents,
    pub after: CacheContents,
    /// As bits.
    pub logits: Vec<u32>,
}

impl Recording {
    /// Goes through the step on a backend that is new. Returns what is not as it was.
    pub fn replay(&self, fresh: Box<dyn Backend>) -> Result<(), String> {
        // Handles are numbered in the order in which they are made, so they are the same again.
        let mut checker = Checker::new(fresh);
        for made in &self.made {
            again(&mut checker, made.clone()).map_err(|e| format!("{e:#}"))?;
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
        self.operations.iter().for_each(|operation| ask(&mut checker, operation));
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

fn again(to: &mut Checker, made: Made) -> anyhow::Result<()> {
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

fn ask(to: &mut dyn Operations, operation: &Operation) {
    match operation {
        Operation::Embed { table, out } => to.embed(*table, *out),
        Operation::Project { x, norm, projections } => to.project(*x, *norm, projections),
        Operation::ProjectAdd { x, linear, out } => to.project_add(*x, linear, *out),
        Operation::Attention(layer) => to.attention(layer),
        Operation::DeltaNet(layer) => to.delta_net(layer),
        Operation::Mlp { x, norm, mlp, residual } => to.mlp(*x, *norm, mlp, *residual),
        Operation::Mixture { x, moe, residual } => to.mixture(*x, *moe, *residual),
        Operation::Logits { x, norm, head } => to.logits(*x, *norm, *head),
    }
}
