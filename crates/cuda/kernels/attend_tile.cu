// Attention of prompts: a block takes the query heads of a KV head of several tokens, up to 64 rows, through all partitions in turn, whose keys and values all
// of them share in shared memory. Grid: (tiles of tokens, KV heads). The order of every sum is that of docs/numerics.md: a thread has the dot products of four
// rows with four keys, one lane of sixteen at a time, so that the sixteen meet as the tree says with few of them in registers at once.
//
// Shared memory: queries [k_dim][64], then a partition's keys [k_dim][128] or its values [128][v_dim], then weights [128][64]; each row is four floats longer.
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

// Lane `l` of the dot products of four rows with four keys; STEPS: sixteens of them, 0 where that is known later.
template <u32 STEPS> __device__ __forceinline__ void one_lane(const float* q, const float* k, u32 l, u32 dim, float (&acc)[4][4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) acc[i][j] = 0.0f;
    }
    auto step = [&](u32 d) {
        float4 a = *(const float4*)(q + d * ROWS_STRIDE), b = *(const float4*)(k + d * KEYS_STRIDE);
        float rows[4] = {a.x, a.y, a.z, a.w}, keys[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) acc[i][j] = fma(rows[i], keys[j], acc[i][j]);
        }
    };
    if (STEPS > 0) {
#pragma unroll
        for (int i = 0; i < (int)STEPS; i++) step(l + 16 * i);
    } else {
#pragma unroll 1
        for (u32 d = l; d < dim; d += 16) step(d);
    }
}

// The tree over the lanes l, l + STEP, l + 2 STEP ..
template <u32 STEP, u32 STEPS> __device__ __forceinline__ void lanes_from(const float* q, const float* k, u32 l, u32 dim, float (&sum)[4][4]) {
    if (STEP == 16) {
        one_lane<STEPS>(q, k, l, dim, sum);
    } else {
        float other[4][4];
        lanes_from<STEP == 16 ? 16 : 2 * STEP, STEPS>(q, k, l, dim, sum);
        lanes_from<STEP == 16 ? 16 : 2 * STEP, STEPS>(q, k, l + STEP, dim, other);
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) sum[i][j] = add(sum[i][j], other[i][j]);
        }
    }
}

// Brings a partition's rows of keys or values: across (element by element, positions beside one another) or as they lie. Positions that nobody sees are zero.
template <u32 TYPE, bool ACROSS>
__device__ __forceinline__ void bring_rows(const Cache& c, const u32* table, u32 kv_head, u32 base, u32 from, u32 to, float* room, float* scales) {
    const u32 COUNT = Piece<TYPE>::COUNT;
    auto located = [&](u32 position) {
        u32 at = base + position, in_table = at / c.block_tokens, offset = at - in_table * c.block_tokens;
        Place own = {0, 0};
        if (at < from || at >= to) return own;
        u32 block = table[in_table];
        return ACROSS ? place(c, c.k, c.k_scales, c.k_dim, block, offset, kv_head) : place(c, c.v, c.v_scales, c.v_dim, block, offset, kv_head);
    };
    Place own = located(threadIdx.x % PARTITION);
    if (TYPE == INT8 && threadIdx.x < PARTITION) scales[threadIdx.x] = own.row ? read_scale(own.scale) : 0.0f;
    if (ACROSS) {
        // A thread goes along a key: neighbours write beside one another.
        u32 position = threadIdx.x % PARTITION;
#pragma unroll 4
        for (u32 piece = threadIdx.x / PARTITION; piece < c.k_dim / COUNT; piece += ATTEND_THREADS / PARTITION) {
            Piece<TYPE> v;
            v.words = own.row ? ((const uint4*)own.row)[piece] : make_uint4(0, 0, 0, 0);
#pragma unroll
            for (u32 i = 0; i < COUNT; i++) room[(piece * COUNT + i) * KEYS_STRIDE + position] = v.at(i);
        }
        return;
    }
    u32 pieces = c.v_dim / COUNT;
#pragma unroll 4
    for (u32 i = threadIdx.x; i < PARTITION * pieces; i += ATTEND_THREADS) {
        u32 position = i / pieces, piece = i - position * pieces;
        Place of = located(position);
        Piece<TYPE> v;
        v.words = of.row ? ((const uint4*)of.row)[piece] : make_uint4(0, 0, 0, 0);
        float* to_row = room + position * (c.v_dim + 4) + piece * COUNT;
#pragma unroll
        for (u32 e = 0; e < COUNT; e += 4) *(float4*)(to_row + e) = make_float4(v.at(e), v.at(e + 1), v.at(e + 2), v.at(e + 3));
    }
}

template <u32 TYPE, u32 STEPS> __device__ __forceinline__ void attend_tile_of(const Attention& p) {
    __shared__ float k_scales[PARTITION], v_scales[PARTITION];
    // Of each row: the first and the last position that it sees, and how its sums stand.
    __shared__ u32 firsts[ATTEND_ROWS], lasts[ATTEND_ROWS];
    __shared__ float tops[ATTEND_ROWS], sums[ATTEND_ROWS], kept[ATTEND_ROWS], taken[ATTEND_ROWS];
    const Cache& c = p.cache;
    u32 group = p.heads / p.kv_heads, per_tile = max(ATTEND_ROWS / group, 1u), kv_head = blockIdx.y;
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, v_stride = c.v_dim + 4;
    float *q = room, *keys = q + c.k_dim * ROWS_STRIDE;
    float* weights = keys + max(c.k_dim * KEYS_STRIDE, PARTITION * v_stride);
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
        for (u32 base = lowest / PARTITION * PARTITION; base <= highest; base += PARTITION) {
            __syncthreads();
            bring_rows<TYPE, true>(c, table, kv_head, base, lowest, highest + 1, keys, k_scales);
            __syncthreads();
            // 3. Scores
            // What comes after all tokens has no scores.
            if (row < rows && base + warp % 2 * 64 <= highest) {
                float s[4][4];
                lanes_from<1, STEPS>(q + row, keys + key, 0, c.k_dim, s);
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
            bring_rows<TYPE, false>(c, table, kv_head, base, lowest, highest + 1, keys, v_scales);
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
                        float w = visible ? exp_(sub(weights[i * ROWS_STRIDE + r], top)) : 0.0f;
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
                    float a = exp_(sub(before, m)), b = exp_(sub(top, m));
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
                auto step = [&](u32 n, bool checked) {
                    float4 w = *(const float4*)(weights + n * ROWS_STRIDE + row);
                    float4 v = *(const float4*)(keys + n * v_stride + column);
                    float ws[4] = {w.x, w.y, w.z, w.w}, vs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        if (checked && !(n >= from[i] && n < to[i])) continue;
#pragma unroll
                        for (int j = 0; j < 4; j++) o[i][j] = fma(ws[i], vs[j], o[i][j]);
                    }
                };
                u32 n = some_from;
                for (; n < some_to && (n < all_from || n >= all_to); n++) step(n, true);
#pragma unroll 4
                for (; n < all_to; n++) step(n, false);
                for (; n < some_to; n++) step(n, true);
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
    begin();
    // Heads of 128 in the usual types have their loops unrolled.
    bool usual = p.cache.k_dim == 128;
    if (p.cache.type == F16 && usual) attend_tile_of<F16, 8>(p);
    else if (p.cache.type == BF16 && usual) attend_tile_of<BF16, 8>(p);
    else if (p.cache.type == F32) attend_tile_of<F32, 0>(p);
    else if (p.cache.type == F16) attend_tile_of<F16, 0>(p);
    else if (p.cache.type == BF16) attend_tile_of<BF16, 0>(p);
    else attend_tile_of<INT8, 0>(p);
}
