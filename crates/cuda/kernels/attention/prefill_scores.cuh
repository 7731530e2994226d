// Scores and weights of a tile of tokens, for attention/prefill.cu.
#pragma once
#include "attention/attention.cuh"
#include "attention/cache.cuh"
#include "attention/tiles.cuh"
#include "prim/numerics.cuh"

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
    // The tiles of a warp are 16 rows apart.
    u32 of_rows = warp % ROW_TILES, first_row = of_rows / 2 * 32 + of_rows % 2 * 8, row = first_row + lane % 2 * 16;
    if (first_row >= rows) return;
    // A lane that hands the first half of its rows over holds them behind the others. The same goes for the floats of keys.
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
                // NaN does not count for the maximum, and the sign of a zero does not matter.
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
