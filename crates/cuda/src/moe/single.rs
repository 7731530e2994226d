//! A mixture for one token in three kernels. Its experts are on the device, or the device requests them in the middle of the step ([`crate::moe::mailbox`]).

use anyhow::Result;
use sluice_backend::{Activations, Linear, SharedExpert, Tensor};

use crate::device::memory::Scratch;
use crate::device::stream::Gpu;
use crate::device::sys::Address;
use crate::kernels::{Kernel, STATIC_SHARED, Variant};
use crate::moe::experts::{MAX_CHOSEN, MAX_EXPERTS};
use crate::moe::layer::MoeLayer;
use crate::moe::mailbox::MailboxSlot;
use crate::moe::route::{NORM_COLUMNS, ROUTER_ROWS, ROUTER_THREADS};
use crate::ops::context::Context;
use crate::parameters::{self as p, PROJECTIONS, number};
use crate::weights::HALVES;

/// Columns of a weight group that these kernels take.
const GROUP: usize = 64;
/// Threads of a block of gate and up, and of one of down.
const GATE_UP_THREADS: u32 = 256;
const DOWN_THREADS: u32 = 256;
/// Groups of a row of gate or up that its lanes take together, and the groups that their shared memory has room for.
const ROW_GROUPS: usize = 32;
const ROW_CAPACITY: usize = 40;
/// Chains of a warp of gate and up, with activations as integers of 11 bits.
const ROW_CHAINS: usize = 8;
/// The most blocks for each multiprocessor.
const BLOCKS: usize = 2;
/// Columns of the hidden activations that a block of gate and up takes, and rows of a block of down.
const HIDDEN: usize = 32;
const ROWS: usize = DOWN_THREADS as usize / 32;

/// What the kernels take of memory.
struct Bytes {
    /// The encoded input of gate and up, and what they leave.
    encoded: usize,
    hidden: usize,
    /// Shared memory of both kernels.
    gate_up_shared: usize,
    down_shared: usize,
}

impl Bytes {
    /// For activations as int8: `groups` of a row of gate or up, `inside` groups of each of `slots` rows of down.
    fn int8(groups: usize, inside: usize, slots: usize) -> Bytes {
        let (quarters, all) = (|groups: usize| 16 * 4 * (groups + 1), slots * inside);
        // Each half of a hidden group has a scale and a mean.
        let hidden = quarters(all) + 2 * 8 * all;
        Bytes {
            encoded: quarters(groups) + 4 * (3 * groups).next_multiple_of(4),
            hidden,
            gate_up_shared: groups.div_ceil(ROW_GROUPS) * (16 * 4 * ROW_CAPACITY + (8 + 4) * ROW_GROUPS),
            down_shared: hidden,
        }
    }

    /// For activations as integers of 11 bits.
    fn int11(groups: usize, inside: usize, slots: usize) -> Bytes {
        let slices = |groups: usize| 16 * 8 * (groups + 1) + 2 * 4 * groups.next_multiple_of(4);
        let (encoded, hidden) = (slices(groups) + 16, 4 * GROUP * slots * inside);
        // Of each warp: its chains' sums, and scales with biases.
        let chains = |threads: u32, chains: usize, stride: usize| threads as usize / 32 * 2 * 4 * chains * stride;
        Bytes {
            encoded,
            hidden,
            gate_up_shared: encoded + chains(GATE_UP_THREADS, ROW_CHAINS, ROW_GROUPS + 4),
            down_shared: slices(slots * inside) + hidden + chains(DOWN_THREADS, slots, inside | 1),
        }
    }
}

/// The launches of a mixture for one token.
pub struct SingleTokenMoe {
    router: p::RouterSingle,
    router_kernel: Kernel,
    router_shared: u32,
    experts: p::SingleToken,
    /// The kernel of gate and up that may request experts.
    requesting: Kernel,
    /// Gate and up, then down: kernel, grid, threads and shared memory.
    launches: [(Kernel, [u32; 3], u32, u32); 2],
}

/// Scratch of a mixture for one token.
#[derive(Default)]
pub struct SingleTokenScratch {
    /// Encoded inputs of gate and up, and of down.
    normed: Scratch,
    hidden: Scratch,
}

impl SingleTokenScratch {
    pub fn bytes(&self) -> usize {
        self.normed.bytes() + self.hidden.bytes()
    }
}

impl SingleTokenMoe {
    /// Prepares `residual += mixture(norm(x))` of one token; `logits`: scratch for the router's. `None` if the kernels cannot take this mixture.
    pub fn prepare(
        context: &Context,
        layer: &MoeLayer,
        logits: &mut Scratch,
        scratch: &mut SingleTokenScratch,
        x: Tensor,
        residual: Tensor,
    ) -> Result<Option<SingleTokenMoe>> {
        let (gpu, device) = (&context.gpu, &context.gpu.device);
        let MoeLayer { moe, kinds, groups, .. } = layer;
        // 1. Whether the kernels can take it
        let (cols, hidden, experts, k) = (x.cols, moe.experts.intermediate(), moe.experts.count, moe.scoring.k());
        let ([&[gate], &[up], &[down]], Some((group, element))) = (kinds.each_ref().map(Vec::as_slice), groups[0])
        else {
            return Ok(None);
        };
        let (Some([gate_up, requesting, _]), Some([.., last])) = (gate.moe_single(), down.moe_single()) else {
            return Ok(None);
        };
        let slots = k + usize::from(moe.shared.is_some());
        let alike = gate == up
            && groups.iter().all(|g| *g == Some((group, element)))
            && group as usize == GROUP
            && HALVES.contains(&element);
        let fits = cols.is_multiple_of(NORM_COLUMNS)
            && hidden.is_multiple_of(GROUP)
            && slots <= MAX_CHOSEN
            && (k..=MAX_EXPERTS).contains(&experts)
            && moe.router.rows.len() == experts;
        // The router's kernel encodes one input for itself and for all experts.
        let one_input = moe.experts.order.is_none() && moe.router_norm.is_none() && moe.latent.is_none();
        if !device.has(Variant::One) || !layer.is_plain || !one_input || !alike || !fits {
            return Ok(None);
        }
        let rows_of = |linear: &Linear, mode: Activations| {
            let product = context.product(linear, 1, p::Tensor::default(), false, mode);
            (product.matrix, (product.rows, product.cols), product.bias == 0)
        };
        let (router, _, plain) = rows_of(&moe.router, Activations::F32);
        let mut possible = plain && router.kind < 4;
        let (mut shared, mut shared_gate) = ([p::Matrix::default(); PROJECTIONS], p::Matrix::default());
        if let Some(SharedExpert { mlp, gate: of_shared }) = &moe.shared {
            let wanted = [(gate, (hidden, cols)), (up, (hidden, cols)), (down, (cols, hidden))];
            for ((linear, (kind, size)), to) in [&mlp.gate, &mlp.up, &mlp.down].into_iter().zip(wanted).zip(&mut shared)
            {
                let (matrix, found, plain) = rows_of(linear, context.mode);
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
        let norm = moe.norm.as_ref().map_or(p::Norm::default(), |norm| context.norm(norm));
        let from = context.place(x);
        possible &= norm.weight != 0 && [from.at, norm.weight].iter().all(|at| at.is_multiple_of(16));
        let route_shared = 4 * (2 + ROUTER_ROWS) * cols;
        let (router_kernel, bytes_of): (_, fn(usize, usize, usize) -> Bytes) = match context.mode {
            Activations::Int11 => (Kernel::MOE_ROUTER_SINGLE_INT11, Bytes::int11),
            _ => (Kernel::MOE_ROUTER_SINGLE, Bytes::int8),
        };
        let bytes = bytes_of(cols / GROUP, hidden / GROUP, slots);
        let most = route_shared.max(bytes.gate_up_shared).max(bytes.down_shared);
        let route = layer.route_parameters((1, 0), 0, 0, 0);
        if !possible || route.groups > 1 || route.table != 0 || most + STATIC_SHARED > device.shared {
            return Ok(None);
        }
        // 2. The router
        let x = p::NormedRow { x: from.at, norm: norm.weight, eps: norm.eps, cols: number(cols) };
        let rows = experts + usize::from(shared_gate.data != 0);
        let logits = logits.reserve(gpu, 4 * rows)?;
        let encoded = scratch.normed.reserve(gpu, bytes.encoded)?;
        let hidden_at = scratch.hidden.reserve(gpu, bytes.hidden)?;
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
            hidden: hidden_at,
            residual: context.place(residual).at,
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
        Ok(Some(SingleTokenMoe {
            router,
            router_kernel,
            router_shared: number(route_shared),
            experts: parameters,
            requesting,
            launches: [
                (gate_up, blocks(slots * hidden / HIDDEN), GATE_UP_THREADS, number(bytes.gate_up_shared)),
                (last, blocks(cols.div_ceil(ROWS)), DOWN_THREADS, number(bytes.down_shared)),
            ],
        }))
    }

    /// Launches it with the layer's table of experts. With a mailbox slot, the device requests the experts that it does not have and waits for the host's answer.
    pub fn launch(self, gpu: &Gpu, table: Address, slot: Option<MailboxSlot>) -> Result<()> {
        let SingleTokenMoe { router, router_kernel, router_shared, experts, requesting, mut launches } = self;
        if slot.is_some() {
            launches[0].0 = requesting;
        }
        let MailboxSlot { at: question, resident: here, answer, normed, input, outputs } = slot.unwrap_or_default();
        let router = p::RouterSingle { normed, answer, ..router };
        let grid = [router.rows.div_ceil(ROUTER_ROWS as u32), 1, 1];
        // SAFETY: `prepare` checked matrices and tensors against their buffers and reserved the scratch.
        unsafe { gpu.launch(router_kernel, grid, ROUTER_THREADS, router_shared, &router)? };
        let experts = p::SingleToken { table, question, here, answer, normed, input, outputs, ..experts };
        for (kernel, grid, threads, shared) in launches {
            // SAFETY: as above; the table has all experts with these rows and columns; a slot has a word for each expert of a token and one for the answer.
            unsafe { gpu.launch(kernel, grid, threads, shared, &experts)? };
        }
        Ok(())
    }
}
