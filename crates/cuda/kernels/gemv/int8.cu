// Products of integer groups for one token, or for pairs of a token and an expert.
#include "format/list.cuh"
#include "format/matrix.cuh"
#include "gemm/matmul.cuh"
#include "prim/mma.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/smem.cuh"

// Groups of a row, in shared memory: scale, bias, joined sum.
static const u32 CHUNK = 1024, SLOTS = CHUNK / 32 + 1;

// The same for one token: a warp takes R rows through chunks of 1,024 columns, D of which are under way; a thread sums 32 columns of each row, and thread
// (row, chain) runs through what meets in shared memory: [groups] joined sums of activations, then SLOTS of each row of each warp.
template <class F, int R, int D> __device__ __forceinline__ void gemv_int8(const Matmul& p) {
    begin();
    const u32 WARPS = 4;
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, parts = p.cols / 32, chunks = (p.cols + CHUNK - 1) / CHUNK;
    u64 first_row = ((u64)blockIdx.x * WARPS + warp) * R;
    for (u32 tile = blockIdx.y; tile < p.outputs; tile += gridDim.y) {
        Work w;
        if (!work<1>(p, KIND_OF<F>, tile, w)) continue;
        const Matrix& m = w.m;
        u32 of_group = m.group / 32, of_chunk = CHUNK / m.group;
        const i8* q = p.x.q + w.x * p.cols;
        const float *sx = p.x.sx + w.x * parts, *mx = p.x.mx + w.x * parts;
        float* sums = smem;
        float4* own = (float4*)(smem + (parts + 3) / 4 * 4) + warp * R * SLOTS;
        __syncthreads();
        for (u32 g = threadIdx.x; g < m.groups; g += blockDim.x) {
            float sum = mx[g * of_group];
            for (u32 i = 1; i < of_group; i++) sum = add(sum, mx[g * of_group + i]);
            sums[g] = sum;
        }
        u64 rows[R];
        // A row that is not there is computed as the last, and not stored.
#pragma unroll
        for (int r = 0; r < R; r++) rows[r] = p.in_matrix(min(first_row + r, (u64)p.rows - 1));
        float acc = 0.0f;
        for (u32 from = 0; from < chunks; from += D) {
            typename F::Part packed[D][R];
            float scales[D][R], biases[D][R];
#pragma unroll
            for (int d = 0; d < D; d++) {
                u32 part = (from + d) * 32 + lane;
#pragma unroll
                for (int r = 0; r < R; r++) packed[d][r].load(m.data + rows[r] * m.row_bytes + (u64)part * 4 * F::BITS, part < parts);
            }
#pragma unroll
            for (int d = 0; d < D; d++) {
                u32 g = (from + d) * of_chunk + lane;
                bool there = lane < of_chunk && g < m.groups;
#pragma unroll
                for (int r = 0; r < R; r++) {
                    scales[d][r] = there ? element(m.scales, m.type, rows[r] * m.groups + g) : 0.0f;
                    biases[d][r] = there ? element(m.biases, m.type, rows[r] * m.groups + g) : 0.0f;
                }
            }
            // What meets is there.
            if (from == 0) __syncthreads();
#pragma unroll
            for (int d = 0; d < D; d++) {
                if (from + d >= chunks) break;
                u32 part = (from + d) * 32 + lane;
                uint4 low = make_uint4(0, 0, 0, 0), high = low;
                float scale = 0.0f;
                if (part < parts) {
                    low = ((const uint4*)(q + part * 32))[0];
                    high = ((const uint4*)(q + part * 32))[1];
                    scale = sx[part];
                }
                __syncwarp();
#pragma unroll
                for (int r = 0; r < R; r++) {
                    u32 b[8];
                    F::unpack(packed[d][r].words, b);
                    int even = dp4a(b[0], low.x, 0), odd = dp4a(b[1], low.y, 0);
                    even = dp4a(b[2], low.z, even);
                    odd = dp4a(b[3], low.w, odd);
                    even = dp4a(b[4], high.x, even);
                    odd = dp4a(b[5], high.y, odd);
                    even = dp4a(b[6], high.z, even);
                    odd = dp4a(b[7], high.w, odd);
                    float sum = (float)(even + odd), joined = mul(scale, sum);
                    for (u32 i = 1; i < of_group; i++) {
                        float scale_i = __shfl_down_sync(ALL, scale, i), sum_i = __shfl_down_sync(ALL, sum, i);
                        joined = fma(scale_i, sum_i, joined);
                    }
                    if (lane % of_group == 0) own[r * SLOTS + lane / of_group].z = joined;
                    if (lane < of_chunk) *(float2*)(own + r * SLOTS + lane) = make_float2(scales[d][r], biases[d][r]);
                }
                __syncwarp();
                if (lane < 4 * R) {
                    u32 before = (from + d) * of_chunk, here = min(of_chunk, m.groups - before);
                    const float4* slots = own + lane / 4 * SLOTS;
                    for (u32 g = lane % 4; g < here; g += 4) {
                        float4 v = slots[g];
                        acc = fma(v.y, sums[before + g], fma(v.x, v.z, acc));
                    }
                }
            }
        }
        float y = add(acc, __shfl_xor_sync(ALL, acc, 2));
        y = add(y, __shfl_xor_sync(ALL, y, 1));
        u64 row = first_row + lane / 4;
        if (lane < 4 * R && lane % 4 == 0 && row < p.rows) put(p, w.first, (u32)row, y);
    }
}

// For few rows and for many.
#define GEMV(name, F) \
    extern "C" __global__ void __launch_bounds__(128) gemv_##name(const __grid_constant__ Products p) { gemv_int8<F, 2, F::BITS == 8 ? 1 : 2>(p.parts[blockIdx.z]); } \
    extern "C" __global__ void __launch_bounds__(128) gemv_##name##_wide(const __grid_constant__ Products p) { gemv_int8<F, 4, 1>(p.parts[blockIdx.z]); }

INT8_FORMATS(GEMV)
