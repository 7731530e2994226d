// Products of integers of 11 bits with weights that are floats of sixteen bits, for any shape: a warp takes a row, a lane eight columns at a time.
#pragma once
#include "format/int11.cuh"
#include "format/list.cuh"
#include "gemm/matmul.cuh"
#include "prim/pdl.cuh"

// Products of up to T tokens.
template <class F, int T> __device__ __forceinline__ void gemv_int11_floats(const Matmul& p) {
    begin();
    const u32 lane = threadIdx.x % WARP, r = blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP, j = lane % 8 / 2, a = lane % 2;
    if (r >= p.rows) return;
    const u64 own = p.in_matrix(r);
    const u32 groups = (p.cols + 63) / 64;
    for (u32 tile = blockIdx.y; tile * T < p.outputs; tile += gridDim.y) {
        Work w;
        if (!work<T>(p, KIND_OF<F>, tile, w)) continue;
        const u16* row = (const u16*)(w.m.data + own * w.m.row_bytes);
        const bool whole = p.cols % 8 == 0 && (u64)row % 16 == 0;
        float acc[T];
#pragma unroll
        for (int t = 0; t < T; t++) acc[t] = 0.0f;
#pragma unroll 2
        for (u32 from = 0; from < groups; from += 4) {
            const u32 g = from + lane / 8, c = from * 64 + lane * 8;
            uint4 eight = make_uint4(0, 0, 0, 0);
            if (whole) {
                if (c < p.cols) eight = *(const uint4*)(row + c);
            } else {
                u32 e[8];
#pragma unroll
                for (u32 k = 0; k < 8; k++) e[k] = c + k < p.cols ? row[c + k] : 0;
                eight = make_uint4(e[0] | e[1] << 16, e[2] | e[3] << 16, e[4] | e[5] << 16, e[6] | e[7] << 16);
            }
            // Lanes of a piece are two and four apart.
            u32 most = F::greatest(eight);
            most = max(most, __shfl_xor_sync(ALL, most, 2));
            most = max(most, __shfl_xor_sync(ALL, most, 4));
            const Piece piece = F::piece(most);
            u32 words[4], high[4], low[4];
            F::round(eight, piece.before, words);
#pragma unroll
            for (u32 o = 0; o < 4; o++) slice_pair(words[o], high[o], low[o]);
#pragma unroll
            for (int t = 0; t < T; t++) {
                float h = 0.0f, l = 0.0f;
                const u64 x = w.x + t;
                if (t < w.count && g < groups) {
                    const u8* token = (const u8*)p.x.n + int11_row(x, g, groups) + 4 * j;
#pragma unroll
                    for (u32 o = 0; o < 4; o++) {
                        const u32 two = *(const u32*)(token + (4 * a + o ^ (u32)x & 7) * 16);
                        const float v0 = from_f16((u16)two), v1 = from_f16((u16)(two >> 16));
                        h = fma(from_f16((u16)(high[o] >> 16)), v1, fma(from_f16((u16)high[o]), v0, h));
                        l = fma(from_f16((u16)(low[o] >> 16)), v1, fma(from_f16((u16)low[o]), v0, l));
                    }
                }
#pragma unroll
                for (u32 step = 2; step <= 4; step *= 2) {
                    h = add(h, __shfl_xor_sync(ALL, h, step));
                    l = add(l, __shfl_xor_sync(ALL, l, step));
                }
                const float product = mul(piece.unit, add(h, l));
#pragma unroll
                for (u32 of = 0; of < 8; of++) {
                    const float next = __shfl_sync(ALL, product, of / 2 * 8 + of % 2);
                    if (from + of / 2 < groups) acc[t] = add(acc[t], next);
                }
            }
        }
#pragma unroll
        for (int t = 0; t < T; t++) {
            if (lane == t && t < w.count) put(p, w.first + t, r, mul(acc[t], p.x.tn[w.x + t]));
        }
    }
}
