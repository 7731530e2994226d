// `attend_tile` for heads of 128 in sixteen bits, which most models have: eight warps, and as many registers as a thread can have. Reading shared memory costs as
// much as computing, so a thread takes eight keys of eight rows: sixteen numbers for 64 products. It has two of their sixteen lanes, i and i + 8; eight threads
// have all, and the tree's other levels are between them: each time a thread hands half of its sums over and keeps the other half. Values are eight rows by four
// columns a thread; a warp has eight rows, whose weights it makes itself, so that warps meet twice in a partition.
//
// Shared memory: queries [128][64], keys [128][128], weights [128][64], of which each row is longer; then keys and values as they lie in the cache.
#pragma once
#include "attend_tile.cu"

static const u32 WIDE_THREADS = 256, WIDE_DIM = 128, WEIGHTS_STRIDE = ATTEND_ROWS + 8, STORED_STRIDE = 2 * WIDE_DIM + 16;

__device__ __forceinline__ void bring_wide(const u8* const* rows, u8* to) {
    u32 piece = threadIdx.x % 16 * 16, position = threadIdx.x / 16;
#pragma unroll 4
    for (u32 i = 0; i < PARTITION / 16; i++, position += 16) {
        const u8* row = rows[position];
        u8* at = to + position * STORED_STRIDE + piece;
        if (row) copy_later(at, row + piece);
        else *(uint4*)at = make_uint4(0, 0, 0, 0);
    }
}

// Keys across: a thread goes along a key, and neighbours write beside one another.
template <u32 TYPE> __device__ __forceinline__ void widen_wide(const u8* from, float* keys) {
    u32 position = threadIdx.x % PARTITION, half = threadIdx.x / PARTITION;
    from += position * STORED_STRIDE + half * 16;
    keys += half * 8 * KEYS_STRIDE + position;
#pragma unroll 2
    for (u32 i = 0; i < WIDE_DIM / 16; i++, from += 32, keys += 16 * KEYS_STRIDE) {
        Piece<TYPE> v;
        v.words = *(const uint4*)from;
#pragma unroll
        for (u32 e = 0; e < 8; e++) keys[e * KEYS_STRIDE] = v.at(e);
    }
}

// One element of eight rows times that of eight keys; `other`: from four of them to the other four. To and fro, so that two of a product's three
// numbers are mostly those of the product before it: a scheduler reads two registers in a cycle, an even one and an odd one.
__device__ __forceinline__ void multiply_wide(const float* q, const float* other_q, const float* k, const float* other_k, float (&acc)[8][8]) {
    float4 a = *(const float4*)q, b = *(const float4*)other_q, c = *(const float4*)k, d = *(const float4*)other_k;
    float rows[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}, keys[8] = {c.x, c.y, c.z, c.w, d.x, d.y, d.z, d.w};
#pragma unroll
    for (int i = 0; i < 8; i++) {
#pragma unroll
        for (int n = 0; n < 8; n++) {
            int j = i % 2 ? n : 7 - n;
            acc[i][j] = fma(rows[i], keys[j], acc[i][j]);
        }
    }
}

// Scores of 16 rows with those of `KEYS` keys that this warp takes; the first of them is at `base`. Bits of a lane: which of two tiles of rows, which of two of keys, and three of the number of its first lane
// of the sixteen. So eight threads that are served together read other banks, and pairs of them the same.
template <u32 DIM, u32 KEYS> __device__ __forceinline__ void wide_scores(const Attention& p, const float* q, const float* keys, float* weights, u32 rows, u32 base, u32 lowest, u32 highest) {
    const u32 STRIDE = KEYS + 4;
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, l = lane / 4;
    bool four = lane & 16, two = lane & 8, one = lane & 4;
    // Tiles of a warp are 16 rows from one another.
    u32 first_row = warp % 4 / 2 * 32 + warp % 2 * 8, row = first_row + lane % 2 * 16;
    if (first_row >= rows) return;
    // Who hands the first half of the rows over has them behind the others.
    const float *q0 = q + l * ROWS_STRIDE + row + (four ? 4 : 0), *q1 = q + l * ROWS_STRIDE + row + (four ? 0 : 4);
#pragma unroll 1
    for (u32 turn = warp / 4; turn < KEYS / 16; turn += 2) {
        // A tile of keys: four, and those 32 further; two tiles are 16 from one another.
        u32 first_key = turn / 4 * 64 + turn % 4 * 4, key = first_key + lane / 2 % 2 * 16;
        if (base + first_key > highest || base + first_key + 64 <= lowest) continue;
        const float *k0 = keys + l * STRIDE + key + (two ? 32 : 0), *k1 = keys + l * STRIDE + key + (two ? 0 : 32);
        const float *of_q0 = q0, *of_q1 = q1;
        float s[8][8], other[8][8];
#pragma unroll
        for (int i = 0; i < 64; i++) s[i / 8][i % 8] = other[i / 8][i % 8] = 0.0f;
#pragma unroll 2
        for (u32 i = 0; i < DIM / 16; i++) {
            multiply_wide(of_q0, of_q1, k0, k1, s);
            multiply_wide(of_q0 + 8 * ROWS_STRIDE, of_q1 + 8 * ROWS_STRIDE, k0 + 8 * STRIDE, k1 + 8 * STRIDE, other);
            of_q0 += 16 * ROWS_STRIDE, of_q1 += 16 * ROWS_STRIDE, k0 += 16 * STRIDE, k1 += 16 * STRIDE;
        }
        // i and i + 8, i and i + 4, i and i + 2, 0 and 1.
#pragma unroll
        for (int i = 0; i < 64; i++) s[i / 8][i % 8] = add(s[i / 8][i % 8], other[i / 8][i % 8]);
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < 8; j++) s[i][j] = add(s[i][j], __shfl_xor_sync(ALL, s[i + 4][j], 16));
#pragma unroll
            for (int j = 0; j < 4; j++) s[i][j] = add(s[i][j], __shfl_xor_sync(ALL, s[i][j + 4], 8));
        }
        float* to = weights + (key + (two ? 32 : 0) + (one ? 1 : 0)) * WEIGHTS_STRIDE + row + (four ? 4 : 0);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float v[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float own = one ? s[i][2 * j + 1] : s[i][2 * j], given = one ? s[i][2 * j] : s[i][2 * j + 1];
                v[i] = mul(add(own, __shfl_xor_sync(ALL, given, 4)), p.scale);
            }
            *(float4*)(to + 2 * j * WEIGHTS_STRIDE) = make_float4(v[0], v[1], v[2], v[3]);
        }
    }
}

// How a row's sums stand, and the first and the last position that it sees; the same in four threads.
struct WideRow {
    u32 first, last;
    bool has;
    float top, sum;
};

// Weights of a warp's eight rows, in the place of scores; -1 where a row sees nothing. `all`: all rows see all. kept, taken: what a row's sums are multiplied with, negative
// where they begin and where there is nothing to take.
__device__ __forceinline__ void wide_weights(const Attention& p, float* weights, u32 base, WideRow& row, bool all, float* kept, float* taken) {
    u32 lane = threadIdx.x % WARP, r = threadIdx.x / WARP * 8 + lane % 8, part = lane / 8;
    // Positions part, part + 4 ..: four lanes of the sixteen.
    float* w = weights + part * WEIGHTS_STRIDE + r;
    u32 from = max(row.first, base), to = row.has ? min(row.last + 1, base + PARTITION) : 0, seen = to > from ? to - from : 0;
    if (p.capped) {
#pragma unroll 1
        for (u32 j = 0; j < PARTITION / 4; j++) w[4 * j * WEIGHTS_STRIDE] = mul(tanh_(div(w[4 * j * WEIGHTS_STRIDE], p.cap)), p.cap);
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
                float s = w[(j + e) * 4 * WEIGHTS_STRIDE];
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
                float* s = w + (j + e) * 4 * WEIGHTS_STRIDE;
                bool visible = !checked || at + 4 * e < seen;
                float weight = exp_below(sub(*s, top));
                lanes[e] = add(lanes[e], visible ? weight : 0.0f);
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

// Queries of a warp's eight rows, normed and turned, then their elements beside those of the other rows. `apart`: room for eight rows, one after the other.
template <u32 DIM> __device__ __forceinline__ void wide_queries(const Attention& p, u32 first, u32 group, u32 kv_head, u32 row, u32 rows, float* apart, float* q) {
    u32 lane = threadIdx.x % WARP;
    float x[8][DIM / WARP];
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        auto from = [&] { return p.q.row(first + (row + i) / group) + (u64)(kv_head * group + (row + i) % group) * DIM * (p.gated ? 2 : 1); };
#pragma unroll
        for (u32 j = 0; j < DIM / WARP; j++) x[i][j] = row + i < rows ? from()[j * WARP + lane] : 0.0f;
    }
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
#pragma unroll
        for (u32 j = 0; j < DIM / WARP; j++) apart[i * DIM + j * WARP + lane] = x[i][j];
    }
#pragma unroll 1
    for (u32 i = 0; i < 8; i++) {
        float* head = apart + i * DIM;
        if (row + i < rows) turn(head, head, DIM, p.q_norm, p.angles + (u64)p.positions[first + (row + i) / group] * 2 * p.half, p.half);
        for (u32 d = lane; d < DIM; d += WARP) q[d * ROWS_STRIDE + row + i] = head[d];
    }
}

// Of a partition's positions: all of a warp's rows see those of the first range, and none those outside of the second.
struct WideSeen {
    u32 all_from, all_to, some_from, some_to;

    __device__ __forceinline__ WideSeen(const WideRow& row, u32 base) {
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

// Adds values of the positions from `first` to `end`, times their weights, to the outputs of eight rows: `COLUMNS` columns a thread. values: of position `first`.
template <u32 TYPE, u32 COLUMNS, u32 STRIDE> __device__ __forceinline__ void wide_values(const WideSeen& seen, u32 first, u32 end, const float* weights, const u8* values, float (&o)[8][COLUMNS]) {
    u32 n = max(first, seen.some_from), some_to = min(end, seen.some_to), all_to = min(end, seen.all_to);
    const float* of_n = weights + n * WEIGHTS_STRIDE;
    values += (n - first) * STRIDE + threadIdx.x % WARP * 2 * COLUMNS;
    auto step = [&](bool checked) {
        float4 w = *(const float4*)of_n, x = *(const float4*)(of_n + 4);
        float ws[8] = {w.x, w.y, w.z, w.w, x.x, x.y, x.z, x.w};
        u32 words[COLUMNS / 2];
        if (COLUMNS == 4) *(uint2*)words = *(const uint2*)values;
        else *(uint4*)words = *(const uint4*)values;
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            u16 half = (u16)(words[j / 2] >> j % 2 * 16);
            float v = TYPE == F16 ? from_f16(half) : from_bf16(half);
#pragma unroll
            for (int n = 0; n < 8; n++) {
                int i = j % 2 ? 7 - n : n;
                if (!(checked && ws[i] < 0.0f)) o[i][j] = fma(ws[i], v, o[i][j]);
            }
        }
        n++, of_n += WEIGHTS_STRIDE, values += STRIDE;
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
template <u32 COLUMNS> __device__ __forceinline__ void wide_join(const float (&o)[8][COLUMNS], const float* kept, const float* taken, float (&out)[8][COLUMNS]) {
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
template <u32 COLUMNS> __device__ __forceinline__ void wide_ends(const Attention& p, u32 first, u32 group, u32 kv_head, u32 row, u32 rows, const WideRow& of_row, const float (&out)[8][COLUMNS], float* apart, float* tops, float* sums) {
    const u32 DIM = COLUMNS * WARP;
    u32 lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < 8; i++) {
#pragma unroll
        for (int j = 0; j < COLUMNS; j += 4) *(float4*)(apart + i * DIM + lane * COLUMNS + j) = make_float4(out[i][j], out[i][j + 1], out[i][j + 2], out[i][j + 3]);
    }
    if (lane < 8) tops[row + lane] = of_row.top, sums[row + lane] = of_row.sum;
    __syncwarp();
#pragma unroll 1
    for (u32 r = row; r < min(row + 8, rows); r++) {
        u32 t = first + r / group, h = kv_head * group + r % group;
#pragma unroll
        for (u32 d = lane; d < DIM; d += WARP) finish(p, t, h, d, apart[(r - row) * DIM + d], tops[r], sums[r]);
    }
}

__device__ __forceinline__ WideRow wide_row(const Attention& p, u32 first, u32 group, u32 r, u32 rows) {
    WideRow of_row = {0, 0, r < rows, 0.0f, 0.0f};
    if (of_row.has) {
        of_row.last = p.positions[first + r / group];
        of_row.first = first_seen(p, of_row.last);
    }
    return of_row;
}

// What is shared of known size.
struct OfWideTile {
    Places places[2];
    float kept[ATTEND_ROWS], taken[ATTEND_ROWS], tops[ATTEND_ROWS], sums[ATTEND_ROWS];
};

template <u32 TYPE> __device__ __forceinline__ void attend_wide(const Attention& p, OfWideTile& shared) {
    const Cache& c = p.cache;
    u32 group = p.heads / p.kv_heads, per_tile = max(ATTEND_ROWS / group, 1u);
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, row = warp * 8;
    float *q = room, *keys = q + WIDE_DIM * ROWS_STRIDE, *weights = keys + WIDE_DIM * KEYS_STRIDE;
    u8 *stored_keys = (u8*)(weights + PARTITION * WEIGHTS_STRIDE), *stored_values = stored_keys + PARTITION * STORED_STRIDE;
    // A warp's rows one after the other, where weights lie while there are some.
    float* apart = weights + row * WIDE_DIM;
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
        bring_wide(shared.places[0].keys, stored_keys);
        // 2. Queries
        wide_queries<WIDE_DIM>(p, first, group, kv_head, row, rows, apart, q);
        WideRow of_row = wide_row(p, first, group, row + lane % 8, rows);
        float out[8][4];
#pragma unroll
        for (int i = 0; i < 32; i++) out[i / 4][i % 4] = 0.0f;
        copied();
        __syncthreads();
        widen_wide<TYPE>(stored_keys, keys);
#pragma unroll 1
        for (u32 turns = 0; base <= highest; base += PARTITION, turns++) {
            // Keys are floats; weights, and what is stored, are through.
            __syncthreads();
            bring_wide(shared.places[turns % 2].values, stored_values);
            bool more = base + PARTITION <= highest;
            if (more) bring_wide(shared.places[(turns + 1) % 2].keys, stored_keys);
            // 3. Scores
            wide_scores<WIDE_DIM, PARTITION>(p, q, keys, weights, rows, base, lowest, highest);
            copied();
            __syncthreads();
            if (more) find(turns, base + 2 * PARTITION);
            if (row < rows) {
                // 4. Weights
                WideSeen seen(of_row, base);
                wide_weights(p, weights, base, of_row, seen.all(), shared.kept, shared.taken);
                __syncwarp();
                // 5. Values
                float o[8][4];
#pragma unroll
                for (int i = 0; i < 32; i++) o[i / 4][i % 4] = 0.0f;
                wide_values<TYPE, 4, STORED_STRIDE>(seen, 0, PARTITION, weights + row, stored_values, o);
                wide_join(o, shared.kept + row, shared.taken + row, out);
            }
            if (more) widen_wide<TYPE>(stored_keys, keys);
        }
        __syncthreads();
        // 6. The end of each row
        wide_ends(p, first, group, kv_head, row, rows, of_row, out, apart, shared.tops, shared.sums);
    }
}

extern "C" __global__ void __launch_bounds__(256, 1) attend_tile_128(const __grid_constant__ Attention p) {
    __shared__ __align__(16) OfWideTile shared;
    begin();
    if (p.cache.type == F16) attend_wide<F16>(p, shared);
    else attend_wide<BF16>(p, shared);
}
