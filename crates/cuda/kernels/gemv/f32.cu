// Lane sums for one token, or for pairs of a token and an expert.
#include "format/list.cuh"
#include "format/matrix.cuh"
#include "gemm/matmul.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/reduce.cuh"

// One token, or pairs of a token and an expert: half a warp takes a row.
template <class F> __device__ __forceinline__ void gemv_f32(const Matmul& p) {
    begin();
    const u32 per_block = blockDim.x / 16;
    if (blockIdx.x * per_block >= p.rows) return;
    u32 lane = threadIdx.x % 16;
    u64 r = (u64)blockIdx.x * per_block + threadIdx.x / 16;
    // A row that is not there is computed as the last, so that whole warps meet, and not stored.
    u64 row = p.in_matrix(min(r, (u64)p.rows - 1));
    for (u32 tile = blockIdx.y; tile < p.outputs; tile += gridDim.y) {
        Work w;
        if (!work<1>(p, KIND_OF<F>, tile, w)) continue;
        const float* x = p.x.f + w.x * p.cols;
        float acc = 0.0f;
        if (F::IS_PACKED && 32 % w.m.bits == 0) {
            acc = affine_lanes(w.m, row, x, p.cols);
        } else {
            // Several weights are under way before the first is used; missing ones of the last sixteen are zeros.
            const int DEEP = 16;
            const u32 all = (p.cols + 15) / 16 * 16;
            for (u32 from = lane; from < all; from += 16 * DEEP) {
                float weights[DEEP];
#pragma unroll
                for (int d = 0; d < DEEP; d++) {
                    u32 i = from + 16 * d;
                    weights[d] = i < p.cols ? F::weight(w.m, row, i) : 0.0f;
                }
#pragma unroll
                for (int d = 0; d < DEEP; d++) {
                    u32 i = from + 16 * d;
                    if (i >= all) break;
                    acc = fma(weights[d], i < p.cols ? x[i] : 0.0f, acc);
                }
            }
        }
        float y = lane_tree(acc);
        if (lane == 0 && r < p.rows) put(p, w.first, (u32)r, y);
    }
}

#define GEMV(name, F) \
    extern "C" __global__ void __launch_bounds__(256) gemv_##name(const __grid_constant__ Products p) { gemv_f32<F>(p.parts[blockIdx.z]); }

F32_FORMATS(GEMV)
