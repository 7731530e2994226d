// How products of prompts by wgmma go through their tiles, where weights and tokens come in bulk: 128 rows and 128 tokens at a time.
//
// Two warpgroups of 64 rows each multiply and fold; a thread of another brings weights and tokens F::STAGES groups of 64 columns ahead. F, the state of a multiplying warp, says how
// many bytes of both there are, and takes a group.
//
// In a mixture (GROUPED) a tile's tokens are up to 128 pairs of one expert (moe/pairs.cu), and a launch takes the pairs of some experts, whose weights lie one after the other.
#pragma once
#include "format/int11.cuh"
#include "gemm/matmul.cuh"
#include "gemm/tiles_of.cuh"
#include "prim/pdl.cuh"
#include "prim/smem.cuh"
#include "prim/wgmma.cuh"

static const u32 ROWS = 128, TOKENS = 128;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// The results, of which `put` would look for each one's place anew.
__device__ __forceinline__ void leave(const float (&acc)[2][32], const Matmul& p, const float* by_token, u32 t0, u32 r0, u32 lane) {
    const u32 own = t0 + lane % 4 * 2;
#pragma unroll
    for (u32 k = 0; k < 2; k++) {
        const u32 r = r0 + 8 * k;
        if (r >= p.rows) continue;
        float* to = p.out.row(own) + p.in_output(r);
        const float bias = p.bias ? p.bias[r] : 0.0f;
#pragma unroll
        for (u32 n = 0; n < 16; n++) {
            // There are as many scales as rows of whole tiles.
            const float2 by = *(const float2*)(by_token + own + 8 * n);
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                float y = mul(acc[n / 8][n % 8 * 4 + 2 * k + i], i ? by.y : by.x);
                float* at = to + (8 * n + i) * p.out.stride;
                if (own + 8 * n + i >= p.outputs) continue;
                if (p.bias) y = add(y, bias);
                *at = p.accumulate ? add(*at, y) : y;
            }
        }
    }
}

// The same of a mixture: a tile's tokens, which are pairs in `outputs`, have `powers`.
__device__ __forceinline__ void leave_pairs(const float (&acc)[2][32], const Matmul& p, const u32* outputs, const float* powers, u32 count, u32 r0, u32 lane) {
#pragma unroll
    for (u32 n = 0; n < 16; n++)
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const u32 t = 8 * n + lane % 4 * 2 + i % 2, r = r0 + i / 2 * 8;
            if (t < count && r < p.rows) put(p, outputs[t], r, mul(acc[n / 8][n % 8 * 4 + i], powers[t]));
        }
}

// What a tile has: its product, the number of its 128 rows' weights and that of its tokens, where its rows begin, and how many tokens there are. Of a mixture also its pairs.
struct WideTile {
    const Matmul* product;
    u64 weights;
    u32 tokens;
    u32 row;
    u32 count;
    const u32* order;
};

// Which experts a launch takes.
struct SomeExperts {
    u32 first;
    u32 count;
};

// False: the tile is of an expert that this launch does not take, or that is not on the device.
template <bool GROUPED> __device__ __forceinline__ bool tile_of(const Products& all, u32 count, u32 across, SomeExperts experts, u32 tile, WideTile& of) {
    if (GROUPED) {
        of.tokens = tile / across;
        tile %= across;
        const uint4 pairs = ((const uint4*)all.parts[0].tiles)[1 + of.tokens];
        if (pairs.x - experts.first >= experts.count) return false;
        of.product = &part_of<ROWS>(all, count, 1, tile);
        of.weights = (u64)(pairs.x - experts.first) * ((of.product->rows + ROWS - 1) / ROWS) + tile;
        of.row = tile * ROWS, of.count = pairs.z, of.order = of.product->order + pairs.y;
        return of.product->table[pairs.x].kind == of.product->matrix.kind;
    }
    of.product = &part_of<ROWS>(all, count, across, tile);
    of.weights = tile / across, of.tokens = tile % across, of.row = tile / across * ROWS;
    return true;
}

// `all.parts[..].x.n`: the tokens, whose tiles are F::TOKEN_BYTES for each group; `matrix.data`: weights, F::RECORD_BYTES for each 128 rows of one.
template <class F, bool GROUPED = false> __device__ __forceinline__ void gemm_wide(const Products& all, SomeExperts experts = {}) {
    __shared__ __align__(8) u64 barriers[2 * F::STAGES];
    // Of a tile's pairs: where results go, and what they are multiplied with.
    __shared__ u32 outputs[GROUPED ? TOKENS : 1];
    __shared__ float powers[GROUPED ? TOKENS : 1];
    const Matmul& first = all.parts[0];
    const u32 th = threadIdx.x, lane = th % WARP, groups = first.cols / 64;
    u32 count = 1, of_rows = (first.rows + ROWS - 1) / ROWS;
    for (; count < 3 && all.parts[count].rows; count++) of_rows += (all.parts[count].rows + ROWS - 1) / ROWS;
    // Rows of 128 bytes are swizzled by their addresses.
    u8* mem = (u8*)smem + (-shared_address(smem) & 1023);
    const u32 base = shared_address(mem), full = shared_address(barriers), empty = full + 8 * F::STAGES;
    if (th == 0) {
        for (u32 i = 0; i < F::STAGES; i++) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, 8);
        }
        barriers_are_made();
    }
    begin();
    __syncthreads();
    // Tiles of the same rows follow one another, or in a mixture those of the same pairs.
    const u32 of_tokens = GROUPED ? first.tiles[0] : (first.outputs + TOKENS - 1) / TOKENS, tiles = of_rows * of_tokens, across = GROUPED ? of_rows : of_tokens;
    if (th >= 256) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (th > 256) return;
        u32 s = 0, ph = 1;
#pragma unroll 1
        for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            WideTile of;
            if (!tile_of<GROUPED>(all, count, across, experts, tile, of)) continue;
            const u8 *weights = of.product->matrix.data + of.weights * groups * F::RECORD_BYTES, *x = (const u8*)first.x.n + (u64)of.tokens * groups * F::TOKEN_BYTES;
            // A tile of few pairs need not have all its rows: what lies in their place gives results that nobody takes.
            const u32 integers = GROUPED ? of.count * 128 : TILE_BYTES;
#pragma unroll 1
            for (u32 g = 0; g < groups; g++) {
                const u32 at = base + s * F::STAGE_BYTES, f = full + 8 * s;
                barrier_wait(empty + 8 * s, ph);
                barrier_expect(f, F::STAGE_BYTES - (TILE_BYTES - integers));
                if (GROUPED) {
                    copy_bulk(at, x + (u64)g * F::TOKEN_BYTES, integers, f);
                    copy_bulk(at + TILE_BYTES, x + (u64)g * F::TOKEN_BYTES + TILE_BYTES, F::TOKEN_BYTES - TILE_BYTES, f);
                } else {
                    copy_bulk(at, x + (u64)g * F::TOKEN_BYTES, F::TOKEN_BYTES, f);
                }
                copy_bulk(at + F::TOKEN_BYTES, weights + (u64)g * F::RECORD_BYTES, F::RECORD_BYTES, f);
                if (++s == F::STAGES) s = 0, ph ^= 1;
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        F w;
        w.set = th / WARP;
        w.lane = lane;
        u32 s = 0, ph = 0;
#pragma unroll 1
        for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            WideTile of;
            if (!tile_of<GROUPED>(all, count, across, experts, tile, of)) continue;
            const u32 r0 = of.row + w.set * 16 + lane / 4;
#pragma unroll
            for (u32 h = 0; h < 2; h++)
#pragma unroll
                for (u32 i = 0; i < 32; i++) w.acc[h][i] = 0.0f;
            // Nothing is under way from one turn of the loop to the next: the compiler would put wgmmas one after the other.
#pragma unroll 1
            for (u32 g = 0; g < groups; g++) {
                w.stage = mem + s * F::STAGE_BYTES;
                w.stage_at = base + s * F::STAGE_BYTES;
                barrier_wait(full + 8 * s, ph);
                if constexpr (GROUPED) of.count <= TOKENS / 2 ? w.half_group(empty + 8 * s) : w.group(empty + 8 * s);
                else w.group(empty + 8 * s);
                if (++s == F::STAGES) s = 0, ph ^= 1;
            }
            if (!GROUPED) {
                leave(w.acc, *of.product, first.x.tn, of.tokens * TOKENS, r0, lane);
                continue;
            }
            // Everybody has left the tile before.
            wait_for_256(1);
            if (th < of.count) outputs[th] = of.order[th], powers[th] = first.x.tn[of.order[th] / of.product->per_row];
            wait_for_256(1);
            leave_pairs(w.acc, *of.product, outputs, powers, of.count, r0, lane);
        }
    }
}
#endif
