// Gate and up of the experts of one token, and `silu(gate) * up`.
#pragma once
#include "format/activations.cuh"
#include "format/list.cuh"
#include "format/matrix.cuh"
#include "gemv/parts.cuh"
#include "moe/ask.cuh"
#include "moe/single.cuh"
#include "moe/topk.cuh"
#include "prim/cp_async.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/reduce.cuh"
#include "prim/smem.cuh"
#include "prim/stamps.cuh"

// Lanes that a row of gate and one of up have side by side, whose groups are of chain `lane mod 4`: the first four have so many of a chain's groups, the other four
// those that follow.
static const u32 ROW_LANES = 8, ROW_UNITS = 4, ROW_GROUPS = ROW_LANES * ROW_UNITS;

// Columns of the hidden row that a warp takes together, and a block: a group of activations.
static const u32 HIDDEN_OF_WARP = WARP / ROW_LANES, HIDDEN = GATE_UP_THREADS / WARP * HIDDEN_OF_WARP;

static_assert(HIDDEN == 32);

// Quantizes 32 columns of the hidden row, one a lane, with the bits of `quantize_eight`.
__device__ __forceinline__ void quantize_hidden(float v, u32 task, u32 groups, u8* hidden) {
    const u32 lane = threadIdx.x % WARP, eight = 4 * task + lane / 8, stride = groups + 1;
    const float a = bits(warp_max_redux(bits(v) & 0x7fffffffu)), inv = div(127.0f, a), scale = div(a, 127.0f);
    const u32 keep = is_finite(inv) && is_finite(a) ? ALL : 0;
    const i8 q = (i8)(keep & bits(add(mul(v, inv), 12582912.0f)));
    hidden[16 * (eight / 2 % 4 * stride + eight / 8) + eight % 2 * 8 + lane % 8 / 2 + lane % 2 * 4] = (u8)q;
    const int sum = warp_sum_redux(q);
    float* scales = (float*)(hidden + 64 * stride);
    if (lane == 0) {
        scales[task] = scale;
        scales[2 * groups + task] = mul(scale, (float)sum);
    }
}

// Eight lanes take a column's gate and up. Shared memory: quarters of x, with room for groups up to a multiple of ROW_GROUPS; behind each sixteen four are left out, so
// that those that a row's lanes read at once are in different banks. ASKS: for experts that may not be on the device; code that is only stepped over costs a token, too.
template <class F, bool ASKS> __device__ __forceinline__ void gate_up(const SingleToken& p) {
    WATCH();
    __shared__ Taken taken;
    // Two tasks, one after the other.
    __shared__ float hidden[2][HIDDEN];
    // Bits of the slots whose experts are still to come, and of those whose experts the host computes.
    __shared__ volatile u32 absent, by_host;
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, groups = p.cols / 64, type = p.type;
    const u32 in_row = lane % ROW_LANES, of_warp = lane / ROW_LANES, sub = in_row / 4, first = 4 * ROW_UNITS * sub + in_row % 4;
    const u32 line = 128 * (blockIdx.x * GATE_UP_THREADS + threadIdx.x);
    if (line < PROJECTIONS * p.route.experts * sizeof(Matrix)) prefetch((const u8*)p.table + line);
    const u32 tasks = p.slots * p.intermediate / HIDDEN, all = p.slots * p.intermediate / 64, of_slot = p.intermediate / HIDDEN, row_bytes = groups * (8 * F::BITS);
    u32 task = blockIdx.x, slot = task / of_slot, turn = 0;
    materialize(slot);
    Quarters x;
    x.q = (uint4*)smem;
    x.stride = (groups + ROW_GROUPS - 1) / ROW_GROUPS * (ROW_GROUPS / 4 * 5);
    x.sx = (float2*)(x.q + 4 * x.stride);
    x.m = (float*)(x.sx + groups);
    const u32 here = ASKS ? here_of(p) : 0;
    STAMP(1, 0);
    begin();
    STAMP(1, 1);
    // Threads that take no part in the choice of experts begin to load.
#pragma unroll 1
    for (u32 i = GATE_UP_THREADS - 1 - threadIdx.x; i < 4 * groups + (3 * groups + 3) / 4; i += GATE_UP_THREADS) {
        const u32 quarter = i % 4, group = i / 4, behind = i - 4 * groups;
        if (group < groups) cp_async_16(x.q + quarter * x.stride + group + group / 16 * 4, (const uint4*)p.x + quarter * (groups + 1) + group);
        else cp_async_16((uint4*)x.sx + behind, (const uint4*)p.x + 4 * (groups + 1) + behind);
    }
    if (ASKS && threadIdx.x == GATE_UP_THREADS - 1) absent = by_host = 0;
    topk_block(p.route, GATE_UP_THREADS / WARP, false, taken);
    cp_async_wait_all();
    __syncthreads();
    if (ASKS) {
        const u32 gone = absent_of(p, taken, here);
        if (blockIdx.x == 0) ask(p, taken, gone);
        if (threadIdx.x == 0) absent = gone;
        __syncthreads();
    }
    STAMP(1, 2);
    x.q += first + 4 * sub, x.sx += first, x.m += first;
#pragma unroll 1
    while (task < tasks) {
        if (ASKS && absent >> slot & 1) {
            __syncthreads();
            if (threadIdx.x == 0) absent = 0, by_host = answered(p);
            __syncthreads();
        }
        if (!ASKS || !(by_host >> slot & 1)) {
            // The lane's rows, from its first group on.
            const u64 column = (task - slot * of_slot) * HIDDEN + warp * HIDDEN_OF_WARP + of_warp;
            FusedMatrix rows[2];
#pragma unroll
            for (u32 e = 0; e < 2; e++) {
                rows[e] = matrix_of<ASKS>(p, taken, e, slot);
                rows[e].data += column * row_bytes + first * (8 * F::BITS);
                rows[e].scales += 2 * (column * groups + first);
                rows[e].biases += 2 * (column * groups + first);
            }
            Quarters own = x;
            float y[2] = {0.0f, 0.0f};
#pragma unroll 1
            for (u32 from = 0; from < groups; from += ROW_GROUPS) {
                u32 words[2][ROW_UNITS][2 * F::BITS], s[2][ROW_UNITS], b[2][ROW_UNITS];
                auto load = [&](const bool whole) {
#pragma unroll
                    for (u32 d = 0; d < ROW_UNITS; d++) {
#pragma unroll
                        for (u32 e = 0; e < 2; e++) F::load_unit(words[e][d], s[e][d], b[e][d], rows[e], 0, 0, 0, 4 * d, whole || from + first + 4 * d < groups);
                    }
                };
                if (from + ROW_GROUPS <= groups) load(true);
                else load(false);
                // Prefetches the rest of the rows.
                if (from == 0 && groups > ROW_GROUPS) {
                    prefetch_row(rows[0].data - first * (8 * F::BITS), ROW_GROUPS * (8 * F::BITS), row_bytes, in_row, ROW_LANES);
                    prefetch_row(rows[1].data - first * (8 * F::BITS), ROW_GROUPS * (8 * F::BITS), row_bytes, in_row, ROW_LANES);
                }
                float t[2][ROW_UNITS], m[ROW_UNITS], scales[2][ROW_UNITS], biases[2][ROW_UNITS];
#pragma unroll
                for (u32 d = 0; d < ROW_UNITS; d++) {
#pragma unroll
                    for (u32 e = 0; e < 2; e++) {
                        F::unit_sum(words[e][d], own, 4 * d, t[e][d], m[d]);
                        scales[e][d] = half_value(s[e][d], type);
                        biases[e][d] = half_value(b[e][d], type);
                    }
                }
                STAMP(1, 3);
                // From those who have their beginning to those who have their end. What is not there is left out.
#pragma unroll
                for (u32 k = 0; k < ROW_LANES / 4; k++) {
#pragma unroll
                    for (u32 e = 0; e < 2; e++) {
                        float end = y[e];
#pragma unroll
                        for (u32 d = 0; d < ROW_UNITS; d++) {
                            const float next = fma(biases[e][d], m[d], fma(scales[e][d], t[e][d], end));
                            end = from + first + 4 * d < groups ? next : end;
                        }
                        y[e] = __shfl_sync(ALL, end, 4 * k + lane % 4, ROW_LANES);
                    }
                }
#pragma unroll
                for (u32 e = 0; e < 2; e++) {
                    rows[e].data += ROW_GROUPS * (8 * F::BITS);
                    rows[e].scales += 2 * ROW_GROUPS;
                    rows[e].biases += 2 * ROW_GROUPS;
                }
                own.q += ROW_GROUPS / 4 * 5, own.sx += ROW_GROUPS, own.m += ROW_GROUPS;
            }
#pragma unroll
            for (u32 e = 0; e < 2; e++) {
                y[e] = add(y[e], __shfl_xor_sync(ALL, y[e], 2));
                y[e] = add(y[e], __shfl_xor_sync(ALL, y[e], 1));
            }
            if (in_row == 0) hidden[turn][warp * HIDDEN_OF_WARP + of_warp] = mul(silu(y[0]), y[1]);
            __syncthreads();
            STAMP(1, 4);
            if (warp == 0) quantize_hidden(hidden[turn][lane], task, all, p.hidden);
            turn ^= 1;
        }
        task += gridDim.x;
        while (task >= (slot + 1) * of_slot) slot++;
    }
    STAMP(1, 5);
}
