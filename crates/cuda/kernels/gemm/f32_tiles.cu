// Lane sums of many tokens: routers of long prompts, and all matrices where activations stay floats. A block has 32 rows and 32 tokens, a thread one lane of
// eight rows and eight tokens: of sixteen columns it reads one of each, so that 64 fmas take four reads of shared memory.
#include "format/list.cuh"
#include "format/matrix.cuh"
#include "gemm/matmul.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/reduce.cuh"

static const u32 LANE_ROWS = 32, LANE_TOKENS = 32, LANE_COLUMNS = 64;

// Where four neighbouring rows (or tokens) of a column lie in shared memory, in floats: eight columns side by side meet different banks when they are read, and so do eight that are four apart,
// when they are written.
__device__ __forceinline__ u32 four_of(u32 column, u32 quad) { return column * LANE_ROWS + 4 * (quad ^ ((column + column / 8) % 8)); }

template <class F> __device__ __forceinline__ void gemm_f32_32(const Matmul& p) {
    static_assert(LANE_ROWS == LANE_TOKENS, "both lie alike");
    const u32 EACH = LANE_COLUMNS / 32;
    __shared__ __align__(16) float weights[2][LANE_COLUMNS * LANE_ROWS], xs[2][LANE_COLUMNS * LANE_TOKENS];
    const u32 thread = threadIdx.x, lane = thread % 16, cols = p.cols, first_row = blockIdx.x * LANE_ROWS;
    const u32 row_quad = thread / 16 % 4 * 2, token_quad = thread / 64 * 2;
    // What it brings: four columns of a row and of a token; a warp four rows of 32 columns.
    const u32 piece = 4 * (thread % 8), other = thread / 8;
    if (first_row >= p.rows) {
        begin();
        return;
    }
    const Matrix& m = p.matrix;
    const u64 own_row = p.in_matrix(min(first_row + other, p.rows - 1));
    typename F::Four next[EACH];
    float4 next_x[EACH];
    auto load_weights = [&](u32 from) {
#pragma unroll
        for (u32 k = 0; k < EACH; k++) next[k].load(m, own_row, from + 32 * k + piece, cols);
    };
    load_weights(0);
    begin();
    for (u32 tile = blockIdx.y; tile * LANE_TOKENS < p.outputs; tile += gridDim.y) {
        const u32 first_token = tile * LANE_TOKENS;
        const float* x = p.x.f + (u64)min(first_token + other, p.outputs - 1) * cols;
        auto load_inputs = [&](u32 from) {
#pragma unroll
            for (u32 k = 0; k < EACH; k++) {
                u32 i = from + 32 * k + piece;
                if (cols % 4 == 0) {
                    next_x[k] = i < cols ? *(const float4*)(x + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                } else {
                    next_x[k] = make_float4(i < cols ? x[i] : 0.0f, i + 1 < cols ? x[i + 1] : 0.0f, i + 2 < cols ? x[i + 2] : 0.0f, i + 3 < cols ? x[i + 3] : 0.0f);
                }
            }
        };
        auto store = [&](u32 into) {
#pragma unroll
            for (u32 k = 0; k < EACH; k++) {
                float4 w = next[k].values(m), v = next_x[k];
                const float both[2][4] = {{w.x, w.y, w.z, w.w}, {v.x, v.y, v.z, v.w}};
#pragma unroll
                for (u32 e = 0; e < 4; e++) {
                    u32 at = four_of(32 * k + piece + e, other / 4) + other % 4;
                    weights[into][at] = both[0][e];
                    xs[into][at] = both[1][e];
                }
            }
        };
        if (tile != blockIdx.y) load_weights(0);
        load_inputs(0);
        float acc[8][8];
#pragma unroll
        for (u32 r = 0; r < 8; r++)
#pragma unroll
            for (u32 t = 0; t < 8; t++) acc[r][t] = 0.0f;
        u32 now = 0;
        store(now);
        __syncthreads();
        for (u32 from = 0; from < cols; from += LANE_COLUMNS) {
            const bool more = from + LANE_COLUMNS < cols;
            if (more) {
                load_weights(from + LANE_COLUMNS);
                load_inputs(from + LANE_COLUMNS);
            }
            // Missing columns of the last sixteen are zeros, and nothing comes behind them.
            const u32 steps = min(LANE_COLUMNS / 16, (cols - from + 15) / 16);
#pragma unroll 2
            for (u32 step = 0; step < steps; step++) {
                const u32 column = 16 * step + lane;
                float w[8], v[8];
#pragma unroll
                for (u32 half = 0; half < 2; half++) {
                    *(float4*)(w + 4 * half) = *(const float4*)(weights[now] + four_of(column, row_quad + half));
                    *(float4*)(v + 4 * half) = *(const float4*)(xs[now] + four_of(column, token_quad + half));
                }
#pragma unroll
                for (u32 r = 0; r < 8; r++)
#pragma unroll
                    for (u32 t = 0; t < 8; t++) acc[r][t] = fma(w[r], v[t], acc[r][t]);
            }
            now ^= 1;
            if (more) store(now);
            __syncthreads();
        }
        float own[4] = {};
#pragma unroll
        for (u32 i = 0; i < 64; i++) {
            float y = lane_tree(acc[i / 8][i % 8]);
            if (lane == i % 16) own[i / 16] = y;
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 r = first_row + 4 * row_quad + 2 * i + lane / 8, t = first_token + 4 * token_quad + lane % 8;
            if (r < p.rows && t < p.outputs) put(p, t, r, own[i]);
        }
    }
}

#define GEMM_32(name, F) \
    extern "C" __global__ void __launch_bounds__(256, 2) gemm_32_##name(const __grid_constant__ Products p) { gemm_f32_32<F>(p.parts[blockIdx.z]); }

F32_FORMATS(GEMM_32)
