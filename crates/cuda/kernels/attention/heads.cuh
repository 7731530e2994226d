// One partition of attention for a few query heads of a token: scores, weights, weighted sums of values.
#pragma once
#include "attention/attention.cuh"
#include "attention/cache.cuh"
#include "attention/lanes.cuh"
#include "prim/numerics.cuh"
#include "prim/reduce.cuh"

// Addresses of a partition's visible keys and values. A thread for each position looks them up once.
struct Located {
    const u8* keys[PARTITION];
    const u8* values[PARTITION];
    float k_scales[PARTITION];
    float v_scales[PARTITION];
};

// The sums of products of a key of sixteen bits with G queries: of all but two low bytes, as `docs/numerics.md` has them. A query's integers are floats.
template <int G> __device__ __forceinline__ void dot_int16(const i8* key, u32 dim, const float* q, u32 pad, int (&sums)[G]) {
#pragma unroll
    for (int g = 0; g < G; g++) sums[g] = 0;
    for (u32 d = 0; d < dim; d++) {
        const int high = key[d], all = 256 * high + key[dim + d];
#pragma unroll
        for (int g = 0; g < G; g++) {
            const int n = (int)q[g * pad + d];
            sums[g] += high_byte(n) * all + low_byte(n) * high;
        }
    }
}

// The weights of one partition, for G query heads that share a KV head: scores[g][position] = exp(s - m) (times the value's scale), ends[g] = m and the sum
// of weights. `p` has scale, soft cap and whether queries are integers. By a block with a thread for each position; `q`: [G][padded k_dim]. Positions from `from` to `to` are visible. Where queries are integers,
// weights become integers too, with `weight_scales`; of eight bits all their sums are below 2^24, which floats hold exactly.
template <int G, u32 DEEP, class P>
__device__ __forceinline__ void weigh(const P& p, const Cache& c, const float* q, float* q_scales, u32 base, u32 from, u32 to, u32 heads, const Located& located,
                                      float (*scores)[PARTITION], float (*ends)[2], float* weight_scales) {
    u32 position = threadIdx.x, lane = threadIdx.x % 16, pad = padded(c.k_dim);
    // 1. scores: a thread has the sixteen lanes of a dot product
    if (base + position >= from && base + position < to) {
        float acc[G][16];
#pragma unroll
        for (int g = 0; g < G; g++) {
#pragma unroll
            for (int i = 0; i < 16; i++) acc[g][i] = 0.0f;
        }
        const u8* key = located.keys[position];
        int whole[G];
        if (c.type == INT16) dot_int16<G>((const i8*)key, c.k_dim, q, pad, whole);
        else if (c.type == F32) dot_lanes<G, F32, DEEP>(key, c.k_dim, q, pad, acc);
        else if (c.type == F16) dot_lanes<G, F16, DEEP>(key, c.k_dim, q, pad, acc);
        else if (c.type == BF16) dot_lanes<G, BF16, DEEP>(key, c.k_dim, q, pad, acc);
        else dot_lanes<G, INT8, DEEP>(key, c.k_dim, q, pad, acc);
#pragma unroll
        for (int g = 0; g < G; g++) {
#pragma unroll
            for (int step = 8; step > 0; step /= 2) {
#pragma unroll
                for (int i = 0; i < step; i++) acc[g][i] = add(acc[g][i], acc[g][i + step]);
            }
            float s = c.type == INT16 ? (float)whole[g] : acc[g][0];
            if (has_scales(c.type)) s = mul(s, located.k_scales[position]);
            s = mul(s, p.integers ? mul(p.scale, q_scales[g]) : p.scale);
            if (p.capped) s = mul(tanh_(div(s, p.cap)), p.cap);
            scores[g][position] = s;
        }
    }
    __syncthreads();
    // 2. weights: a warp takes a head
    for (u32 g = threadIdx.x / WARP; g < heads; g += blockDim.x / WARP) {
        float top = bits(NEGATIVE_INFINITY);
        for (u32 i = threadIdx.x % WARP; i < PARTITION; i += WARP) {
            if (base + i >= from && base + i < to) top = greater(scores[g][i], top);
        }
        top = warp_max(top);
        float sum = 0.0f, weights[PARTITION / 16];
#pragma unroll
        for (u32 j = 0; j < PARTITION / 16; j++) {
            u32 i = 16 * j + lane;
            bool visible = base + i >= from && base + i < to;
            weights[j] = visible ? exp_below(sub(scores[g][i], top)) : 0.0f;
            sum = add(sum, weights[j]);
        }
        u32 greatest = 0;
#pragma unroll
        for (u32 j = 0; j < PARTITION / 16; j++) {
            u32 i = 16 * j + lane;
            if (has_scales(c.type) && base + i >= from && base + i < to) {
                weights[j] = mul(weights[j], located.v_scales[i]);
                greatest = max(greatest, bits(weights[j]) & 0x7fffffffu);
            }
        }
        if (p.integers) {
            const float most = c.type == INT8 ? 255.0f : 65535.0f, a = bits(warp_max(greatest)), inv = div(most, a);
            bool finite = is_finite(a);
            // A row with NaN or infinity becomes zeros with a scale of NaN.
            bool some = finite && is_finite(inv);
#pragma unroll
            for (u32 j = 0; j < PARTITION / 16; j++) {
                // This addition rounds numbers of this size to the nearest integer, ties to even.
                weights[j] = some ? sub(add(mul(weights[j], inv), 12582912.0f), 12582912.0f) : 0.0f;
            }
            if (threadIdx.x % WARP == 0) weight_scales[g] = finite ? mul(byte_factor(c.type), div(a, most)) : bits(0x7fc00000u);
        }
        // Both halves of the warp read the scores before either overwrites them.
        __syncwarp();
#pragma unroll
        for (u32 j = 0; j < PARTITION / 16; j++) {
            u32 i = 16 * j + lane;
            if (threadIdx.x % WARP < 16 && base + i >= from && base + i < to) scores[g][i] = weights[j];
        }
        sum = lane_tree(sum);
        if (threadIdx.x % WARP == 0) {
            ends[g][0] = top;
            ends[g][1] = sum;
        }
    }
    __syncthreads();
}

template <int G, u32 TYPE, u32 DEEP>
__device__ __forceinline__ void sum_typed(const Located& located, u32 first, u32 end, u32 d, float (*scores)[PARTITION], float (&sums)[G]) {
    // Many loads are issued before the first is used.
    for (u32 from = first; from < end; from += DEEP) {
        float v[DEEP];
#pragma unroll
        for (u32 i = 0; i < DEEP; i++) v[i] = from + i < end ? cached(located.values[from + i], TYPE, d) : 0.0f;
#pragma unroll
        for (u32 i = 0; i < DEEP; i++) {
            if (from + i < end) {
#pragma unroll
                for (int g = 0; g < G; g++) sums[g] = fma(scores[g][from + i], v[i], sums[g]);
            }
        }
    }
}

// The same of values of sixteen bits, whose low bytes lie `dim` further.
template <int G>
__device__ __forceinline__ void sum_int16(const Located& located, u32 first, u32 end, u32 dim, u32 d, float (*scores)[PARTITION], float (&sums)[G]) {
    int whole[G];
#pragma unroll
    for (int g = 0; g < G; g++) whole[g] = 0;
#pragma unroll 4
    for (u32 i = first; i < end; i++) {
        const i8* value = (const i8*)located.values[i];
        const int high = value[d], all = 256 * high + value[dim + d];
#pragma unroll
        for (int g = 0; g < G; g++) {
            const int n = (int)scores[g][i];
            whole[g] += (n >> 8) * all + (n & 255) * high;
        }
    }
#pragma unroll
    for (int g = 0; g < G; g++) sums[g] = (float)whole[g];
}

// The weighted sums of values at column `d` over the visible positions, for G heads.
template <int G, u32 DEEP>
__device__ __forceinline__ void sum_values(const Cache& c, const Located& located, u32 base, u32 from, u32 to, u32 d, float (*scores)[PARTITION],
                                           float (&sums)[G]) {
#pragma unroll
    for (int g = 0; g < G; g++) sums[g] = 0.0f;
    if (c.type == F32) sum_typed<G, F32, DEEP>(located, from - base, to - base, d, scores, sums);
    else if (c.type == F16) sum_typed<G, F16, DEEP>(located, from - base, to - base, d, scores, sums);
    else if (c.type == BF16) sum_typed<G, BF16, DEEP>(located, from - base, to - base, d, scores, sums);
    else if (c.type == INT16) sum_int16<G>(located, from - base, to - base, c.before_value ? c.k_dim : c.v_dim, d, scores, sums);
    else sum_typed<G, INT8, DEEP>(located, from - base, to - base, d, scores, sums);
}

// Rounds a query to integers, stored exactly as floats, and finds its scale; by a warp.
__device__ __forceinline__ void round_query(float* q, u32 dim, u32 type, float* scale) {
    const u32 lane = threadIdx.x % WARP;
    const Rounding rounding = rounding_of(q, dim, top_of(type));
    for (u32 i = lane; i < dim; i += WARP) q[i] = (float)round_int(mul(q[i], rounding.inv));
    if (lane == 0) *scale = mul(byte_factor(type), rounding.scale);
    __syncwarp();
}
