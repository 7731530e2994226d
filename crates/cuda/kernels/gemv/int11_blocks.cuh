// Products of weights in blocks with integers of 11 bits, for any number of tokens: a warp takes a row, a lane 32 columns at a time.
#pragma once
#include "format/block_scales.cuh"
#include "format/int11.cuh"
#include "format/list.cuh"
#include "format/matrix.cuh"
#include "gemm/matmul.cuh"
#include "prim/pdl.cuh"

// Of each group in 32 columns: the sum of (q - zero) v, times 2^-20, and that of v.
template <class F> __device__ __forceinline__ void block_sums(const u32 (&w)[8], int zero, const u8* row, u32 half, u32 swizzle, float (&d)[F::HALVES], float (&all)[F::HALVES]) {
    float high[F::HALVES] = {}, low[F::HALVES] = {};
#pragma unroll
    for (int h = 0; h < F::HALVES; h++) all[h] = 0.0f;
#pragma unroll
    for (u32 c = 0; c < 8; c++) {
        const uint2 words = *(const uint2*)(row + (c ^ swizzle) * 16 + 8 * half);
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            // Column 8 e + o of the 32.
            const u32 e = 2 * (k / 2) + c / 4, o = c % 4 + k % 2 * 4, word = k / 2 ? words.y : words.x, h = F::HALVES == 2 ? k / 2 : 0;
            const float v = from_f16((u16)(k % 2 ? word >> 16 : word));
            const int q = (int)(w[2 * e + o % 2] >> o / 2 * 8 & 0xff) - zero;
            // Two slices, whose sums are exact.
            high[h] = fma((float)(q >> 4), v, high[h]);
            low[h] = fma((float)(q & 15), v, low[h]);
            all[h] = add(all[h], v);
        }
    }
#pragma unroll
    for (int h = 0; h < F::HALVES; h++) {
        d[h] = mul(fma(16.0f, high[h], low[h]), STEP);
        all[h] = mul(all[h], STEP);
    }
}

// Products of up to T tokens.
template <class F, int T> __device__ __forceinline__ void gemv_int11_blocks(const Matmul& p) {
    begin();
    typedef typename F::Integers B;
    const int HALVES = B::HALVES;
    const u32 lane = threadIdx.x % WARP, r = blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP, parts = p.cols / 32, groups = (p.cols + 63) / 64;
    if (r >= p.rows) return;
    const u64 own = p.in_matrix(r);
    for (u32 tile = blockIdx.y; tile * T < p.outputs; tile += gridDim.y) {
        Work w;
        if (!work<T>(p, KIND_OF<F>, tile, w)) continue;
        const u64 at = own * w.m.row_bytes;
        const typename B::Values values(w.m.type);
        const int zero = (int)zero_of(w.m.type);
        const bool biased = is_biased(w.m.type);
        float acc[T];
#pragma unroll
        for (int t = 0; t < T; t++) acc[t] = 0.0f;
        for (u32 from = 0; from < parts; from += WARP) {
            const u32 part = from + lane;
            float s[HALVES] = {}, b[HALVES] = {}, d[T][HALVES] = {}, m[T][HALVES] = {};
            if (part < parts) {
                typename B::Part packed;
                u32 q[8];
                packed.load(w.m.data + at + (u64)part * 4 * B::BITS, true);
                const u32 codes = B::codes(w.m.scales + at, w.m.type, part), unit = unit_of_column(w.m.biases + at, w.m.type, part * 32);
                B::unpack(packed.words, q, values);
#pragma unroll
                for (int h = 0; h < HALVES; h++) {
                    const float2 scale = scale_and_bias<B>(B::code(codes, h), unit, w.m.type);
                    s[h] = scale.x, b[h] = scale.y;
                }
#pragma unroll
                for (int t = 0; t < T; t++) {
                    if (t >= w.count) break;
                    const u64 x = w.x + t;
                    block_sums<B>(q, zero, (const u8*)p.x.n + int11_row(x, part / 2, groups), part % 2, (u32)x & 7, d[t], m[t]);
                }
            }
#pragma unroll 4
            for (u32 of = 0; of < WARP; of++) {
#pragma unroll
                for (int h = 0; h < HALVES; h++) {
                    const float s_of = __shfl_sync(ALL, s[h], of), b_of = __shfl_sync(ALL, b[h], of);
#pragma unroll
                    for (int t = 0; t < T; t++) {
                        const float d_of = __shfl_sync(ALL, d[t][h], of), m_of = biased ? __shfl_sync(ALL, m[t][h], of) : 0.0f;
                        if (from + of >= parts) continue;
                        acc[t] = fma(s_of, d_of, acc[t]);
                        if (biased) acc[t] = fma(b_of, m_of, acc[t]);
                    }
                }
            }
        }
#pragma unroll
        for (int t = 0; t < T; t++) {
            if (lane == t && t < w.count) put(p, w.first + t, r, mul(acc[t], p.x.tn[w.x + t]));
        }
    }
}
