// Products of integer groups for tiles of eight tokens, without tensor cores.
#include "format/list.cuh"
#include "format/matrix.cuh"
#include "gemm/matmul.cuh"
#include "prim/mma.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"

// A warp takes a row for several tokens: each thread the integer sums of a group, which then meet in four chains, group w in that of thread w mod 4.
template <class F, int T> __device__ __forceinline__ void gemm_int8(const Matmul& p) {
    begin();
    u32 lane = threadIdx.x % WARP;
    u32 r = blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
    if (r >= p.rows) return;
    u64 row = p.in_matrix(r);
    for (u32 tile = blockIdx.y; tile * T < p.outputs; tile += gridDim.y) {
        Work w;
        if (!work<T>(p, KIND_OF<F>, tile, w)) continue;
        const u8* data = w.m.data + row * w.m.row_bytes;
        u32 parts = w.m.group / 32;
        float acc[T];
#pragma unroll
        for (int t = 0; t < T; t++) acc[t] = 0.0f;
        for (u32 from = 0; from < w.m.groups; from += WARP) {
            u32 g = from + lane;
            float s = 0.0f, b = 0.0f, joined[T], m[T];
#pragma unroll
            for (int t = 0; t < T; t++) joined[t] = m[t] = 0.0f;
            if (g < w.m.groups) {
                s = element(w.m.scales, w.m.type, row * w.m.groups + g);
                b = element(w.m.biases, w.m.type, row * w.m.groups + g);
                for (u32 part = 0; part < parts; part++) {
                    u32 column = g * w.m.group + part * 32, q[8];
                    typename F::Part packed;
                    packed.load(data + column / 8 * F::BITS, true);
                    F::unpack(packed.words, q);
#pragma unroll
                    for (int t = 0; t < T; t++) {
                        if (t >= w.count) break;
                        u64 at = (w.x + t) * p.cols + column;
                        uint4 low = ((const uint4*)(p.x.q + at))[0], high = ((const uint4*)(p.x.q + at))[1];
                        int sum = dp4a(q[0], low.x, 0);
                        sum = dp4a(q[1], low.y, sum);
                        sum = dp4a(q[2], low.z, sum);
                        sum = dp4a(q[3], low.w, sum);
                        sum = dp4a(q[4], high.x, sum);
                        sum = dp4a(q[5], high.y, sum);
                        sum = dp4a(q[6], high.z, sum);
                        sum = dp4a(q[7], high.w, sum);
                        float sx = p.x.sx[at / 32], mx = p.x.mx[at / 32];
                        joined[t] = part == 0 ? mul(sx, (float)sum) : fma(sx, (float)sum, joined[t]);
                        m[t] = part == 0 ? mx : add(m[t], mx);
                    }
                }
            }
#pragma unroll
            for (u32 j = 0; j < WARP; j += 4) {
                u32 of = j + lane % 4;
                bool there = from + of < w.m.groups;
                float s_of = __shfl_sync(ALL, s, of), b_of = __shfl_sync(ALL, b, of);
#pragma unroll
                for (int t = 0; t < T; t++) {
                    float joined_of = __shfl_sync(ALL, joined[t], of), m_of = __shfl_sync(ALL, m[t], of);
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

#define GEMM_8(name, F) \
    extern "C" __global__ void __launch_bounds__(256) gemm_8_##name(const __grid_constant__ Products p) { gemm_int8<F, 8>(p.parts[blockIdx.z]); }

INT8_FORMATS(GEMM_8)
