// Products of integers of 11 bits for prompts with weights that are floats of sixteen bits, by mma, from the integers that gemm/int11_split.cu made of them: for devices
// without wgmma.
//
// A block takes 128 rows and 64 tokens at a time, a warp sixteen rows. Groups of 64 columns are copied STAGES - 1 ahead.
#include "format/int11.cuh"
#include "format/list.cuh"
#include "gemm/int11_split.cuh"
#include "gemm/matmul.cuh"
#include "gemm/tiles_of.cuh"
#include "prim/cp_async.cuh"
#include "prim/mma.cuh"
#include "prim/pdl.cuh"
#include "prim/smem.cuh"

static const u32 STAGES = 3, ROWS = 128, TOKENS = 64;
static const u32 TOKEN_BYTES = TOKENS * 128, STAGE = RECORD_BYTES + TOKEN_BYTES;

__device__ __forceinline__ void gemm_slices(const Products& all) {
    const Matmul& first = all.parts[0];
    const u32 lane = threadIdx.x % WARP, set = threadIdx.x / WARP, groups = first.cols / 64, across = (first.outputs + TOKENS - 1) / TOKENS;
    u32 count = 1, tiles = (first.rows + ROWS - 1) / ROWS * across;
    for (; count < 3 && all.parts[count].rows; count++) tiles += (all.parts[count].rows + ROWS - 1) / ROWS * across;
    u8* mem = (u8*)smem;
    begin();
#pragma unroll 1
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        u32 own = tile;
        const Matmul& p = part_of<ROWS>(all, count, across, own);
        const u32 t0 = own % across * TOKENS;
        const u8 *weights = p.matrix.data + (u64)(own / across) * groups * RECORD_BYTES, *x = (const u8*)first.x.n + int11_row(t0, 0, groups);
        auto load = [&](u32 g) {
            if (g < groups) {
                u8* to = mem + g % STAGES * STAGE;
#pragma unroll 1
                for (u32 i = threadIdx.x; i < STAGE / 16; i += THREADS) {
                    const u8* from = i < RECORD_BYTES / 16 ? weights + (u64)g * RECORD_BYTES + i * 16 : x + (u64)g * TILE_BYTES + i * 16 - RECORD_BYTES;
                    cp_async_16(to + i * 16, from);
                }
            }
            cp_async_commit();
        };
        __syncthreads();
#pragma unroll
        for (u32 g = 0; g + 1 < STAGES; g++) load(g);
        float acc[TOKENS / 8][4];
#pragma unroll
        for (u32 n = 0; n < TOKENS / 8; n++)
#pragma unroll
            for (u32 k = 0; k < 4; k++) acc[n][k] = 0.0f;
#pragma unroll 1
        for (u32 g = 0; g < groups; g++) {
            cp_async_wait<STAGES - 2>();
            // All see what all have copied, and have left the stage that is copied to next.
            __syncthreads();
            load(g + STAGES - 1);
            const u8 *stage = mem + g % STAGES * STAGE, *tokens = stage + RECORD_BYTES;
            const float* units = (const float*)(stage + RECORD_UNITS) + set * 16 + lane / 4;
#pragma unroll
            for (u32 piece = 0; piece < 2; piece++) {
                u32 high[2][4], low[2][4];
#pragma unroll
                for (u32 u = 0; u < 2; u++) {
                    const uint4 w = ((const uint4*)stage)[(set * 4 + 2 * piece + u) * WARP + lane];
                    slice_pair(w.x, high[u][0], low[u][0]);
                    slice_pair(w.y, high[u][1], low[u][1]);
                    slice_pair(w.z, high[u][2], low[u][2]);
                    slice_pair(w.w, high[u][3], low[u][3]);
                }
                const float unit[2] = {units[piece * ROWS], units[piece * ROWS + 8]};
#pragma unroll
                for (u32 n = 0; n < TOKENS / 8; n++) {
                    u32 of_x[4];
                    ldmatrix_x4(of_x, tokens + (n * 8 + lane % 8) * 128 + 16 * (4 * piece + lane / 8 ^ lane % 8));
                    float of_high[4] = {}, of_low[4] = {};
#pragma unroll
                    for (u32 u = 0; u < 2; u++) {
                        mma_f16(of_high, high[u], of_x[2 * u], of_x[2 * u + 1]);
                        mma_f16(of_low, low[u], of_x[2 * u], of_x[2 * u + 1]);
                    }
#pragma unroll
                    for (u32 k = 0; k < 4; k++) acc[n][k] = fma(unit[k / 2], add(of_high[k], of_low[k]), acc[n][k]);
                }
            }
        }
        cp_async_wait_all();
#pragma unroll
        for (u32 n = 0; n < TOKENS / 8; n++)
#pragma unroll
            for (u32 k = 0; k < 4; k++) {
                const u32 t = t0 + n * 8 + lane % 4 * 2 + k % 2, r = own / across * ROWS + set * 16 + lane / 4 + k / 2 * 8;
                if (t < p.outputs && r < p.rows) put(p, t, r, mul(acc[n][k], first.x.tn[t]));
            }
    }
}

#define GEMM_SLICES(name, F) \
    extern "C" __global__ void __launch_bounds__(256, 2) gemm_slices_##name(const __grid_constant__ Products p) { ON_TENSOR_CORES(gemm_slices(p);) }

INT11_FLOAT_FORMATS(GEMM_SLICES)
