// The delta rule, with one decay for a head (GatedDeltaNet) or one for each channel of its keys (Kimi Delta Attention): what its kernels take.
#pragma once
#include "prim/numerics.cuh"
#include "prim/tensor.cuh"
#include "recurrent/convolution.cuh"

struct Delta {
    Tensor qkv;
    Tensor z;
    Tensor b;
    Tensor a;
    Tensor out;
    // [taps, channels]
    Tensor conv;
    // [rows, ..]: from this layer's part on.
    Tensor states;
    const float* decay;
    const float* dt_bias;
    Norm norm;
    // [tokens, channels], and [tokens, value_heads] twice: results that one kernel leaves for the next. Decays of channels are [tokens, value_heads * key_dim].
    float* mixed;
    float* decays;
    float* beta;
    // [sequences + 1], [sequences]
    const u32* starts;
    const u32* rows;
    // As in `Convolution`.
    const u32* kept;
    u32 tokens;
    u32 count;
    u32 key_heads;
    u32 value_heads;
    u32 key_dim;
    u32 value_dim;
    u32 taps;
    float scale;
    // Whether q and k lie by the lanes of their sums: elements of one number modulo 4 beside one another.
    u32 by_lanes;
    // Value head v uses key head v % key_heads.
    u32 tiled;
    // Each channel of a head's keys has a decay: `a` and `dt_bias` have [value_heads * key_dim] of them.
    // 2: their logarithms have a lower bound.
    u32 by_channel;
    float bound;
    // The output is gated by a sigmoid, not by silu.
    u32 sigmoid_gate;
    u32 unused;
};

// What is left of a channel, by its projection and what is added to it.
__device__ __forceinline__ float channel_decay(const Delta& p, float rate, float x) {
    return exp_(p.by_channel == 2 ? mul(p.bound, sigmoid(mul(sub(0.0f, rate), x))) : mul(rate, softplus(x)));
}

__device__ __forceinline__ u32 key_head_of(const Delta& p, u32 h) { return p.tiled ? h % p.key_heads : h / (p.value_heads / p.key_heads); }

static const float L2_EPS = 1e-6f;
__device__ __forceinline__ u32 channels(const Delta& p) { return 2 * p.key_heads * p.key_dim + p.value_heads * p.value_dim; }

// The last inputs of the convolution of a sequence: [taps - 1, channels].
__device__ __forceinline__ float* window(const Delta& p, u32 sequence) { return p.states.row(p.rows[sequence]) + (u64)p.value_heads * p.key_dim * p.value_dim; }

static const u32 MOST_BY_LANES = 128;
