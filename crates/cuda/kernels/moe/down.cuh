// Down of the experts of one token, and the sum of the experts.
#pragma once
#include "format/activations.cuh"
#include "format/list.cuh"
#include "format/matrix.cuh"
#include "gemv/parts.cuh"
#include "moe/single.cuh"
#include "moe/topk.cuh"
#include "prim/cp_async.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/smem.cuh"
#include "prim/stamps.cuh"

static const u32 DOWN_THREADS = 256, DOWN_WARPS = DOWN_THREADS / WARP;
// Experts that a warp computes side by side, four lanes each.
static const u32 OCTET = 8;

// A warp takes a row of down of all the token's experts; what they give is summed by as many threads as there are rows. Shared memory: what is hidden, as it lies in
// memory. UNITS: of each slot a round takes four groups, and so many rounds of slots are under way; of three there are always all.
template <class F, int UNITS> __device__ __forceinline__ void down(const SingleToken& p) {
    WATCH();
    __shared__ Taken taken;
    __shared__ float outputs[MOST_SLOTS][DOWN_WARPS];
    // Volatile, so that it takes no register: registers are scarce.
    __shared__ volatile u32 by_host;
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, chain = lane & 3, inside = p.intermediate / 64, all = p.slots * inside, rounds = (inside + 3) / 4;
    const u32 units = (p.slots + OCTET - 1) / OCTET * rounds, type = p.type;
    u32 first = blockIdx.x * DOWN_WARPS;
    const u32 here = p.here ? here_of(p) : 0;
    // The gate and up kernel before this one has waited for the router.
    if (threadIdx.x == DOWN_THREADS - 1) {
        by_host = 0;
        if (p.slots > p.route.k) taken.weights[p.route.k] = p.gate ? sigmoid(__ldcg(p.gate)) : 1.0f;
    }
    topk_block(p.route, DOWN_WARPS, true, taken);
    __syncthreads();
    if (p.here && absent_of(p, taken, here)) {
        // That kernel has also waited for the host, once it has ended.
        pdl_wait();
        if (threadIdx.x == 0) by_host = __ldcg(p.answer) >> 1;
        __syncthreads();
    }
    STAMP(2, 0);
    FusedMatrix parts[MOST_SLOTS / OCTET];
#pragma unroll
    for (int i = 0; i < MOST_SLOTS / OCTET; i++) {
        const u32 slot = i * OCTET + lane / 4;
        parts[i] = matrix_of<false>(p, taken, 2, slot < p.slots ? slot : 0);
    }
    const u64 row_bytes = inside * (8 * F::BITS);
    const Quarters x = quarters(smem, all);
    const float2* means = (const float2*)(x.sx + all);
    bool waits = true;
#pragma unroll 1
    while (true) {
        const u32 row = first + warp;
        float y = 0.0f, before = 0.0f;
        if (threadIdx.x < DOWN_WARPS) before = __ldcg(p.residual + first + threadIdx.x);
        u32 octet = 0, round = 0;
#pragma unroll 1
        for (u32 from = 0; from < units; from += UNITS) {
            u32 words[UNITS][2 * F::BITS], s[UNITS], b[UNITS], o = octet, r = round;
#pragma unroll
            for (int d = 0; d < UNITS; d++) {
                const u32 group = r * 4 + chain;
                const bool there = o * OCTET + lane / 4 < p.slots && group < inside;
                // Field by field: an indexed array would not stay in registers.
                const FusedMatrix part = {o ? parts[1].data : parts[0].data, o ? parts[1].scales : parts[0].scales, o ? parts[1].biases : parts[0].biases, nullptr};
                F::load_unit(words[d], s[d], b[d], part, row, row_bytes, inside, group, there);
                if (++r == rounds) {
                    r = 0;
                    o++;
                }
            }
            if (from == 0 && by_host) {
                // Outputs of the host's experts for this block's rows, while the weights are being loaded.
                const u32 slot = threadIdx.x / DOWN_WARPS, own = threadIdx.x % DOWN_WARPS;
                if (slot < MOST_SLOTS && by_host >> slot & 1) {
                    const volatile float* of_slot = p.outputs + __popc(by_host & ((1u << slot) - 1)) * p.cols;
                    outputs[slot][own] = of_slot[first + own];
                }
            }
            if (waits) {
                STAMP(2, 1);
                begin();
                STAMP(2, 2);
                // Through registers as far as they suffice: asynchronous copies take longer.
                const u32 pieces = 4 * (all + 1) + all, i = threadIdx.x;
                const uint4* hidden = (const uint4*)p.hidden;
                uint4* to = (uint4*)smem;
#pragma unroll 1
                for (u32 j = i + 2 * DOWN_THREADS; j < pieces; j += DOWN_THREADS) cp_async_16(to + j, hidden + j);
                const uint4 near = __ldcg(hidden + min(i, pieces - 1)), far = __ldcg(hidden + min(i + DOWN_THREADS, pieces - 1));
                to[min(i, pieces - 1)] = near;
                to[min(i + DOWN_THREADS, pieces - 1)] = far;
                cp_async_wait_all();
                __syncthreads();
                waits = false;
                STAMP(2, 3);
            }
            float t[UNITS], m[UNITS];
            bool there[UNITS];
            o = octet, r = round;
#pragma unroll
            for (int d = 0; d < UNITS; d++) {
                const u32 slot = o * OCTET + lane / 4, group = r * 4 + chain;
                there[d] = slot < p.slots && group < inside;
                const u32 g = there[d] ? slot * inside + group : 0;
                float unused;
                F::unit_sum(words[d], x, g, t[d], unused);
                m[d] = add(means[g].x, means[g].y);
                if (++r == rounds) {
                    r = 0;
                    o++;
                }
            }
#pragma unroll
            for (int d = 0; d < UNITS; d++) {
                if (UNITS != 3 && from + d >= units) break;
                const float next = fma(half_value(b[d], type), m[d], fma(half_value(s[d], type), t[d], y));
                y = there[d] ? next : y;
                if (++round < rounds) continue;
                // All of an octet's groups are done: their chains meet.
                y = add(y, __shfl_xor_sync(ALL, y, 2));
                y = add(y, __shfl_xor_sync(ALL, y, 1));
                const u32 slot = octet * OCTET + lane / 4;
                if (chain == 0 && slot < p.slots && !(by_host >> slot & 1)) outputs[slot][warp] = y;
                y = 0.0f;
                round = 0;
                octet++;
            }
        }
        __syncthreads();
        if (threadIdx.x < DOWN_WARPS) {
            float sum = 0.0f;
#pragma unroll 8
            for (u32 slot = 0; slot < p.slots; slot++) sum = fma(taken.weights[slot], outputs[slot][threadIdx.x], sum);
            p.residual[first + threadIdx.x] = add(before, sum);
        }
        first += gridDim.x * DOWN_WARPS;
        if (first >= p.cols) break;
        __syncthreads();
    }
    STAMP(2, 4);
}
