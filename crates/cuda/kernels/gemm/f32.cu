// Lane sums of several tokens, by blocks of 4 rows and 8 tokens.
#include "format/list.cuh"
#include "format/matrix.cuh"
#include "gemm/matmul.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/reduce.cuh"

// Several tokens: a block has 4 rows and 8 tokens, whose columns it brings to shared memory, weights as floats; a thread has one lane of a row and 2 tokens.
template <class F> __device__ __forceinline__ void gemm_f32_8(const Matmul& p) {
    // The stride is such that both halves of a warp meet different banks.
    const u32 ROWS = 4, TOKENS = 8, CHUNK = 768, STRIDE = CHUNK + 8;
    __shared__ __align__(16) float weights[ROWS * STRIDE], xs[TOKENS * STRIDE];
    const u32 thread = threadIdx.x, lane = thread % 16, first_row = blockIdx.x * ROWS, cols = p.cols;
    const u32 token_pair = thread / 16 % 4 * 2, row = thread / 64;
    if (first_row >= p.rows) {
        begin();
        return;
    }
    const Matrix& m = p.matrix;
    u64 own_row = p.in_matrix(min(first_row + row, p.rows - 1));
    typename F::Four next[3];
    float4 next_x[6];
    auto load_weights = [&](u32 from) {
#pragma unroll
        for (u32 k = 0; k < 3; k++) next[k].load(m, own_row, from + 4 * (thread % 64) + 256 * k, cols);
    };
    load_weights(0);
    begin();
    for (u32 tile = blockIdx.y; tile * TOKENS < p.outputs; tile += gridDim.y) {
        const float* x = p.x.f + (u64)min(tile * TOKENS + thread / 32, p.outputs - 1) * cols;
        auto load_inputs = [&](u32 from) {
#pragma unroll
            for (u32 k = 0; k < 6; k++) {
                u32 i = from + 4 * (thread % 32) + 128 * k;
                if (cols % 4 == 0) {
                    next_x[k] = i < cols ? *(const float4*)(x + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                } else {
                    next_x[k] = make_float4(i < cols ? x[i] : 0.0f, i + 1 < cols ? x[i + 1] : 0.0f, i + 2 < cols ? x[i + 2] : 0.0f, i + 3 < cols ? x[i + 3] : 0.0f);
                }
            }
        };
        if (tile != blockIdx.y) load_weights(0);
        load_inputs(0);
        float acc[2] = {0.0f, 0.0f};
        for (u32 from = 0; from < cols; from += CHUNK) {
            __syncthreads();
#pragma unroll
            for (u32 k = 0; k < 3; k++) *(float4*)(weights + row * STRIDE + 4 * (thread % 64) + 256 * k) = next[k].values(m);
#pragma unroll
            for (u32 k = 0; k < 6; k++) *(float4*)(xs + thread / 32 * STRIDE + 4 * (thread % 32) + 128 * k) = next_x[k];
            __syncthreads();
            if (from + CHUNK < cols) {
                load_weights(from + CHUNK);
                load_inputs(from + CHUNK);
            }
            // Missing columns of the last sixteen are zeros, and nothing comes behind them.
            const u32 steps = min(CHUNK / 16, (cols - from + 15) / 16);
#pragma unroll 8
            for (u32 step = 0; step < steps; step++) {
                float w = weights[row * STRIDE + 16 * step + lane];
#pragma unroll
                for (u32 t = 0; t < 2; t++) acc[t] = fma(w, xs[(token_pair + t) * STRIDE + 16 * step + lane], acc[t]);
            }
        }
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            float y = lane_tree(acc[i]);
            u32 r = first_row + row, t = tile * TOKENS + token_pair + i;
            if (lane == i && r < p.rows && t < p.outputs) put(p, t, r, y);
        }
    }
}

#define GEMM_8(name, F) \
    extern "C" __global__ void __launch_bounds__(256) gemm_8_##name(const __grid_constant__ Products p) { gemm_f32_8<F>(p.parts[blockIdx.z]); }

F32_FORMATS(GEMM_8)
