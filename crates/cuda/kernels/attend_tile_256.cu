// `attend_tile` for heads of 256 in sixteen bits, as `attend_tile_128` does it for heads of half that size. As floats there is room for half of a partition's keys only, and
// keys and values come in pieces of 32 positions that use the same three rooms in turn: first the four of the keys, then the four of the values. Each goes on while two
// more are under way.
//
// Shared memory: queries [256][64], keys [256][64], weights [128][64], of which each row is longer; then three pieces as they lie in the cache.
#pragma once
#include "attend_tile_128.cu"
#include "tiles.cu"

static const u32 BROAD_DIM = 256, BROAD_KEYS = PARTITION / 2, BROAD_KEYS_STRIDE = BROAD_KEYS + 4, PIECE = 32, PIECES = PARTITION / PIECE, PIECE_ROOMS = 3;
static const u32 BROAD_STRIDE = 2 * BROAD_DIM + 16, PIECE_BYTES = PIECE * BROAD_STRIDE;

// A warp brings a row at a time. What nobody sees is zero.
__device__ __forceinline__ void bring_broad(const u8* const* rows, u8* to) {
    u32 piece = threadIdx.x % WARP * 16, position = threadIdx.x / WARP;
#pragma unroll
    for (u32 i = 0; i < PIECE / 8; i++, position += 8) {
        const u8* row = rows[position];
        u8* at = to + position * BROAD_STRIDE + piece;
        if (row) copy_later(at, row + piece);
        else *(uint4*)at = make_uint4(0, 0, 0, 0);
    }
}

// Keys across: a lane goes along a key, and lanes write beside one another.
template <u32 TYPE> __device__ __forceinline__ void widen_broad(const u8* from, float* keys) {
    u32 position = threadIdx.x % PIECE, warp = threadIdx.x / PIECE;
    from += position * BROAD_STRIDE + warp * 16;
    keys += warp * 8 * BROAD_KEYS_STRIDE + position;
#pragma unroll 2
    for (u32 i = 0; i < BROAD_DIM / 64; i++, from += 128, keys += 64 * BROAD_KEYS_STRIDE) {
        Piece<TYPE> v;
        v.words = *(const uint4*)from;
#pragma unroll
        for (u32 e = 0; e < 8; e++) keys[e * BROAD_KEYS_STRIDE] = v.at(e);
    }
}

template <u32 TYPE> __device__ __forceinline__ void attend_broad(const Attention& p, OfWideTile& shared) {
    const Cache& c = p.cache;
    u32 group = p.heads / p.kv_heads, per_tile = max(ATTEND_ROWS / group, 1u);
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, row = warp * 8;
    float *q = room, *keys = q + BROAD_DIM * ROWS_STRIDE, *weights = keys + BROAD_DIM * BROAD_KEYS_STRIDE;
    u8* stored = (u8*)(weights + PARTITION * WEIGHTS_STRIDE);
    // A warp's rows one after the other, where keys lie while there are some.
    float* apart = keys + row * BROAD_DIM;
    // The last tokens see most: they come first, with all their heads.
    u32 block = blockIdx.y * gridDim.x + blockIdx.x, kv_head = block % gridDim.y;
    u32 tile = gridDim.x - 1 - block / gridDim.y, end_of_tile = min((tile + 1) * per_tile, p.tokens);
#pragma unroll 1
    for (u32 first = tile * per_tile, next; first < end_of_tile; first = next) {
        // 1. Tokens of one sequence, and its first keys, which come beside queries
        u32 sequence = p.sequences[first];
        for (next = first + 1; next < end_of_tile && p.sequences[next] == sequence;) next++;
        u32 rows = (next - first) * group;
        const u32* table = p.tables + p.table_starts[sequence];
        u32 lowest = first_seen(p, p.positions[first]), highest = p.positions[next - 1], base = lowest / PARTITION * PARTITION;
        auto find = [&](u32 n, u32 at) { find_places(c, table, kv_head, at, lowest, highest + 1, shared.places[n % 2], nullptr, nullptr); };
        __syncthreads();
        find(0, base);
        find(1, base + PARTITION);
        __syncthreads();
        // Pieces that were asked for, of all that there are, and those that went on.
        u32 asked = 0, gone = 0, all = ((highest - base) / PARTITION + 1) * 2 * PIECES;
        auto ask = [&] {
            if (asked < all) {
                const Places& places = shared.places[asked / (2 * PIECES) % 2];
                u32 piece = asked % (2 * PIECES);
                bring_broad((piece < PIECES ? places.keys : places.values) + piece % PIECES * PIECE, stored + asked % PIECE_ROOMS * PIECE_BYTES);
            }
            copies_end();
            asked++;
        };
        // The next piece, once all are through with the one before it, whose room is another's then.
        auto piece = [&] {
            copied_but<PIECE_ROOMS - 2>();
            __syncthreads();
            ask();
            return stored + gone++ % PIECE_ROOMS * PIECE_BYTES;
        };
#pragma unroll
        for (u32 i = 0; i < PIECE_ROOMS - 1; i++) ask();
        // 2. Queries
        wide_queries<BROAD_DIM>(p, first, group, kv_head, row, rows, apart, q);
        WideRow of_row = wide_row(p, first, group, row + lane % 8, rows);
        float out[8][8];
#pragma unroll
        for (int i = 0; i < 64; i++) out[i / 8][i % 8] = 0.0f;
#pragma unroll 1
        for (u32 turns = 0; base <= highest; base += PARTITION, turns++) {
            // 3. Scores
#pragma unroll 1
            for (u32 from = 0; from < PARTITION; from += BROAD_KEYS) {
#pragma unroll 1
                for (u32 i = 0; i < BROAD_KEYS; i += PIECE) widen_broad<TYPE>(piece(), keys + i);
                __syncthreads();
                wide_scores<BROAD_DIM, BROAD_KEYS>(p, q, keys, weights + from * WEIGHTS_STRIDE, rows, base + from, lowest, highest);
            }
            const u8* values = piece();
            // 4. Weights
            WideSeen seen(of_row, base);
            if (row < rows) wide_weights(p, weights, base, of_row, seen.all(), shared.kept, shared.taken);
            __syncwarp();
            // 5. Values
            float o[8][8];
#pragma unroll
            for (int i = 0; i < 64; i++) o[i / 8][i % 8] = 0.0f;
#pragma unroll 1
            for (u32 n = 0;; values = piece()) {
                if (row < rows) wide_values<TYPE, 8, BROAD_STRIDE>(seen, n, n + PIECE, weights + row, values, o);
                n += PIECE;
                if (n == PARTITION) break;
            }
            // All have asked for this partition's last piece.
            find(turns, base + 2 * PARTITION);
            if (row < rows) wide_join(o, shared.kept + row, shared.taken + row, out);
        }
        // 6. The end of each row
        wide_ends(p, first, group, kv_head, row, rows, of_row, out, apart, shared.tops, shared.sums);
    }
}

extern "C" __global__ void __launch_bounds__(256, 1) attend_tile_256(const __grid_constant__ Attention p) {
    __shared__ __align__(16) OfWideTile shared;
    begin();
    if (p.cache.type == F16) attend_broad<F16>(p, shared);
    else attend_broad<BF16>(p, shared);
}
