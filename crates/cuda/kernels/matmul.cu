// Products of weight matrices with encoded activations: `out[t, r] (+)= W[r] x[t] (+ bias[r])`. One kernel for each way to sum, each for one token and for
// tiles of several. An element of the result is always summed whole, by one warp or half of one, in the order that docs/numerics.md gives.
//
// Of a mixture each output row has an expert of its own, whose matrix is looked up in a table; a kernel leaves rows alone whose matrix is another kernel's.
#pragma once
#include "numerics.cuh"

struct Matmul {
    // The matrix, if there is no table.
    Matrix matrix;
    const Matrix* table;
    // [outputs]: which matrix of the table each output row takes.
    const u32* experts;
    // Output rows by their matrix, and tiles of them: `Pairs` of mixture.cu; null: they are taken as they come.
    const u32* tiles;
    const u32* order;
    // Output rows of each row of x, where there is a table.
    u32 per_row;
    u32 rows;
    u32 cols;
    // Output rows.
    u32 outputs;
    Encoded x;
    Tensor out;
    // Null: none.
    const float* bias;
    u32 accumulate;
    // Rows come in runs of so many; from run to run so many rows further in the matrix, and columns in the output.
    u32 run;
    u32 run_rows;
    u32 run_columns;

    // Row `r` of the product in the matrix, and its column in the output.
    __device__ __forceinline__ u64 in_matrix(u64 r) const { return run == rows ? r : r / run * run_rows + r % run; }
    __device__ __forceinline__ u64 in_output(u32 r) const { return run == rows ? r : (u64)(r / run) * run_columns + r % run; }
};

// Products of the same input that one kernel computes side by side, in the third direction of the grid.
struct Products {
    Matmul parts[3];
};

static const u32 THREADS = 256;

// What a warp or half-warp works on.
struct Work {
    Matrix m;
    // Row of x of the first token.
    u64 x;
    // First output row, and how many.
    u32 first;
    u32 count;
};

// Whether output row `first` and on are this kernel's, and with what.
template <int T> __device__ __forceinline__ bool work(const Matmul& p, u32 kind, u32 tile, Work& w) {
    w.first = tile * T;
    w.count = min((u32)T, p.outputs - w.first);
    if (p.table) {
        w.m = p.table[p.experts[w.first]];
        w.x = w.first / p.per_row;
    } else {
        w.m = p.matrix;
        w.x = w.first;
    }
    return w.m.kind == kind;
}

__device__ __forceinline__ void put(const Matmul& p, u32 output, u32 r, float y) {
    float* to = p.out.row(output) + p.in_output(r);
    if (p.bias) y = add(y, p.bias[r]);
    *to = p.accumulate ? add(*to, y) : y;
}

// A scale, from how it lies.
__device__ __forceinline__ float value(u32 raw, u32 type) {
    if (type == BF16) return bits(raw << 16);
    return type == F32 ? bits(raw) : from_f16((u16)raw);
}

// ---- lane sums

template <int KIND> __device__ __forceinline__ float lane_weight(const Matrix& m, u64 r, u32 i) {
    const u8* row = m.data + r * m.row_bytes;
    if (KIND == LANES_F32) return ((const float*)row)[i];
    if (KIND == LANES_F16) return from_f16(((const u16*)row)[i]);
    if (KIND == LANES_BF16) return from_bf16(((const u16*)row)[i]);
    return affine_weight(m, r, i);
}

// A lane sum of an affine row whose q do not reach from word to word, for one token: 512 columns' words and scales are under way together. A group is whole
// pairs of sixteens, so what a pair needs is the same for all lanes.
__device__ __forceinline__ float affine_lanes(const Matrix& m, u64 row, const float* x, u32 cols) {
    const int DEEP = 32;
    u32 lane = threadIdx.x % 16, shift = 31 - __clz(m.group), mask = (1u << m.bits) - 1;
    const u32* words = (const u32*)(m.data + row * m.row_bytes);
    float acc = 0.0f;
    for (u32 from = 0; from < cols; from += 16 * DEEP) {
        u32 own[DEEP];
        float s[DEEP / 2], b[DEEP / 2], v[DEEP];
#pragma unroll
        for (int d = 0; d < DEEP; d++) {
            u32 i = from + 16 * d + lane;
            own[d] = i < cols ? __ldg(words + i * m.bits / 32) : 0;
            v[d] = i < cols ? x[i] : 0.0f;
            if (d % 2 == 0) {
                u64 g = row * m.groups + (min(i, cols - 1) >> shift);
                s[d / 2] = element(m.scales, m.type, g);
                b[d / 2] = element(m.biases, m.type, g);
            }
        }
#pragma unroll
        for (int d = 0; d < DEEP; d++) {
            u32 i = from + 16 * d + lane;
            if (from + 16 * d >= cols) break;
            float q = (float)(own[d] >> i * m.bits % 32 & mask);
            acc = fma(fma(q, s[d / 2], b[d / 2]), v[d], acc);
        }
    }
    return acc;
}

// One token, or pairs of a token and an expert: half a warp takes a row.
template <int KIND> __device__ __forceinline__ void lane_sums(const Matmul& p) {
    begin();
    const u32 per_block = blockDim.x / 16;
    if (blockIdx.x * per_block >= p.rows) return;
    u32 lane = threadIdx.x % 16;
    u64 r = (u64)blockIdx.x * per_block + threadIdx.x / 16;
    // A row that is not there is computed as the last, so that whole warps meet, and not stored.
    u64 row = p.in_matrix(min(r, (u64)p.rows - 1));
    for (u32 tile = blockIdx.y; tile < p.outputs; tile += gridDim.y) {
        Work w;
        if (!work<1>(p, KIND, tile, w)) continue;
        const float* x = p.x.f + w.x * p.cols;
        float acc = 0.0f;
        if (KIND == LANES_AFFINE && 32 % w.m.bits == 0) {
            acc = affine_lanes(w.m, row, x, p.cols);
        } else {
            // Several weights are under way before the first is used; missing ones of the last sixteen are zeros.
            const int DEEP = 16;
            const u32 all = (p.cols + 15) / 16 * 16;
            for (u32 from = lane; from < all; from += 16 * DEEP) {
                float weights[DEEP];
#pragma unroll
                for (int d = 0; d < DEEP; d++) {
                    u32 i = from + 16 * d;
                    weights[d] = i < p.cols ? lane_weight<KIND>(w.m, row, i) : 0.0f;
                }
#pragma unroll
                for (int d = 0; d < DEEP; d++) {
                    u32 i = from + 16 * d;
                    if (i >= all) break;
                    acc = fma(weights[d], i < p.cols ? x[i] : 0.0f, acc);
                }
            }
        }
        float y = lane_tree(acc);
        if (lane == 0 && r < p.rows) put(p, w.first, (u32)r, y);
    }
}

// Four neighbouring columns of a row, as they lie.
template <int KIND> struct FourColumns {
    u32 w[4];

    __device__ __forceinline__ void load(const Matrix& m, u64 r, u32 i, u32 cols) {
        const u8* row = m.data + r * m.row_bytes;
#pragma unroll
        for (u32 e = 0; e < 4; e++) {
            w[e] = 0;
            if (KIND == LANES_F32 && i + e < cols) w[e] = ((const u32*)row)[i + e];
            if ((KIND == LANES_F16 || KIND == LANES_BF16) && i + e < cols) w[e] = ((const u16*)row)[i + e];
        }
        if (KIND == LANES_AFFINE && i < cols) {
            u32 bit = i * m.bits, word = bit / 32, shift = bit % 32;
            u64 g = r * m.groups + (i >> (31 - __clz(m.group)));
            const u32* words = (const u32*)row;
            w[0] = __funnelshift_r(words[word], shift + 4 * m.bits > 32 ? words[word + 1] : 0, shift);
            w[1] = m.type == F32 ? ((const u32*)m.scales)[g] : ((const u16*)m.scales)[g];
            w[2] = m.type == F32 ? ((const u32*)m.biases)[g] : ((const u16*)m.biases)[g];
        }
    }

    __device__ __forceinline__ float4 values(const Matrix& m) const {
        if (KIND == LANES_F32) return make_float4(bits(w[0]), bits(w[1]), bits(w[2]), bits(w[3]));
        if (KIND == LANES_F16) return make_float4(from_f16((u16)w[0]), from_f16((u16)w[1]), from_f16((u16)w[2]), from_f16((u16)w[3]));
        if (KIND == LANES_BF16) return make_float4(bits(w[0] << 16), bits(w[1] << 16), bits(w[2] << 16), bits(w[3] << 16));
        float s = value(w[1], m.type), b = value(w[2], m.type), q[4];
#pragma unroll
        for (u32 e = 0; e < 4; e++) q[e] = fma((float)(w[0] >> e * m.bits & ((1u << m.bits) - 1)), s, b);
        return make_float4(q[0], q[1], q[2], q[3]);
    }
};

// Several tokens: a block has 4 rows and 8 tokens, whose columns it brings to shared memory, weights as floats; a thread has one lane of a row and 2 tokens.
template <int KIND> __device__ __forceinline__ void lane_tiles(const Matmul& p) {
    // The stride is such that both halves of a warp meet different banks.
    const u32 ROWS = 4, TOKENS = 8, CHUNK = 768, STRIDE = CHUNK + 8;
    __shared__ __align__(16) float weights[ROWS * STRIDE], xs[TOKENS * STRIDE];
    const u32 thread = threadIdx.x, lane = thread % 16, first_row = blockIdx.x * ROWS, cols = p.cols;
    const u32 token_pair = thread / 16 % 4 * 2, row = thread / 64;
    if (first_row >= p.rows) {
        begin();
        return;
    }
    const Matrix& m = p.matrix;
    u64 own_row = p.in_matrix(min(first_row + row, p.rows - 1));
    FourColumns<KIND> next[3];
    float4 next_x[6];
    auto load_weights = [&](u32 from) {
#pragma unroll
        for (u32 k = 0; k < 3; k++) next[k].load(m, own_row, from + 4 * (thread % 64) + 256 * k, cols);
    };
    load_weights(0);
    begin();
    for (u32 tile = blockIdx.y; tile * TOKENS < p.outputs; tile += gridDim.y) {
        const float* x = p.x.f + (u64)min(tile * TOKENS + thread / 32, p.outputs - 1) * cols;
        auto load_inputs = [&](u32 from) {
#pragma unroll
            for (u32 k = 0; k < 6; k++) {
                u32 i = from + 4 * (thread % 32) + 128 * k;
                if (cols % 4 == 0) {
                    next_x[k] = i < cols ? *(const float4*)(x + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                } else {
                    next_x[k] = make_float4(i < cols ? x[i] : 0.0f, i + 1 < cols ? x[i + 1] : 0.0f, i + 2 < cols ? x[i + 2] : 0.0f, i + 3 < cols ? x[i + 3] : 0.0f);
                }
            }
        };
        if (tile != blockIdx.y) load_weights(0);
        load_inputs(0);
        float acc[2] = {0.0f, 0.0f};
        for (u32 from = 0; from < cols; from += CHUNK) {
            __syncthreads();
#pragma unroll
            for (u32 k = 0; k < 3; k++) *(float4*)(weights + row * STRIDE + 4 * (thread % 64) + 256 * k) = next[k].values(m);
#pragma unroll
            for (u32 k = 0; k < 6; k++) *(float4*)(xs + thread / 32 * STRIDE + 4 * (thread % 32) + 128 * k) = next_x[k];
            __syncthreads();
            if (from + CHUNK < cols) {
                load_weights(from + CHUNK);
                load_inputs(from + CHUNK);
            }
            // Missing columns of the last sixteen are zeros, and nothing comes behind them.
            const u32 steps = min(CHUNK / 16, (cols - from + 15) / 16);
#pragma unroll 8
            for (u32 step = 0; step < steps; step++) {
                float w = weights[row * STRIDE + 16 * step + lane];
#pragma unroll
                for (u32 t = 0; t < 2; t++) acc[t] = fma(w, xs[(token_pair + t) * STRIDE + 16 * step + lane], acc[t]);
            }
        }
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            float y = lane_tree(acc[i]);
            u32 r = first_row + row, t = tile * TOKENS + token_pair + i;
            if (lane == i && r < p.rows && t < p.outputs) put(p, t, r, y);
        }
    }
}

// ---- bf16 pairs

// The weights of columns i and i + 1, of which the second may not be there.
template <int KIND> __device__ __forceinline__ void pair_weights(const Matrix& m, u64 r, u32 i, u32 cols, float& even, float& odd) {
    if (KIND == PAIRS_BF16) {
        const u16* row = (const u16*)(m.data + r * m.row_bytes);
        if (cols % 2 == 0) {
            u32 both = *(const u32*)(row + i);
            even = bits(both << 16);
            odd = bits(both & 0xffff0000u);
        } else {
            even = from_bf16(row[i]);
            odd = i + 1 < cols ? from_bf16(row[i + 1]) : 0.0f;
        }
    } else {
        even = from_bf16(to_bf16(affine_weight(m, r, i)));
        odd = from_bf16(to_bf16(affine_weight(m, r, i + 1)));
    }
}

__device__ __forceinline__ void pair_inputs(const u16* x, u32 i, u32 cols, float& even, float& odd) {
    if (cols % 2 == 0) {
        u32 both = *(const u32*)(x + i);
        even = bits(both << 16);
        odd = bits(both & 0xffff0000u);
    } else {
        even = from_bf16(x[i]);
        odd = i + 1 < cols ? from_bf16(x[i + 1]) : 0.0f;
    }
}

// Rows of bf16 that are whole words: many are under way before the first is used.
template <int T> __device__ __forceinline__ void paired_words(const Matmul& p, const Work& w, u64 row, float (&acc)[T]) {
    const int DEEP = T == 1 ? 32 : 8;
    u32 lane = threadIdx.x % 16, all = p.cols / 2;
    const u32* words = (const u32*)(w.m.data + row * w.m.row_bytes);
    for (u32 from = lane; from < (all + 15) / 16 * 16; from += 16 * DEEP) {
        u32 weights[DEEP];
#pragma unroll
        for (int d = 0; d < DEEP; d++) weights[d] = from + 16 * d < all ? __ldcs(words + from + 16 * d) : 0;
        // The first weights are under way before what they meet is there.
        begin();
#pragma unroll
        for (int d = 0; d < DEEP; d++) {
            u32 i = from + 16 * d;
            if (i - lane >= all) break;
#pragma unroll
            for (int t = 0; t < T; t++) {
                u32 x = i < all && t < w.count ? ((const u32*)(p.x.h + (w.x + t) * p.cols))[i] : 0;
                acc[t] = flushed_fma(bits(weights[d] & 0xffff0000u), bits(x & 0xffff0000u), acc[t]);
                acc[t] = flushed_fma(bits(weights[d] << 16), bits(x << 16), acc[t]);
            }
        }
    }
}

template <int KIND, int T> __device__ __forceinline__ void pair_sums(const Matmul& p) {
    bool idle = blockIdx.y * T >= p.outputs || blockIdx.x * (THREADS / 16) >= p.rows;
    if (p.table || KIND != PAIRS_BF16 || p.cols % 2 != 0 || idle) begin();
    if (idle) return;
    u32 lane = threadIdx.x % 16;
    u64 r = (u64)blockIdx.x * (THREADS / 16) + threadIdx.x / 16;
    u64 row = p.in_matrix(min(r, (u64)p.rows - 1));
    for (u32 tile = blockIdx.y; tile * T < p.outputs; tile += gridDim.y) {
        Work w;
        if (!work<T>(p, KIND, tile, w)) continue;
        float acc[T];
#pragma unroll
        for (int t = 0; t < T; t++) acc[t] = 0.0f;
        if (KIND == PAIRS_BF16 && p.cols % 2 == 0) {
            paired_words<T>(p, w, row, acc);
        } else {
#pragma unroll 4
            for (u32 c = 0; c < p.cols; c += 32) {
                u32 i = c + 2 * lane;
                bool inside = i < p.cols;
                float even = 0.0f, odd = 0.0f;
                if (inside) pair_weights<KIND>(w.m, row, i, p.cols, even, odd);
#pragma unroll
                for (int t = 0; t < T; t++) {
                    float x = 0.0f, x_odd = 0.0f;
                    if (inside && t < w.count) pair_inputs(p.x.h + (w.x + t) * p.cols, i, p.cols, x, x_odd);
                    acc[t] = flushed_fma(odd, x_odd, acc[t]);
                    acc[t] = flushed_fma(even, x, acc[t]);
                }
            }
        }
#pragma unroll
        for (int t = 0; t < T; t++) {
            float y = lane_tree(acc[t]);
            if (lane == t && t < w.count && r < p.rows) put(p, w.first + t, (u32)r, y);
        }
    }
}

// ---- integer groups

// 32 q as bytes, in the order in which activations lie, from the words that they are packed in.
template <int BITS> __device__ __forceinline__ void spread(const u32 (&words)[BITS], u32 (&w)[8]) {
    if (BITS == 4) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            w[2 * e] = words[e % BITS] & 0x0f0f0f0fu;
            w[2 * e + 1] = words[e % BITS] >> 4 & 0x0f0f0f0fu;
        }
    } else if (BITS == 8) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            w[2 * e] = __byte_perm(words[2 * e % BITS], words[(2 * e + 1) % BITS], 0x6420);
            w[2 * e + 1] = __byte_perm(words[2 * e % BITS], words[(2 * e + 1) % BITS], 0x7531);
        }
    } else {
        const u32 mask = (1u << BITS) - 1;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            u32 even = 0, odd = 0;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const int bit = (e * 8 + j) * BITS, word = bit / 32;
                const u32 q = __funnelshift_r(words[word], word + 1 < BITS ? words[(word + 1) % BITS] : 0, bit % 32) & mask;
                if (j % 2 == 0) even |= q << (j / 2 * 8);
                else odd |= q << (j / 2 * 8);
            }
            w[2 * e] = even;
            w[2 * e + 1] = odd;
        }
    }
}

// 32 q as they lie, under way.
template <int BITS> struct Packed {
    u32 words[BITS];

    __device__ __forceinline__ void load(const u8* p, bool there) {
        if (BITS == 4 || BITS == 8) {
#pragma unroll
            for (int i = 0; i < BITS / 4; i++) {
                uint4 v = there ? __ldcs((const uint4*)p + i) : make_uint4(0, 0, 0, 0);
                words[4 * i] = v.x;
                words[4 * i + 1] = v.y;
                words[4 * i + 2] = v.z;
                words[4 * i + 3] = v.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < BITS; i++) words[i] = there ? __ldcs((const u32*)p + i) : 0;
        }
    }
};

// `sum + a . b` of four u8 and four i8.
__device__ __forceinline__ int dot4(u32 a, u32 b, int sum) {
    int d;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(sum));
    return d;
}

// A warp takes a row for several tokens: each thread the integer sums of a group, which then meet in four chains, group w in that of thread w mod 4.
template <int BITS, int T> __device__ __forceinline__ void integer_sums(const Matmul& p) {
    begin();
    u32 lane = threadIdx.x % WARP;
    u32 r = blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
    if (r >= p.rows) return;
    u64 row = p.in_matrix(r);
    for (u32 tile = blockIdx.y; tile * T < p.outputs; tile += gridDim.y) {
        Work w;
        if (!work<T>(p, INTEGERS + (BITS == 8 ? 5 : BITS - 2), tile, w)) continue;
        const u8* data = w.m.data + row * w.m.row_bytes;
        u32 parts = w.m.group / 32;
        float acc[T];
#pragma unroll
        for (int t = 0; t < T; t++) acc[t] = 0.0f;
        for (u32 from = 0; from < w.m.groups; from += WARP) {
            u32 g = from + lane;
            float s = 0.0f, b = 0.0f, joined[T], m[T];
#pragma unroll
            for (int t = 0; t < T; t++) joined[t] = m[t] = 0.0f;
            if (g < w.m.groups) {
                s = element(w.m.scales, w.m.type, row * w.m.groups + g);
                b = element(w.m.biases, w.m.type, row * w.m.groups + g);
                for (u32 part = 0; part < parts; part++) {
                    u32 column = g * w.m.group + part * 32, q[8];
                    Packed<BITS> packed;
                    packed.load(data + column / 8 * BITS, true);
                    spread<BITS>(packed.words, q);
#pragma unroll
                    for (int t = 0; t < T; t++) {
                        if (t >= w.count) break;
                        u64 at = (w.x + t) * p.cols + column;
                        uint4 low = ((const uint4*)(p.x.q + at))[0], high = ((const uint4*)(p.x.q + at))[1];
                        int sum = dot4(q[0], low.x, 0);
                        sum = dot4(q[1], low.y, sum);
                        sum = dot4(q[2], low.z, sum);
                        sum = dot4(q[3], low.w, sum);
                        sum = dot4(q[4], high.x, sum);
                        sum = dot4(q[5], high.y, sum);
                        sum = dot4(q[6], high.z, sum);
                        sum = dot4(q[7], high.w, sum);
                        float sx = p.x.sx[at / 32], mx = p.x.mx[at / 32];
                        joined[t] = part == 0 ? mul(sx, (float)sum) : fma(sx, (float)sum, joined[t]);
                        m[t] = part == 0 ? mx : add(m[t], mx);
                    }
                }
            }
#pragma unroll
            for (u32 j = 0; j < WARP; j += 4) {
                u32 of = j + lane % 4;
                bool there = from + of < w.m.groups;
                float s_of = __shfl_sync(ALL, s, of), b_of = __shfl_sync(ALL, b, of);
#pragma unroll
                for (int t = 0; t < T; t++) {
                    float joined_of = __shfl_sync(ALL, joined[t], of), m_of = __shfl_sync(ALL, m[t], of);
                    if (there) acc[t] = fma(b_of, m_of, fma(s_of, joined_of, acc[t]));
                }
            }
        }
#pragma unroll
        for (int t = 0; t < T; t++) {
            float y = add(acc[t], __shfl_xor_sync(ALL, acc[t], 2));
            y = add(y, __shfl_xor_sync(ALL, y, 1));
            if (lane == t && t < w.count) put(p, w.first + t, r, y);
        }
    }
}

// Groups of a row, in shared memory: scale, bias, joined sum.
static const u32 CHUNK = 1024, SLOTS = CHUNK / 32 + 1;

// The same for one token: a warp takes R rows through chunks of 1,024 columns, D of which are under way; a thread sums 32 columns of each row, and thread
// (row, chain) runs through what meets in shared memory: [groups] joined sums of activations, then SLOTS of each row of each warp.
template <int BITS, int R, int D> __device__ __forceinline__ void integer_sum(const Matmul& p) {
    begin();
    const u32 WARPS = 4;
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, parts = p.cols / 32, chunks = (p.cols + CHUNK - 1) / CHUNK;
    u64 first_row = ((u64)blockIdx.x * WARPS + warp) * R;
    for (u32 tile = blockIdx.y; tile < p.outputs; tile += gridDim.y) {
        Work w;
        if (!work<1>(p, INTEGERS + (BITS == 8 ? 5 : BITS - 2), tile, w)) continue;
        const Matrix& m = w.m;
        u32 of_group = m.group / 32, of_chunk = CHUNK / m.group;
        const i8* q = p.x.q + w.x * p.cols;
        const float *sx = p.x.sx + w.x * parts, *mx = p.x.mx + w.x * parts;
        float* sums = room;
        float4* own = (float4*)(room + (parts + 3) / 4 * 4) + warp * R * SLOTS;
        __syncthreads();
        for (u32 g = threadIdx.x; g < m.groups; g += blockDim.x) {
            float sum = mx[g * of_group];
            for (u32 i = 1; i < of_group; i++) sum = add(sum, mx[g * of_group + i]);
            sums[g] = sum;
        }
        u64 rows[R];
        // A row that is not there is computed as the last, and not stored.
#pragma unroll
        for (int r = 0; r < R; r++) rows[r] = p.in_matrix(min(first_row + r, (u64)p.rows - 1));
        float acc = 0.0f;
        for (u32 from = 0; from < chunks; from += D) {
            Packed<BITS> packed[D][R];
            float scales[D][R], biases[D][R];
#pragma unroll
            for (int d = 0; d < D; d++) {
                u32 part = (from + d) * 32 + lane;
#pragma unroll
                for (int r = 0; r < R; r++) packed[d][r].load(m.data + rows[r] * m.row_bytes + (u64)part * 4 * BITS, part < parts);
            }
#pragma unroll
            for (int d = 0; d < D; d++) {
                u32 g = (from + d) * of_chunk + lane;
                bool there = lane < of_chunk && g < m.groups;
#pragma unroll
                for (int r = 0; r < R; r++) {
                    scales[d][r] = there ? element(m.scales, m.type, rows[r] * m.groups + g) : 0.0f;
                    biases[d][r] = there ? element(m.biases, m.type, rows[r] * m.groups + g) : 0.0f;
                }
            }
            // What meets is there.
            if (from == 0) __syncthreads();
#pragma unroll
            for (int d = 0; d < D; d++) {
                if (from + d >= chunks) break;
                u32 part = (from + d) * 32 + lane;
                uint4 low = make_uint4(0, 0, 0, 0), high = low;
                float scale = 0.0f;
                if (part < parts) {
                    low = ((const uint4*)(q + part * 32))[0];
                    high = ((const uint4*)(q + part * 32))[1];
                    scale = sx[part];
                }
                __syncwarp();
#pragma unroll
                for (int r = 0; r < R; r++) {
                    u32 b[8];
                    spread<BITS>(packed[d][r].words, b);
                    int even = dot4(b[0], low.x, 0), odd = dot4(b[1], low.y, 0);
                    even = dot4(b[2], low.z, even);
                    odd = dot4(b[3], low.w, odd);
                    even = dot4(b[4], high.x, even);
                    odd = dot4(b[5], high.y, odd);
                    even = dot4(b[6], high.z, even);
                    odd = dot4(b[7], high.w, odd);
                    float sum = (float)(even + odd), joined = mul(scale, sum);
                    for (u32 i = 1; i < of_group; i++) {
                        float scale_i = __shfl_down_sync(ALL, scale, i), sum_i = __shfl_down_sync(ALL, sum, i);
                        joined = fma(scale_i, sum_i, joined);
                    }
                    if (lane % of_group == 0) own[r * SLOTS + lane / of_group].z = joined;
                    if (lane < of_chunk) *(float2*)(own + r * SLOTS + lane) = make_float2(scales[d][r], biases[d][r]);
                }
                __syncwarp();
                if (lane < 4 * R) {
                    u32 before = (from + d) * of_chunk, here = min(of_chunk, m.groups - before);
                    const float4* slots = own + lane / 4 * SLOTS;
                    for (u32 g = lane % 4; g < here; g += 4) {
                        float4 v = slots[g];
                        acc = fma(v.y, sums[before + g], fma(v.x, v.z, acc));
                    }
                }
            }
        }
        float y = add(acc, __shfl_xor_sync(ALL, acc, 2));
        y = add(y, __shfl_xor_sync(ALL, y, 1));
        u64 row = first_row + lane / 4;
        if (lane < 4 * R && lane % 4 == 0 && row < p.rows) put(p, w.first, (u32)row, y);
    }
}

// ---- kernels: for one token, and for tiles of eight

#define KERNELS(name, body, variant)                                                                                                             \
    extern "C" __global__ void __launch_bounds__(256) name##_1(const __grid_constant__ Products p) { body<variant, 1>(p.parts[blockIdx.z]); } \
    extern "C" __global__ void __launch_bounds__(256) name##_8(const __grid_constant__ Products p) { body<variant, 8>(p.parts[blockIdx.z]); }

#define LANE_KERNELS(name, kind)                                                                                                             \
    extern "C" __global__ void __launch_bounds__(256) name##_1(const __grid_constant__ Products p) { lane_sums<kind>(p.parts[blockIdx.z]); } \
    extern "C" __global__ void __launch_bounds__(256) name##_8(const __grid_constant__ Products p) { lane_tiles<kind>(p.parts[blockIdx.z]); }

LANE_KERNELS(lanes_f32, LANES_F32)
LANE_KERNELS(lanes_f16, LANES_F16)
LANE_KERNELS(lanes_bf16, LANES_BF16)
LANE_KERNELS(lanes_affine, LANES_AFFINE)
KERNELS(pairs_bf16, pair_sums, PAIRS_BF16)
KERNELS(pairs_affine, pair_sums, PAIRS_AFFINE)

// For one token in few rows and in many.
#define INTEGER_KERNELS(bits)                                                                                                                              \
    extern "C" __global__ void __launch_bounds__(128) integers_##bits##_1(const __grid_constant__ Products p) {                                            \
        integer_sum<bits, 2, bits == 8 ? 1 : 2>(p.parts[blockIdx.z]);                                                                                     \
    }                                                                                                                                                      \
    extern "C" __global__ void __launch_bounds__(128) integers_##bits##_1_wide(const __grid_constant__ Products p) {                                       \
        integer_sum<bits, 4, 1>(p.parts[blockIdx.z]);                                                                                                      \
    }                                                                                                                                                      \
    extern "C" __global__ void __launch_bounds__(256) integers_##bits##_8(const __grid_constant__ Products p) { integer_sums<bits, 8>(p.parts[blockIdx.z]); }

INTEGER_KERNELS(2)
INTEGER_KERNELS(3)
INTEGER_KERNELS(4)
INTEGER_KERNELS(5)
INTEGER_KERNELS(6)
INTEGER_KERNELS(8)
