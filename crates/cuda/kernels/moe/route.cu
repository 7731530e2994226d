// Which experts a token takes, a warp for each token.
#include "moe/route.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/smem.cuh"

// A warp takes a token; logits stay as they are. Shared memory: scores and the values that experts are chosen by, [experts] each; the chosen ones and their weights,
// [k] each.
extern "C" __global__ void __launch_bounds__(32) moe_route(const Route p) {
    begin();
    __shared__ float ranks[MAX_GROUPS];
    float *score = smem, *offered = score + p.experts, *weights = offered + p.experts;
    u32* chosen = (u32*)(weights + p.k);
    const u32 TAKEN = 0xffffffffu;
    u32 lane = threadIdx.x;
    for (u32 t = blockIdx.x; t < p.tokens; t += gridDim.x) {
        __syncwarp();
        // 1. scores
        for (u32 i = lane; i < p.experts; i += WARP) score[i] = p.logits[(u64)t * p.experts + i];
        __syncwarp();
        if (p.scoring == SOFTMAX_TOP_K) softmax(score, p.experts);
        if (scored_alone(p.scoring)) {
            for (u32 i = lane; i < p.experts; i += WARP) score[i] = score_alone(p.scoring, score[i]);
        }
        __syncwarp();
        // 2. values to choose by; a NaN score counts as the least. NaN as a value marks experts that take no part, or no longer.
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
        for (u32 n = lane; p.table && n < p.k; n += WARP) chosen[n] = p.table[(u64)p.numbers[t] * p.k + n];
        __syncwarp();
        for (u32 n = 0; !p.table && n < p.k; n++) {
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
        if (scored_alone(p.scoring)) {
            for (u32 n = lane; n < p.k; n += WARP) weights[n] = score[chosen[n]];
            __syncwarp();
        }
        weigh(p.scoring, p.renormalise, p.scale, weights, p.k);
        for (u32 n = lane; p.scales && n < p.k; n += WARP) weights[n] = mul(weights[n], p.scales[chosen[n]]);
        __syncwarp();
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
