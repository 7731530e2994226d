// Which experts each of up to 32 tokens takes, in two kernels: the router norms for itself, and leaves what it normed encoded; one block chooses for all tokens, and puts
// pairs of a token and an expert in the order of their experts.
#pragma once
#include "encode.cu"
#include "mixture_one.cu"

struct RouteFew {
    // What is normed and encoded.
    Encode x;
    // [experts, cols]
    Matrix router;
    // [tokens, experts]
    float* logits;
    u32 experts;
    // Blocks that have rows; those behind them encode a token each.
    u32 row_blocks;
};

// Tokens of a block that has rows: a warp each.
static const u32 ROUTE_TOKENS = 8;

// Grid: (blocks of rows and ROUTE_TOKENS more, tokens / ROUTE_TOKENS). Shared memory: x of each token, the norm's weights and rows [ROUTE_ROWS], of [cols] in quads each; or
// a token's x, and the norm's weights.
extern "C" __global__ void __launch_bounds__(384) route_few(const __grid_constant__ RouteFew p) {
    const u32 cols = p.x.cols, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, part = threadIdx.x / OF_ROW;
    if (blockIdx.x >= p.row_blocks) {
        const u32 token = blockIdx.y * ROUTE_TOKENS + blockIdx.x - p.row_blocks;
        float *x = room, *norm = x + cols;
        for (u32 i = threadIdx.x; i < cols / 4; i += ROUTE_THREADS) copy_later((float4*)norm + i, (const float4*)p.x.norm.weight + i);
        begin();
        if (token >= p.x.rows) return;
        const float4* from = (const float4*)p.x.x.row(token);
#pragma unroll 2
        for (u32 i = threadIdx.x; i < cols / 4; i += ROUTE_THREADS) ((float4*)x)[i] = __ldcg(from + i);
        copied();
        __syncthreads();
        const float inverse = inverse_rms_256(x, cols, p.x.norm.eps);
        // Whole groups of 32 stay in a warp.
#pragma unroll 2
        for (u32 i = threadIdx.x; i / WARP * WARP < cols / 4; i += ROUTE_THREADS) {
            const bool inside = i < cols / 4;
            float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (inside) {
                const float4 own = ((const float4*)x)[i], w = ((const float4*)norm)[i];
                v = make_float4(mul(mul(own.x, inverse), w.x), mul(mul(own.y, inverse), w.y), mul(mul(own.z, inverse), w.z), mul(mul(own.w, inverse), w.w));
            }
            encode_four(p.x, (u64)token * cols + 4 * i, v, inside);
        }
        return;
    }
    float *x = room, *norm = x + ROUTE_TOKENS * cols, *rows = norm + cols;
    // A row that is not there is computed as the first, and not stored.
    const u32 first = blockIdx.x * ROUTE_ROWS, r = part < ROUTE_ROWS && first + part < p.experts ? first + part : 0;
    const bool of_norm = part == ROUTE_ROWS;
    Matrix m = p.router;
    if (of_norm) m.data = (const u8*)p.x.norm.weight, m.kind = LANES_F32, m.type = F32;
    widen_row(m, of_norm ? 0 : r, cols, of_norm ? norm : rows + part * cols);
    begin();
    const u32 token = blockIdx.y * ROUTE_TOKENS + warp;
    const bool there = warp < ROUTE_TOKENS && token < p.x.rows;
    x += warp * cols;
    if (there) {
        const int DEEP = 8;
        const float* from = p.x.x.row(token);
#pragma unroll 1
        for (u32 quad = lane; quad < cols / 4; quad += DEEP * WARP) {
            float4 own[DEEP];
#pragma unroll
            for (int d = 0; d < DEEP; d++) {
                const float* at = from + column_of(min(quad + d * WARP, cols / 4 - 1));
                own[d] = make_float4(__ldcg(at), __ldcg(at + 16), __ldcg(at + 32), __ldcg(at + 48));
            }
#pragma unroll
            for (int d = 0; d < DEEP; d++) ((float4*)x)[min(quad + d * WARP, cols / 4 - 1)] = own[d];
        }
    }
    __syncthreads();
    if (!there) return;
    const float inverse = inverse_rms_quads((const float4*)x, cols, p.x.norm.eps);
    const u32 row = lane / 16;
    const float4 *of_row = (const float4*)(rows + row * cols) + lane % 16, *of_x = (const float4*)x + lane % 16, *of_weights = (const float4*)norm + lane % 16;
    const float sum = normed_product(of_row, of_x, of_weights, cols, inverse);
    if (lane % 16 == 0 && first + row < p.experts) p.logits[(u64)token * p.experts + first + row] = sum;
}

struct ChooseFew {
    // Without groups of experts; logits stay as they are.
    Route route;
    // As in `Pairs`.
    u32* tiles;
    u32* order;
    u32 of_tile;
    u32 unused;
};

static const u32 CHOOSE_THREADS = 1024, CHOOSE_WARPS = CHOOSE_THREADS / WARP, MOST_TOKENS = CHOOSE_WARPS, MOST_LISTS = MOST_EXPERTS / WARP;

// Chooses for a token as `route` does it, by a warp: which expert the lane's is, best first, both halves of the warp the same, and how many of those that were chosen have a
// lower number. `taken`: a bit for each expert. LISTS: of 32 experts each, one a lane.
template <int LISTS> __device__ __forceinline__ void choose_for(const Route& p, u32 token, u32* taken, u32& expert, u32& at) {
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
        const float m = number_of(greatest_of_warp(most));
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
        if (scoring == SIGMOID) score[l] = sigmoid(score[l]);
        keys[l] = i < experts ? ordered(p.bias ? add(score[l], p.bias[i]) : score[l]) : 0;
    }
    // 2. The best, best first
    u32 gone = 0, key = 0;
    expert = NONE;
#pragma unroll 1
    for (u32 n = 0; n < k; n++) {
        u32 most = keys[0], of = 0;
#pragma unroll
        for (u32 l = 1; l < LISTS; l++) {
            of = keys[l] > most ? l : of;
            most = max(most, keys[l]);
        }
        const u32 best = greatest_of_warp(most), id = ~greatest_of_warp(most == best ? ~(of * WARP + lane) : 0);
#pragma unroll
        for (u32 l = 0; l < LISTS; l++) keys[l] = id == l * WARP + lane ? 0 : keys[l];
        gone |= id % WARP == lane ? 1u << id / WARP : 0;
        if (lane % 16 == n) expert = id, key = best;
    }
#pragma unroll
    for (u32 l = 0; l < LISTS; l++) {
        const u32 bits_of_list = __ballot_sync(ALL, gone >> l & 1);
        if (lane == l) taken[l] = bits_of_list;
    }
    // 3. Their order, and their weights
    at = 0;
#pragma unroll
    for (u32 other = 0; other < MOST_SLOTS; other++) at += __shfl_sync(ALL, expert, other) < expert;
    const bool there = lane % 16 < k;
    float weight = number_of(key);
    if (scoring == SIGMOID) weight = there ? sigmoid(__ldcg(logits + expert)) : 0.0f;
    if (scoring == TOP_K_SOFTMAX) weight = exp_(sub(weight, __shfl_sync(ALL, weight, 0)));
    if (scoring == TOP_K_SOFTMAX || p.renormalise) {
        float all = lane_tree(there ? add(0.0f, weight) : 0.0f);
        if (scoring == SIGMOID) all = add(all, 1e-20f);
        weight = div(weight, all);
    }
    if (scoring == SIGMOID) weight = mul(weight, p.scale);
    if (lane < k) {
        p.chosen[(u64)token * k + at] = expert;
        p.weights[(u64)token * k + at] = weight;
    }
}

// One block. A warp takes a token; then a thread takes an expert, whose tokens are bits of a word.
extern "C" __global__ void __launch_bounds__(1024) choose_few(const __grid_constant__ ChooseFew p) {
    __shared__ u32 taken[MOST_TOKENS][MOST_LISTS + 1], tokens_of[MOST_EXPERTS], places[MOST_EXPERTS], sums[CHOOSE_WARPS];
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, tokens = p.route.tokens, experts = p.route.experts, k = p.route.k;
    u32 expert, at;
    begin();
    if (warp < tokens) {
        if (experts <= 4 * WARP) choose_for<4>(p.route, warp, taken[warp], expert, at);
        else choose_for<MOST_LISTS>(p.route, warp, taken[warp], expert, at);
    }
    __syncthreads();
    const u32 own = threadIdx.x;
    u32 mask = 0;
    if (own < experts) {
#pragma unroll 8
        for (u32 t = 0; t < tokens; t++) mask |= (taken[t][own / WARP] >> lane & 1) << t;
    }
    // Pairs, and tiles of them in the upper half, of all experts before this one
    const u32 count = __popc(mask), tiles = (count + p.of_tile - 1) / p.of_tile, both = count | tiles << 16;
    u32 before = both;
#pragma unroll
    for (u32 step = 1; step < WARP; step *= 2) {
        const u32 other = __shfl_up_sync(ALL, before, step);
        if (lane >= step) before += other;
    }
    if (lane == WARP - 1) sums[warp] = before;
    __syncthreads();
    before += sum_of_warp(lane < warp ? sums[lane] : 0) - both;
    const u32 first = before & 0xffff;
    if (own < experts) {
        tokens_of[own] = mask;
        places[own] = first;
    }
#pragma unroll 1
    for (u32 t = 0; t < tiles; t++) ((uint4*)p.tiles)[1 + (before >> 16) + t] = make_uint4(own, first + t * p.of_tile, min(p.of_tile, count - t * p.of_tile), 0);
    if (own == CHOOSE_THREADS - 1) p.tiles[0] = (before + both) >> 16;
    __syncthreads();
    if (warp < tokens && lane < k) p.order[places[expert] + __popc(tokens_of[expert] & ((1u << warp) - 1))] = warp * k + at;
}
