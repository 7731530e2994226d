// What all kernels of attention take, and how they end.
#pragma once
#include "attention/cache.cuh"
#include "format/activations.cuh"
#include "prim/numerics.cuh"
#include "prim/tensor.cuh"

struct Attention {
    Cache cache;
    Tensor q;
    Tensor k;
    Tensor v;
    Tensor out;
    Norm q_norm;
    Norm k_norm;
    // [positions, 2 * half]: cosines, then sines.
    const float* angles;
    // [heads]; null: none.
    const float* sinks;
    // [tokens]
    const u32* positions;
    const u32* sequences;
    const u64* slots;
    // The block tables of all sequences, and where each begins.
    const u32* tables;
    const u32* table_starts;
    u32 tokens;
    u32 heads;
    u32 kv_heads;
    u32 gated;
    u32 half;
    // 0: all positions.
    u32 window;
    float scale;
    float cap;
    u32 capped;
    // Results of partitions, with room for `partitions` of each head of a token.
    u32 partitions;
    float* parts;
    // [tokens, tiles of heads]: how many partitions have ended; zero between kernels. Null: `attention_combine` runs next.
    u32* counters;
    // Whether queries and weights are rounded to integers, as keys and values are.
    u32 integers;
    // Elements of queries and keys that are transformed together before they are rounded; 1: none are.
    u32 run;
    // [tokens, heads * v_dim]: the combined output, quantized; null: not wanted.
    Encoded encoded;
    // [tokens, top + pool - 1]: slots of what a token sees, at most so many; null: all positions up to its own.
    const u32* selected;
    u32 top;
    // Whether a block may have heads of several tokens, which are all of one sequence.
    u32 flat;
    // Positions of a pool: whole pools are selected, `top` positions of them, and those behind the last whole one are seen too. 1: positions are.
    u32 pool;
    // Whether a sequence has several tokens in the step: the kernel before has stored their keys and values.
    u32 stored;
};

static const u32 PARTITION = 128;

// Floats of a partition's result for a head, of [tokens, heads, partitions]: sums of values, maximum, sum of weights, padded to sixteen bytes.
__device__ __forceinline__ u32 part_width(u32 v_dim) { return (v_dim + 5) & ~3u; }

// The first position that is visible to a token.
__device__ __forceinline__ u32 first_seen(const Attention& p, u32 position) {
    return p.window && position + 1 > p.window ? position + 1 - p.window : 0;
}

// The last place that is visible to a token: its position, or the last of those that were selected for it.
__device__ __forceinline__ u32 last_seen(const Attention& p, u32 t) {
    const u32 position = p.positions[t];
    return !p.selected || position < p.top + p.pool - 1 ? position : p.top + (position + 1) % p.pool - 1;
}

// The slot of place `at` among those that a token sees.
__device__ __forceinline__ u64 slot_of(const Attention& p, u32 t, const u32* table, u32 at) {
    const u32 tokens = p.cache.block_tokens;
    return p.selected ? p.selected[(u64)t * (p.top + p.pool - 1) + at] : (u64)table[at / tokens] * tokens + at % tokens;
}

// Applies sink, division and gate, and stores element `d` of head `h` of token `t`.
__device__ __forceinline__ float finish(const Attention& p, u32 t, u32 h, u32 d, float o, float m, float l) {
    const Cache& c = p.cache;
    float a = 1.0f;
    if (p.sinks) {
        float sink = p.sinks[h], top = greater(sink, m);
        a = exp_below(sub(m, top));
        l = fma(l, a, exp_below(sub(sink, top)));
    }
    float y = div(mul(o, a), l);
    if (p.gated) y = mul(y, sigmoid(p.q.row(t)[(u64)h * 2 * c.k_dim + c.k_dim + d]));
    p.out.row(t)[(u64)h * c.v_dim + d] = y;
    return y;
}

// The same for 32 elements, one a lane; quantizes them too if that is wanted.
__device__ __forceinline__ void finish_joined(const Attention& p, u32 t, u32 h, u32 d, float o, float m, float l) {
    const float y = finish(p, t, h, d, o, m, l);
    if (p.encoded.q) quantize_lanes(y, ((u64)t * p.heads + h) * p.cache.v_dim + d / WARP * WARP, p.encoded);
}
