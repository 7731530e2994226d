// Products of blocks for one token, as a layer's part: gemv/fused.cu for groups of 32 and 16 columns. A lane takes 32 columns at a time. Where these are two groups, it
// carries two of a row's four chains, and its neighbour the others.
#include "format/activations.cuh"
#include "format/block_scales.cuh"
#include "format/list.cuh"
#include "format/matrix.cuh"
#include "gemv/fused.cuh"
#include "gemv/parts.cuh"
#include "prim/cp_async.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/reduce.cuh"
#include "prim/smem.cuh"

// Activations in shared memory: of each 32 columns the first and the last sixteen bytes, their scale, and the mean of each group.
struct Thirties {
    uint4* low;
    uint4* high;
    float* sx;
    float* m;
};

// Quantizes eight columns a thread; four neighbouring threads have 32. `i`: which eight columns.
template <int HALVES> __device__ __forceinline__ void quantize_part(const float (&v)[8], bool inside, u32 i, const Thirties& to) {
    u32 even, odd;
    const float a = quantized_eight(v, even, odd);
    int sum = __dp4a((int)even, 0x01010101, __dp4a((int)odd, 0x01010101, 0));
    sum += __shfl_xor_sync(ALL, sum, 1);
    if (HALVES == 1) sum += __shfl_xor_sync(ALL, sum, 2);
    if (!inside) return;
    ((uint2*)((i % 4 < 2 ? to.low : to.high) + i / 4))[i % 2] = make_uint2(even, odd);
    const float scale = div(a, 127.0f);
    if (i % 4 == 0) to.sx[i / 4] = scale;
    if (i % (4 / HALVES) == 0) to.m[i / (4 / HALVES)] = mul(scale, (float)sum);
}

// Encodes x by the whole block, as `stage_one` of gemv/fused.cu.
template <int HALVES, int THREADS> __device__ __forceinline__ void stage_part(const NormedRow& p, const Thirties& to, float* loose, const float* weights) {
    __shared__ float inverse;
    const u32 eights = p.cols / 8;
    const bool first = threadIdx.x < eights;
    float v[8], inv = 1.0f;
    load_eight_written(v, p.x, threadIdx.x, first);
#pragma unroll 1
    for (u32 i = 2 * THREADS + threadIdx.x; i < 2 * eights; i += THREADS) cp_async_16((float4*)loose + i, (const float4*)p.x + i);
    if (p.norm && first) {
        ((float4*)loose)[2 * threadIdx.x] = make_float4(v[0], v[1], v[2], v[3]);
        ((float4*)loose)[2 * threadIdx.x + 1] = make_float4(v[4], v[5], v[6], v[7]);
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
        quantize_part<HALVES>(v, inside, i, to);
    }
}

// Where a lane's 32 columns lie.
struct PartPlace {
    const FusedMatrix& matrix;
    u64 row;
    u32 part;
    bool there;
};

__device__ __forceinline__ PartPlace place_of(const GemvFused& p, u32 set, u32 step) {
    const u32 lane = threadIdx.x % WARP, log = p.log_lanes, part = (step << log) + (lane & ((1u << log) - 1));
    const FusedMatrix& matrix = p.parts[p.gated ? set & 1 : set < p.second ? 0 : set < p.third ? 1 : 2];
    return {matrix, ((u64)(p.gated ? set >> 1 : set) << (5 - log)) + (lane >> log), part, set < p.sets && part < p.cols / 32};
}

template <class F, int UNITS, int THREADS> __device__ __forceinline__ void gemv_fused_blocks(const GemvFused& p) {
    const int HALVES = F::HALVES;
    // Lanes that are alike modulo this have the same chains.
    const u32 ALIKE = 4 / HALVES;
    const u32 lane = threadIdx.x % WARP, log = p.log_lanes, lanes = 1u << log, in_row = lane & (lanes - 1), row_in_set = lane >> log, log_rows = 5 - log;
    const u32 subs = lanes / ALIKE, sub = in_row / ALIKE, parts = p.cols / 32, steps = (parts + lanes - 1) >> log, type = p.type;
    const bool rows_mode = steps == 1;
    const u32 together = rows_mode ? UNITS : 1, task = p.gated && together == 1 ? 2 : together, warps = gridDim.x * (THREADS / WARP);
    Thirties x;
    x.low = (uint4*)smem;
    x.high = x.low + parts;
    x.sx = (float*)(x.high + parts);
    x.m = x.sx + (parts + 3) / 4 * 4;
    float *loose = x.m + (parts * HALVES + 3) / 4 * 4, *weights = loose + p.cols;
    if (p.norm) {
#pragma unroll 1
        for (u32 i = threadIdx.x; i < p.cols / 4; i += THREADS) cp_async_16((float4*)weights + i, (const float4*)p.norm + i);
    }
    const typename F::Values values(type);
    // Neighbouring rows go to different multiprocessors.
    u32 set = (threadIdx.x / WARP * gridDim.x + blockIdx.x) * task, step = 0;
    bool waits = true;
    float acc[HALVES] = {}, gate = 0.0f;
#pragma unroll 1
    while (true) {
        // 1. Weights
        typename F::Wide words[UNITS];
        u32 codes[UNITS], unit[UNITS];
#pragma unroll
        for (int d = 0; d < UNITS; d++) {
            const PartPlace own = place_of(p, rows_mode ? set + d : set, rows_mode ? 0 : step + d);
            const u64 row = own.row * p.row_bytes;
            words[d].load(own.matrix.data + row + own.part * (4 * F::BITS), own.there);
            codes[d] = own.there ? F::codes(own.matrix.scales + row, type, own.part) : 0;
            unit[d] = own.there ? unit_of_column(own.matrix.biases + row, type, own.part * 32) : 0;
        }
        // 2. The row whose result this lane writes, what is there, and the first time the activations
        const bool last = rows_mode || step + UNITS >= steps;
        const u32 own = set + in_row;
        float* to = nullptr;
        if (last && in_row < together && own < p.sets && (!p.gated || (own & 1))) {
            u32 row = ((p.gated ? own >> 1 : own) << log_rows) + row_in_set;
            to = result_of(p, own, row, 1u << log_rows);
        }
        if (waits) begin();
        float before = 0.0f;
        if (p.accumulate && to) before = *to;
        if (waits) {
            stage_part<HALVES, THREADS>({p.x, p.norm, p.eps, p.cols}, x, loose, weights);
            __syncthreads();
            waits = false;
        }
        // 3. Integer sums, with the scales and biases that they meet
        float t[UNITS][HALVES], m[UNITS][HALVES], y[UNITS][HALVES];
        float2 scale[UNITS][HALVES];
#pragma unroll
        for (int d = 0; d < UNITS; d++) {
            const u32 part = min(((rows_mode ? 0 : step + d) << log) + in_row, parts - 1);
            F::part_sums(words[d].words, values, x.low[part], x.high[part], x.sx[part], t[d]);
#pragma unroll
            for (int h = 0; h < HALVES; h++) {
                m[d][h] = x.m[part * HALVES + h];
                scale[d][h] = scale_and_bias<F>(F::code(codes[d], h), unit[d], type);
            }
        }
        // 4. Chains: those of rows side by side, or one after the other's. What is not there is left out.
        auto add_groups = [&](int d, float (&to)[HALVES], bool there) {
#pragma unroll
            for (int h = 0; h < HALVES; h++) {
                const float next = fma(scale[d][h].y, m[d][h], fma(scale[d][h].x, t[d][h], to[h]));
                to[h] = there ? next : to[h];
            }
        };
        auto pass_on = [&](float (&to)[HALVES], u32 k) {
#pragma unroll
            for (int h = 0; h < HALVES; h++) to[h] = __shfl_sync(ALL, to[h], k * ALIKE + (lane & (ALIKE - 1)), lanes);
        };
        if (rows_mode) {
#pragma unroll
            for (int d = 0; d < UNITS; d++)
#pragma unroll
                for (int h = 0; h < HALVES; h++) y[d][h] = 0.0f;
#pragma unroll 1
            for (u32 k = 0; k < subs; k++) {
#pragma unroll
                for (int d = 0; d < UNITS; d++) {
                    add_groups(d, y[d], sub == k && in_row < parts);
                    pass_on(y[d], k);
                }
            }
        } else {
#pragma unroll
            for (int d = 0; d < UNITS; d++) {
                const bool there = ((step + d) << log) + in_row < parts;
#pragma unroll 1
                for (u32 k = 0; k < subs; k++) {
                    add_groups(d, acc, sub == k && there);
                    pass_on(acc, k);
                }
            }
#pragma unroll
            for (int h = 0; h < HALVES; h++) y[0][h] = acc[h];
        }
        // 5. Results
        if (last) {
            float sums[UNITS] = {};
#pragma unroll
            for (int d = 0; d < UNITS; d++) {
                if (d > 0 && !rows_mode) continue;
                if (HALVES == 1) {
                    sums[d] = add(y[d][0], __shfl_xor_sync(ALL, y[d][0], 2));
                    sums[d] = add(sums[d], __shfl_xor_sync(ALL, sums[d], 1));
                } else {
                    // Chains 0 and 1 lie in even lanes, 2 and 3 in odd ones.
                    const float first = add(y[d][0], __shfl_xor_sync(ALL, y[d][0], 1));
                    const float second = add(y[d][HALVES - 1], __shfl_xor_sync(ALL, y[d][HALVES - 1], 1));
                    sums[d] = add(first, second);
                }
            }
            float mine = sums[0], other = gate;
#pragma unroll
            for (int d = 1; d < UNITS; d++) {
                if (in_row == d && rows_mode) {
                    mine = sums[d];
                    other = sums[d - 1];
                }
            }
            gate = mine;
#pragma unroll
            for (int h = 0; h < HALVES; h++) acc[h] = 0.0f;
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
}

#define GEMV_FUSED(name, F) \
    extern "C" __global__ void __launch_bounds__(256, 3) gemv_fused_##name(const __grid_constant__ GemvFused p) { gemv_fused_blocks<F, 2, 256>(p); } \
    extern "C" __global__ void __launch_bounds__(512, 2) gemv_fused_##name##_wide(const __grid_constant__ GemvFused p) { gemv_fused_blocks<F, 2, 512>(p); } \
    extern "C" __global__ void __launch_bounds__(512, 1) gemv_fused_##name##_deep(const __grid_constant__ GemvFused p) { gemv_fused_blocks<F, 4, 512>(p); }

BLOCK_FORMATS(GEMV_FUSED)
