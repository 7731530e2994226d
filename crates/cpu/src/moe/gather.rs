//! Inputs of experts whose columns are in the order of activations: each expert has an order of its own.

use sluice_kernels::elementwise;

use super::experts::Grouping;
use crate::encoded::{Encoded, Needs};
use crate::exec::ExecContext;
use crate::memory::{Place, part};

/// The input of each (expert, token) pair in its expert's order, encoded: `into` has `[pairs, hidden]`. `x`: `[tokens, hidden]`; `order`: `[experts, hidden]`.
pub fn gather(
    mut context: ExecContext,
    grouping: &Grouping,
    (x, order): (Place, Place),
    needs: Needs,
    into: &mut Encoded,
) {
    let pairs = grouping.order.len();
    into.reset(pairs, x.cols, needs);
    context.reserve(0, x.cols, 0, 0);
    let (isa, workers) = (context.isa, &*context.workers);
    let writer = into.writer(needs);
    context.pool.run(pairs, &|pair, thread| {
        let unit = grouping.units.partition_point(|u| u.from <= pair) - 1;
        let (expert, token) = (grouping.wanted[unit] as usize, grouping.order[pair] as usize);
        // SAFETY: one borrow, by the task that runs as this thread; inputs and orders are not written meanwhile; this task alone writes row `pair`.
        unsafe {
            let row = part(&mut workers.get(thread).row, x.cols);
            elementwise::gather(x.get(token, 0..x.cols), order.get(expert, 0..x.cols), row);
            writer.write(isa, pair, 0, row);
        }
    });
    into.lay_out(isa, needs, context.pool);
}
