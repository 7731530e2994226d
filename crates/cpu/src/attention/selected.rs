//! Attention over what an indexer has selected for each token.

use sluice_backend::StepInputs;
use sluice_kernels::Isa;
use sluice_kernels::attention::{self, Head, KvShape, KvView, Run};

use super::Queries;
use super::index::IndexWork;
use crate::exec::Worker;
use crate::memory::{PerThread, part};
use crate::threads::Pool;

/// Heads of a KV head that one task takes through what a token sees.
pub const HEADS: usize = 16;

/// Attends, for each token, over what was selected for it.
pub(super) fn attend_selected(
    (isa, pool, workers): (Isa, &mut Pool, &mut PerThread<Worker>),
    inputs: &StepInputs,
    kv_bytes: &[u8],
    queries: &Queries,
    selected: &IndexWork,
) {
    let (tokens, shape) = (inputs.tokens().len(), KvShape { by_slot: true, ..queries.shape });
    let (dim, v_dim, group) = (shape.k_dim, shape.v_dim, queries.heads / shape.kv_heads);
    let runs = group.div_ceil(HEADS);
    workers.reserve(0, 0, attention::scratch_len(&shape, HEADS.min(group), 1), 0);
    let workers = &*workers;
    pool.run(tokens * shape.kv_heads * runs, &|task, thread| {
        let (t, kv_head, from) = (task / (shape.kv_heads * runs), task / runs % shape.kv_heads, task % runs * HEADS);
        let some = kv_head * group + from..kv_head * group + (from + HEADS).min(group);
        let Some(slots) = selected.seen(t, inputs.positions()[t] as usize) else { return };
        if inputs.rows(inputs.sequence_of(t)).len() > 1 {
            (queries.prepare)(t, some.clone());
        }
        let head = Head {
            kv: KvView { bytes: kv_bytes, shape },
            kv_head,
            group: some.len(),
            scale: queries.scale,
            window: None,
            softcap: queries.softcap,
            // SAFETY: weights are written once, at load.
            sinks: queries.sinks.map(|sinks| unsafe { sinks.get(0, some.clone()) }),
        };
        let run = Run { table: slots, position: slots.len() - 1, row: t, tokens: 1 };
        // SAFETY: one borrow, by the task that runs as this thread; it alone writes what comes of these heads of this token, whose queries are only read now.
        unsafe {
            let scratch = part(&mut workers.get(thread).floats, head.scratch_len(1));
            let q = queries.q.part(0..tokens, some.start * dim..some.end * dim).as_rows();
            let mut out = queries.out.part(0..tokens, some.start * v_dim..some.end * v_dim).as_rows_mut();
            attention::attend(isa, &head, &[run], q, &mut out, scratch);
        }
        (queries.finish)(t, some);
    });
}
