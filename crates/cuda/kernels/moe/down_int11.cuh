// Down of the experts of one token, whose activations are integers of 11 bits, and the sum of the experts.
#pragma once
#include "format/slices.cuh"
#include "moe/single.cuh"
#include "moe/topk.cuh"
#include "prim/cp_async.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/reduce.cuh"
#include "prim/smem.cuh"

static const u32 DOWN_THREADS = 256, DOWN_WARPS = DOWN_THREADS / WARP;
// Groups that a lane has under way.
static const u32 UNITS = 4;

// Encodes the hidden rows, a warp each; what results are multiplied with goes to `scales`.
__device__ __forceinline__ void encode_hidden(const float* hidden, u32 slots, u32 cols, const Slices& to, float* scales) {
    const u32 lane = threadIdx.x % WARP, eights = cols / 8;
#pragma unroll 1
    for (u32 slot = threadIdx.x / WARP; slot < slots; slot += DOWN_WARPS) {
        const float4* row = (const float4*)(hidden + slot * cols);
        u32 most = 0;
#pragma unroll 2
        for (u32 i = lane; i < cols / 4; i += WARP) {
            const float4 v = row[i];
            most = max(max(most, max(bits(v.x) & 0x7fffffffu, bits(v.y) & 0x7fffffffu)), max(bits(v.z) & 0x7fffffffu, bits(v.w) & 0x7fffffffu));
        }
        const TokenScale scale = scale_of_token(warp_max_redux(most));
        // Whole warps go on, so that groups stay together.
#pragma unroll 1
        for (u32 i = lane; i / WARP * WARP < eights; i += WARP) {
            float v[8], sum;
            const float4 near = row[2 * min(i, eights - 1)], far = row[2 * min(i, eights - 1) + 1];
            const float own[8] = {near.x, near.y, near.z, near.w, far.x, far.y, far.z, far.w};
            const int e = round_eight(own, scale.before, v, sum);
            if (i < eights) put_slices(to, slot * eights + i, v, e, sum);
        }
        if (lane == 0) scales[slot] = scale.behind;
    }
}

// A warp takes a row of down of all the token's experts, a lane some of their groups at a time. What they have goes to shared memory, where a lane for each expert adds
// it up. Shared memory: the hidden rows encoded, then as floats; for each warp the sums of its row, and scales with biases, by expert.
template <class F> __device__ __forceinline__ void down(const SingleToken& p) {
    __shared__ Taken taken;
    __shared__ float outputs[MOST_SLOTS][DOWN_WARPS], scales_of[MOST_SLOTS];
    __shared__ FusedMatrix parts[MOST_SLOTS];
    __shared__ volatile u32 by_host;
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, inside = p.intermediate / 64, all = p.slots * inside, type = p.type, stride = inside | 1;
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
    if (threadIdx.x < p.slots) parts[threadIdx.x] = matrix_of<false>(p, taken, 2, threadIdx.x);
    __syncthreads();
    const u64 row_bytes = inside * (8 * F::BITS);
    const Slices x = slices(smem, all);
    float *hidden = behind(x, all), *sums = hidden + p.slots * p.intermediate + warp * (2 * p.slots * stride);
    u32* scales = (u32*)sums + p.slots * stride;
    bool waits = true;
#pragma unroll 1
    while (true) {
        const u32 row = first + warp;
        float before = 0.0f;
        if (threadIdx.x < DOWN_WARPS) before = __ldcg(p.residual + first + threadIdx.x);
#pragma unroll 1
        for (u32 from = 0; from < all; from += UNITS * WARP) {
            u32 words[UNITS][2 * F::BITS], s[UNITS], b[UNITS], to[UNITS];
#pragma unroll
            for (u32 d = 0; d < UNITS; d++) {
                const u32 unit = from + d * WARP + lane, slot = min(unit / inside, p.slots - 1), group = unit - slot * inside;
                to[d] = slot * stride + group;
                F::load_unit(words[d], s[d], b[d], parts[slot], row, row_bytes, inside, group, unit < all);
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
                begin();
#pragma unroll 1
                for (u32 i = threadIdx.x; i < p.slots * p.intermediate / 4; i += DOWN_THREADS) cp_async_16((float4*)hidden + i, (const float4*)p.hidden + i);
                cp_async_wait_all();
                __syncthreads();
                encode_hidden(hidden, p.slots, p.intermediate, x, scales_of);
                __syncthreads();
                waits = false;
            }
#pragma unroll
            for (u32 d = 0; d < UNITS; d++) {
                const u32 unit = from + d * WARP + lane;
                if (unit >= all) continue;
                sums[to[d]] = slices_sum<F>(words[d], x, unit);
                scales[to[d]] = s[d] | b[d] << 16;
            }
        }
        __syncwarp();
        if (lane < p.slots && !(by_host >> lane & 1)) {
            const float *own = sums + lane * stride, *m = x.sums + lane * inside;
            const u32* of_own = scales + lane * stride;
            float y = 0.0f;
#pragma unroll 4
            for (u32 k = 0; k < inside; k++) y = fma(half_value(of_own[k] >> 16, type), m[k], fma(half_value(of_own[k] & 0xffff, type), own[k], y));
            outputs[lane][warp] = mul(y, scales_of[lane]);
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
}
