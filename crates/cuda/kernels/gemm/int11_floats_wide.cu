// Products of integers of 11 bits for prompts with weights that are floats of sixteen bits, by wgmma, from the integers that gemm/int11_split.cu made of them.
//
// A block takes 128 rows and 128 tokens at a time: two warpgroups of 64 rows each multiply and fold, a thread of another brings weights and tokens in bulk, STAGES groups
// ahead. A piece is four products, two of each slice. Of 128 tokens one half is folded while the other, or the next piece's first, is multiplied.
#include "format/int11.cuh"
#include "format/list.cuh"
#include "gemm/int11_record.cuh"
#include "gemm/matmul.cuh"
#include "prim/pdl.cuh"
#include "prim/smem.cuh"
#include "prim/wgmma.cuh"

static const u32 STAGES = 6, ROWS = 128, TOKENS = 128;
// A stage: tokens, and a record of weights.
static const u32 RECORD_AT = TILE_BYTES, STAGE = RECORD_AT + RECORD_BYTES;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// What a warp of a multiplying warpgroup has.
struct Fold {
    float acc[2][32];
    // Of each half of the tokens, sums of high and of low slices.
    float high[2][32];
    float low[2][32];
    u32 a[16];
    u32 set;
    u32 lane;
    const u8* stage;
    u32 stage_at;

    // Those of the next piece, before they are cut.
    uint4 words[2];

    __device__ __forceinline__ void load(u32 piece) {
        const uint4* from = (const uint4*)(stage + RECORD_AT) + (set * 4 + 2 * piece) * WARP + lane;
        words[0] = from[0];
        words[1] = from[WARP];
    }

    // The words of a piece in slices: two products' high ones, and their low ones.
    __device__ __forceinline__ void fragments() {
#pragma unroll
        for (u32 u = 0; u < 2; u++) {
            const uint4 w = words[u];
            slice_pair(w.x, a[4 * u], a[8 + 4 * u]);
            slice_pair(w.y, a[4 * u + 1], a[8 + 4 * u + 1]);
            slice_pair(w.z, a[4 * u + 2], a[8 + 4 * u + 2]);
            slice_pair(w.w, a[4 * u + 3], a[8 + 4 * u + 3]);
        }
    }

    __device__ __forceinline__ void units(u32 piece, float (&unit)[2]) const {
        const float* from = (const float*)(stage + RECORD_AT + RECORD_UNITS) + piece * ROWS + set * 16 + lane / 4;
        unit[0] = from[0];
        unit[1] = from[8];
    }

    template <u32 H> __device__ __forceinline__ void issue(u32 piece) {
        const u64 b = rows_of_128(stage_at + H * 8192) + 4 * piece;
        wgmma_fence();
        wgmma_f16(high[H], a, b, 0);
        wgmma_f16(low[H], a + 8, b, 0);
        wgmma_f16(high[H], a + 4, b + 2, 1);
        wgmma_f16(low[H], a + 12, b + 2, 1);
        wgmma_commit();
    }

    template <u32 H> __device__ __forceinline__ void fold(const float (&unit)[2]) {
#pragma unroll
        for (u32 i = 0; i < 32; i++) acc[H][i] = fma(unit[i / 2 % 2], add(high[H][i], low[H][i]), acc[H][i]);
    }

    template <u32 H, int LEFT> __device__ __forceinline__ void wait() {
        wgmma_wait<LEFT>(high[H]);
        keep_sums(low[H]);
    }

    // The results, of which `put` would look for each one's place anew.
    __device__ __forceinline__ void leave(const Matmul& p, const float* scales, u32 t0, u32 r0) const {
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
                const float2 by = *(const float2*)(scales + own + 8 * n);
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

    // Both pieces of a group; nothing is under way before and behind.
    __device__ __forceinline__ void group(u32 empty) {
        float first[2], second[2];
        load(0);
        fragments();
        issue<0>(0);
        issue<1>(0);
        load(1);
        units(0, first);
        units(1, second);
        wait<0, 1>();
        fold<0>(first);
        wait<1, 0>();
        keep_until_here(a);
        fragments();
        issue<0>(1);
        fold<1>(first);
        issue<1>(1);
        wait<0, 1>();
        fold<0>(second);
        wait<1, 0>();
        keep_until_here(a);
        // What comes in bulk may overtake reads that are still under way.
        fence_async();
        __syncwarp();
        if (lane == 0) barrier_arrive(empty);
        fold<1>(second);
    }
};

// Which product a tile belongs to, and what is left of its number there.
__device__ __forceinline__ const Matmul& part_of(const Products& all, u32 count, u32 across, u32& tile) {
    u32 k = 0;
    for (; k + 1 < count; k++) {
        const u32 tiles = (all.parts[k].rows + ROWS - 1) / ROWS * across;
        if (tile < tiles) break;
        tile -= tiles;
    }
    return all.parts[k];
}

__device__ __forceinline__ void gemm_wide(const Products& all) {
    __shared__ __align__(8) u64 barriers[2 * STAGES];
    const Matmul& first = all.parts[0];
    const u32 th = threadIdx.x, lane = th % WARP, groups = first.cols / 64, across = (first.outputs + TOKENS - 1) / TOKENS;
    u32 count = 1, tiles = (first.rows + ROWS - 1) / ROWS * across;
    for (; count < 3 && all.parts[count].rows; count++) tiles += (all.parts[count].rows + ROWS - 1) / ROWS * across;
    // Rows of 128 bytes are swizzled by their addresses.
    u8* mem = (u8*)smem + (-shared_address(smem) & 1023);
    const u32 base = shared_address(mem), full = shared_address(barriers), empty = full + 8 * STAGES;
    if (th == 0) {
        for (u32 i = 0; i < STAGES; i++) {
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
            const Matmul& p = part_of(all, count, across, own);
            const u8 *weights = p.matrix.data + (u64)(own / across) * groups * RECORD_BYTES, *x = (const u8*)first.x.n + (u64)(own % across) * groups * TILE_BYTES;
#pragma unroll 1
            for (u32 g = 0; g < groups; g++) {
                const u32 at = base + s * STAGE, f = full + 8 * s;
                barrier_wait(empty + 8 * s, ph);
                barrier_expect(f, STAGE);
                copy_bulk(at, x + (u64)g * TILE_BYTES, TILE_BYTES, f);
                copy_bulk(at + RECORD_AT, weights + (u64)g * RECORD_BYTES, RECORD_BYTES, f);
                if (++s == STAGES) s = 0, ph ^= 1;
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        Fold w;
        w.set = th / WARP;
        w.lane = lane;
        u32 s = 0, ph = 0;
#pragma unroll 1
        for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            u32 own = tile;
            const Matmul& p = part_of(all, count, across, own);
            const u32 t0 = own % across * TOKENS, r0 = own / across * ROWS + w.set * 16 + lane / 4;
#pragma unroll
            for (u32 h = 0; h < 2; h++)
#pragma unroll
                for (u32 i = 0; i < 32; i++) w.acc[h][i] = 0.0f;
            // Nothing is under way from one turn of the loop to the next: the compiler would put wgmmas one after the other.
#pragma unroll 1
            for (u32 g = 0; g < groups; g++) {
                w.stage = mem + s * STAGE;
                w.stage_at = base + s * STAGE;
                barrier_wait(full + 8 * s, ph);
                w.group(empty + 8 * s);
                if (++s == STAGES) s = 0, ph ^= 1;
            }
            w.leave(p, first.x.tn, t0, r0);
        }
    }
}
#endif

#define GEMM_WIDE(name, F) \
    extern "C" __global__ void __launch_bounds__(384, 1) gemm_wide_##name(const __grid_constant__ Products p) { ON_HOPPER(gemm_wide(p);) }

INT11_FLOAT_FORMATS(GEMM_WIDE)
