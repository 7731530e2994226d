// How products of prompts by wgmma go through their tiles, where weights and tokens come in bulk: 128 rows and 128 tokens at a time.
//
// Two warpgroups of 64 rows each multiply and fold; a thread of another brings weights and tokens F::STAGES groups of 64 columns ahead. F, the state of a multiplying warp, says how
// many bytes of both there are, and takes a group.
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

// `all.parts[..].x.n`: the tokens, whose tiles are F::TOKEN_BYTES for each group; `matrix.data`: weights, F::RECORD_BYTES for each 128 rows of one.
template <class F> __device__ __forceinline__ void gemm_wide(const Products& all) {
    __shared__ __align__(8) u64 barriers[2 * F::STAGES];
    const Matmul& first = all.parts[0];
    const u32 th = threadIdx.x, lane = th % WARP, groups = first.cols / 64, across = (first.outputs + TOKENS - 1) / TOKENS;
    u32 count = 1, tiles = (first.rows + ROWS - 1) / ROWS * across;
    for (; count < 3 && all.parts[count].rows; count++) tiles += (all.parts[count].rows + ROWS - 1) / ROWS * across;
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
    if (th >= 256) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (th > 256) return;
        u32 s = 0, ph = 1;
#pragma unroll 1
        for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            u32 own = tile;
            const Matmul& p = part_of<ROWS>(all, count, across, own);
            const u8 *weights = p.matrix.data + (u64)(own / across) * groups * F::RECORD_BYTES, *x = (const u8*)first.x.n + (u64)(own % across) * groups * F::TOKEN_BYTES;
#pragma unroll 1
            for (u32 g = 0; g < groups; g++) {
                const u32 at = base + s * F::STAGE_BYTES, f = full + 8 * s;
                barrier_wait(empty + 8 * s, ph);
                barrier_expect(f, F::STAGE_BYTES);
                copy_bulk(at, x + (u64)g * F::TOKEN_BYTES, F::TOKEN_BYTES, f);
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
            u32 own = tile;
            const Matmul& p = part_of<ROWS>(all, count, across, own);
            const u32 t0 = own % across * TOKENS, r0 = own / across * ROWS + w.set * 16 + lane / 4;
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
                w.group(empty + 8 * s);
                if (++s == F::STAGES) s = 0, ph ^= 1;
            }
            leave(w.acc, p, first.x.tn, t0, r0, lane);
        }
    }
}
#endif
