// Attention on integers of prompts, on integer tensor cores: a block takes the query heads of a KV head of several tokens, up to 64 rows, through all
// partitions in turn. A warp has sixteen rows and all keys of a partition: their sums, weights and outputs stay in its registers. Sums of integers are exact,
// so that positions may meet in any order: weights are multiplied with values in the order in which they lie in a warp's registers. Grid: (tiles of tokens, KV
// heads).
//
// Integers have one byte, or two: then the high bytes' product counts 256 times, the two products of a high and a low byte are added, and the low bytes' product is
// left out.
//
// Shared memory: keys [128][BYTES * DIM] and values likewise as they lie in the cache, each row sixteen bytes longer; values across, [BYTES][DIM][128], likewise.
#pragma once
#include "attention/attention.cuh"
#include "attention/cache.cuh"
#include "attention/integer_rows.cuh"
#include "attention/tiles.cuh"
#include "attention/turn_across.cuh"
#include "prim/cp_async.cuh"
#include "prim/mma.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/smem.cuh"

static const u32 INTEGER_THREADS = 128, ACROSS_STRIDE = PARTITION + 16;

// Rows of a partition, of SIZE bytes, as they lie. What nobody sees is zero.
template <u32 SIZE> __device__ __forceinline__ void bring_integers(const u8* const* keys, u64 behind, u8* to) {
    const u32 PIECES = SIZE / 16, AT_ONCE = INTEGER_THREADS / PIECES;
    const u32 piece = threadIdx.x % PIECES * 16;
#pragma unroll
    for (u32 position = threadIdx.x / PIECES, i = 0; i < PARTITION / AT_ONCE; i++, position += AT_ONCE) {
        bring_later(keys[position], behind + piece, to + position * (SIZE + 16) + piece);
    }
}

__device__ __forceinline__ void shift_by_byte(u32 (&sums)[4]) {
#pragma unroll
    for (u32 e = 0; e < 4; e++) sums[e] <<= 8;
}

// The part of shared memory whose size is known.
struct OfIntegers {
    Places places[2];
    float q_scales[ATTEND_ROWS], tops[ATTEND_ROWS], sums[ATTEND_ROWS];
};

template <u32 DIM, u32 BYTES> __device__ __forceinline__ void attend_integers(const Attention& p) {
    __shared__ __align__(16) OfIntegers shared;
    const Cache& c = p.cache;
    const u32 STRIDE = BYTES * DIM + 16;
    const float TOP = BYTES == 1 ? TOP_INT8 : TOP_INT16;
    const u32 group = p.heads / p.kv_heads, per_tile = max(ATTEND_ROWS / group, 1u), lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, quad = lane % 4;
    u8 *keys = (u8*)smem, *values = keys + PARTITION * STRIDE, *across = values + PARTITION * STRIDE;
    // Where a lane's rows of four matrices begin: eight rows, of four pieces one behind the other.
    const u8 *key_rows = keys + lane % 8 * STRIDE + lane / 8 * 16, *column_rows = across + lane % 8 * ACROSS_STRIDE + lane / 8 * 16;
    begin();
    // The last tokens see most positions, so their blocks come first, with all their heads.
    const u32 block = blockIdx.y * gridDim.x + blockIdx.x, kv_head = block % gridDim.y;
    const u32 tile = gridDim.x - 1 - block / gridDim.y, end_of_tile = min((tile + 1) * per_tile, p.tokens);
#pragma unroll 1
    for (u32 first = tile * per_tile, next; first < end_of_tile; first = next) {
        // 1. Tokens of one sequence, and its first keys and values, which come beside queries
        const u32 sequence = p.sequences[first];
        for (next = first + 1; next < end_of_tile && p.sequences[next] == sequence;) next++;
        const u32 rows = (next - first) * group;
        const u32* table = p.tables + p.table_starts[sequence];
        const u32 lowest = first_seen(p, p.positions[first]), highest = p.positions[next - 1];
        u32 base = lowest / PARTITION * PARTITION;
        auto find = [&](u32 n, u32 at) { find_places(c, table, kv_head, at, lowest, highest + 1, shared.places[n % 2]); };
        __syncthreads();
        find(0, base);
        __syncthreads();
        bring_integers<BYTES * DIM>(shared.places[0].keys, 0, keys);
        bring_integers<BYTES * DIM>(shared.places[0].keys, values_behind(c), values);
        // 2. Queries, normed and turned, then as integers
        float* head = (float*)across + warp * DIM;
        u8* queries = across + 4 * 4 * DIM;
#pragma unroll 1
        for (u32 r = warp * 16; r < warp * 16 + 16; r++) {
            u8* to = queries + r * STRIDE;
            if (r < rows) {
                const u32 t = first + r / group, h = kv_head * group + r % group;
                turn(p.q.row(t) + (u64)h * DIM * (p.gated ? 2 : 1), head, DIM, p.q_norm, p.angles + (u64)p.positions[t] * 2 * p.half, p.half, p.run);
                const Rounding rounding = rounding_of(head, DIM, TOP);
                for (u32 d = lane; d < DIM; d += WARP) {
                    const int n = round_int(mul(head[d], rounding.inv));
                    to[d] = BYTES == 1 ? (u8)n : (u8)high_byte(n);
                    if (BYTES == 2) to[DIM + d] = (u8)low_byte(n);
                }
                if (lane == 0) shared.q_scales[r] = BYTES == 1 ? rounding.scale : mul(256.0f, rounding.scale);
                __syncwarp();
            } else {
                for (u32 d = lane; d < BYTES * DIM; d += WARP) to[d] = 0;
            }
        }
        __syncwarp();
        u32 q[BYTES * DIM / 32][4];
#pragma unroll
        for (u32 i = 0; i < BYTES * DIM / 32; i++) ldmatrix_x4(q[i], queries + (warp * 16 + lane % 16) * STRIDE + lane / 16 * 16 + i * 32);
        IntegerRows own = rows_of_thread(p, first, rows, shared.q_scales);
        float out[DIM / 8][4];
#pragma unroll
        for (u32 i = 0; i < DIM / 8; i++) out[i][0] = out[i][1] = out[i][2] = out[i][3] = -0.0f;
        const bool busy = warp * 16 < rows;
#pragma unroll 1
        for (u32 turns = 0; base <= highest; base += PARTITION, turns++) {
            cp_async_wait_all();
            __syncthreads();
            // 3. Sums of queries and keys; values across, and where the next ones lie
            const bool more = base + PARTITION <= highest;
            if (more) find(turns + 1, base + PARTITION);
#pragma unroll
            for (u32 b = 0; b < BYTES; b++) {
                u8* to = across + b * DIM * ACROSS_STRIDE;
                turn_across<DIM, STRIDE, INTEGER_THREADS>(values + b * DIM, [&](u32 column, u32 word) { return (u32*)(to + column * ACROSS_STRIDE + word * 4); });
            }
            float s[TILES][4];
            if (busy) {
#pragma unroll
                for (u32 n = 0; n < TILES; n++) {
                    const u32 start = BYTES == 1 ? MAGIC : 0;
                    u32 sums[4] = {start, start, start, start};
                    const u8* row = key_rows + n * 8 * STRIDE;
                    // Of two bytes, q's first half are the high ones.
                    u32 k[DIM / 32][2];
#pragma unroll
                    for (u32 i = 0; i < DIM / 32; i += 2) {
                        u32 two[4];
                        ldmatrix_x4(two, row + i * 32);
                        k[i][0] = two[0], k[i][1] = two[1], k[i + 1][0] = two[2], k[i + 1][1] = two[3];
                        mma_i8_i8_add(sums, q[i], k[i][0], k[i][1]);
                        mma_i8_i8_add(sums, q[i + 1], k[i + 1][0], k[i + 1][1]);
                    }
                    if (BYTES == 2) {
                        shift_by_byte(sums);
#pragma unroll
                        for (u32 i = 0; i < DIM / 32; i += 2) {
                            u32 low[4];
                            ldmatrix_x4(low, row + DIM + i * 32);
                            mma_i8_i8_add(sums, q[(BYTES - 1) * DIM / 32 + i], k[i][0], k[i][1]);
                            mma_i8_i8_add(sums, q[i], low[0], low[1]);
                            mma_i8_i8_add(sums, q[(BYTES - 1) * DIM / 32 + i + 1], k[i + 1][0], k[i + 1][1]);
                            mma_i8_i8_add(sums, q[i + 1], low[2], low[3]);
                        }
                    }
#pragma unroll
                    for (u32 e = 0; e < 4; e++) s[n][e] = float_of<BYTES>(sums[e]);
                }
            }
            __syncthreads();
            if (more) {
                const u8* const* next_keys = shared.places[(turns + 1) % 2].keys;
                bring_integers<BYTES * DIM>(next_keys, 0, keys);
                bring_integers<BYTES * DIM>(next_keys, values_behind(c), values);
            }
            if (!busy) continue;
            // 4. Weights, in the place of scores, and as integers
            u32 w[BYTES][TILES / 2][2];
            const Steps steps = weigh<BYTES>(p, own, s, w, shared.places[turns % 2].k_scales, shared.places[turns % 2].v_scales, base);
            // 5. Values
#pragma unroll
            for (u32 j = 0; j < DIM / 8; j++) {
                const u32 start = BYTES == 1 ? MAGIC : 0;
                u32 sums[4] = {start, start, start, start};
                u32 v[PARTITION / 32][2];
                // Weights of 32 positions in the order of a fragment
                auto fragment = [&](u32 (&to)[4], u32 byte, u32 i) { to[0] = w[byte][2 * i][0], to[1] = w[byte][2 * i][1], to[2] = w[byte][2 * i + 1][0], to[3] = w[byte][2 * i + 1][1]; };
#pragma unroll
                for (u32 i = 0; i < PARTITION / 32; i += 2) {
                    u32 two[4], high[4];
                    ldmatrix_x4(two, column_rows + j * 8 * ACROSS_STRIDE + i * 32);
#pragma unroll
                    for (u32 k = 0; k < 2; k++) {
                        v[i + k][0] = two[2 * k], v[i + k][1] = two[2 * k + 1];
                        fragment(high, 0, i + k);
                        mma_u8_i8_add(sums, high, v[i + k][0], v[i + k][1]);
                    }
                }
                if (BYTES == 2) {
                    shift_by_byte(sums);
#pragma unroll
                    for (u32 i = 0; i < PARTITION / 32; i += 2) {
                        u32 two[4], weights[4];
                        ldmatrix_x4(two, column_rows + (DIM + j * 8) * ACROSS_STRIDE + i * 32);
#pragma unroll
                        for (u32 k = 0; k < 2; k++) {
                            fragment(weights, BYTES - 1, i + k);
                            mma_u8_i8_add(sums, weights, v[i + k][0], v[i + k][1]);
                            fragment(weights, 0, i + k);
                            mma_u8_i8_add(sums, weights, two[2 * k], two[2 * k + 1]);
                        }
                    }
                }
#pragma unroll
                for (u32 e = 0; e < 4; e++) {
                    const float o = mul(float_of<BYTES>(sums[e]), steps.scales[e / 2]);
                    out[j][e] = fma(out[j][e], steps.kept[e / 2], mul(o, steps.taken[e / 2]));
                }
            }
        }
        // 6. The end of each row, where keys and values were
        float* const ends = (float*)smem;
#pragma unroll
        for (u32 e = 0; e < 2; e++) {
            const u32 r = warp * 16 + lane / 4 + 8 * e;
            if (quad == 0) shared.tops[r] = own.top[e], shared.sums[r] = own.sum[e];
#pragma unroll
            for (u32 j = 0; j < DIM / 8; j++) *(float2*)(ends + r * DIM + 8 * j + 2 * quad) = make_float2(out[j][2 * e], out[j][2 * e + 1]);
        }
        __syncwarp();
#pragma unroll 1
        for (u32 r = warp * 16; r < min(warp * 16 + 16, rows); r++) {
            const u32 t = first + r / group, h = kv_head * group + r % group;
#pragma unroll
            for (u32 d = lane; d < DIM; d += WARP) finish(p, t, h, d, ends[r * DIM + d], shared.tops[r], shared.sums[r]);
        }
    }
}
