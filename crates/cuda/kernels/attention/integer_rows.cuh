// Rows of scores as a warp has them that multiplies sixteen rows with all keys of a partition on integer tensor cores: how they become weights, and those integers.
#pragma once
#include "attention/attention.cuh"
#include "attention/cache.cuh"
#include "prim/mma.cuh"
#include "prim/numerics.cuh"

static const u32 TILES = PARTITION / 8;

// Sums of integers as floats: of single bytes with MAGIC added, of two bytes as they are.
template <u32 BYTES> __device__ __forceinline__ float float_of(u32 sum) { return BYTES == 1 ? sub(bits(sum), MAGIC_FLOAT) : (float)(int)sum; }

// How two rows' sums stand, `lane / 4` and eight further; the same in the four threads that have them.
struct IntegerRows {
    u32 first[2], last[2];
    bool has[2];
    float top[2], sum[2], scale[2];
};

// This thread's rows of `rows` query rows, which are the heads of a KV head of the tokens from `first` on.
__device__ __forceinline__ IntegerRows rows_of_thread(const Attention& p, u32 first, u32 rows, const float* q_scales) {
    IntegerRows own;
#pragma unroll
    for (u32 e = 0; e < 2; e++) {
        const u32 r = threadIdx.x / WARP * 16 + threadIdx.x % WARP / 4 + 8 * e;
        own.has[e] = r < rows;
        own.last[e] = own.has[e] ? p.positions[first + r / (p.heads / p.kv_heads)] : 0;
        own.first[e] = own.has[e] ? first_seen(p, own.last[e]) : 0;
        own.scale[e] = own.has[e] ? mul(p.scale, q_scales[r]) : 0.0f;
        own.top[e] = own.sum[e] = 0.0f;
    }
    return own;
}

// How two rows' outputs go on: factors of what they are and of what comes, and the scales of integers that come.
struct Steps {
    float kept[2], taken[2], scales[2];
};

// Rarely wanted and long, so it is one piece of code for all scores.
__device__ __noinline__ float softly_capped(float score, float cap) { return mul(tanh_(div(score, cap)), cap); }

// Weights of the two rows in the place of their scores, and as integers: four to a word, of each two tiles, the highest byte first. CHECKED: a row may not see all.
template <u32 BYTES, bool CHECKED>
__device__ __forceinline__ void weigh_rows(IntegerRows& own, float (&s)[TILES][4], u32 (&w)[BYTES][TILES / 2][2], const float2* v_scales, u32 base,
                                           const u32 (&from)[2], const u32 (&seen)[2], Steps& to) {
    const u32 quad = threadIdx.x % 4;
    const float most = BYTES == 1 ? 255.0f : 65535.0f;
#pragma unroll
    for (u32 e = 0; e < 2; e++) {
        auto visible = [&](u32 n, u32 j) { return !CHECKED || 8 * n + 2 * quad + j - from[e] < seen[e]; };
        // NaN does not count for the maximum, and the sign of a zero does not matter.
        float top = bits(NEGATIVE_INFINITY);
#pragma unroll
        for (u32 n = 0; n < TILES; n++) {
#pragma unroll
            for (u32 j = 0; j < 2; j++) top = visible(n, j) ? fmaxf(s[n][2 * e + j], top) : top;
        }
        top = fmaxf(top, __shfl_xor_sync(ALL, top, 1));
        top = fmaxf(top, __shfl_xor_sync(ALL, top, 2));
        // Positions of one remainder by sixteen each: those of even tiles, and of odd ones.
        float lanes[2][2] = {{0.0f, 0.0f}, {0.0f, 0.0f}};
        u32 greatest = 0;
#pragma unroll
        for (u32 n = 0; n < TILES; n++) {
            const float2 v_scale = v_scales[4 * n + quad];
#pragma unroll
            for (u32 j = 0; j < 2; j++) {
                float& weight = s[n][2 * e + j];
                weight = visible(n, j) ? exp_below(sub(weight, top)) : 0.0f;
                lanes[n % 2][j] = add(lanes[n % 2][j], weight);
                weight = mul(weight, j ? v_scale.y : v_scale.x);
                if (visible(n, j)) greatest = max(greatest, bits(weight) & 0x7fffffffu);
            }
        }
        // i and i + 8, i and i + 4, i and i + 2, 0 and 1.
        float both[2];
#pragma unroll
        for (u32 j = 0; j < 2; j++) {
            both[j] = add(lanes[0][j], lanes[1][j]);
            both[j] = add(both[j], __shfl_xor_sync(ALL, both[j], 2));
            both[j] = add(both[j], __shfl_xor_sync(ALL, both[j], 1));
        }
        const float sum = add(both[0], both[1]);
        greatest = max(greatest, __shfl_xor_sync(ALL, greatest, 1));
        greatest = max(greatest, __shfl_xor_sync(ALL, greatest, 2));
        // A row with NaN or infinity becomes zeros with a scale of NaN.
        const float a = bits(greatest), inv = div(most, a);
        const bool some = is_finite(a) && is_finite(inv);
        to.scales[e] = is_finite(a) ? mul(BYTES == 1 ? 1.0f : 256.0f, div(a, most)) : bits(NOT_A_NUMBER);
#pragma unroll
        for (u32 n = 0; n < TILES; n += 2) {
            u32 four[4];
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                const u32 rounded = bits(add(mul(s[n + j / 2][2 * e + j % 2], inv), MAGIC_FLOAT));
                four[j] = some && visible(n + j / 2, j % 2) ? rounded : 0;
            }
            // The highest byte first
#pragma unroll
            for (u32 b = 0; b < BYTES; b++) {
                const u32 same = 0x0040 + 0x11 * (BYTES - 1 - b);
                w[b][n / 2][e] = __byte_perm(__byte_perm(four[0], four[1], same), __byte_perm(four[2], four[3], same), 0x5410);
            }
        }
        // How the row's sums go on
        to.kept[e] = 1.0f, to.taken[e] = 1.0f;
        if (seen[e] == 0) {
            // Nothing is added to it: -0.
            to.taken[e] = -0.0f, to.scales[e] = 0.0f;
        } else if (base <= own.first[e]) {
            own.top[e] = top, own.sum[e] = sum;
        } else {
            const float m = greater(top, own.top[e]);
            to.kept[e] = exp_below(sub(own.top[e], m)), to.taken[e] = exp_below(sub(top, m));
            own.sum[e] = fma(own.sum[e], to.kept[e], mul(sum, to.taken[e]));
            own.top[e] = m;
        }
    }
}

// From sums of products of queries and keys to weights, and what becomes of the rows. `k_scales`, `v_scales`: [PARTITION]
template <u32 BYTES>
__device__ __forceinline__ Steps weigh(const Attention& p, IntegerRows& own, float (&s)[TILES][4], u32 (&w)[BYTES][TILES / 2][2], const float* k_scales,
                                       const float* v_scales, u32 base) {
    const u32 quad = threadIdx.x % 4;
#pragma unroll
    for (u32 n = 0; n < TILES; n++) {
        const float2 scale = ((const float2*)k_scales)[4 * n + quad];
#pragma unroll
        for (u32 e = 0; e < 4; e++) s[n][e] = mul(mul(s[n][e], e % 2 ? scale.y : scale.x), own.scale[e / 2]);
    }
    if (p.capped) {
#pragma unroll
        for (u32 n = 0; n < TILES; n++) {
#pragma unroll
            for (u32 e = 0; e < 4; e++) s[n][e] = softly_capped(s[n][e], p.cap);
        }
    }
    u32 from[2], seen[2];
#pragma unroll
    for (u32 e = 0; e < 2; e++) {
        from[e] = own.has[e] ? max(own.first[e], base) - base : 0;
        const u32 to = own.has[e] && own.last[e] >= base ? min(own.last[e] + 1 - base, PARTITION) : 0;
        seen[e] = to > from[e] ? to - from[e] : 0;
    }
    const bool all = __ballot_sync(ALL, seen[0] < PARTITION || seen[1] < PARTITION) == 0;
    Steps to;
    if (all) weigh_rows<BYTES, false>(own, s, w, (const float2*)v_scales, base, from, seen, to);
    else weigh_rows<BYTES, true>(own, s, w, (const float2*)v_scales, base, from, seen, to);
    return to;
}
