// Products of integers of 11 bits for any format: a warp takes a row, a lane 32 columns at a time.
#pragma once
#include "format/int11.cuh"
#include "format/list.cuh"
#include "format/matrix.cuh"
#include "gemm/matmul.cuh"
#include "prim/pdl.cuh"

// The sums of 32 columns: of q v, above 4 bits of the high and the low four bits of q, and of v. All are exact.
template <class F> __device__ __forceinline__ void int11_sums(const u32 (&w)[8], const u8* row, u32 half, u32 swizzle, float& high, float& low, float& all) {
    high = low = all = 0.0f;
#pragma unroll
    for (u32 c = 0; c < 8; c++) {
        const uint2 words = *(const uint2*)(row + (c ^ swizzle) * 16 + 8 * half);
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            // Column 8 e + o of the 32.
            const u32 e = 2 * (k / 2) + c / 4, o = c % 4 + k % 2 * 4, word = k / 2 ? words.y : words.x;
            const float v = from_f16((u16)(k % 2 ? word >> 16 : word));
            const u32 q = w[2 * e + o % 2] >> o / 2 * 8 & 0xff;
            if (F::BITS > 4) high = fma((float)(q >> 4), v, high);
            low = fma((float)(F::BITS > 4 ? q & 15 : q), v, low);
            all = add(all, v);
        }
    }
}

// Products of up to T tokens.
template <class F, int T> __device__ __forceinline__ void gemv_int11(const Matmul& p) {
    begin();
    const u32 lane = threadIdx.x % WARP, r = blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
    if (r >= p.rows) return;
    const u64 own = p.in_matrix(r);
    const u32 parts = p.cols / 32, groups = (p.cols + 63) / 64;
    for (u32 tile = blockIdx.y; tile * T < p.outputs; tile += gridDim.y) {
        Work w;
        if (!work<T>(p, KIND_OF<F>, tile, w)) continue;
        const u32 group = w.m.group / 32, step = min(group, 2u);
        float acc[T];
#pragma unroll
        for (int t = 0; t < T; t++) acc[t] = 0.0f;
        for (u32 from = 0; from < parts; from += WARP) {
            const u32 part = from + lane;
            float s = 0.0f, b = 0.0f, d[T], m[T];
            u32 q[8];
            if (part < parts) {
                typename F::Part packed;
                packed.load(w.m.data + own * w.m.row_bytes + (u64)part * 4 * F::BITS, true);
                F::unpack(packed.words, q);
                s = element(w.m.scales, w.m.type, own * w.m.groups + part / group);
                b = element(w.m.biases, w.m.type, own * w.m.groups + part / group);
            }
#pragma unroll
            for (int t = 0; t < T; t++) {
                float high = 0.0f, low = 0.0f, all = 0.0f;
                const u64 x = w.x + t;
                if (t < w.count && part < parts) {
                    int11_sums<F>(q, (const u8*)p.x.n + int11_row(x, part / 2, groups), part % 2, (u32)x & 7, high, low, all);
                }
                if (step == 2) {
                    high = add(high, __shfl_down_sync(ALL, high, 1));
                    low = add(low, __shfl_down_sync(ALL, low, 1));
                    all = add(all, __shfl_down_sync(ALL, all, 1));
                }
                d[t] = mul(F::BITS > 4 ? fma(16.0f, high, low) : low, STEP);
                m[t] = mul(all, STEP);
            }
            for (u32 of = 0; of < WARP; of += step) {
                const float s_of = __shfl_sync(ALL, s, of), b_of = __shfl_sync(ALL, b, of);
#pragma unroll
                for (int t = 0; t < T; t++) {
                    const float d_of = __shfl_sync(ALL, d[t], of), m_of = __shfl_sync(ALL, m[t], of);
                    if (from + of < parts) acc[t] = fma(b_of, m_of, fma(s_of, d_of, acc[t]));
                }
            }
        }
#pragma unroll
        for (int t = 0; t < T; t++) {
            if (lane == t && t < w.count) put(p, w.first + t, r, mul(acc[t], p.x.tn[w.x + t]));
        }
    }
}
