// Products of integers of 11 bits for prompts, with 4-bit weights in groups of 64 or 128, by wgmma: about half of what the tensor cores do without scales.
//
// A block takes 128 rows and 128 tokens at a time: two warpgroups of 64 rows each multiply and fold, one brings weights by copies of sixteen bytes and tokens in
// bulk, STAGES groups ahead. Weights are unpacked in registers. Of 128 tokens one half is folded while the other, or the next group's first, is multiplied.
//
// In a mixture (GROUPED) a tile has up to 128 pairs of one expert, whose tokens come by copies of sixteen bytes too, from wherever they are.
#include "format/int11.cuh"
#include "format/list.cuh"
#include "gemm/matmul.cuh"
#include "gemm/tiles_of.cuh"
#include "prim/cp_async.cuh"
#include "prim/pdl.cuh"
#include "prim/smem.cuh"
#include "prim/wgmma.cuh"

static const u32 STAGES = 8, ROWS = 128, TOKENS = 128, HALVES = 2;
// Of a mixture's stages so many are under way before the first of them is waited for.
static const u32 AHEAD = 4;
// A stage: tokens, weights, sums of tokens. Before the stages: two turns of scales and biases, eight groups of each row. Rows of a mixture's experts may be shorter than a turn, so that there
// each stage has two scales and two biases of each row instead.
static const u32 WEIGHTS_AT = TILE_BYTES, SUMS_AT = WEIGHTS_AT + ROWS * 32, STAGE = (SUMS_AT + TOKENS * 4 + 1023) / 1024 * 1024;
static const u32 SCALES = ROWS * 16, TURN = 2 * SCALES, STAGES_AT = 2 * TURN, PAIRS = ROWS * 8;
static_assert(STAGES * PAIRS <= STAGES_AT, "they lie in the place of turns");

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// What a warp of a multiplying warpgroup has.
template <bool GROUPED> struct Fold {
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
        const u8* scales = GROUPED ? mem + s * PAIRS + (of & 1) * 2 : mem + (of / 8 & 1) * TURN + of % 8 * 2;
        const u32 of_row = GROUPED ? 8 : 16, biases = GROUPED ? 4 : SCALES;
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            const u32 r = row + 8 * h;
            v[h] = *(const u16*)(scales + r * of_row) | (u32) * (const u16*)(scales + biases + r * of_row) << 16;
            unpack_int11(*(const uint2*)(weights + r * 32 + j * 8), a, h);
        }
    }

    // Half H of the tokens, into D of two places for sums.
    template <u32 H, u32 D = H> __device__ __forceinline__ void issue(u32 s, const u32 (&a)[16]) {
        wgmma_begin(d[D], a, rows_of_128(base + STAGES_AT + s * STAGE + H * 8192));
    }

    template <u32 H, u32 D = H> __device__ __forceinline__ void fold(const u32 (&v)[2]) {
        const float s[2] = {half_value(v[0] & 0xffff, type), half_value(v[1] & 0xffff, type)}, b[2] = {half_value(v[0] >> 16, type), half_value(v[1] >> 16, type)};
#pragma unroll
        for (u32 n = 0; n < 8; n += 2) {
            const float4 four = *(const float4*)(mem + STAGES_AT + stage * STAGE + SUMS_AT + (H * 64 + n * 8 + 4 * j) * 4);
            const float m[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                const u32 h = i / 2 % 2;
                float& c = acc[H][4 * n + i];
                c = fma(b[h], m[i / 4 * 2 + i % 2], fma(s[h], d[D][4 * n + i], c));
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
        release(s, ph);
    }

    // The same of the first half alone: while it is folded, that of the next group is multiplied, into the other place.
    template <u32 D, bool MORE> __device__ __forceinline__ void half_group(u32 g, const u32 (&a)[16], const u32 (&v)[2], u32 (&next)[16], u32 (&next_v)[2]) {
        u32 s = stage + 1, ph = phase;
        if (s == STAGES) s = 0, ph ^= 1;
        if (MORE) {
            barrier_wait(full + 8 * s, ph);
            fragments(s, g + 1, next, next_v);
            issue<0, 1 - D>(s, next);
            wgmma_wait<1>(d[D]);
        } else {
            wgmma_wait<0>(d[D]);
        }
        keep_until_here(a);
        fold<0, D>(v);
        release(s, ph);
    }

    // Gives the stage back, and goes on with the next.
    __device__ __forceinline__ void release(u32 next, u32 next_phase) {
        // Sums of tokens come by bulk copies, which may overtake reads that are still under way.
        fence_async();
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + 8 * stage);
        stage = next;
        phase = next_phase;
    }
};

// What a tile has: rows of a matrix from `row` on, and tokens. With GROUPED tokens are pairs in `order`, and tiles of the same pairs follow one another.
struct Tile {
    const Matmul* product;
    const Matrix* matrix;
    const u32* order;
    u32 row;
    u32 token;
    u32 count;
};

template <bool GROUPED> __device__ __forceinline__ Tile tile_of(const Products& all, u32 count, u32 across, u32 of_rows, u32 tile) {
    Tile t;
    if (GROUPED) {
        const uint4 pairs = ((const uint4*)all.parts[0].tiles)[1 + tile / of_rows];
        tile %= of_rows;
        t.product = &part_of<ROWS>(all, count, 1, tile);
        t.matrix = t.product->table + pairs.x;
        t.order = t.product->order + pairs.y;
        t.row = tile * ROWS, t.token = 0, t.count = pairs.z;
    } else {
        t.product = &part_of<ROWS>(all, count, across, tile);
        t.matrix = &t.product->matrix;
        t.order = nullptr;
        t.row = tile / across * ROWS, t.token = tile % across * TOKENS, t.count = min(TOKENS, t.product->outputs - t.token);
    }
    return t;
}

template <bool GROUPED, u32 KIND> __device__ __forceinline__ void gemm_wide(const Products& all) {
    __shared__ __align__(8) u64 barriers[2 * STAGES];
    // Of a tile's tokens: where results go, and what they are multiplied with.
    __shared__ u32 outputs[TOKENS];
    __shared__ float powers[TOKENS];
    const Matmul& first = all.parts[0];
    const u32 th = threadIdx.x, lane = th % WARP, groups = first.cols / 64, across = (first.outputs + TOKENS - 1) / TOKENS, log_wide = first.matrix.group == 128, turn_groups = 8u << log_wide;
    u32 count = 1, of_rows = (first.rows + ROWS - 1) / ROWS;
    for (; count < 3 && all.parts[count].rows; count++) of_rows += (all.parts[count].rows + ROWS - 1) / ROWS;
    // Rows of 128 bytes are swizzled by their addresses.
    u8* mem = (u8*)smem + (-shared_address(smem) & 1023);
    const u32 base = shared_address(mem), full = shared_address(barriers), empty = full + 8 * STAGES;
    if (th == 0) {
        for (u32 i = 0; i < STAGES; i++) {
            barrier_init(full + 8 * i, GROUPED ? 128 : 129);
            barrier_init(empty + 8 * i, 8);
        }
        barriers_are_made();
    }
    begin();
    __syncthreads();
    const u32 tiles = of_rows * (GROUPED ? first.tiles[0] : across);
    if (th >= 256) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        const u32 k = th - 256;
        u32 s = 0, ph = 1, turn = 0, unannounced = 0, next = 0;
        // What came by other than bulk copies is announced behind a fence, since wgmma reads it.
        auto announce = [&]() {
            fence_async();
            barrier_arrive(full + 8 * next);
            if (++next == STAGES) next = 0;
            unannounced--;
        };
#pragma unroll 1
        for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const Tile of = tile_of<GROUPED>(all, count, across, of_rows, tile);
            const Matrix& m = *of.matrix;
            // An expert that is not on the device is skipped.
            if (GROUPED && m.kind != KIND) continue;
            // Beyond the last row, the last one again; and of tokens.
            const u64 r = of.product->in_matrix(min(of.row + k, of.product->rows - 1));
            const u8 *row = m.data + r * m.row_bytes, *scales = m.scales + 2 * r * m.groups, *biases = m.biases + 2 * r * m.groups;
            const u32 token = GROUPED ? of.order[min(k, of.count - 1)] / of.product->per_row : of.token;
            const u8* x = (const u8*)first.x.n + (GROUPED ? int11_row(token, 0, groups) : (u64)(token / TOKENS) * groups * TILE_BYTES);
            const float* sums = first.x.sn + (GROUPED ? int11_place(token) : token);
            const bool aligned = !GROUPED || (((u64)m.data & 15) | ((u64)m.scales & 3) | ((u64)m.biases & 3) | (m.groups & 1)) == 0;
#pragma unroll 1
            for (u32 g = 0; g < groups; g++) {
                const u32 at = base + STAGES_AT + s * STAGE, f = full + 8 * s;
                u8 *here = mem + STAGES_AT + s * STAGE, *own = here + WEIGHTS_AT + k * 32;
                barrier_wait(empty + 8 * s, ph);
                if (GROUPED && k < of.count) {
                    // Sixteen bytes are swizzled by the row that they come from, and by the one that they go to.
#pragma unroll
                    for (u32 c = 0; c < 8; c++) cp_async_16(here + k * 128 + ((c ^ token ^ k) & 7) * 16, x + (u64)g * TILE_BYTES + c * 16);
                    cp_async_4(here + SUMS_AT + int11_place(k) * 4, sums + (u64)g * first.x.padded);
                } else if (!GROUPED && k == 0) {
                    barrier_expect(f, TILE_BYTES + TOKENS * 4);
                    copy_bulk(at, x + (u64)g * TILE_BYTES, TILE_BYTES, f);
                    copy_bulk(at + SUMS_AT, sums + (u64)g * first.x.padded, TOKENS * 4, f);
                }
                if (GROUPED) {
                    const u32 pair = g >> log_wide & ~1u;
                    u8* to = mem + s * PAIRS + k * 8;
                    if (aligned) {
                        cp_async_4(to, scales + pair * 2);
                        cp_async_4(to + 4, biases + pair * 2);
                    } else {
                        copy_slowly(to, scales + pair * 2, min(m.groups - pair, 2u));
                        copy_slowly(to + 4, biases + pair * 2, min(m.groups - pair, 2u));
                    }
                } else if ((g & (turn_groups - 1)) == 0) {
                    u8* to = mem + turn * TURN + k * 16;
                    cp_async_16(to, scales + (g >> log_wide) * 2);
                    cp_async_16(to + SCALES, biases + (g >> log_wide) * 2);
                    turn ^= 1;
                }
                if (aligned) {
                    cp_async_16(own, row + (u64)g * 32);
                    cp_async_16(own + 16, row + (u64)g * 32 + 16);
                } else {
                    copy_slowly(own, row + (u64)g * 32, 16);
                }
                if (GROUPED) {
                    cp_async_commit();
                    if (++unannounced > AHEAD) {
                        cp_async_wait<AHEAD>();
                        announce();
                    }
                } else {
                    barrier_arrive_copied(f);
                }
                if (++s == STAGES) s = 0, ph ^= 1;
            }
        }
        cp_async_wait_all();
        while (GROUPED && unannounced) announce();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        Fold<GROUPED> w;
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
            const Tile of = tile_of<GROUPED>(all, count, across, of_rows, tile);
            if (GROUPED && of.matrix->kind != KIND) continue;
            u32 output = 0;
            float power = 0.0f;
            if (th < of.count) {
                output = GROUPED ? of.order[th] : of.token + th;
                power = first.x.tn[GROUPED ? output / of.product->per_row : output];
            }
#pragma unroll
            for (u32 q = 0; q < HALVES; q++)
#pragma unroll
                for (u32 i = 0; i < 32; i++) w.acc[q][i] = 0.0f;
            // Nothing is under way from one turn of the loop to the next: the compiler would put wgmmas one after the other.
#pragma unroll 1
            for (u32 g = 0; g < groups; g += 2) {
                barrier_wait(full + 8 * w.stage, w.phase);
                w.fragments(w.stage, g + shift, a0, v0);
                w.template issue<0>(w.stage, a0);
                if (GROUPED && of.count <= TOKENS / HALVES) {
                    w.template half_group<0, true>(g + shift, a0, v0, a1, v1);
                    w.template half_group<1, false>(g + shift + 1, a1, v1, a0, v0);
                    continue;
                }
                w.template group<true>(g + shift, a0, v0, a1, v1);
                w.template group<false>(g + shift + 1, a1, v1, a0, v0);
            }
            if (!GROUPED && turns % 2) shift ^= turn_groups;
            // Everybody has left the tile before.
            wait_for_256(1);
            if (th < TOKENS) outputs[th] = output, powers[th] = power;
            wait_for_256(1);
#pragma unroll
            for (u32 q = 0; q < HALVES; q++)
#pragma unroll
                for (u32 n = 0; n < 8; n++)
#pragma unroll
                    for (u32 i = 0; i < 4; i++) {
                        const u32 t = q * 64 + n * 8 + 2 * w.j + i % 2, r = of.row + w.row + i / 2 * 8;
                        if (t < of.count && r < of.product->rows) put(*of.product, outputs[t], r, mul(w.acc[q][4 * n + i], powers[t]));
                    }
        }
    }
}
#endif

#define GEMM_WIDE(name, F) \
    extern "C" __global__ void __launch_bounds__(384, 1) gemm_wide_##name(const __grid_constant__ Products p) { ON_HOPPER(gemm_wide<false, KIND_OF<F>>(p);) } \
    extern "C" __global__ void __launch_bounds__(384, 1) gemm_wide_##name##_grouped(const __grid_constant__ Products p) { ON_HOPPER(gemm_wide<true, KIND_OF<F>>(p);) }

INT11_TENSOR_FORMATS(GEMM_WIDE)
