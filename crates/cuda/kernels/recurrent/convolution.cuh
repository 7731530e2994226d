// The short convolution before recurrent layers, and what else these have in common.
#pragma once
#include "prim/numerics.cuh"
#include "prim/tensor.cuh"

// In `kept`: the state after this token is kept nowhere.
static const u32 NOT_KEPT = 0xffffffffu;

struct Convolution {
    // [tokens, channels]
    Tensor x;
    // [taps, channels], the oldest tap first
    Tensor weights;
    // [rows of the pool of states, ..]: from the layer's windows on, [taps - 1, channels] each, the last inputs before the step.
    Tensor windows;
    // [channels]: where sums begin; null: at zero.
    const float* bias;
    // [tokens, channels]
    float* out;
    // [tokens]
    const u32* sequences;
    // [sequences + 1], [sequences]
    const u32* starts;
    const u32* rows;
    // [tokens]: the row that keeps the state after each token, or NOT_KEPT. Null: no state is kept.
    const u32* kept;
    u32 tokens;
    u32 count;
    u32 channels;
    u32 taps;
};

static const u32 MAX_TAPS = 4, CONVOLVED = 16;

// The same as `div(1, x)`, since it is rounded correctly too, in fewer instructions.
__device__ __forceinline__ float inverse(float x) { return __frcp_rn(x); }
