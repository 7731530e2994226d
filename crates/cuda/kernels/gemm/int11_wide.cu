// Products of integers of 11 bits for prompts, with 4-bit weights in groups of 64 or 128, by wgmma: about half of what the tensor cores do without scales.
//
// A block takes 128 rows and 128 tokens at a time: two warpgroups of 64 rows each multiply and fold, one brings weights by copies of sixteen bytes and tokens in
// bulk, STAGES groups ahead. Weights are unpacked in registers. Of 128 tokens one half is folded while the other, or the next group's first, is multiplied.
#include "format/int11.cuh"
#include "format/list.cuh"
#include "gemm/matmul.cuh"
#include "prim/cp_async.cuh"
#include "prim/pdl.cuh"
#include "prim/smem.cuh"
#include "prim/wgmma.cuh"

static const u32 STAGES = 8, ROWS = 128, TOKENS = 128, HALVES = 2;
// A stage: tokens, weights, sums of tokens. Before the stages: two turns of scales and biases, eight groups of each row.
static const u32 WEIGHTS_AT = TILE_BYTES, SUMS_AT = WEIGHTS_AT + ROWS * 32, STAGE = (SUMS_AT + TOKENS * 4 + 1023) / 1024 * 1024;
static const u32 SCALES = ROWS * 16, TURN = 2 * SCALES, STAGES_AT = 2 * TURN;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// What a warp of a multiplying warpgroup has.
struct Fold {
    float acc[HALVES][32];
    float d[2][32];
    u32 row;
    u32 j;
    u32 lane;
    u32 stage;
    u32 phase;
    u32 type;
    // A weight group has 2^log_wide groups of 64 columns.
    u32 log_wide;
    u32 base;
    u32 full;
    u32 empty;
    const u8* mem;

    // Weights of rows `row` and `row + 8`, and their scales and biases: low and high half of `v`.
    __device__ __forceinline__ void fragments(u32 s, u32 g, u32 (&a)[16], u32 (&v)[2]) const {
        const u8* weights = mem + STAGES_AT + s * STAGE + WEIGHTS_AT;
        const u32 of = g >> log_wide;
        const u8* scales = mem + (of / 8 & 1) * TURN + of % 8 * 2;
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            const u32 r = row + 8 * h;
            v[h] = *(const u16*)(scales + r * 16) | (u32) * (const u16*)(scales + SCALES + r * 16) << 16;
            unpack_int11(*(const uint2*)(weights + r * 32 + j * 8), a, h);
        }
    }

    template <u32 H> __device__ __forceinline__ void issue(u32 s, const u32 (&a)[16]) {
        const u64 b = rows_of_128(base + STAGES_AT + s * STAGE + H * 8192);
        wgmma_fence();
        wgmma_f16(d[H], a, b, 0);
        wgmma_f16(d[H], a + 4, b + 2, 1);
        wgmma_f16(d[H], a + 8, b + 4, 1);
        wgmma_f16(d[H], a + 12, b + 6, 1);
        wgmma_commit();
    }

    template <u32 H> __device__ __forceinline__ void fold(const u32 (&v)[2]) {
        const float s[2] = {half_value(v[0] & 0xffff, type), half_value(v[1] & 0xffff, type)}, b[2] = {half_value(v[0] >> 16, type), half_value(v[1] >> 16, type)};
#pragma unroll
        for (u32 n = 0; n < 8; n += 2) {
            const float4 four = *(const float4*)(mem + STAGES_AT + stage * STAGE + SUMS_AT + (H * 64 + n * 8 + 4 * j) * 4);
            const float m[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                const u32 h = i / 2 % 2;
                float& c = acc[H][4 * n + i];
                c = fma(b[h], m[i / 4 * 2 + i % 2], fma(s[h], d[H][4 * n + i], c));
            }
        }
    }

    // A group; the next one's first half is under way in the end, if there is to be one.
    template <bool MORE> __device__ __forceinline__ void group(u32 g, const u32 (&a)[16], const u32 (&v)[2], u32 (&next)[16], u32 (&next_v)[2]) {
        u32 s = stage + 1, ph = phase;
        if (s == STAGES) s = 0, ph ^= 1;
        issue<1>(stage, a);
        if (MORE) {
            barrier_wait(full + 8 * s, ph);
            fragments(s, g + 1, next, next_v);
        }
        wgmma_wait<1>(d[0]);
        fold<0>(v);
        if (MORE) {
            issue<0>(s, next);
            wgmma_wait<1>(d[1]);
        } else {
            wgmma_wait<0>(d[1]);
        }
        keep_until_here(a);
        fold<1>(v);
        // Sums of tokens come by bulk copies, which may overtake reads that are still under way.
        fence_async();
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + 8 * stage);
        stage = s;
        phase = ph;
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
    const u32 th = threadIdx.x, lane = th % WARP, groups = first.cols / 64, across = (first.outputs + TOKENS - 1) / TOKENS, log_wide = first.matrix.group == 128, turn_groups = 8u << log_wide;
    u32 count = 1, tiles = (first.rows + ROWS - 1) / ROWS * across;
    for (; count < 3 && all.parts[count].rows; count++) tiles += (all.parts[count].rows + ROWS - 1) / ROWS * across;
    // Rows of 128 bytes are swizzled by their addresses.
    u8* mem = (u8*)smem + (-shared_address(smem) & 1023);
    const u32 base = shared_address(mem), full = shared_address(barriers), empty = full + 8 * STAGES;
    if (th == 0) {
        for (u32 i = 0; i < STAGES; i++) {
            barrier_init(full + 8 * i, 129);
            barrier_init(empty + 8 * i, 8);
        }
        barriers_are_made();
    }
    begin();
    __syncthreads();
    if (th >= 256) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        const u32 k = th - 256;
        u32 s = 0, ph = 1, turn = 0;
#pragma unroll 1
        for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            u32 own = tile;
            const Matmul& p = part_of(all, count, across, own);
            const u32 tx = own % across, r0 = own / across * ROWS;
            // Beyond the last row, the last one again.
            const u64 r = p.in_matrix(min(r0 + k, p.rows - 1));
            const u8 *row = p.matrix.data + r * p.matrix.row_bytes, *scales = p.matrix.scales + 2 * r * p.matrix.groups, *biases = p.matrix.biases + 2 * r * p.matrix.groups;
            const u8* x = (const u8*)first.x.n + (u64)tx * groups * TILE_BYTES;
            const float* m = first.x.sn + tx * TOKENS;
#pragma unroll 1
            for (u32 g = 0; g < groups; g++) {
                const u32 at = base + STAGES_AT + s * STAGE, f = full + 8 * s;
                u8* here = mem + STAGES_AT + s * STAGE;
                barrier_wait(empty + 8 * s, ph);
                if (k == 0) {
                    barrier_expect(f, TILE_BYTES + TOKENS * 4);
                    copy_bulk(at, x + (u64)g * TILE_BYTES, TILE_BYTES, f);
                    copy_bulk(at + SUMS_AT, m + (u64)g * first.x.padded, TOKENS * 4, f);
                }
                if ((g & (turn_groups - 1)) == 0) {
                    u8* to = mem + turn * TURN + k * 16;
                    cp_async_16(to, scales + (g >> log_wide) * 2);
                    cp_async_16(to + SCALES, biases + (g >> log_wide) * 2);
                    turn ^= 1;
                }
                cp_async_16(here + WEIGHTS_AT + k * 32, row + (u64)g * 32);
                cp_async_16(here + WEIGHTS_AT + k * 32 + 16, row + (u64)g * 32 + 16);
                barrier_arrive_copied(f);
                if (++s == STAGES) s = 0, ph ^= 1;
            }
        }
        cp_async_wait_all();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        Fold w;
        w.row = th / WARP * 16 + lane / 4;
        w.j = lane % 4;
        w.lane = lane;
        w.stage = w.phase = 0;
        w.type = first.matrix.type;
        w.log_wide = log_wide;
        w.base = base;
        w.full = full;
        w.empty = empty;
        w.mem = mem;
        // Of scales, turns alternate from tile to tile too.
        const u32 turns = groups / turn_groups;
        u32 shift = 0;
        u32 a0[16], a1[16], v0[2], v1[2];
#pragma unroll 1
        for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            u32 own = tile;
            const Matmul& p = part_of(all, count, across, own);
            const u32 t0 = own % across * TOKENS, r0 = own / across * ROWS;
#pragma unroll
            for (u32 q = 0; q < HALVES; q++)
#pragma unroll
                for (u32 i = 0; i < 32; i++) w.acc[q][i] = 0.0f;
            // Nothing is under way from one turn of the loop to the next: the compiler would put wgmmas one after the other.
#pragma unroll 1
            for (u32 g = 0; g < groups; g += 2) {
                barrier_wait(full + 8 * w.stage, w.phase);
                w.fragments(w.stage, g + shift, a0, v0);
                w.issue<0>(w.stage, a0);
                w.group<true>(g + shift, a0, v0, a1, v1);
                w.group<false>(g + shift + 1, a1, v1, a0, v0);
            }
            if (turns % 2) shift ^= turn_groups;
#pragma unroll
            for (u32 q = 0; q < HALVES; q++)
#pragma unroll
                for (u32 n = 0; n < 8; n++)
#pragma unroll
                    for (u32 i = 0; i < 4; i++) {
                        const u32 t = t0 + q * 64 + n * 8 + 2 * w.j + i % 2, r = r0 + w.row + i / 2 * 8;
                        if (t < p.outputs && r < p.rows) put(p, t, r, mul(w.acc[q][4 * n + i], first.x.tn[t]));
                    }
        }
    }
}
#endif

#define GEMM_WIDE(name, F) \
    extern "C" __global__ void __launch_bounds__(384, 1) gemm_wide_##name(const __grid_constant__ Products p) { ON_HOPPER(gemm_wide(p);) }

INT11_TENSOR_FORMATS(GEMM_WIDE)
