//! A mixture for one token, whose experts are all on the device, or come there or are computed by the host once it has asked: three kernels (`kernels/moe/single.cuh`).

use anyhow::Result;
use sluice_backend::{Activations, Linear, SharedExpert, Tensor};

use crate::backend::Cuda;
use crate::driver::Address;
use crate::kernels::{Kernel, STATIC_SHARED};
use crate::mailbox::{MOST_CHOSEN, Question};
use crate::mixture::{Mixtures, Registered};
use crate::parameters::{self as p, PROJECTIONS, number};
use crate::weights::HALVES;

/// Columns of a weight group that these kernels take.
const GROUP: usize = 64;
/// Columns whose squares are summed in one go.
pub const NORMED: usize = 256;
/// Threads of a block of gate and up, of one of down, and of one of the router, which has two rows.
const GATE_UP_THREADS: u32 = 256;
const DOWN_THREADS: u32 = 256;
pub const ROUTE_THREADS: u32 = 384;
pub const ROUTE_ROWS: usize = 2;
/// Groups of a row of gate or up that its lanes take together, and the room that they have.
const ROW_GROUPS: usize = 32;
const ROW_ROOM: usize = 40;
/// Experts that a token has at most, the shared one included, and that there are.
pub const MOST_SLOTS: usize = MOST_CHOSEN;
pub const MOST_EXPERTS: usize = 512;
/// Blocks on each multiprocessor.
const BLOCKS: usize = 2;
/// Columns of what is hidden that a block takes together, and rows of down.
const HIDDEN: usize = 32;
const ROWS: usize = DOWN_THREADS as usize / 32;

/// Bytes that so many groups take once they are encoded.
fn quarters(groups: usize) -> usize {
    16 * 4 * (groups + 1) + 4 * (3 * groups).next_multiple_of(4)
}

/// The same of what lies between gate and up, and down, where each half of a group has a scale and a mean.
fn between(groups: usize) -> usize {
    16 * 4 * (groups + 1) + 2 * 8 * groups
}

/// The kernels of a mixture for one token, to be launched by [`Cuda::run_one`].
pub(crate) struct MixtureOfOne {
    router: p::RouterSingle,
    router_shared: u32,
    experts: p::SingleToken,
    /// Instead of the first one, where the device may have to ask.
    asking: Kernel,
    /// Gate and up, down: blocks, threads, shared memory.
    launches: [(Kernel, [u32; 3], u32, u32); 2],
}

impl Cuda {
    /// What computes `residual += mixture(norm(x))` of one token in few kernels, if that can be done; nothing is launched yet.
    pub(crate) fn mixture_of_one(
        &self,
        m: &mut Mixtures,
        x: Tensor,
        of: usize,
        residual: Tensor,
    ) -> Result<Option<MixtureOfOne>> {
        let (gpu, device) = (&self.gpu, &self.gpu.device);
        let Registered { moe, kinds, groups, .. } = &m.all[of];
        // 1. Whether it can be done so
        let (cols, hidden, experts, k) = (x.cols, moe.experts.intermediate(), moe.experts.count, moe.scoring.k());
        let ([&[gate], &[up], &[down]], Some((group, element))) = (kinds.each_ref().map(Vec::as_slice), groups[0])
        else {
            return Ok(None);
        };
        let (Some([gate_up, asking, _]), Some([.., last])) = (gate.moe_single(), down.moe_single()) else {
            return Ok(None);
        };
        let slots = k + usize::from(moe.shared.is_some());
        let alike = gate == up
            && groups.iter().all(|g| *g == Some((group, element)))
            && group as usize == GROUP
            && HALVES.contains(&element);
        let fits = cols.is_multiple_of(NORMED)
            && hidden.is_multiple_of(GROUP)
            && slots <= MOST_SLOTS
            && (k..=MOST_EXPERTS).contains(&experts)
            && moe.router.rows.len() == experts;
        if !device.one || !alike || !fits {
            return Ok(None);
        }
        let rows_of = |linear: &Linear, mode: Activations| {
            let product = self.product(linear, 1, p::Tensor::default(), false, mode);
            (product.matrix, (product.rows, product.cols), product.bias == 0)
        };
        let (router, _, plain) = rows_of(&moe.router, Activations::F32);
        let mut possible = plain && router.kind < 4;
        let (mut shared, mut shared_gate) = ([p::Matrix::default(); PROJECTIONS], p::Matrix::default());
        if let Some(SharedExpert { mlp, gate: of_shared }) = &moe.shared {
            let wanted = [(gate, (hidden, cols)), (up, (hidden, cols)), (down, (cols, hidden))];
            for ((linear, (kind, size)), to) in [&mlp.gate, &mlp.up, &mlp.down].into_iter().zip(wanted).zip(&mut shared)
            {
                let (matrix, found, plain) = rows_of(linear, self.mode);
                possible &= plain
                    && found == size
                    && (matrix.kind, matrix.group, matrix.element) == (kind as u32, group, element);
                *to = matrix;
            }
            if let Some(linear) = of_shared {
                let (matrix, _, plain) = rows_of(linear, Activations::F32);
                possible &= plain && matrix.kind < 4;
                shared_gate = matrix;
            }
        }
        let norm = self.norm(&moe.norm);
        let from = self.place(x);
        possible &= norm.weight != 0 && [from.at, norm.weight].iter().all(|at| at.is_multiple_of(16));
        let route_shared = 4 * (2 + ROUTE_ROWS) * cols;
        let turns = (cols / GROUP).div_ceil(ROW_GROUPS);
        let gate_up_shared = turns * (16 * 4 * ROW_ROOM + (8 + 4) * ROW_GROUPS);
        let down_shared = between(slots * hidden / GROUP);
        let most = route_shared.max(gate_up_shared).max(down_shared);
        let route = m.all[of].route(1, 0, 0, 0);
        if !possible || route.groups > 1 || most + STATIC_SHARED > device.shared {
            return Ok(None);
        }
        // 2. The router
        let x = p::NormedRow { x: from.at, norm: norm.weight, eps: norm.eps, cols: number(cols) };
        let rows = experts + usize::from(shared_gate.data != 0);
        let logits = m.choice.logits.room(gpu, 4 * rows)?;
        let [normed, gated] = &mut m.encoded_one;
        let encoded = normed.room(gpu, quarters(cols / GROUP))?;
        let room = gated.room(gpu, between(slots * hidden / GROUP))?;
        let gate = if shared_gate.data != 0 { logits + 4 * experts as u64 } else { 0 };
        let router = p::RouterSingle {
            x,
            router,
            gate: shared_gate,
            logits,
            encoded,
            normed: 0,
            answer: 0,
            experts: number(experts),
            rows: number(rows),
        };
        // 3. The experts
        let parameters = p::SingleToken {
            route: p::Route { logits, ..route },
            x: encoded,
            table: 0,
            shared,
            gate,
            hidden: room,
            residual: self.place(residual).at,
            question: 0,
            here: 0,
            answer: 0,
            normed: 0,
            input: 0,
            outputs: 0,
            cols: number(cols),
            intermediate: number(hidden),
            slots: number(slots),
            element,
        };
        let blocks = |n: usize| [number(n.min(BLOCKS * device.multiprocessors)), 1, 1];
        Ok(Some(MixtureOfOne {
            router,
            router_shared: number(route_shared),
            experts: parameters,
            asking,
            launches: [
                (gate_up, blocks(slots * hidden / HIDDEN), GATE_UP_THREADS, number(gate_up_shared)),
                (last, blocks(cols.div_ceil(ROWS)), DOWN_THREADS, number(down_shared)),
            ],
        }))
    }

    /// Has the experts that the router chooses added; `table`: where they are. With a question the device asks the host for those that it does not have, and waits until
    /// it has answered.
    pub(crate) fn run_one(&self, one: MixtureOfOne, table: Address, question: Option<Question>) -> Result<()> {
        let MixtureOfOne { router, router_shared, experts, asking, mut launches } = one;
        if question.is_some() {
            launches[0].0 = asking;
        }
        let Question { at: question, here, answer, normed, input, outputs } = question.unwrap_or_default();
        let router = p::RouterSingle { normed, answer, ..router };
        let grid = [router.rows.div_ceil(ROUTE_ROWS as u32), 1, 1];
        // SAFETY: matrices and tensors were checked against their buffers, and the room was made when `one` was.
        unsafe { self.gpu.launch(Kernel::MOE_ROUTER_SINGLE, grid, ROUTE_THREADS, router_shared, &router)? };
        let experts = p::SingleToken { table, question, here, answer, normed, input, outputs, ..experts };
        for (kernel, grid, threads, shared) in launches {
            // SAFETY: as above; the table has all experts, each of so many rows and columns; a question has a word for each that a token takes, and one for the answer.
            unsafe { self.gpu.launch(kernel, grid, threads, shared, &experts)? };
        }
        Ok(())
    }
}
