// GatedDeltaNet: what its kernels take.
#pragma once
#include "prim/numerics.cuh"
#include "prim/tensor.cuh"

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
    // [tokens, channels], [tokens, value_heads] each: results that one kernel leaves for the next.
    float* mixed;
    float* decays;
    float* beta;
    // [tokens]
    const u32* sequences;
    // [sequences + 1], [sequences]
    const u32* starts;
    const u32* rows;
    // [tokens]: the row that keeps the state after each token, or NOT_KEPT. Null: no state is kept.
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
};

__device__ __forceinline__ u32 key_head_of(const Delta& p, u32 h) { return p.tiled ? h % p.key_heads : h / (p.value_heads / p.key_heads); }

static const u32 NOT_KEPT = 0xffffffffu;
static const float L2_EPS = 1e-6f;
__device__ __forceinline__ u32 channels(const Delta& p) { return 2 * p.key_heads * p.key_dim + p.value_heads * p.value_dim; }

// The last inputs of the convolution in a row of the pool: [taps - 1, channels].
__device__ __forceinline__ float* window_of(const Delta& p, u32 row) { return p.states.row(row) + (u64)p.value_heads * p.key_dim * p.value_dim; }

// Those of a sequence.
__device__ __forceinline__ float* window(const Delta& p, u32 sequence) { return window_of(p, p.rows[sequence]); }

// Input `i` of a channel, counted from the window's start.
__device__ __forceinline__ float input(const Delta& p, u32 sequence, u32 i, u32 channel) {
    u32 before = p.taps - 1;
    if (i < before) return window(p, sequence)[(u64)i * channels(p) + channel];
    return p.qkv.row(p.starts[sequence] + i - before)[channel];
}

static const u32 MAX_TAPS = 4, CONVOLVED = 16;

// The same as `div(1, x)`, since it is rounded correctly too, in fewer instructions.
__device__ __forceinline__ float inverse(float x) { return __frcp_rn(x); }

static const u32 MOST_BY_LANES = 128;
