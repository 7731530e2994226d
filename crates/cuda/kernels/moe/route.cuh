// How a router's logits become weights.
#pragma once
#include "prim/numerics.cuh"
#include "prim/reduce.cuh"

struct Route {
    // [tokens, experts], overwritten with scores.
    float* logits;
    // [experts]: added to scores for the choice only, not for the weights; null: none.
    const float* bias;
    // [experts]: what the weight of each is multiplied by last; null: nothing.
    const float* scales;
    // [tokens, k] each
    u32* chosen;
    float* weights;
    u32 tokens;
    u32 experts;
    u32 k;
    u32 scoring;
    u32 renormalise;
    u32 groups;
    u32 top_groups;
    float scale;
    // Experts by the token's number, [numbers, k], and the numbers of tokens; null: the router chooses.
    const u32* table;
    const u32* numbers;
};

static const u32 SOFTMAX_TOP_K = 0, TOP_K_SOFTMAX = 1, SIGMOID = 2, ROOT_SOFTPLUS = 3;

// Whether scores are made one by one, and weights of them are scaled.
__device__ __forceinline__ bool scored_alone(u32 scoring) { return scoring >= SIGMOID; }
__device__ __forceinline__ float score_alone(u32 scoring, float x) { return scoring == SIGMOID ? sigmoid(x) : __fsqrt_rn(softplus(x)); }

static const u32 MAX_GROUPS = 64;

// `x = softmax(x)`, by a warp, with a wide sum.
__device__ void softmax(float* x, u32 n) {
    u32 lane = threadIdx.x % WARP;
    float m = bits(NEGATIVE_INFINITY);
    for (u32 i = lane; i < n; i += WARP) m = greater(x[i], m);
    m = warp_max(m);
    float low = 0.0f, high = 0.0f;
    for (u32 i = lane; i < n; i += 64) {
        x[i] = exp_(sub(x[i], m));
        low = add(low, x[i]);
        if (i + 32 < n) {
            x[i + 32] = exp_(sub(x[i + 32], m));
            high = add(high, x[i + 32]);
        }
    }
    float sum = wide_tree(low, high);
    for (u32 i = lane; i < n; i += WARP) x[i] = div(x[i], sum);
    __syncwarp();
}

// The lane sum of `n` elements, by a warp.
__device__ float lane_sum(const float* x, u32 n) {
    u32 lane = threadIdx.x % 16;
    float sum = 0.0f;
    for (u32 i = lane; i < (n + 15) / 16 * 16; i += 16) sum = add(sum, i < n ? x[i] : 0.0f);
    return lane_tree(sum);
}

// Whether score `a` of expert `i` comes before score `b` of expert `j`.
__device__ __forceinline__ bool before(float a, u32 i, float b, u32 j) { return a > b || a == b && i < j; }

// Replaces the scores of the chosen experts, best first, by their weights; by a warp.
__device__ __forceinline__ void weigh(u32 scoring, bool renormalise, float scale, float* weights, u32 k) {
    u32 lane = threadIdx.x % WARP;
    if (scoring == TOP_K_SOFTMAX) softmax(weights, k);
    if (scoring != TOP_K_SOFTMAX && renormalise) {
        float sum = lane_sum(weights, k);
        if (scored_alone(scoring)) sum = add(sum, 1e-20f);
        __syncwarp();
        for (u32 n = lane; n < k; n += WARP) weights[n] = div(weights[n], sum);
        __syncwarp();
    }
    if (scored_alone(scoring)) {
        for (u32 n = lane; n < k; n += WARP) weights[n] = mul(weights[n], scale);
        __syncwarp();
    }
}
