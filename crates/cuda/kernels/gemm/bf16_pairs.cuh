// Products of bf16 pairs, for one token or for tiles of several: half a warp takes a row.
#pragma once
#include "format/list.cuh"
#include "format/matrix.cuh"
#include "gemm/matmul.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/reduce.cuh"

// Rows of bf16 that are whole words: many are under way before the first is used.
template <int T> __device__ __forceinline__ void bf16_dot_words(const Matmul& p, const Work& w, u64 row, float (&acc)[T]) {
    const int DEEP = T == 1 ? 32 : 8;
    u32 lane = threadIdx.x % 16, all = p.cols / 2;
    const u32* words = (const u32*)(w.m.data + row * w.m.row_bytes);
    for (u32 from = lane; from < (all + 15) / 16 * 16; from += 16 * DEEP) {
        u32 weights[DEEP];
#pragma unroll
        for (int d = 0; d < DEEP; d++) weights[d] = from + 16 * d < all ? __ldcs(words + from + 16 * d) : 0;
        // The first weights are under way before what they meet is there.
        begin();
#pragma unroll
        for (int d = 0; d < DEEP; d++) {
            u32 i = from + 16 * d;
            if (i - lane >= all) break;
#pragma unroll
            for (int t = 0; t < T; t++) {
                u32 x = i < all && t < w.count ? ((const u32*)(p.x.h + (w.x + t) * p.cols))[i] : 0;
                acc[t] = flushed_fma(bits(weights[d] & 0xffff0000u), bits(x & 0xffff0000u), acc[t]);
                acc[t] = flushed_fma(bits(weights[d] << 16), bits(x << 16), acc[t]);
            }
        }
    }
}

template <class F, int T> __device__ __forceinline__ void bf16_dot(const Matmul& p) {
    bool idle = blockIdx.y * T >= p.outputs || blockIdx.x * (THREADS / 16) >= p.rows;
    if (p.table || !F::IS_PLAIN || p.cols % 2 != 0 || idle) begin();
    if (idle) return;
    u32 lane = threadIdx.x % 16;
    u64 r = (u64)blockIdx.x * (THREADS / 16) + threadIdx.x / 16;
    u64 row = p.in_matrix(min(r, (u64)p.rows - 1));
    for (u32 tile = blockIdx.y; tile * T < p.outputs; tile += gridDim.y) {
        Work w;
        if (!work<T>(p, KIND_OF<F>, tile, w)) continue;
        float acc[T];
#pragma unroll
        for (int t = 0; t < T; t++) acc[t] = 0.0f;
        if (F::IS_PLAIN && p.cols % 2 == 0) {
            bf16_dot_words<T>(p, w, row, acc);
        } else {
#pragma unroll 4
            for (u32 c = 0; c < p.cols; c += 32) {
                u32 i = c + 2 * lane;
                bool inside = i < p.cols;
                float even = 0.0f, odd = 0.0f;
                if (inside) F::pair(w.m, row, i, p.cols, even, odd);
#pragma unroll
                for (int t = 0; t < T; t++) {
                    float x = 0.0f, x_odd = 0.0f;
                    if (inside && t < w.count) bf16_pair(p.x.h + (w.x + t) * p.cols, i, p.cols, x, x_odd);
                    acc[t] = flushed_fma(odd, x_odd, acc[t]);
                    acc[t] = flushed_fma(even, x, acc[t]);
                }
            }
        }
#pragma unroll
        for (int t = 0; t < T; t++) {
            float y = lane_tree(acc[t]);
            if (lane == t && t < w.count && r < p.rows) put(p, w.first + t, (u32)r, y);
        }
    }
}
