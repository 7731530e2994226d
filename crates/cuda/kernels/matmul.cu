// Products of weight matrices with encoded activations: `out[t, r] (+)= W[r] x[t] (+ bias[r])`. One kernel for each way to sum, each for one token and for
// tiles of several. An element of the result is always summed whole, by one warp or half of one, in the order that docs/numerics.md gives.
//
// Of a mixture each output row has an expert of its own, whose matrix is looked up in a table; a kernel leaves rows alone whose matrix is another kernel's.
#include "numerics.cuh"

struct Matmul {
    // The matrix, if there is no table.
    Matrix matrix;
    const Matrix* table;
    // [outputs]: which matrix of the table each output row takes.
    const u32* experts;
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
    u32 unused;
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
    float* to = p.out.row(output) + r;
    if (p.bias) y = add(y, p.bias[r]);
    *to = p.accumulate ? add(*to, y) : y;
}

// ---- lane sums

template <int KIND> __device__ __forceinline__ float lane_weight(const Matrix& m, u64 r, u32 i) {
    const u8* row = m.data + r * m.row_bytes;
    if (KIND == LANES_F32) return ((const float*)row)[i];
    if (KIND == LANES_F16) return from_f16(((const u16*)row)[i]);
    if (KIND == LANES_BF16) return from_bf16(((const u16*)row)[i]);
    return affine_weight(m, r, i);
}

// Half a warp takes a row.
template <int KIND, int T> __device__ __forceinline__ void lane_sums(const Matmul& p) {
    u32 lane = threadIdx.x % 16;
    u64 r = (u64)blockIdx.x * (THREADS / 16) + threadIdx.x / 16;
    // A row that is not there is computed as the last, so that whole warps meet, and not stored.
    u64 row = min(r, (u64)p.rows - 1);
    for (u32 tile = blockIdx.y; tile * T < p.outputs; tile += gridDim.y) {
        Work w;
        if (!work<T>(p, KIND, tile, w)) continue;
        float acc[T];
#pragma unroll
        for (int t = 0; t < T; t++) acc[t] = 0.0f;
        u32 whole = p.cols / 16 * 16;
        // Several weights are under way before the first is used.
        const int DEEP = T == 1 ? 16 : 4;
        for (u32 from = lane; from < whole; from += 16 * DEEP) {
            float weights[DEEP];
#pragma unroll
            for (int d = 0; d < DEEP; d++) {
                u32 i = from + 16 * d;
                weights[d] = i < whole ? lane_weight<KIND>(w.m, row, i) : 0.0f;
            }
#pragma unroll
            for (int d = 0; d < DEEP; d++) {
                u32 i = from + 16 * d;
                if (i >= whole) break;
#pragma unroll
                for (int t = 0; t < T; t++) {
                    if (t < w.count) acc[t] = fma(weights[d], p.x.f[(w.x + t) * p.cols + i], acc[t]);
                }
            }
        }
        if (whole < p.cols) {
            u32 i = whole + lane;
            bool inside = i < p.cols;
            float weight = inside ? lane_weight<KIND>(w.m, row, i) : 0.0f;
#pragma unroll
            for (int t = 0; t < T; t++) {
                float x = inside && t < w.count ? p.x.f[(w.x + t) * p.cols + i] : 0.0f;
                acc[t] = fma(weight, x, acc[t]);
            }
        }
#pragma unroll
        for (int t = 0; t < T; t++) {
            float y = lane_tree(acc[t]);
            if (lane == t && t < w.count && r < p.rows) put(p, w.first + t, (u32)r, y);
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

template <int KIND, int T> __device__ __forceinline__ void pair_sums(const Matmul& p) {
    u32 lane = threadIdx.x % 16;
    u64 r = (u64)blockIdx.x * (THREADS / 16) + threadIdx.x / 16;
    u64 row = min(r, (u64)p.rows - 1);
    for (u32 tile = blockIdx.y; tile * T < p.outputs; tile += gridDim.y) {
        Work w;
        if (!work<T>(p, KIND, tile, w)) continue;
        float acc[T];
#pragma unroll
        for (int t = 0; t < T; t++) acc[t] = 0.0f;
        // Several weights are under way before the first is used.
        const int DEEP = T == 1 ? (KIND == PAIRS_BF16 ? 32 : 8) : 4;
        for (u32 from = 0; from < p.cols; from += 32 * DEEP) {
            float even[DEEP], odd[DEEP];
#pragma unroll
            for (int d = 0; d < DEEP; d++) {
                u32 i = from + 32 * d + 2 * lane;
                even[d] = odd[d] = 0.0f;
                if (i < p.cols) pair_weights<KIND>(w.m, row, i, p.cols, even[d], odd[d]);
            }
#pragma unroll
            for (int d = 0; d < DEEP; d++) {
                if (from + 32 * d >= p.cols) break;
                u32 i = from + 32 * d + 2 * lane;
#pragma unroll
                for (int t = 0; t < T; t++) {
                    float x = 0.0f, x_odd = 0.0f;
                    if (i < p.cols && t < w.count) pair_inputs(p.x.h + (w.x + t) * p.cols, i, p.cols, x, x_odd);
                    acc[t] = flushed_fma(odd[d], x_odd, acc[t]);
                    acc[t] = flushed_fma(even[d], x, acc[t]);
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

// 32 q as bytes, in the order in which activations lie.
template <int BITS> __device__ __forceinline__ void unpack(const u8* p, u32 (&w)[8]) {
    if (BITS == 4) {
        uint4 v = *(const uint4*)p;
        u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int e = 0; e < 4; e++) {
            w[2 * e] = words[e] & 0x0f0f0f0fu;
            w[2 * e + 1] = words[e] >> 4 & 0x0f0f0f0fu;
        }
    } else if (BITS == 8) {
        uint4 a = ((const uint4*)p)[0], b = ((const uint4*)p)[1];
        u32 words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
        for (int e = 0; e < 4; e++) {
            w[2 * e] = __byte_perm(words[2 * e], words[2 * e + 1], 0x6420);
            w[2 * e + 1] = __byte_perm(words[2 * e], words[2 * e + 1], 0x7531);
        }
    } else {
        u32 words[BITS + 1];
#pragma unroll
        for (int i = 0; i < BITS; i++) words[i] = ((const u32*)p)[i];
        words[BITS] = 0;
        const u32 mask = (1u << BITS) - 1;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            u32 even = 0, odd = 0;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const int bit = (e * 8 + j) * BITS;
                const u32 q = __funnelshift_r(words[bit / 32], words[bit / 32 + 1], bit % 32) & mask;
                if (j % 2 == 0) even |= q << (j / 2 * 8);
                else odd |= q << (j / 2 * 8);
            }
            w[2 * e] = even;
            w[2 * e + 1] = odd;
        }
    }
}

// `sum + a . b` of four u8 and four i8.
__device__ __forceinline__ int dot4(u32 a, u32 b, int sum) {
    int d;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(sum));
    return d;
}

// A warp takes a row: each thread the integer sums of a group, which then meet in four chains, group w in that of thread w mod 4.
template <int BITS, int T> __device__ __forceinline__ void integer_sums(const Matmul& p) {
    u32 lane = threadIdx.x % WARP;
    u64 row = (u64)blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
    if (row >= p.rows) return;
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
                    unpack<BITS>(data + column / 8 * BITS, q);
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
            if (lane == t && t < w.count) put(p, w.first + t, (u32)row, y);
        }
    }
}

// ---- kernels: for one token, and for tiles of eight

#define KERNELS(name, body, variant)                                                                  \
    extern "C" __global__ void __launch_bounds__(256) name##_1(const Matmul p) { body<variant, 1>(p); } \
    extern "C" __global__ void __launch_bounds__(256) name##_8(const Matmul p) { body<variant, 8>(p); }

KERNELS(lanes_f32, lane_sums, LANES_F32)
KERNELS(lanes_f16, lane_sums, LANES_F16)
KERNELS(lanes_bf16, lane_sums, LANES_BF16)
KERNELS(lanes_affine, lane_sums, LANES_AFFINE)
KERNELS(pairs_bf16, pair_sums, PAIRS_BF16)
KERNELS(pairs_affine, pair_sums, PAIRS_AFFINE)
KERNELS(integers_2, integer_sums, 2)
KERNELS(integers_3, integer_sums, 3)
KERNELS(integers_4, integer_sums, 4)
KERNELS(integers_5, integer_sums, 5)
KERNELS(integers_6, integer_sums, 6)
KERNELS(integers_8, integer_sums, 8)
