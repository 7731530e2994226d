// Which experts a token takes, chosen as moe/route.cu does it: by a block, or by a warp.
#pragma once
#include "moe/route.cuh"
#include "prim/numerics.cuh"
#include "prim/reduce.cuh"

// Experts that a token has at most, the shared one included.
static const u32 MOST_SLOTS = 16;

// Which experts the token takes, ascending, and with what weight.
struct Taken {
    u32 experts[MOST_SLOTS];
    float weights[MOST_SLOTS];
};

// Bits that are ordered as numbers are, a NaN counting as the least; those of nothing are 0. Both zeros are one.
__device__ __forceinline__ u32 ordered(float x) {
    const u32 b = bits(is_nan(x) ? bits(NEGATIVE_INFINITY) : add(x, 0.0f));
    return b >> 31 ? ~b : b | 0x80000000u;
}

__device__ __forceinline__ float number_of(u32 ordered) { return bits(ordered >> 31 ? ordered ^ 0x80000000u : ~ordered); }

// The greatest of the scores, by a whole warp, with DEEP loads under way. It is only subtracted, so the sign of a zero does not matter.
template <int DEEP> __device__ __forceinline__ float greatest_score(const float* logits, u32 experts) {
    u32 most = 0;
#pragma unroll 1
    for (u32 from = threadIdx.x % WARP; from < experts; from += DEEP * WARP) {
        float own[DEEP];
#pragma unroll
        for (int d = 0; d < DEEP; d++) own[d] = __ldcg(logits + min(from + d * WARP, experts - 1));
#pragma unroll
        for (int d = 0; d < DEEP; d++) most = max(most, ordered(own[d]));
    }
    return number_of(warp_max_redux(most));
}

// Counts the greater keys in several sums, so that they do not wait for each other.
struct Count {
    u32 of[4];

    __device__ __forceinline__ void add(uint4 keys, u32 than) {
        of[0] += keys.x > than;
        of[1] += keys.y > than;
        of[2] += keys.z > than;
        of[3] += keys.w > than;
    }

    __device__ __forceinline__ u32 all() const { return of[0] + of[1] + (of[2] + of[3]); }
};

static const u32 MAX_EXPERTS = 512;

// Chooses as `route` does it, by a block of so many warps; `taken` is there once they have met. An expert's rank is the number of those that come before it: a warp
// ranks 32 experts, a list, and then each list's best are ranked among all of them. Weights are computed only where they are asked for.
__device__ __forceinline__ void topk_block(const Route& p, u32 warps, bool weighed, Taken& taken) {
    const u32 NONE = 0xffffffffu;
    // What each list's experts are chosen by, sorted once they are ranked, and which they are in it.
    __shared__ __align__(16) u32 keys[MAX_EXPERTS];
    __shared__ u8 members[MAX_EXPERTS];
    // Exponentials, or scores.
    __shared__ float values[MAX_EXPERTS];
    // Best first.
    __shared__ __align__(16) u32 chosen[MOST_SLOTS];
    __shared__ float weights[MOST_SLOTS];
    // The number of lists is a multiple of four, so the last ones may be empty.
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, experts = p.experts, k = p.k, scoring = p.scoring, lists = (experts + 4 * WARP - 1) / (4 * WARP) * 4;
    if (threadIdx.x < MOST_SLOTS) chosen[threadIdx.x] = NONE;
    // 1. Scores
    float sum = 0.0f;
    if (scoring == SOFTMAX_TOP_K) {
        if (warp < lists) {
            // This load is under way with those whose maximum is sought.
            const float first = __ldcg(p.logits + min(threadIdx.x, experts - 1));
            const float m = experts <= 4 * WARP ? greatest_score<4>(p.logits, experts) : greatest_score<16>(p.logits, experts);
            values[threadIdx.x] = threadIdx.x < experts ? exp_(sub(first, m)) : 0.0f;
#pragma unroll 1
            for (u32 i = threadIdx.x + warps * WARP; i < lists * WARP; i += warps * WARP) values[i] = i < experts ? exp_(sub(__ldcg(p.logits + i), m)) : 0.0f;
        }
        __syncthreads();
        if (warp < lists) {
            float low = 0.0f, high = 0.0f;
#pragma unroll 1
            for (u32 i = lane; i < lists * WARP; i += 4 * WARP) {
                const float own[4] = {values[i], values[i + WARP], values[i + 2 * WARP], values[i + 3 * WARP]};
                low = add(add(low, own[0]), own[2]);
                high = add(add(high, own[1]), own[3]);
            }
            sum = wide_tree(low, high);
        }
    }
    // 2. Lists
#pragma unroll 1
    for (u32 list = warp; list < lists; list += warps) {
        const u32 i = list * WARP + lane;
        u32 key = 0;
        if (i < experts) {
            float s = scoring == SOFTMAX_TOP_K ? div(values[i], sum) : __ldcg(p.logits + i);
            const float bias = p.bias ? p.bias[i] : 0.0f;
            if (scored_alone(scoring)) values[i] = s = score_alone(scoring, s);
            key = ordered(p.bias ? add(s, bias) : s);
        }
        u32* of_list = keys + list * WARP;
        of_list[lane] = key;
        __syncwarp();
        Count before = {};
        // Equal keys keep their order. A thread compares its own four one by one.
#pragma unroll
        for (u32 q = 0; q < WARP / 4; q++) before.add(((const uint4*)of_list)[q], q == lane / 4 ? NONE : key - (q < lane / 4));
#pragma unroll
        for (u32 other = 1; other < 4; other++) before.of[other] += __shfl_xor_sync(ALL, key, other) > key - ((lane ^ other) < lane);
        const u32 rank = before.all();
        __syncwarp();
        if (key) {
            of_list[rank] = key;
            members[list * WARP + rank] = lane;
        }
    }
    __syncthreads();
    // 3. The best, best first
    const u32 log = 32 - __clz(k - 1);
#pragma unroll 1
    for (u32 c = threadIdx.x; c < lists << log; c += warps * WARP) {
        const u32 list = c >> log, n = c & ((1u << log) - 1), own = list * WARP + n, key = n < k ? keys[own] : 0;
        // Of its own list there are n. Of the others eight are looked at, and eight more, since they are sorted.
        Count before = {n};
#pragma unroll 1
        for (u32 from = 0; from < lists; from += 4) {
#pragma unroll 1
            for (u32 q = 0; q < k; q += 8) {
                uint4 others[4][2];
#pragma unroll
                for (u32 i = 0; i < 8; i++) others[i / 2][i % 2] = ((const uint4*)(keys + (from + i / 2) * WARP + q))[i % 2];
#pragma unroll
                for (u32 i = 0; i < 8; i++) {
                    const u32 of = from + i / 2;
                    before.add(others[i / 2][i % 2], of == list ? NONE : key - (of < list));
                }
            }
        }
        const u32 rank = before.all();
        if (key && rank < k) {
            const u32 expert = list * WARP + members[own];
            chosen[rank] = expert;
            weights[rank] = scored_alone(scoring) ? values[expert] : number_of(key);
        }
    }
    // If the first warp has all lists, there is nobody to wait for.
    if (lists << log > WARP) __syncthreads();
    if (warp > 0) return;
    __syncwarp();
    // 4. Their order, and their weights, both halves of the warp the same
    const u32 rank = threadIdx.x % 16, own = chosen[rank];
    const bool there = rank < k;
    u32 at = 0;
#pragma unroll
    for (u32 q = 0; q < MOST_SLOTS / 4; q++) {
        const uint4 others = ((const uint4*)chosen)[q];
        at += (others.x < own) + (others.y < own) + (others.z < own) + (others.w < own);
    }
    float weight = 0.0f;
    if (weighed) {
        weight = there ? weights[rank] : 0.0f;
        if (scoring == TOP_K_SOFTMAX) weight = exp_(sub(weight, weights[0]));
        if (scoring == TOP_K_SOFTMAX || p.renormalise) {
            float all = lane_tree(there ? add(0.0f, weight) : 0.0f);
            if (scored_alone(scoring)) all = add(all, 1e-20f);
            weight = div(weight, all);
        }
        if (scored_alone(scoring)) weight = mul(weight, p.scale);
        if (p.scales && there) weight = mul(weight, p.scales[own]);
    }
    if (threadIdx.x < k) {
        taken.experts[at] = own;
        taken.weights[at] = weight;
    }
}

// Chooses as `route` does it, by a warp: a lane comes to have one of those that are chosen, best first, both halves of the warp the same. LISTS: of 32 experts each, one a lane.
template <int LISTS> __device__ __forceinline__ void topk_warp(const Route& p, u32 token) {
    const u32 NONE = 0xffffffffu, lane = threadIdx.x % WARP, experts = p.experts, k = p.k, scoring = p.scoring;
    const float* logits = p.logits + (u64)token * experts;
    // 1. Scores, and what experts are chosen by
    float score[LISTS];
    u32 keys[LISTS];
#pragma unroll
    for (u32 l = 0; l < LISTS; l++) score[l] = __ldcg(logits + min(l * WARP + lane, experts - 1));
    if (scoring == SOFTMAX_TOP_K) {
        u32 most = 0;
#pragma unroll
        for (u32 l = 0; l < LISTS; l++) most = max(most, ordered(score[l]));
        const float m = number_of(warp_max_redux(most));
        float sums[2] = {0.0f, 0.0f};
#pragma unroll
        for (u32 l = 0; l < LISTS; l++) {
            score[l] = l * WARP + lane < experts ? exp_(sub(score[l], m)) : 0.0f;
            sums[l % 2] = add(sums[l % 2], score[l]);
        }
        const float sum = wide_tree(sums[0], sums[1]);
#pragma unroll
        for (u32 l = 0; l < LISTS; l++) score[l] = div(score[l], sum);
    }
#pragma unroll
    for (u32 l = 0; l < LISTS; l++) {
        const u32 i = l * WARP + lane;
        if (scored_alone(scoring)) score[l] = score_alone(scoring, score[l]);
        keys[l] = i < experts ? ordered(p.bias ? add(score[l], p.bias[i]) : score[l]) : 0;
    }
    // 2. The best, best first
    u32 expert = NONE, key = 0;
#pragma unroll 1
    for (u32 n = 0; n < k; n++) {
        u32 most = keys[0], of = 0;
#pragma unroll
        for (u32 l = 1; l < LISTS; l++) {
            of = keys[l] > most ? l : of;
            most = max(most, keys[l]);
        }
        const u32 best = warp_max_redux(most), id = ~warp_max_redux(most == best ? ~(of * WARP + lane) : 0);
#pragma unroll
        for (u32 l = 0; l < LISTS; l++) keys[l] = id == l * WARP + lane ? 0 : keys[l];
        if (lane % 16 == n) expert = id, key = best;
    }
    // 3. Their order, and their weights
    u32 at = 0;
#pragma unroll
    for (u32 other = 0; other < MOST_SLOTS; other++) at += __shfl_sync(ALL, expert, other) < expert;
    const bool there = lane % 16 < k;
    float weight = number_of(key);
    if (scored_alone(scoring)) weight = there ? score_alone(scoring, __ldcg(logits + expert)) : 0.0f;
    if (scoring == TOP_K_SOFTMAX) weight = exp_(sub(weight, __shfl_sync(ALL, weight, 0)));
    if (scoring == TOP_K_SOFTMAX || p.renormalise) {
        float all = lane_tree(there ? add(0.0f, weight) : 0.0f);
        if (scored_alone(scoring)) all = add(all, 1e-20f);
        weight = div(weight, all);
    }
    if (scored_alone(scoring)) weight = mul(weight, p.scale);
    if (p.scales && there) weight = mul(weight, p.scales[expert]);
    if (lane < k) {
        p.chosen[(u64)token * k + at] = expert;
        p.weights[(u64)token * k + at] = weight;
    }
}
