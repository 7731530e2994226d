// The router of up to 32 tokens. It norms for itself and leaves what it normed encoded.
#include "format/activations.cuh"
#include "format/matrix.cuh"
#include "format/list.cuh"
#include "format/quads.cuh"
#include "moe/router.cuh"
#include "prim/cp_async.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/reduce.cuh"
#include "prim/smem.cuh"

struct RouterFew {
    // The rows to norm and quantize.
    Quantize x;
    // [experts, cols]
    Matrix router;
    // [tokens, experts]
    float* logits;
    u32 experts;
    // Blocks that compute rows, and rows of each. The blocks after them quantize a token each.
    u32 row_blocks;
    u32 block_rows;
    u32 unused;
};

// Tokens of a block that has rows: a warp each.
static const u32 ROUTER_TOKENS = 8;

// Lane sums of two rows and of two tokens as they are normed, all of them in quads, by half a warp: each pointer is the lane's.
__device__ __forceinline__ void four_products(const float4* of_rows, const float4* of_x, const float4* of_weights, u32 cols, const float (&inverse)[2], float (&sums)[2][2]) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) sums[i / 2][i % 2] = 0.0f;
#pragma unroll 4
    for (u32 from = 0; from < cols / 4; from += 16) {
        float4 a[2], b[2];
        const float4 w = of_weights[from];
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const float4 v = of_x[i * (cols / 4) + from];
            a[i] = of_rows[i * (cols / 4) + from];
            b[i] = make_float4(mul(mul(v.x, inverse[i]), w.x), mul(mul(v.y, inverse[i]), w.y), mul(mul(v.z, inverse[i]), w.z), mul(mul(v.w, inverse[i]), w.w));
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            float& sum = sums[i / 2][i % 2];
            sum = fma(a[i / 2].x, b[i % 2].x, sum);
            sum = fma(a[i / 2].y, b[i % 2].y, sum);
            sum = fma(a[i / 2].z, b[i % 2].z, sum);
            sum = fma(a[i / 2].w, b[i % 2].w, sum);
        }
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++) sums[i / 2][i % 2] = lane_tree(sums[i / 2][i % 2]);
}

// Grid: (blocks of rows and ROUTER_TOKENS more, tokens / ROUTER_TOKENS). Shared memory: x of each token, the norm's weights and rows [block_rows], of [cols] in quads each; or
// a token's x, and the norm's weights.
extern "C" __global__ void __launch_bounds__(384) moe_router_few(const __grid_constant__ RouterFew p) {
    const u32 cols = p.x.cols, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, part = threadIdx.x / OF_ROW;
    if (blockIdx.x >= p.row_blocks) {
        const u32 token = blockIdx.y * ROUTER_TOKENS + blockIdx.x - p.row_blocks;
        float *x = smem, *norm = x + cols;
        for (u32 i = threadIdx.x; i < cols / 4; i += ROUTE_THREADS) cp_async_16((float4*)norm + i, (const float4*)p.x.norm.weight + i);
        begin();
        if (token >= p.x.rows) return;
        const float4* from = (const float4*)p.x.x.row(token);
#pragma unroll 2
        for (u32 i = threadIdx.x; i < cols / 4; i += ROUTE_THREADS) ((float4*)x)[i] = __ldcg(from + i);
        cp_async_wait_all();
        __syncthreads();
        const float inverse = inverse_rms_256(x, cols, p.x.norm.eps);
        // Whole groups of 32 stay in a warp.
#pragma unroll 2
        for (u32 i = threadIdx.x; i / WARP * WARP < cols / 4; i += ROUTE_THREADS) {
            const bool inside = i < cols / 4;
            float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (inside) {
                const float4 own = ((const float4*)x)[i], w = ((const float4*)norm)[i];
                v = make_float4(mul(mul(own.x, inverse), w.x), mul(mul(own.y, inverse), w.y), mul(mul(own.z, inverse), w.z), mul(mul(own.w, inverse), w.w));
            }
            quantize_four(p.x, (u64)token * cols + 4 * i, v, inside);
        }
        return;
    }
    float *x = smem, *norm = x + ROUTER_TOKENS * cols, *rows = norm + cols;
    const u32 first = blockIdx.x * p.block_rows;
#pragma unroll 1
    for (u32 i = part; i <= p.block_rows; i += ROUTE_THREADS / OF_ROW) {
        // Threads without a row compute the first one, and do not store it.
        const bool of_norm = i == p.block_rows;
        Matrix m = p.router;
        if (of_norm) m.data = (const u8*)p.x.norm.weight, m.kind = KIND_f32_f32, m.type = F32;
        widen_row(m, !of_norm && first + i < p.experts ? first + i : 0, cols, of_norm ? norm : rows + i * cols);
    }
    begin();
    const u32 token = blockIdx.y * ROUTER_TOKENS + warp;
    const bool there = warp < ROUTER_TOKENS && token < p.x.rows;
    x += warp * cols;
    if (there) {
        const int DEEP = 8;
        const float* from = p.x.x.row(token);
#pragma unroll 1
        for (u32 quad = lane; quad < cols / 4; quad += DEEP * WARP) {
            float4 own[DEEP];
#pragma unroll
            for (int d = 0; d < DEEP; d++) {
                const float* at = from + column_of(min(quad + d * WARP, cols / 4 - 1));
                own[d] = make_float4(__ldcg(at), __ldcg(at + 16), __ldcg(at + 32), __ldcg(at + 48));
            }
#pragma unroll
            for (int d = 0; d < DEEP; d++) ((float4*)x)[min(quad + d * WARP, cols / 4 - 1)] = own[d];
        }
    }
    __shared__ float inverses[ROUTER_TOKENS];
    __syncwarp();
    if (there) {
        const float inverse = inverse_rms_quads((const float4*)x, cols, p.x.norm.eps);
        if (lane == 0) inverses[warp] = inverse;
    }
    __syncthreads();
    // Half a warp has two rows and two tokens. The second token may be missing.
    const u32 square = threadIdx.x / 16, row = square / (ROUTER_TOKENS / 2) * 2, of_block = square % (ROUTER_TOKENS / 2) * 2;
    if (row >= p.block_rows) return;
    float sums[2][2];
    const float own[2] = {inverses[of_block], inverses[of_block + 1]};
    four_products((const float4*)(rows + row * cols) + lane % 16, (const float4*)(smem + of_block * cols) + lane % 16, (const float4*)norm + lane % 16, cols, own, sums);
    // One lane stores each of the four.
    const u32 r = first + row + lane / 2 % 2, t = blockIdx.y * ROUTER_TOKENS + of_block + lane % 2;
    const float sum = lane / 2 % 2 ? lane % 2 ? sums[1][1] : sums[1][0] : lane % 2 ? sums[0][1] : sums[0][0];
    if (lane % 16 < 4 && r < p.experts && t < p.x.rows) p.logits[(u64)t * p.experts + r] = sum;
}
