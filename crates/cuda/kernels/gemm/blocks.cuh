// Products of integer groups of 32 or 16 columns with weights in blocks: a warp takes a row for several tokens, a thread 32 columns at a time. Groups then meet in
// four chains, group w in that of the threads w mod 4.
#pragma once
#include "format/block_scales.cuh"
#include "format/list.cuh"
#include "format/matrix.cuh"
#include "gemm/matmul.cuh"
#include "prim/mma.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"

// Of one of a thread's groups in the thread `of`: the second, if this thread's chain has those.
template <int HALVES> __device__ __forceinline__ float of_group(const float (&own)[HALVES], u32 of, bool second) {
    const float first = __shfl_sync(ALL, own[0], of);
    if (HALVES == 1) return first;
    const float other = __shfl_sync(ALL, own[HALVES - 1], of);
    return second ? other : first;
}

template <class F, int T> __device__ __forceinline__ void blocks_dot(const Matmul& p) {
    begin();
    const int HALVES = F::HALVES;
    const u32 lane = threadIdx.x % WARP, r = blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP, parts = p.cols / 32;
    if (r >= p.rows) return;
    const u64 row = p.in_matrix(r);
    for (u32 tile = blockIdx.y; tile * T < p.outputs; tile += gridDim.y) {
        Work w;
        if (!work<T>(p, KIND_OF<F>, tile, w)) continue;
        const u64 at = row * w.m.row_bytes;
        const u8 *data = w.m.data + at, *codes = w.m.scales + at, *units = w.m.biases + at;
        const typename F::Values values(w.m.type);
        float acc[T];
#pragma unroll
        for (int t = 0; t < T; t++) acc[t] = 0.0f;
        for (u32 from = 0; from < parts; from += WARP) {
            const u32 part = from + lane;
            float s[HALVES] = {}, b[HALVES] = {}, joined[T][HALVES] = {}, m[T][HALVES] = {};
            if (part < parts) {
                typename F::Part packed;
                u32 q[8];
                packed.load(data + (u64)part * 4 * F::BITS, true);
                const u32 own = F::codes(codes, w.m.type, part), unit = unit_of_column(units, w.m.type, part * 32);
                F::unpack(packed.words, q, values);
#pragma unroll
                for (int h = 0; h < HALVES; h++) {
                    const float2 scale = scale_and_bias<F>(F::code(own, h), unit, w.m.type);
                    s[h] = scale.x, b[h] = scale.y;
                }
#pragma unroll
                for (int t = 0; t < T; t++) {
                    if (t >= w.count) break;
                    const u64 column = (w.x + t) * p.cols + part * 32;
                    const uint4 low = ((const uint4*)(p.x.q + column))[0], high = ((const uint4*)(p.x.q + column))[1];
                    const float sx = p.x.sx[column / 32];
                    int first = dp4a(q[0], low.x, 0), second = dp4a(q[4], high.x, 0);
                    first = dp4a(q[1], low.y, first), second = dp4a(q[5], high.y, second);
                    first = dp4a(q[2], low.z, first), second = dp4a(q[6], high.z, second);
                    first = dp4a(q[3], low.w, first), second = dp4a(q[7], high.w, second);
                    if (HALVES == 1) {
                        joined[t][0] = mul(sx, (float)(first + second));
                        m[t][0] = p.x.mx[column / 32];
                        continue;
                    }
                    const u32 ONES = 0x01010101u;
                    joined[t][0] = mul(sx, (float)first);
                    joined[t][HALVES - 1] = mul(sx, (float)second);
                    m[t][0] = mul(sx, (float)dp4a(ONES, low.x, dp4a(ONES, low.y, dp4a(ONES, low.z, dp4a(ONES, low.w, 0)))));
                    m[t][HALVES - 1] = mul(sx, (float)dp4a(ONES, high.x, dp4a(ONES, high.y, dp4a(ONES, high.z, dp4a(ONES, high.w, 0)))));
                }
            }
#pragma unroll 4
            for (u32 j = 0; j < WARP * HALVES; j += 4) {
                const u32 of = (j + lane % 4) / HALVES;
                const bool second = HALVES == 2 && lane % 2, there = from + of < parts;
                const float s_of = of_group<HALVES>(s, of, second), b_of = of_group<HALVES>(b, of, second);
#pragma unroll
                for (int t = 0; t < T; t++) {
                    const float joined_of = of_group<HALVES>(joined[t], of, second), m_of = of_group<HALVES>(m[t], of, second);
                    if (there) acc[t] = fma(b_of, m_of, fma(s_of, joined_of, acc[t]));
                }
            }
        }
#pragma unroll
        for (int t = 0; t < T; t++) {
            float y = add(acc[t], __shfl_xor_sync(ALL, acc[t], 2));
            y = add(y, __shfl_xor_sync(ALL, y, 1));
            if (lane == t && t < w.count) put(p, w.first + t, r, y);
        }
    }
}
