// Attention of prompts: a block takes the query heads of a KV head of several tokens, up to 64 rows, through all partitions in turn, whose keys and values all
// of them share in shared memory. Grid: (tiles of tokens, KV heads). The order of every sum is that of docs/numerics.md: a thread has the dot products of four
// rows with four keys, one lane of sixteen at a time, so that the sixteen meet as the tree says with few of them in registers at once.
//
// Shared memory: queries [k_dim][64], then a partition's keys [k_dim][128] or its values [128][v_dim], then weights [128][64]; each row is four floats longer. Then
// keys and values as they lie in the cache.
#pragma once
#include "attention.cu"

static const u32 ATTEND_ROWS = 64, ATTEND_THREADS = 512, ROWS_STRIDE = ATTEND_ROWS + 4, KEYS_STRIDE = PARTITION + 4;

// Eight or four elements of a stored row, from an address of whole sixteen bytes, as floats.
template <u32 TYPE> struct Piece {
    static const u32 COUNT = TYPE == F32 ? 4 : TYPE == INT8 ? 16 : 8;
    uint4 words;

    __device__ __forceinline__ float at(u32 i) const {
        u32 four[4] = {words.x, words.y, words.z, words.w};
        if (TYPE == F32) return bits(four[i % 4]);
        if (TYPE == INT8) return (float)(i8)(four[i / 4] >> i % 4 * 8);
        u16 half = (u16)(four[i / 2 % 4] >> i % 2 * 16);
        return TYPE == F16 ? from_f16(half) : from_bf16(half);
    }
};

// Lane `l` of the dot products of four rows with four keys.
__device__ __forceinline__ void one_lane(const float* q, const float* k, u32 l, u32 dim, float (&acc)[4][4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) acc[i][j] = 0.0f;
    }
#pragma unroll 1
    for (u32 d = l; d < dim; d += 16) {
        float4 a = *(const float4*)(q + d * ROWS_STRIDE), b = *(const float4*)(k + d * KEYS_STRIDE);
        float rows[4] = {a.x, a.y, a.z, a.w}, keys[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) acc[i][j] = fma(rows[i], keys[j], acc[i][j]);
        }
    }
}

// The tree over the lanes l, l + STEP, l + 2 STEP ..
template <u32 STEP> __device__ __forceinline__ void lanes_from(const float* q, const float* k, u32 l, u32 dim, float (&sum)[4][4]) {
    if (STEP == 16) {
        one_lane(q, k, l, dim, sum);
    } else {
        float other[4][4];
        lanes_from<STEP == 16 ? 16 : 2 * STEP>(q, k, l, dim, sum);
        lanes_from<STEP == 16 ? 16 : 2 * STEP>(q, k, l + STEP, dim, other);
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) sum[i][j] = add(sum[i][j], other[i][j]);
        }
    }
}

// The tree over all sixteen lanes, four of them at a time in one piece of code, so that instructions stay in their cache.
__device__ __forceinline__ void dot_products(const float* q, const float* k, u32 dim, float (&sum)[4][4]) {
    float two[4][4];
#pragma unroll 1
    for (u32 i = 0; i < 4; i++) {
        // Lanes from 0 and from 2 on meet, then those from 1 and from 3 on, then both.
        float four[4][4];
        u32 first = i / 2 + i % 2 * 2;
        lanes_from<4>(q + first * ROWS_STRIDE, k + first * KEYS_STRIDE, 0, dim - first, four);
#pragma unroll
        for (int e = 0; e < 16; e++) {
            float own = four[e / 4][e % 4], &both = two[e / 4][e % 4];
            both = i % 2 ? add(both, own) : own;
            if (i == 1) sum[e / 4][e % 4] = both;
        }
    }
#pragma unroll
    for (int e = 0; e < 16; e++) sum[e / 4][e % 4] = add(sum[e / 4][e % 4], two[e / 4][e % 4]);
}

// Where a partition's keys and values lie: null where nobody sees them.
struct Places {
    const u8* keys[PARTITION];
    const u8* values[PARTITION];
};

__device__ __forceinline__ void find_places(const Cache& c, const u32* table, u32 kv_head, u32 base, u32 from, u32 to, Places& places, float* k_scales, float* v_scales) {
    u32 position = threadIdx.x;
    if (position >= PARTITION) return;
    u32 at = base + position, in_table = at / c.block_tokens, offset = at - in_table * c.block_tokens;
    Place key = {0, 0}, value = {0, 0};
    if (at >= from && at < to) {
        u32 block = table[in_table];
        key = place(c, c.k, c.k_scales, c.k_dim, block, offset, kv_head);
        value = place(c, c.v, c.v_scales, c.v_dim, block, offset, kv_head);
    }
    places.keys[position] = key.row;
    places.values[position] = value.row;
    if (c.type == INT8) {
        k_scales[position] = key.row ? read_scale(key.scale) : 0.0f;
        v_scales[position] = value.row ? read_scale(value.scale) : 0.0f;
    }
}

// Brings rows as they lie, sixteen bytes further from one another than they are long. What nobody sees is zero.
__device__ __forceinline__ void bring_later(const u8* const* rows, u32 bytes, u8* to) {
    u32 pieces = bytes / 16;
#pragma unroll 4
    for (u32 i = threadIdx.x; i < PARTITION * pieces; i += ATTEND_THREADS) {
        u32 position = i / pieces, piece = i - position * pieces;
        const u8* row = rows[position];
        u8* at = to + position * (bytes + 16) + piece * 16;
        if (row) copy_later(at, row + piece * 16);
        else *(uint4*)at = make_uint4(0, 0, 0, 0);
    }
}

// Keys across (element by element, positions beside one another), values as they lie; as floats.
template <u32 TYPE, bool ACROSS> __device__ __forceinline__ void widen(const u8* from, u32 dim, float* to) {
    const u32 COUNT = Piece<TYPE>::COUNT;
    u32 pieces = dim / COUNT, stride = 16 * pieces + 16;
    if (ACROSS) {
        // A thread goes along a key: neighbours write beside one another.
        u32 position = threadIdx.x % PARTITION;
#pragma unroll 4
        for (u32 piece = threadIdx.x / PARTITION; piece < pieces; piece += ATTEND_THREADS / PARTITION) {
            Piece<TYPE> v;
            v.words = *(const uint4*)(from + position * stride + piece * 16);
#pragma unroll
            for (u32 i = 0; i < COUNT; i++) to[(piece * COUNT + i) * KEYS_STRIDE + position] = v.at(i);
        }
        return;
    }
#pragma unroll 4
    for (u32 i = threadIdx.x; i < PARTITION * pieces; i += ATTEND_THREADS) {
        u32 position = i / pieces, piece = i - position * pieces;
        Piece<TYPE> v;
        v.words = *(const uint4*)(from + position * stride + piece * 16);
        float* row = to + position * (dim + 4) + piece * COUNT;
#pragma unroll
        for (u32 e = 0; e < COUNT; e += 4) *(float4*)(row + e) = make_float4(v.at(e), v.at(e + 1), v.at(e + 2), v.at(e + 3));
    }
}

// What a block shares of known size, once for all types.
struct OfTile {
    float scales[2][2][PARTITION];
    Places places;
    // Of each row: the first and the last position that it sees, and how its sums stand.
    u32 firsts[ATTEND_ROWS], lasts[ATTEND_ROWS];
    float tops[ATTEND_ROWS], sums[ATTEND_ROWS], kept[ATTEND_ROWS], taken[ATTEND_ROWS];
};

template <u32 TYPE> __device__ __forceinline__ void attend_tile_of(const Attention& p, OfTile& shared) {
    auto &scales = shared.scales;
    Places& places = shared.places;
    u32 *firsts = shared.firsts, *lasts = shared.lasts;
    float *tops = shared.tops, *sums = shared.sums, *kept = shared.kept, *taken = shared.taken;
    const Cache& c = p.cache;
    u32 group = p.heads / p.kv_heads, per_tile = max(ATTEND_ROWS / group, 1u), kv_head = blockIdx.y;
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const u32 SIZE = TYPE == F32 ? 4 : TYPE == INT8 ? 1 : 2;
    u32 v_stride = c.v_dim + 4;
    float *q = room, *keys = q + c.k_dim * ROWS_STRIDE;
    float* weights = keys + max(c.k_dim * KEYS_STRIDE, PARTITION * v_stride);
    // Keys of the next partition and values of this one are under way while there is something to compute.
    u8 *next_keys = (u8*)(weights + PARTITION * ROWS_STRIDE), *next_values = next_keys + PARTITION * (c.k_dim * SIZE + 16);
    // The last tokens see most: they come first.
    u32 tile = gridDim.x - 1 - blockIdx.x, end_of_tile = min((tile + 1) * per_tile, p.tokens);
    // A thread's four rows, and four keys or columns: a warp has two times four rows, and half of the keys.
    u32 row = (warp / 2 * 2 + lane / 16) * 4, key = (warp % 2 * 16 + lane % 16) * 4, column = key;
    for (u32 first = tile * per_tile, next; first < end_of_tile; first = next) {
        // 1. Tokens of one sequence
        u32 sequence = p.sequences[first];
        for (next = first + 1; next < end_of_tile && p.sequences[next] == sequence;) next++;
        u32 rows = (next - first) * group;
        const u32* table = p.tables + p.table_starts[sequence];
        __syncthreads();
        // 2. Queries, normed and turned, a warp a row; then their elements beside those of the other rows
        for (u32 r = warp; r < ATTEND_ROWS; r += ATTEND_THREADS / WARP) {
            float* head = weights + warp * c.k_dim;
            if (r < rows) {
                u32 t = first + r / group, h = kv_head * group + r % group, position = p.positions[t];
                const float* q_in = p.q.row(t) + (u64)h * c.k_dim * (p.gated ? 2 : 1);
                turn(q_in, head, c.k_dim, p.q_norm, p.angles + (u64)position * 2 * p.half, p.half);
                if (lane == 0) {
                    firsts[r] = first_seen(p, position);
                    lasts[r] = position;
                }
            }
            for (u32 d = lane; d < c.k_dim; d += WARP) q[d * ROWS_STRIDE + r] = r < rows ? head[d] : 0.0f;
            __syncwarp();
        }
        u32 lowest = first_seen(p, p.positions[first]), highest = p.positions[next - 1];
        float out[4][4];
#pragma unroll
        for (int i = 0; i < 16; i++) out[i / 4][i % 4] = 0.0f;
        u32 turns = 0;
        __syncthreads();
        find_places(c, table, kv_head, lowest / PARTITION * PARTITION, lowest, highest + 1, places, scales[0][0], scales[0][1]);
        __syncthreads();
        bring_later(places.keys, c.k_dim * SIZE, next_keys);
        for (u32 base = lowest / PARTITION * PARTITION; base <= highest; base += PARTITION, turns++) {
            const float *k_scales = scales[turns % 2][0], *v_scales = scales[turns % 2][1];
            bring_later(places.values, c.v_dim * SIZE, next_values);
            copied();
            __syncthreads();
            widen<TYPE, true>(next_keys, c.k_dim, keys);
            // Of the next partition, or of none.
            find_places(c, table, kv_head, base + PARTITION, lowest, highest + 1, places, scales[(turns + 1) % 2][0], scales[(turns + 1) % 2][1]);
            __syncthreads();
            if (base + PARTITION <= highest) bring_later(places.keys, c.k_dim * SIZE, next_keys);
            // 3. Scores
            // What comes after all tokens has no scores.
            if (row < rows && base + warp % 2 * 64 <= highest) {
                float s[4][4];
                dot_products(q + row, keys + key, c.k_dim, s);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float four[4];
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float v = s[i][j];
                        if (TYPE == INT8) v = mul(v, k_scales[key + j]);
                        v = mul(v, p.scale);
                        if (p.capped) v = mul(tanh_(div(v, p.cap)), p.cap);
                        four[i] = v;
                    }
                    *(float4*)(weights + (key + j) * ROWS_STRIDE + row) = make_float4(four[0], four[1], four[2], four[3]);
                }
            }
            __syncthreads();
            // Keys are through: values take their place.
            widen<TYPE, false>(next_values, c.v_dim, keys);
            // 4. Weights: eight threads a row, each with two lanes of its sum
            {
                u32 r = threadIdx.x / 8, part = threadIdx.x % 8;
                bool has = r < rows;
                u32 from = has ? max(firsts[r], base) : 1, to = has ? min(lasts[r] + 1, base + PARTITION) : 0;
                float top = bits(NEGATIVE_INFINITY);
#pragma unroll 8
                for (u32 j = 0; j < PARTITION / 8; j++) {
                    u32 i = j / 2 * 16 + part * 2 + j % 2;
                    if (base + i >= from && base + i < to) top = greater(weights[i * ROWS_STRIDE + r], top);
                }
                top = greater(__shfl_xor_sync(ALL, top, 1), top);
                top = greater(__shfl_xor_sync(ALL, top, 2), top);
                top = greater(__shfl_xor_sync(ALL, top, 4), top);
                float lanes[2] = {0.0f, 0.0f};
#pragma unroll 2
                for (u32 j = 0; j < PARTITION / 16; j++) {
#pragma unroll
                    for (u32 e = 0; e < 2; e++) {
                        u32 i = j * 16 + part * 2 + e;
                        bool visible = base + i >= from && base + i < to;
                        float w = visible ? exp_below(sub(weights[i * ROWS_STRIDE + r], top)) : 0.0f;
                        lanes[e] = add(lanes[e], w);
                        weights[i * ROWS_STRIDE + r] = w;
                    }
                }
                // Lanes i and i + 8, i and i + 4, i and i + 2, 0 and 1: of this thread's two, with those of the others.
#pragma unroll
                for (u32 e = 0; e < 2; e++) {
#pragma unroll
                    for (u32 other = 4; other > 0; other /= 2) lanes[e] = add(lanes[e], __shfl_xor_sync(ALL, lanes[e], other));
                }
                float sum = add(lanes[0], lanes[1]);
                if (has && part == 0 && from < to) {
                    bool begins = base <= firsts[r];
                    float before = begins ? top : tops[r], m = greater(top, before);
                    float a = exp_below(sub(before, m)), b = exp_below(sub(top, m));
                    kept[r] = begins ? 0.0f : a;
                    taken[r] = b;
                    sums[r] = begins ? sum : fma(sums[r], a, mul(sum, b));
                    tops[r] = begins ? top : m;
                }
            }
            __syncthreads();
            if (TYPE == INT8) {
                for (u32 i = threadIdx.x; i < PARTITION * ATTEND_ROWS; i += ATTEND_THREADS) {
                    float* w = weights + i / ATTEND_ROWS * ROWS_STRIDE + i % ATTEND_ROWS;
                    *w = mul(*w, v_scales[i / ATTEND_ROWS]);
                }
                __syncthreads();
            }
            // 5. Values
            if (row < rows && column < c.v_dim) {
                u32 from[4], to[4], all_from = 0, all_to = PARTITION, some_from = PARTITION, some_to = 0;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    bool has = row + i < rows;
                    from[i] = has ? max(firsts[row + i], base) - base : 0;
                    u32 last = has ? min(lasts[row + i] + 1, base + PARTITION) : base;
                    to[i] = last > base ? last - base : 0;
                    if (from[i] >= to[i]) from[i] = to[i] = 0;
                    all_from = max(all_from, from[i]);
                    all_to = min(all_to, to[i]);
                    some_from = min(some_from, from[i]);
                    some_to = max(some_to, to[i]);
                }
                float o[4][4];
#pragma unroll
                for (int i = 0; i < 16; i++) o[i / 4][i % 4] = 0.0f;
                u32 n = some_from;
                const float *of_n = weights + n * ROWS_STRIDE + row, *values = keys + n * v_stride + column;
                auto step = [&](bool checked) {
                    float4 w = *(const float4*)of_n, v = *(const float4*)values;
                    float ws[4] = {w.x, w.y, w.z, w.w}, vs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        if (checked && !(n >= from[i] && n < to[i])) continue;
#pragma unroll
                        for (int j = 0; j < 4; j++) o[i][j] = fma(ws[i], vs[j], o[i][j]);
                    }
                    n++, of_n += ROWS_STRIDE, values += v_stride;
                };
#pragma unroll 1
                while (n < some_to && (n < all_from || n >= all_to)) step(true);
                for (; n + 8 <= all_to;) {
#pragma unroll
                    for (int i = 0; i < 8; i++) step(false);
                }
#pragma unroll 1
                while (n < all_to) step(false);
#pragma unroll 1
                while (n < some_to) step(true);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    if (from[i] >= to[i]) continue;
                    bool begins = base <= firsts[row + i];
                    float a = kept[row + i], b = taken[row + i];
#pragma unroll
                    for (int j = 0; j < 4; j++) out[i][j] = begins ? o[i][j] : fma(out[i][j], a, mul(o[i][j], b));
                }
            }
        }
        __syncthreads();
        // 6. The end of each row
        if (row < rows && column < c.v_dim) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (row + i >= rows) continue;
                u32 r = row + i, t = first + r / group, h = kv_head * group + r % group;
#pragma unroll
                for (int j = 0; j < 4; j++) finish(p, t, h, column + j, out[i][j], tops[r], sums[r]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(512, 1) attend_tile(const __grid_constant__ Attention p) {
    __shared__ __align__(16) OfTile shared;
    begin();
    if (p.cache.type == F32) attend_tile_of<F32>(p, shared);
    else if (p.cache.type == F16) attend_tile_of<F16>(p, shared);
    else if (p.cache.type == BF16) attend_tile_of<BF16>(p, shared);
    else attend_tile_of<INT8>(p, shared);
}
