// Mixtures of experts: which experts a token takes, and the sum of what they give.
#pragma once
#include "numerics.cuh"

struct Route {
    // [tokens, experts], overwritten with scores.
    float* logits;
    // [experts]: added to choose, not to weigh; null: none.
    const float* bias;
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
};

static const u32 SOFTMAX_TOP_K = 0, TOP_K_SOFTMAX = 1, SIGMOID = 2;
static const u32 MAX_GROUPS = 64;

// `x = softmax(x)`, by a whole warp; the sum is a wide one.
__device__ void softmax(float* x, u32 n) {
    u32 lane = threadIdx.x % WARP;
    float m = bits(NEGATIVE_INFINITY);
    for (u32 i = lane; i < n; i += WARP) m = greater(x[i], m);
    m = warp_greatest(m);
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

// The lane sum of `n` elements, by a whole warp.
__device__ float lane_sum(const float* x, u32 n) {
    u32 lane = threadIdx.x % 16;
    float sum = 0.0f;
    for (u32 i = lane; i < (n + 15) / 16 * 16; i += 16) sum = add(sum, i < n ? x[i] : 0.0f);
    return lane_tree(sum);
}

// Whether score `a` of expert `i` comes before score `b` of expert `j`.
__device__ __forceinline__ bool before(float a, u32 i, float b, u32 j) { return a > b || a == b && i < j; }

// The weights of those that were chosen, by a whole warp, which leaves them where it finds their scores, best first.
__device__ __forceinline__ void weigh(u32 scoring, bool renormalise, float scale, float* weights, u32 k) {
    u32 lane = threadIdx.x % WARP;
    if (scoring == TOP_K_SOFTMAX) softmax(weights, k);
    if (scoring != TOP_K_SOFTMAX && renormalise) {
        float sum = lane_sum(weights, k);
        if (scoring == SIGMOID) sum = add(sum, 1e-20f);
        __syncwarp();
        for (u32 n = lane; n < k; n += WARP) weights[n] = div(weights[n], sum);
        __syncwarp();
    }
    if (scoring == SIGMOID) {
        for (u32 n = lane; n < k; n += WARP) weights[n] = mul(weights[n], scale);
        __syncwarp();
    }
}

// A warp takes a token, and leaves its logits as they are. Shared memory: scores, and what experts are chosen by [experts] each; those that were chosen, and with what [k] each.
extern "C" __global__ void __launch_bounds__(32) route(const Route p) {
    begin();
    __shared__ float ranks[MAX_GROUPS];
    float *score = room, *offered = score + p.experts, *weights = offered + p.experts;
    u32* chosen = (u32*)(weights + p.k);
    const u32 TAKEN = 0xffffffffu;
    u32 lane = threadIdx.x;
    for (u32 t = blockIdx.x; t < p.tokens; t += gridDim.x) {
        __syncwarp();
        // 1. scores
        for (u32 i = lane; i < p.experts; i += WARP) score[i] = p.logits[(u64)t * p.experts + i];
        __syncwarp();
        if (p.scoring == SOFTMAX_TOP_K) softmax(score, p.experts);
        if (p.scoring == SIGMOID) {
            for (u32 i = lane; i < p.experts; i += WARP) score[i] = sigmoid(score[i]);
        }
        __syncwarp();
        // 2. who takes part, and by what it is chosen; a NaN counts as the least. NaN itself marks who takes no part, or no more.
        for (u32 i = lane; i < p.experts; i += WARP) {
            float s = p.bias ? add(score[i], p.bias[i]) : score[i];
            offered[i] = is_nan(s) ? bits(NEGATIVE_INFINITY) : s;
        }
        if (p.scoring == SIGMOID && p.groups > 1) {
            u32 size = p.experts / p.groups;
            for (u32 g = lane; g < p.groups; g += WARP) {
                float first = bits(NEGATIVE_INFINITY), second = bits(NEGATIVE_INFINITY);
                for (u32 i = g * size; i < (g + 1) * size; i++) {
                    float s = p.bias ? add(score[i], p.bias[i]) : score[i];
                    if (s > first) {
                        second = first;
                        first = s;
                    } else if (s > second) {
                        second = s;
                    }
                }
                ranks[g] = size == 1 ? first : add(first, second);
            }
            __syncwarp();
            for (u32 i = lane; i < p.experts; i += WARP) {
                u32 g = i / size, ahead = 0;
                for (u32 other = 0; other < p.groups; other++) {
                    if (other != g && before(ranks[other], other, ranks[g], g)) ahead++;
                }
                if (ahead >= p.top_groups) offered[i] = bits(TAKEN);
            }
        }
        __syncwarp();
        // 3. the best, best first
        for (u32 n = 0; n < p.k; n++) {
            float best = bits(NEGATIVE_INFINITY);
            u32 id = TAKEN;
            for (u32 i = lane; i < p.experts; i += WARP) {
                if (!is_nan(offered[i]) && before(offered[i], i, best, id)) {
                    best = offered[i];
                    id = i;
                }
            }
            for (u32 step = 16; step > 0; step /= 2) {
                float other = __shfl_xor_sync(ALL, best, step);
                u32 other_id = __shfl_xor_sync(ALL, id, step);
                if (before(other, other_id, best, id)) {
                    best = other;
                    id = other_id;
                }
            }
            if (lane == 0) {
                chosen[n] = id;
                weights[n] = best;
                offered[id] = bits(TAKEN);
            }
            __syncwarp();
        }
        // 4. their weights
        if (p.scoring == SIGMOID) {
            for (u32 n = lane; n < p.k; n += WARP) weights[n] = score[chosen[n]];
            __syncwarp();
        }
        weigh(p.scoring, p.renormalise, p.scale, weights, p.k);
        // 5. ascending by number
        for (u32 n = lane; n < p.k; n += WARP) {
            u32 at = 0;
            for (u32 other = 0; other < p.k; other++) at += chosen[other] < chosen[n];
            p.chosen[(u64)t * p.k + at] = chosen[n];
            p.weights[(u64)t * p.k + at] = weights[n];
        }
        __syncwarp();
    }
}

// Output rows of many tokens, grouped by their expert, so that a tile of them shares a matrix.
struct Pairs {
    // [pairs]
    const u32* chosen;
    // [experts]: how many pairs each has.
    u32* counts;
    // How many tiles there are, three words unused; of each its expert, its first place in `order`, how many it has, a word unused.
    u32* tiles;
    // [pairs]: pairs by expert, ascending within one.
    u32* order;
    u32 pairs;
    u32 experts;
    // Pairs that a tile has at most.
    u32 of_tile;
    u32 unused;
};

static const u32 PAIR_THREADS = 512;

// The pairs of a block's share of all, one warp's after the other: whether each is the expert's, which it is, and which threads of the warp have one, thirty-two at a time.
template <class F> __device__ __forceinline__ void pairs_of(const Pairs& p, u32 expert, F each) {
    const u32 DEEP = 4, WARPS = PAIR_THREADS / WARP;
    const u32 share = (p.pairs + WARPS * DEEP * WARP - 1) / (WARPS * DEEP * WARP) * (DEEP * WARP);
    const u32 first = threadIdx.x / WARP * share, end = min(first + share, p.pairs);
#pragma unroll 1
    for (u32 from = first; from < end; from += DEEP * WARP) {
        bool own[DEEP];
#pragma unroll
        for (u32 d = 0; d < DEEP; d++) {
            u32 pair = from + d * WARP + threadIdx.x % WARP;
            own[d] = pair < end && p.chosen[min(pair, p.pairs - 1)] == expert;
        }
#pragma unroll
        for (u32 d = 0; d < DEEP; d++) each(own[d], from + d * WARP + threadIdx.x % WARP, __ballot_sync(ALL, own[d]));
    }
}

// How many pairs of an expert the warps of a block before this one have, and all of them together.
__device__ __forceinline__ uint2 pairs_before(const Pairs& p, u32 expert) {
    __shared__ u32 counts[PAIR_THREADS / WARP];
    u32 count = 0;
    pairs_of(p, expert, [&](bool, u32, u32 all) { count += __popc(all); });
    if (threadIdx.x % WARP == 0) counts[threadIdx.x / WARP] = count;
    __syncthreads();
    uint2 sums = make_uint2(0, 0);
    for (u32 w = 0; w < PAIR_THREADS / WARP; w++) {
        sums.x += w < threadIdx.x / WARP ? counts[w] : 0;
        sums.y += counts[w];
    }
    return sums;
}

// A block takes an expert.
extern "C" __global__ void __launch_bounds__(PAIR_THREADS) count_pairs(const Pairs p) {
    begin();
    u32 count = pairs_before(p, blockIdx.x).y;
    if (threadIdx.x == 0) p.counts[blockIdx.x] = count;
}

extern "C" __global__ void __launch_bounds__(PAIR_THREADS) group_pairs(const Pairs p) {
    begin();
    const u32 expert = blockIdx.x, lane = threadIdx.x % WARP;
    int before = 0, tiles_before = 0;
    for (u32 other = lane; other < expert; other += WARP) {
        before += p.counts[other];
        tiles_before += (p.counts[other] + p.of_tile - 1) / p.of_tile;
    }
    before = warp_sum(before), tiles_before = warp_sum(tiles_before);
    const uint2 own = pairs_before(p, expert);
    const u32 tiles = (own.y + p.of_tile - 1) / p.of_tile;
    for (u32 t = threadIdx.x; t < tiles; t += PAIR_THREADS) {
        u32 first = t * p.of_tile;
        ((uint4*)p.tiles)[1 + tiles_before + t] = make_uint4(expert, before + first, min(p.of_tile, own.y - first), 0);
    }
    if (expert + 1 == p.experts && threadIdx.x == 0) p.tiles[0] = tiles_before + tiles;
    u32 at = before + own.x;
    pairs_of(p, expert, [&](bool mine, u32 pair, u32 all) {
        if (mine) p.order[at + __popc(all & ((1u << lane) - 1))] = pair;
        at += __popc(all);
    });
}

struct Combine {
    // [tokens, k, cols]: what each token's experts gave, and with what weight.
    const float* outputs;
    const float* weights;
    // [tokens, cols]: what the shared one gave; null: there is none.
    const float* shared;
    // [tokens]: before the sigmoid; null: 1.
    const float* gates;
    Tensor residual;
    u32 tokens;
    u32 cols;
    u32 k;
    u32 unused;
};

// `residual += sum of the routed experts + gate * the shared one`
extern "C" __global__ void combine(const Combine p) {
    begin();
    for (u32 t = blockIdx.y; t < p.tokens; t += gridDim.y) {
        for (u32 c = blockIdx.x * blockDim.x + threadIdx.x; c < p.cols; c += gridDim.x * blockDim.x) {
            const int DEEP = 8;
            float* to = p.residual.row(t) + c;
            const float before = *to;
            float sum = 0.0f;
#pragma unroll 1
            for (u32 from = 0; from < p.k; from += DEEP) {
                float weights[DEEP], outputs[DEEP];
#pragma unroll
                for (u32 d = 0; d < DEEP; d++) {
                    const u64 pair = (u64)t * p.k + min(from + d, p.k - 1);
                    weights[d] = p.weights[pair];
                    outputs[d] = p.outputs[pair * p.cols + c];
                }
#pragma unroll
                for (u32 d = 0; d < DEEP; d++) sum = from + d < p.k ? fma(weights[d], outputs[d], sum) : sum;
            }
            if (p.shared) {
                float gate = p.gates ? sigmoid(p.gates[t]) : 1.0f;
                sum = fma(gate, p.shared[(u64)t * p.cols + c], sum);
            }
            *to = add(before, sum);
        }
    }
}
