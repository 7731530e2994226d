// Products of integer groups of 64, and of bf16 pairs, for one token, as a layer's part (gemv/batched.cu says what that is). What counts here is the time from
// the end of the kernel before to the end of this one: what does not depend on that kernel comes before the wait (weights, scales, the norm's weights), and
// there is little code, since each instruction is fetched for a few executions.
//
// A lane takes a whole weight group at a time, so that its two integer sums meet in registers; a row has 2^lanes lanes side by side, group w in lane w mod
// 2^lanes, and its four chains wander through them, chain w mod 4 in lanes that are alike mod 4. A unit is what a lane takes at a time; UNITS are under way, of
// as many rows where a row is one unit, or of one row.
#include "format/activations.cuh"
#include "format/list.cuh"
#include "format/matrix.cuh"
#include "gemv/fused.cuh"
#include "gemv/parts.cuh"
#include "prim/cp_async.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/reduce.cuh"
#include "prim/smem.cuh"
#include "prim/stamps.cuh"

// Encodes x by the whole block; the norm's weights are on their way to `weights`. `loose`: [cols] floats, where there is a norm or much to encode. A thread's first
// eight columns stay in its registers: loads that go straight to shared memory take longer.
template <int THREADS> __device__ __forceinline__ void stage_one(const NormedRow& p, const Quarters& to, float* loose, const float* weights) {
    __shared__ float inverse;
    const u32 eights = p.cols / 8;
    const bool first = threadIdx.x < eights;
    float v[8], inv = 1.0f;
    load_eight_written(v, p.x, threadIdx.x, first);
#pragma unroll 1
    for (u32 i = 2 * THREADS + threadIdx.x; i < 2 * eights; i += THREADS) cp_async_16((float4*)loose + i, (const float4*)p.x + i);
    if (p.norm) {
        if (first) {
            ((float4*)loose)[2 * threadIdx.x] = make_float4(v[0], v[1], v[2], v[3]);
            ((float4*)loose)[2 * threadIdx.x + 1] = make_float4(v[4], v[5], v[6], v[7]);
        }
    }
    if (p.norm || eights > THREADS) {
        cp_async_wait_all();
        __syncthreads();
    }
    if (p.norm) {
        if (threadIdx.x < WARP) {
            float own = inverse_rms_256(loose, p.cols, p.eps);
            if (threadIdx.x == 0) inverse = own;
        }
        __syncthreads();
        inv = inverse;
    }
    // Whole warps go on, or none of a warp.
#pragma unroll 1
    for (u32 i = threadIdx.x; i / WARP * WARP < eights; i += THREADS) {
        bool inside = i < eights;
        if (i >= THREADS) load_eight(v, loose, i, inside);
        if (p.norm) {
            float w[8];
            load_eight(w, weights, i, inside);
#pragma unroll
            for (int k = 0; k < 8; k++) v[k] = mul(mul(v[k], inv), w[k]);
        }
        quantize_group(v, inside, i, to);
    }
}

// Where a lane's unit lies.
struct Unit {
    const FusedMatrix& part;
    u64 row;
    u32 group;
    bool there;
};

__device__ __forceinline__ Unit unit_of(const GemvFused& p, u32 set, u32 step) {
    const u32 lane = threadIdx.x % WARP, log = p.log_lanes, group = (step << log) + (lane & ((1u << log) - 1));
    const FusedMatrix& part = p.parts[p.gated ? set & 1 : set < p.second ? 0 : set < p.third ? 1 : 2];
    return {part, ((u64)(p.gated ? set >> 1 : set) << (5 - log)) + (lane >> log), group, set < p.sets && group < p.cols / 64};
}

template <class F, int UNITS, int THREADS> __device__ __forceinline__ void gemv_fused_int8(const GemvFused& p) {
    const u32 lane = threadIdx.x % WARP, log = p.log_lanes, lanes = 1u << log, in_row = lane & (lanes - 1), row_in_set = lane >> log, log_rows = 5 - log;
    const u32 subs = lanes >> 2, sub = in_row >> 2, groups = p.cols / 64, steps = (groups + lanes - 1) >> log;
    const bool rows_mode = steps == 1;
    const u32 together = rows_mode ? UNITS : 1, task = p.gated && together == 1 ? 2 : together, warps = gridDim.x * (THREADS / WARP);
    WATCH();
    Quarters x;
    x.q = (uint4*)smem;
    x.stride = groups + 1;
    x.sx = (float2*)(x.q + 4 * x.stride);
    x.m = (float*)(x.sx + groups);
    float *loose = (float*)(x.q + 4 * x.stride) + (3 * groups + 3) / 4 * 4, *weights = loose + p.cols;
    if (p.norm) {
#pragma unroll 1
        for (u32 i = threadIdx.x; i < p.cols / 4; i += THREADS) cp_async_16((float4*)weights + i, (const float4*)p.norm + i);
    }
    // Neighbouring rows go to different multiprocessors.
    u32 set = (threadIdx.x / WARP * gridDim.x + blockIdx.x) * task, step = 0;
    bool waits = true;
    float acc = 0.0f, gate = 0.0f;
#pragma unroll 1
    while (true) {
        // 1. Weights
        u32 words[UNITS][2 * F::BITS], s[UNITS], b[UNITS];
#pragma unroll
        for (int d = 0; d < UNITS; d++) {
            const Unit unit = unit_of(p, rows_mode ? set + d : set, rows_mode ? 0 : step + d);
            F::load_unit(words[d], s[d], b[d], unit.part, unit.row, p.row_bytes, groups, unit.group, unit.there);
        }
        // 2. The row whose result this lane writes, what is there, and the first time the activations
        const bool last = rows_mode || step + UNITS >= steps;
        const u32 own = set + in_row;
        float* to = nullptr;
        if (last && in_row < together && own < p.sets && (!p.gated || (own & 1))) {
            u32 row = ((p.gated ? own >> 1 : own) << log_rows) + row_in_set;
            to = result_of(p, own, row, 1u << log_rows);
        }
        if (waits) {
            STAMP(3 + p.accumulate, 0);
            begin();
            STAMP(3 + p.accumulate, 1);
        }
        float before = 0.0f;
        if (p.accumulate && to) before = *to;
        if (waits) {
            stage_one<THREADS>({p.x, p.norm, p.eps, p.cols}, x, loose, weights);
            __syncthreads();
            waits = false;
            STAMP(3 + p.accumulate, 2);
        }
        // 3. Integer sums
        float t[UNITS], m[UNITS], y[UNITS];
#pragma unroll
        for (int d = 0; d < UNITS; d++) {
            u32 g = min(((rows_mode ? 0 : step + d) << log) + in_row, groups - 1);
            F::unit_sum(words[d], x, g, t[d], m[d]);
        }
        // 4. Chains: those of rows side by side, or one after the other's. What is not there is left out.
        const bool there0 = in_row < groups;
        if (rows_mode) {
#pragma unroll
            for (int d = 0; d < UNITS; d++) y[d] = 0.0f;
#pragma unroll 1
            for (u32 k = 0; k < subs; k++) {
#pragma unroll
                for (int d = 0; d < UNITS; d++) {
                    float next = fma(half_value(b[d], p.type), m[d], fma(half_value(s[d], p.type), t[d], y[d]));
                    if (sub == k && there0) y[d] = next;
                    y[d] = __shfl_sync(ALL, y[d], (k << 2) + (lane & 3), lanes);
                }
            }
        } else {
#pragma unroll
            for (int d = 0; d < UNITS; d++) {
                bool there = ((step + d) << log) + in_row < groups;
#pragma unroll 1
                for (u32 k = 0; k < subs; k++) {
                    float next = fma(half_value(b[d], p.type), m[d], fma(half_value(s[d], p.type), t[d], acc));
                    if (sub == k && there) acc = next;
                    acc = __shfl_sync(ALL, acc, (k << 2) + (lane & 3), lanes);
                }
                y[d] = acc;
            }
            y[0] = acc;
        }
        // 5. Results
        if (last) {
#pragma unroll
            for (int d = 0; d < UNITS; d++) {
                y[d] = add(y[d], __shfl_xor_sync(ALL, y[d], 2));
                y[d] = add(y[d], __shfl_xor_sync(ALL, y[d], 1));
            }
            float mine = y[0], other = gate;
#pragma unroll
            for (int d = 1; d < UNITS; d++) {
                if (in_row == d && rows_mode) {
                    mine = y[d];
                    other = y[d - 1];
                }
            }
            gate = mine;
            acc = 0.0f;
            if (to) *to = p.gated ? mul(silu(other), mine) : add(before, mine);
        }
        // 6. On
        step += UNITS;
        if (last) {
            step = 0;
            set = set_after(set, together, task, warps);
        }
        if (set >= p.sets) break;
    }
    STAMP(3 + p.accumulate, 3);
}

// Blocks of 256 threads for what is through at once, so that they hold little up; else of 512; and of as many with more under way for long rows.

#define GEMV_FUSED(name, F) \
    extern "C" __global__ void __launch_bounds__(256, 3) gemv_fused_##name(const __grid_constant__ GemvFused p) { gemv_fused_int8<F, 2, 256>(p); } \
    extern "C" __global__ void __launch_bounds__(512, 2) gemv_fused_##name##_wide(const __grid_constant__ GemvFused p) { gemv_fused_int8<F, 2, 512>(p); } \
    extern "C" __global__ void __launch_bounds__(512, 1) gemv_fused_##name##_deep(const __grid_constant__ GemvFused p) { gemv_fused_int8<F, 4, 512>(p); }

INT8_FORMATS(GEMV_FUSED)
