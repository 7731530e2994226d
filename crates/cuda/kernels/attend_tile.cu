// Attention of prompts by tiles: a block takes the query heads of a KV head of several tokens, up to 64 rows, through all partitions in turn, whose keys and values all
// of them share in shared memory. Grid: (tiles of tokens, KV heads). The order of every sum is that of docs/numerics.md.
//
// Reading shared memory costs as much as computing, so a thread takes eight keys of eight rows: sixteen numbers for 64 products. It has two of their sixteen lanes, i and
// i + 8; eight threads have all, and the tree's other levels are between them: each time a thread hands half of its sums over and keeps the other half. Values are eight
// rows by four or eight columns a thread; a warp has eight rows, whose weights it makes itself.
//
// Keys and values come from the cache in pieces, as they lie there, to rooms that these use in turn: first a partition's keys, then its values. Each goes on while the next
// ones are under way. Keys go on to lie across, element by element, as many at a time as there is room for.
//
// Shared memory: queries [dim][rows], keys across [dim][KEYS], weights [128][rows], of which each row is longer; then rooms.
#pragma once
#include "attention.cu"

// Rows of most kernels here.
static const u32 ATTEND_ROWS = 64;

// How a kernel does it. TYPE: of keys and values. DIM: of both; 0: any multiple of sixteen up to what COLUMNS of each of a warp's threads are. KEYS: positions that lie across at a time, as FLOATS or in sixteen bits. PIECE: positions of a room.
template <u32 TYPE_, u32 DIM_, u32 COLUMNS_, u32 ROWS_, bool FLOATS_, u32 KEYS_, u32 PIECE_, u32 ROOMS_> struct Way {
    static const u32 TYPE = TYPE_, DIM = DIM_, COLUMNS = COLUMNS_, ROWS = ROWS_, KEYS = KEYS_, PIECE = PIECE_, ROOMS = ROOMS_;
    static const bool FLOATS = FLOATS_;
    static const u32 SIZE = TYPE == F32 ? 4 : TYPE == INT8 ? 1 : 2, WARPS = ROWS / 8, THREADS = WARPS * WARP;
    static const u32 Q_STRIDE = ROWS + 4, WEIGHTS_STRIDE = ROWS + 8, KEYS_STRIDE = KEYS + (FLOATS ? 4 : 8), KEY_BYTES = FLOATS ? 4 : 2;

    static __device__ __forceinline__ u32 dim(u32 of_cache) { return DIM ? DIM + 0 : of_cache; }
    // Of a stored row, so that neighbours meet other banks.
    static __device__ __forceinline__ u32 stride(u32 dim) { return dim * SIZE + 16; }
};

// Sixteen bytes of a stored row.
template <u32 TYPE> struct Piece {
    static const u32 COUNT = TYPE == F32 ? 4 : TYPE == INT8 ? 16 : 8;
    uint4 words;

    __device__ __forceinline__ u16 half_at(u32 i) const {
        u32 four[4] = {words.x, words.y, words.z, words.w};
        return (u16)(four[i / 2 % 4] >> i % 2 * 16);
    }

    __device__ __forceinline__ float at(u32 i) const {
        u32 four[4] = {words.x, words.y, words.z, words.w};
        if (TYPE == F32) return bits(four[i % 4]);
        if (TYPE == INT8) return (float)(i8)(four[i / 4] >> i % 4 * 8);
        return TYPE == F16 ? from_f16(half_at(i)) : from_bf16(half_at(i));
    }
};

// Where a partition's keys lie, and what their integers' scales are; null where nobody sees them. As heads' keys and values are as long, these lie as far from their keys
// everywhere.
struct Places {
    const u8* keys[PARTITION];
    float k_scales[PARTITION], v_scales[PARTITION];
};

__device__ __forceinline__ u64 values_behind(const Cache& c) { return c.v - c.k; }

__device__ __forceinline__ void find_places(const Cache& c, const u32* table, u32 kv_head, u32 base, u32 from, u32 to, Places& places) {
    u32 position = threadIdx.x;
    if (position >= PARTITION) return;
    u32 at = base + position, in_table = at / c.block_tokens, offset = at - in_table * c.block_tokens;
    Place key = {0, 0};
    float k_scale = 0.0f, v_scale = 0.0f;
    if (at >= from && at < to) {
        u32 block = table[in_table];
        key = place(c, c.k, c.k_scales, c.k_dim, block, offset, kv_head);
        if (c.type == INT8) k_scale = read_scale(key.scale), v_scale = read_scale(key.scale + (c.v_scales - c.k_scales));
    }
    places.keys[position] = key.row;
    places.k_scales[position] = k_scale, places.v_scales[position] = v_scale;
}

// Brings sixteen bytes that lie so far behind this key, or zeros where there is none.
__device__ __forceinline__ void bring_later(const u8* key, u64 behind, u8* to) {
    if (key) copy_later(to, key + behind);
    else *(uint4*)to = make_uint4(0, 0, 0, 0);
}

// Brings a piece: as many threads a row as it has sixteens of bytes, or the next power of two up to a warp.
template <class W> __device__ __forceinline__ void bring_piece(const u8* const* keys, u64 behind, u32 dim, u8* to) {
    const u32 units = dim * W::SIZE / 16, across = units > 16 ? 32 : units > 8 ? 16 : 8, per_turn = W::THREADS / across;
#pragma unroll 4
    for (u32 position = threadIdx.x / across; position < W::PIECE; position += per_turn) {
        for (u32 unit = threadIdx.x % across; unit < units; unit += across) bring_later(keys[position], behind + unit * 16, to + position * W::stride(dim) + unit * 16);
    }
}

// Keys across: a lane goes along a key, and lanes write beside one another.
template <class W> __device__ __forceinline__ void turn_keys(const u8* from, u32 dim, u8* keys) {
    typedef Piece<W::TYPE> Sixteens;
    const u32 position = threadIdx.x % W::PIECE;
    from += position * W::stride(dim);
    keys += position * W::KEY_BYTES;
#pragma unroll 2
    for (u32 unit = threadIdx.x / W::PIECE; unit < dim * W::SIZE / 16; unit += W::THREADS / W::PIECE) {
        Sixteens v;
        v.words = *(const uint4*)(from + unit * 16);
#pragma unroll
        for (u32 e = 0; e < Sixteens::COUNT; e++) {
            u8* to = keys + (unit * Sixteens::COUNT + e) * W::KEYS_STRIDE * W::KEY_BYTES;
            if (W::FLOATS) *(float*)to = v.at(e);
            // Eight bits are whole in a bf16.
            else *(u16*)to = W::TYPE == INT8 ? (u16)(bits(v.at(e)) >> 16) : v.half_at(e);
        }
    }
}

// One element of eight rows times that of eight keys. Keys as floats: four of them from `k`, the others from `other_k`. To and fro, so that two of a product's three
// numbers are mostly those of the product before it: a scheduler reads two registers in a cycle, an even one and an odd one.
template <class W> __device__ __forceinline__ void multiply_eight(const float* q, const float* other_q, const u8* k, const u8* other_k, float (&acc)[8][8]) {
    float4 a = *(const float4*)q, b = *(const float4*)other_q;
    float rows[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}, keys[8];
    if (W::FLOATS) {
        float4 c = *(const float4*)k, d = *(const float4*)other_k;
        keys[0] = c.x, keys[1] = c.y, keys[2] = c.z, keys[3] = c.w, keys[4] = d.x, keys[5] = d.y, keys[6] = d.z, keys[7] = d.w;
    } else {
        Piece<W::TYPE == F16 ? F16 : BF16> eight;
        eight.words = *(const uint4*)k;
#pragma unroll
        for (int j = 0; j < 8; j++) keys[j] = eight.at(j);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
#pragma unroll
        for (int n = 0; n < 8; n++) {
            int j = i % 2 ? n : 7 - n;
            acc[i][j] = fma(rows[i], keys[j], acc[i][j]);
        }
    }
}

// Scores of a warp's rows with its share of the keys that lie across, of which the first is at `base`. Bits of a lane: which of two tiles of eight rows, which of two of
// eight keys, and three of the number of its first lane of the sixteen. So eight threads that are served together read other banks, and pairs of them the same.
template <class W>
__device__ __forceinline__ void tile_scores(const Attention& p, const float* q, const u8* keys, float* weights, const float* k_scales, u32 dim, u32 rows, u32 base, u32 lowest, u32 highest) {
    const u32 ROW_TILES = W::ROWS / 16, Q_STRIDE = W::Q_STRIDE, K_BYTES = W::KEYS_STRIDE * W::KEY_BYTES;
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, l = lane / 4;
    bool four = lane & 16, two = lane & 8, one = lane & 4;
    // Tiles of a warp are 16 rows from one another.
    u32 of_rows = warp % ROW_TILES, first_row = of_rows / 2 * 32 + of_rows % 2 * 8, row = first_row + lane % 2 * 16;
    if (first_row >= rows) return;
    // Who hands the first half of the rows over has them behind the others; so with floats of keys.
    const float *q0 = q + l * Q_STRIDE + row + (four ? 4 : 0), *q1 = q + l * Q_STRIDE + row + (four ? 0 : 4);
#pragma unroll 1
    for (u32 turn = warp / ROW_TILES; turn < W::KEYS / 16; turn += 2) {
        // Two tiles of keys are 16 from one another.
        u32 first_key = turn / 2 * 32 + turn % 2 * 8, key = first_key + lane / 2 % 2 * 16;
        if (base + first_key > highest || base + first_key + 24 <= lowest) continue;
        const u8* k = keys + (l * W::KEYS_STRIDE + key) * W::KEY_BYTES;
        const u8 *k0 = k + (W::FLOATS && two ? 16 : 0), *k1 = k + (two ? 0 : 16);
        const float *of_q0 = q0, *of_q1 = q1;
        float s[8][8], other[8][8];
#pragma unroll
        for (int i = 0; i < 64; i++) s[i / 8][i % 8] = other[i / 8][i % 8] = 0.0f;
#pragma unroll 2
        for (u32 i = 0; i < dim / 16; i++) {
            multiply_eight<W>(of_q0, of_q1, k0, k1, s);
            multiply_eight<W>(of_q0 + 8 * Q_STRIDE, of_q1 + 8 * Q_STRIDE, k0 + 8 * K_BYTES, k1 + 8 * K_BYTES, other);
            of_q0 += 16 * Q_STRIDE, of_q1 += 16 * Q_STRIDE, k0 += 16 * K_BYTES, k1 += 16 * K_BYTES;
        }
        // i and i + 8, i and i + 4, i and i + 2, 0 and 1.
#pragma unroll
        for (int i = 0; i < 64; i++) s[i / 8][i % 8] = add(s[i / 8][i % 8], other[i / 8][i % 8]);
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < 8; j++) s[i][j] = add(s[i][j], __shfl_xor_sync(ALL, s[i + 4][j], 16));
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float own = s[i][j], given = s[i][j + 4];
                if (!W::FLOATS && two) own = s[i][j + 4], given = s[i][j];
                s[i][j] = add(own, __shfl_xor_sync(ALL, given, 8));
            }
        }
        u32 own_key = key + (two ? 4 : 0) + (one ? 1 : 0);
        float* to = weights + own_key * W::WEIGHTS_STRIDE + row + (four ? 4 : 0);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float v[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float own = one ? s[i][2 * j + 1] : s[i][2 * j], given = one ? s[i][2 * j] : s[i][2 * j + 1];
                v[i] = add(own, __shfl_xor_sync(ALL, given, 4));
                if (W::TYPE == INT8) v[i] = mul(v[i], k_scales[own_key + 2 * j]);
                v[i] = mul(v[i], p.scale);
            }
            *(float4*)(to + 2 * j * W::WEIGHTS_STRIDE) = make_float4(v[0], v[1], v[2], v[3]);
        }
    }
}

// How a row's sums stand, and the first and the last position that it sees; the same in four threads.
struct TileRow {
    u32 first, last;
    bool has;
    float top, sum;
};

__device__ __forceinline__ TileRow tile_row(const Attention& p, u32 first, u32 group, u32 r, u32 rows) {
    TileRow of_row = {0, 0, r < rows, 0.0f, 0.0f};
    if (of_row.has) {
        of_row.last = p.positions[first + r / group];
        of_row.first = first_seen(p, of_row.last);
    }
    return of_row;
}

// Weights of a warp's eight rows, in the place of scores (times the scales of integers' values); -1 where a row sees nothing. `all`: all rows see all. kept, taken: what a
// row's sums are multiplied with, negative where they begin and where there is nothing to take.
template <class W> __device__ __forceinline__ void tile_weights(const Attention& p, float* weights, const float* v_scales, u32 base, TileRow& row, bool all, float* kept, float* taken) {
    const u32 STRIDE = W::WEIGHTS_STRIDE;
    u32 lane = threadIdx.x % WARP, r = threadIdx.x / WARP * 8 + lane % 8, part = lane / 8;
    // Positions part, part + 4 ..: four lanes of the sixteen.
    float* w = weights + part * STRIDE + r;
    u32 from = max(row.first, base), to = row.has ? min(row.last + 1, base + PARTITION) : 0, seen = to > from ? to - from : 0;
    if (p.capped) {
#pragma unroll 1
        for (u32 j = 0; j < PARTITION / 4; j++) w[4 * j * STRIDE] = mul(tanh_(div(w[4 * j * STRIDE], p.cap)), p.cap);
    }
    float tops[4], lanes[4];
#pragma unroll
    for (int e = 0; e < 4; e++) tops[e] = bits(NEGATIVE_INFINITY), lanes[e] = 0.0f;
    auto highest = [&](bool checked) {
        u32 at = base + part - from;
#pragma unroll 2
        for (u32 j = 0; j < PARTITION / 4; j += 4, at += 16) {
#pragma unroll
            for (u32 e = 0; e < 4; e++) {
                float s = w[(j + e) * 4 * STRIDE];
                // A NaN is no maximum; nor does the sign of a zero matter.
                if (!checked || at + 4 * e < seen) tops[e] = fmaxf(s, tops[e]);
            }
        }
    };
    if (all) highest(false);
    else highest(true);
    float top = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
    top = fmaxf(top, __shfl_xor_sync(ALL, top, 8));
    top = fmaxf(top, __shfl_xor_sync(ALL, top, 16));
    auto weigh_all = [&](bool checked) {
        u32 at = base + part - from;
#pragma unroll 2
        for (u32 j = 0; j < PARTITION / 4; j += 4, at += 16) {
#pragma unroll
            for (u32 e = 0; e < 4; e++) {
                float* s = w + (j + e) * 4 * STRIDE;
                bool visible = !checked || at + 4 * e < seen;
                float weight = exp_below(sub(*s, top));
                lanes[e] = add(lanes[e], visible ? weight : 0.0f);
                if (W::TYPE == INT8) weight = mul(weight, v_scales[(j + e) * 4 + part]);
                *s = visible ? weight : -1.0f;
            }
        }
    };
    if (all) weigh_all(false);
    else weigh_all(true);
    // i and i + 8, i and i + 4, i and i + 2, 0 and 1.
    float sum = add(add(lanes[0], lanes[2]), add(lanes[1], lanes[3]));
    sum = add(sum, __shfl_xor_sync(ALL, sum, 16));
    sum = add(sum, __shfl_xor_sync(ALL, sum, 8));
    float a = -1.0f, b = -1.0f;
    if (seen) {
        bool begins = base <= row.first;
        float m = begins ? top : greater(top, row.top);
        b = exp_below(sub(top, m));
        if (begins) {
            row.sum = sum;
        } else {
            a = exp_below(sub(row.top, m));
            row.sum = fma(row.sum, a, mul(sum, b));
        }
        row.top = m;
    }
    if (part == 0) kept[r] = a, taken[r] = b;
}

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
            if (row + i < rows) turn(head, head, dim, p.q_norm, p.angles + (u64)p.positions[first + (row + i) / group] * 2 * p.half, p.half);
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

// What is shared of known size.
struct OfTile {
    Places places[2];
    float kept[ATTEND_ROWS], taken[ATTEND_ROWS], tops[ATTEND_ROWS], sums[ATTEND_ROWS];
};

template <class W> __device__ __forceinline__ void attend_tile_of(const Attention& p, OfTile& shared) {
    const u32 PIECES = PARTITION / W::PIECE, COLUMNS = W::COLUMNS;
    // All keys of a partition lie across at once, and all rooms hold what comes next: warps meet twice in a partition.
    const bool WHOLE = W::KEYS == PARTITION;
    const Cache& c = p.cache;
    const u32 dim = W::dim(c.k_dim), room_bytes = W::PIECE * W::stride(dim);
    u32 group = p.heads / p.kv_heads, per_tile = max(W::ROWS / group, 1u);
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, row = warp * 8;
    float* q = room;
    u8* keys = (u8*)(q + dim * W::Q_STRIDE);
    float* weights = (float*)(keys + dim * W::KEYS_STRIDE * W::KEY_BYTES);
    u8* stored = (u8*)(weights + PARTITION * W::WEIGHTS_STRIDE);
    // Some of a warp's rows one after the other, where weights lie while there are some.
    float* apart = weights + warp * APART * dim;
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
        auto find = [&](u32 n, u32 at) { find_places(c, table, kv_head, at, lowest, highest + 1, shared.places[n % 2]); };
        __syncthreads();
        find(0, base);
        find(1, base + PARTITION);
        __syncthreads();
        // Pieces that were asked for, of all that there are, and those that went on.
        u32 asked = 0, gone = 0, all = ((highest - base) / PARTITION + 1) * 2 * PIECES;
        auto ask = [&] {
            if (asked < all) {
                const Places& places = shared.places[asked / (2 * PIECES) % 2];
                u32 piece = asked % (2 * PIECES), from = piece % PIECES * W::PIECE;
                bring_piece<W>(places.keys + from, piece < PIECES ? 0 : values_behind(c), dim, stored + asked % W::ROOMS * room_bytes);
            }
            copies_end();
            asked++;
        };
        // The next piece, once all are through with the one before it, whose room is another's then.
        auto piece = [&] {
            copied_but<W::ROOMS - 2>();
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
            copied();
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
                copied();
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
            // All have asked for this partition's last piece.
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
extern "C" __global__ void __launch_bounds__(256, 1) attend_tile_128(const __grid_constant__ Attention p) {
    __shared__ __align__(16) OfTile shared;
    begin();
    if (p.cache.type == F16) attend_tile_of<Way<F16, 128, 4, 64, true, 128, 128, 2>>(p, shared);
    else attend_tile_of<Way<BF16, 128, 4, 64, true, 128, 128, 2>>(p, shared);
}

// Heads of 256 in sixteen bits: half of its keys.
extern "C" __global__ void __launch_bounds__(256, 1) attend_tile_256(const __grid_constant__ Attention p) {
    __shared__ __align__(16) OfTile shared;
    begin();
    if (p.cache.type == F16) attend_tile_of<Way<F16, 256, 8, 64, true, 64, 32, 3>>(p, shared);
    else attend_tile_of<Way<BF16, 256, 8, 64, true, 64, 32, 3>>(p, shared);
}

// Other sizes and types, and devices with less shared memory: up to 128 elements, up to 256, and up to 256 with half of the rows.
#define ATTEND_TILE(NAME, COLUMNS, ROWS, ROOMS)                                                                   \
    extern "C" __global__ void __launch_bounds__(4 * ROWS, 1) NAME(const __grid_constant__ Attention p) {         \
        __shared__ __align__(16) OfTile shared;                                                                   \
        begin();                                                                                                  \
        if (p.cache.type == F32) attend_tile_of<Way<F32, 0, COLUMNS, ROWS, true, 32, 16, ROOMS>>(p, shared);      \
        else if (p.cache.type == F16) attend_tile_of<Way<F16, 0, COLUMNS, ROWS, false, 32, 16, ROOMS>>(p, shared); \
        else if (p.cache.type == BF16) attend_tile_of<Way<BF16, 0, COLUMNS, ROWS, false, 32, 16, ROOMS>>(p, shared); \
        else attend_tile_of<Way<INT8, 0, COLUMNS, ROWS, false, 32, 16, ROOMS>>(p, shared);                        \
    }

ATTEND_TILE(attend_tile, 4, 64, 3)
ATTEND_TILE(attend_tile_long, 8, 64, 3)
ATTEND_TILE(attend_tile_low, 8, 32, 2)
