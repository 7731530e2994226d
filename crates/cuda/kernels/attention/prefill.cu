// Attention of prompts by tiles: a block takes the query heads of a KV head of several tokens, up to 64 rows, through all partitions in turn, whose keys and
// values all of them share in shared memory. Grid: (tiles of tokens, KV heads). The order of every sum is that of docs/numerics.md.
//
// Reading shared memory costs as much as computing, so a thread takes eight keys of eight rows: sixteen numbers for 64 products. It has two of their sixteen
// lanes, i and i + 8; eight threads have all, and the tree's other levels are between them: each time a thread hands half of its sums over and keeps the other
// half. Values are eight rows by four or eight columns a thread; a warp has eight rows, whose weights it makes itself.
//
// Keys and values come from the cache in pieces, as they lie there, to rooms that these use in turn: first a partition's keys, then its values. Each goes on
// while the next ones are under way. Keys go on to lie across, element by element, as many at a time as there is room for.
//
// Shared memory: queries [dim][rows], keys across [dim][KEYS], weights [128][rows], of which each row is longer; then rooms.
#include "attention/attention.cuh"
#include "attention/cache.cuh"
#include "attention/prefill_scores.cuh"
#include "attention/tiles.cuh"
#include "prim/cp_async.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/smem.cuh"

// Rows of a warp's eight that go through its room together.
static const u32 APART = 4;

// Queries of a warp's eight rows, normed and turned, then their elements beside those of the other rows. `apart`: room for `APART` rows, one after the other.
template <class W> __device__ __forceinline__ void tile_queries(const Attention& p, u32 dim, u32 first, u32 group, u32 kv_head, u32 row, u32 rows, float* apart, float* q) {
    u32 lane = threadIdx.x % WARP;
#pragma unroll 1
    for (u32 end = row + 8; row < end; row += APART) {
        float x[APART][W::COLUMNS];
#pragma unroll
        for (u32 i = 0; i < APART; i++) {
            auto from = [&] { return p.q.row(first + (row + i) / group) + (u64)(kv_head * group + (row + i) % group) * dim * (p.gated ? 2 : 1); };
#pragma unroll
            for (u32 j = 0; j < W::COLUMNS; j++) x[i][j] = row + i < rows && j * WARP + lane < dim ? from()[j * WARP + lane] : 0.0f;
        }
#pragma unroll
        for (u32 i = 0; i < APART; i++) {
#pragma unroll
            for (u32 j = 0; j < W::COLUMNS; j++) {
                if (j * WARP + lane < dim) apart[i * dim + j * WARP + lane] = x[i][j];
            }
        }
#pragma unroll 1
        for (u32 i = 0; i < APART; i++) {
            float* head = apart + i * dim;
            if (row + i < rows) turn(head, head, dim, p.q_norm, p.angles + (u64)p.positions[first + (row + i) / group] * 2 * p.half, p.half, p.run);
            for (u32 d = lane; d < dim; d += WARP) q[d * W::Q_STRIDE + row + i] = head[d];
        }
        __syncwarp();
    }
}

// Of a partition's positions: all of a warp's rows see those of the first range, and none those outside of the second.
struct TileSeen {
    u32 all_from, all_to, some_from, some_to;

    __device__ __forceinline__ TileSeen(const TileRow& row, u32 base) {
        u32 from = row.has ? max(row.first, base) - base : 0, to = PARTITION;
        if (row.has) to = row.last < base ? 0 : min(row.last + 1 - base, PARTITION);
        bool sees = row.has && from < to;
        all_from = from, all_to = to, some_from = sees ? from : PARTITION, some_to = sees ? to : 0;
#pragma unroll
        for (u32 i = 1; i < 8; i *= 2) {
            all_from = max(all_from, __shfl_xor_sync(ALL, all_from, i));
            all_to = min(all_to, __shfl_xor_sync(ALL, all_to, i));
            some_from = min(some_from, __shfl_xor_sync(ALL, some_from, i));
            some_to = max(some_to, __shfl_xor_sync(ALL, some_to, i));
        }
    }

    __device__ __forceinline__ bool all() const { return all_from == 0 && all_to == PARTITION; }
};

// A thread's columns of a stored value.
template <class W> struct Columns {
    static const u32 WORDS = W::COLUMNS * W::SIZE / 4;
    u32 words[WORDS];

    __device__ __forceinline__ void load(const u8* at) {
        if (WORDS == 1) words[0] = *(const u32*)at;
        else if (WORDS == 2) *(uint2*)words = *(const uint2*)at;
        else {
#pragma unroll
            for (u32 i = 0; i < WORDS; i += 4) *(uint4*)(words + i) = *(const uint4*)(at + 4 * i);
        }
    }

    __device__ __forceinline__ float at(u32 j) const {
        if (W::TYPE == F32) return bits(words[j]);
        // A byte behind 2^23 is a float at once.
        if (W::TYPE == INT8) return sub(bits(__byte_perm(words[j / 4] ^ 0x80808080u, 0x4b000000u, 0x7540 + j % 4)), 8388736.0f);
        u16 half = (u16)(words[j * W::SIZE / 4] >> j % 2 * 16);
        return W::TYPE == F16 ? from_f16(half) : from_bf16(half);
    }
};

// Adds values of the positions from `first` to `end`, times their weights, to the outputs of eight rows. values: a thread's columns at position `first`.
template <class W>
__device__ __forceinline__ void tile_values(const TileSeen& seen, u32 first, u32 end, const float* weights, const u8* values, u32 stride, float (&o)[8][W::COLUMNS]) {
    u32 n = max(first, seen.some_from), some_to = min(end, seen.some_to), all_to = min(end, seen.all_to);
    const float* of_n = weights + n * W::WEIGHTS_STRIDE;
    values += (n - first) * stride;
    auto step = [&](bool checked) {
        float4 w = *(const float4*)of_n, x = *(const float4*)(of_n + 4);
        float ws[8] = {w.x, w.y, w.z, w.w, x.x, x.y, x.z, x.w};
        Columns<W> own;
        own.load(values);
#pragma unroll
        for (int j = 0; j < W::COLUMNS; j++) {
            float v = own.at(j);
#pragma unroll
            for (int n = 0; n < 8; n++) {
                int i = j % 2 ? 7 - n : n;
                if (!(checked && ws[i] < 0.0f)) o[i][j] = fma(ws[i], v, o[i][j]);
            }
        }
        n++, of_n += W::WEIGHTS_STRIDE, values += stride;
    };
#pragma unroll 1
    while (n < some_to && (n < seen.all_from || n >= all_to)) step(true);
#pragma unroll 1
    while (n + 8 <= all_to) {
#pragma unroll
        for (int i = 0; i < 8; i++) step(false);
    }
#pragma unroll 1
    while (n < some_to) step(true);
}

// A partition's outputs join those before it.
template <u32 COLUMNS> __device__ __forceinline__ void join_tile(const float (&o)[8][COLUMNS], const float* kept, const float* taken, float (&out)[8][COLUMNS]) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float a = kept[i], b = taken[i];
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            float both = a < 0.0f ? o[i][j] : fma(out[i][j], a, mul(o[i][j], b));
            out[i][j] = b < 0.0f ? out[i][j] : both;
        }
    }
}

// The end of a warp's rows. `apart`: as above; tops, sums: of all rows.
template <u32 COLUMNS>
__device__ __forceinline__ void end_tile(const Attention& p, u32 dim, u32 first, u32 group, u32 kv_head, u32 row, u32 rows, const TileRow& of_row, const float (&out)[8][COLUMNS], float* apart, float* tops, float* sums) {
    u32 lane = threadIdx.x % WARP;
    if (lane < 8) tops[row + lane] = of_row.top, sums[row + lane] = of_row.sum;
#pragma unroll
    for (int from = 0; from < 8; from += APART) {
        __syncwarp();
        if (lane * COLUMNS < dim) {
#pragma unroll
            for (int i = 0; i < APART; i++) {
#pragma unroll
                for (int j = 0; j < COLUMNS; j += 4) *(float4*)(apart + i * dim + lane * COLUMNS + j) = make_float4(out[from + i][j], out[from + i][j + 1], out[from + i][j + 2], out[from + i][j + 3]);
            }
        }
        __syncwarp();
#pragma unroll 1
        for (u32 r = row + from; r < min(row + from + APART, rows); r++) {
            u32 t = first + r / group, h = kv_head * group + r % group;
            for (u32 d = lane; d < dim; d += WARP) finish(p, t, h, d, apart[(r - row - from) * dim + d], tops[r], sums[r]);
        }
    }
}

// The part of shared memory whose size is known.
struct OfTile {
    Places places[2];
    float kept[ATTEND_ROWS], taken[ATTEND_ROWS], tops[ATTEND_ROWS], sums[ATTEND_ROWS];
};

template <class W> __device__ __forceinline__ void attend_prefill(const Attention& p, OfTile& shared) {
    const u32 PIECES = PARTITION / W::PIECE, COLUMNS = W::COLUMNS;
    // Shared memory has room for all keys of a partition, so warps meet only twice in a partition.
    const bool WHOLE = W::KEYS == PARTITION;
    const Cache& c = p.cache;
    const u32 dim = W::dim(c.k_dim), room_bytes = W::PIECE * W::stride(dim);
    u32 group = p.heads / p.kv_heads, per_tile = max(W::ROWS / group, 1u);
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, row = warp * 8;
    float* q = smem;
    u8* keys = (u8*)(q + dim * W::Q_STRIDE);
    float* weights = (float*)(keys + dim * W::KEYS_STRIDE * W::KEY_BYTES);
    u8* stored = (u8*)(weights + PARTITION * W::WEIGHTS_STRIDE);
    // Some of a warp's rows one after the other, where weights lie while there are some.
    float* apart = weights + warp * APART * dim;
    // The last tokens see most positions, so their blocks come first, with all their heads.
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
        auto find = [&](u32 n, u32 at) { find_places(c, table, kv_head, at, lowest, highest + 1, shared.places[n % 2]); };
        __syncthreads();
        find(0, base);
        find(1, base + PARTITION);
        __syncthreads();
        // Pieces of keys and values: requested so far, used so far, and in all.
        u32 asked = 0, gone = 0, all = ((highest - base) / PARTITION + 1) * 2 * PIECES;
        auto ask = [&] {
            if (asked < all) {
                const Places& places = shared.places[asked / (2 * PIECES) % 2];
                u32 piece = asked % (2 * PIECES), from = piece % PIECES * W::PIECE;
                bring_piece<W>(places.keys + from, piece < PIECES ? 0 : values_behind(c), dim, stored + asked % W::ROOMS * room_bytes);
            }
            cp_async_commit();
            asked++;
        };
        // Gets the next piece, once all warps are done with the one before it. Its room is then free for another.
        auto piece = [&] {
            cp_async_wait<W::ROOMS - 2>();
            __syncthreads();
            ask();
            return stored + gone++ % W::ROOMS * room_bytes;
        };
#pragma unroll
        for (u32 i = 0; i < W::ROOMS - 1; i++) ask();
        // 2. Queries
        tile_queries<W>(p, dim, first, group, kv_head, row, rows, apart, q);
        TileRow of_row = tile_row(p, first, group, row + lane % 8, rows);
        float out[8][COLUMNS];
#pragma unroll
        for (int i = 0; i < 8 * COLUMNS; i++) out[i / COLUMNS][i % COLUMNS] = 0.0f;
        if (WHOLE) {
            cp_async_wait_all();
            __syncthreads();
            turn_keys<W>(stored, dim, keys);
        }
#pragma unroll 1
        for (u32 turns = 0; base <= highest; base += PARTITION, turns++) {
            const Places& places = shared.places[turns % 2];
            // 3. Scores
            const u8* values;
            if (WHOLE) {
                // Keys lie across; weights, and what is stored, are through.
                __syncthreads();
                ask(), ask();
                tile_scores<W>(p, q, keys, weights, places.k_scales, dim, rows, base, lowest, highest);
                cp_async_wait_all();
                __syncthreads();
                values = stored + room_bytes;
            } else {
#pragma unroll 1
                for (u32 from = 0; from < PARTITION; from += W::KEYS) {
#pragma unroll 1
                    for (u32 i = 0; i < W::KEYS; i += W::PIECE) turn_keys<W>(piece(), dim, keys + i * W::KEY_BYTES);
                    __syncthreads();
                    tile_scores<W>(p, q, keys, weights + from * W::WEIGHTS_STRIDE, places.k_scales + from, dim, rows, base + from, lowest, highest);
                }
                values = piece();
            }
            // 4. Weights
            TileSeen seen(of_row, base);
            if (row < rows) tile_weights<W>(p, weights, places.v_scales, base, of_row, seen.all(), shared.kept, shared.taken);
            __syncwarp();
            // 5. Values
            float o[8][COLUMNS];
#pragma unroll
            for (int i = 0; i < 8 * COLUMNS; i++) o[i / COLUMNS][i % COLUMNS] = 0.0f;
#pragma unroll 1
            for (u32 n = 0;; values = piece()) {
                if (row < rows && lane * COLUMNS < dim) tile_values<W>(seen, n, n + W::PIECE, weights + row, values + lane * COLUMNS * W::SIZE, W::stride(dim), o);
                n += W::PIECE;
                if (n == PARTITION) break;
            }
            // All warps have requested this partition's last piece.
            find(turns, base + 2 * PARTITION);
            if (row < rows) join_tile(o, shared.kept + row, shared.taken + row, out);
            if (WHOLE && base + PARTITION <= highest) turn_keys<W>(stored, dim, keys);
        }
        // 6. The end of each row, where weights lay
        __syncthreads();
        end_tile(p, dim, first, group, kv_head, row, rows, of_row, out, apart, shared.tops, shared.sums);
    }
}

// Heads of 128 in sixteen bits, which most models have: a whole partition's keys as floats.
extern "C" __global__ void __launch_bounds__(256, 1) attention_prefill_128(const __grid_constant__ Attention p) {
    __shared__ __align__(16) OfTile shared;
    begin();
    if (p.cache.type == F16) attend_prefill<Way<F16, 128, 4, 64, true, 128, 128, 2>>(p, shared);
    else attend_prefill<Way<BF16, 128, 4, 64, true, 128, 128, 2>>(p, shared);
}

// Heads of 256 in sixteen bits: half of its keys.
extern "C" __global__ void __launch_bounds__(256, 1) attention_prefill_256(const __grid_constant__ Attention p) {
    __shared__ __align__(16) OfTile shared;
    begin();
    if (p.cache.type == F16) attend_prefill<Way<F16, 256, 8, 64, true, 64, 32, 3>>(p, shared);
    else attend_prefill<Way<BF16, 256, 8, 64, true, 64, 32, 3>>(p, shared);
}

// Other sizes and types, and devices with less shared memory: up to 128 elements, up to 256, and up to 256 with half of the rows.
#define ATTEND_TILE(NAME, COLUMNS, ROWS, ROOMS)                                                                   \
    extern "C" __global__ void __launch_bounds__(4 * ROWS, 1) NAME(const __grid_constant__ Attention p) {         \
        __shared__ __align__(16) OfTile shared;                                                                   \
        begin();                                                                                                  \
        if (p.cache.type == F32) attend_prefill<Way<F32, 0, COLUMNS, ROWS, true, 32, 16, ROOMS>>(p, shared);      \
        else if (p.cache.type == F16) attend_prefill<Way<F16, 0, COLUMNS, ROWS, false, 32, 16, ROOMS>>(p, shared); \
        else if (p.cache.type == BF16) attend_prefill<Way<BF16, 0, COLUMNS, ROWS, false, 32, 16, ROOMS>>(p, shared); \
        else attend_prefill<Way<INT8, 0, COLUMNS, ROWS, false, 32, 16, ROOMS>>(p, shared);                        \
    }

ATTEND_TILE(attention_prefill, 4, 64, 3)
ATTEND_TILE(attention_prefill_long, 8, 64, 3)
ATTEND_TILE(attention_prefill_low, 8, 32, 2)
