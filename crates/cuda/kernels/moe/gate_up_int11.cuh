// Gate and up of the experts of one token, whose activations are integers of 11 bits, and `silu(gate) * up` as floats.
#pragma once
#include "format/slices.cuh"
#include "moe/ask.cuh"
#include "moe/single.cuh"
#include "moe/topk.cuh"
#include "prim/cp_async.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/smem.cuh"

// Lanes that a row of gate and one of up have side by side, the groups that each of them takes together, and the chains of a warp: gates first.
static const u32 ROW_LANES = 8, ROW_UNITS = 4, ROW_GROUPS = ROW_LANES * ROW_UNITS, OF_WARP = WARP / ROW_LANES, CHAINS = 2 * OF_WARP;
// Hidden columns of a block.
static const u32 HIDDEN = GATE_UP_THREADS / WARP * OF_WARP;
// What a chain has of each turn in shared memory; four more, so that the chains' quads are in different banks.
static const u32 CHAIN_STRIDE = ROW_GROUPS + 4;

static_assert(HIDDEN == 32);

// Lanes multiply side by side, what they have goes to shared memory, and a lane for each chain adds it up. Shared memory: the encoded row as it lies in memory; for
// each warp the sums of its chains, and scales with biases. ASKS: for experts that may not be on the device.
template <class F, bool ASKS> __device__ __forceinline__ void gate_up(const SingleToken& p) {
    __shared__ Taken taken;
    // Bits of the slots whose experts are still to come, and of those whose experts the host computes.
    __shared__ volatile u32 absent, by_host;
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, groups = p.cols / 64, type = p.type, in_row = lane % ROW_LANES, of_warp = lane / ROW_LANES;
    const u32 line = 128 * (blockIdx.x * GATE_UP_THREADS + threadIdx.x);
    if (line < PROJECTIONS * p.route.experts * sizeof(Matrix)) prefetch((const u8*)p.table + line);
    const u32 tasks = p.slots * p.intermediate / HIDDEN, of_slot = p.intermediate / HIDDEN, row_bytes = groups * (8 * F::BITS);
    u32 task = blockIdx.x, slot = task / of_slot;
    const Slices x = slices(smem, groups);
    const float* of_token = behind(x, groups);
    float* sums = (float*)of_token + 4 + warp * (2 * CHAINS * CHAIN_STRIDE);
    u32* scales = (u32*)sums + CHAINS * CHAIN_STRIDE;
    const u32 here = ASKS ? here_of(p) : 0;
    begin();
    // Threads that take no part in the choice of experts begin to load.
#pragma unroll 1
    for (u32 i = GATE_UP_THREADS - 1 - threadIdx.x; i < ((const u8*)(of_token + 4) - (const u8*)smem) / 16; i += GATE_UP_THREADS) {
        cp_async_16((uint4*)smem + i, (const uint4*)p.x + i);
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
#pragma unroll 1
    while (task < tasks) {
        if (ASKS && absent >> slot & 1) {
            __syncthreads();
            if (threadIdx.x == 0) absent = 0, by_host = answered(p);
            __syncthreads();
        }
        if (!ASKS || !(by_host >> slot & 1)) {
            const u32 column = (task - slot * of_slot) * HIDDEN + warp * OF_WARP + of_warp;
            FusedMatrix rows[2];
#pragma unroll
            for (u32 e = 0; e < 2; e++) rows[e] = matrix_of<ASKS>(p, taken, e, slot);
            float y = 0.0f;
#pragma unroll 1
            for (u32 from = 0; from < groups; from += ROW_GROUPS) {
                u32 words[2][ROW_UNITS][2 * F::BITS], s[2][ROW_UNITS], b[2][ROW_UNITS];
#pragma unroll
                for (u32 d = 0; d < ROW_UNITS; d++) {
                    const u32 group = from + ROW_LANES * d + in_row;
#pragma unroll
                    for (u32 e = 0; e < 2; e++) F::load_unit(words[e][d], s[e][d], b[e][d], rows[e], column, row_bytes, groups, group, group < groups);
                }
                // Prefetches the rest of the rows.
                if (from == 0 && groups > ROW_GROUPS) {
#pragma unroll
                    for (u32 e = 0; e < 2; e++) prefetch_row(rows[e].data + (u64)column * row_bytes, ROW_GROUPS * (8 * F::BITS), row_bytes, in_row, ROW_LANES);
                }
#pragma unroll
                for (u32 d = 0; d < ROW_UNITS; d++) {
                    const u32 own = ROW_LANES * d + in_row, group = min(from + own, groups - 1);
#pragma unroll
                    for (u32 e = 0; e < 2; e++) {
                        const u32 at = (e * OF_WARP + of_warp) * CHAIN_STRIDE + own;
                        sums[at] = slices_sum<F>(words[e][d], x, group);
                        scales[at] = s[e][d] | b[e][d] << 16;
                    }
                }
                __syncwarp();
                if (lane < CHAINS) {
                    const float* own = sums + lane * CHAIN_STRIDE;
                    const u32 *of_own = scales + lane * CHAIN_STRIDE, there = min(ROW_GROUPS, groups - from);
                    // The columns of a norm are a multiple of 256.
#pragma unroll 2
                    for (u32 k = 0; k < there; k += 4) {
                        const float4 d = *(const float4*)(own + k), m = *(const float4*)(x.sums + from + k);
                        const uint4 raw = *(const uint4*)(of_own + k);
                        y = fma(half_value(raw.x >> 16, type), m.x, fma(half_value(raw.x & 0xffff, type), d.x, y));
                        y = fma(half_value(raw.y >> 16, type), m.y, fma(half_value(raw.y & 0xffff, type), d.y, y));
                        y = fma(half_value(raw.z >> 16, type), m.z, fma(half_value(raw.z & 0xffff, type), d.z, y));
                        y = fma(half_value(raw.w >> 16, type), m.w, fma(half_value(raw.w & 0xffff, type), d.w, y));
                    }
                }
                __syncwarp();
            }
            y = mul(y, *of_token);
            const float up = __shfl_sync(ALL, y, lane + OF_WARP);
            if (lane < OF_WARP) ((float*)p.hidden)[task * HIDDEN + warp * OF_WARP + lane] = mul(silu(y), up);
        }
        task += gridDim.x;
        while (task >= (slot + 1) * of_slot) slot++;
    }
}
