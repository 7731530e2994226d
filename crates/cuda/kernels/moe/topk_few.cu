// Which experts each of up to 32 tokens takes. A block chooses for some tokens; the last block puts pairs of a token and an expert in the order of their
// experts.
#include "moe/route.cuh"
#include "moe/topk.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/reduce.cuh"

struct TopkFew {
    // Without groups of experts; logits stay as they are.
    Route route;
    // As in `Pairs`.
    u32* tiles;
    u32* order;
    // How many blocks have chosen; zero between kernels.
    u32* counter;
    u32 of_tile;
    u32 unused;
};

static const u32 TOPK_TOKENS = 8, CHOOSE_THREADS = TOPK_TOKENS * WARP, MOST_TOKENS = 32;

// The order of pairs by their experts, whose tokens are bits of a word.
__device__ __forceinline__ void order_pairs(const TopkFew& p) {
    __shared__ u32 tokens_of[MAX_EXPERTS], places[MAX_EXPERTS], sums[CHOOSE_THREADS / WARP];
    const u32 OF_THREAD = MAX_EXPERTS / CHOOSE_THREADS, own = threadIdx.x, lane = own % WARP, warp = own / WARP, k = p.route.k, pairs = p.route.tokens * k;
    static_assert(MAX_EXPERTS == 2 * CHOOSE_THREADS && MOST_TOKENS * MOST_SLOTS == 2 * CHOOSE_THREADS, "two experts and two pairs a thread");
    u32 expert[OF_THREAD], token[OF_THREAD];
#pragma unroll
    for (u32 i = 0; i < OF_THREAD; i++) {
        const u32 pair = i * CHOOSE_THREADS + own;
        expert[i] = pair < pairs ? __ldcg(p.route.chosen + pair) : 0;
        token[i] = pair / k;
        tokens_of[pair] = 0;
    }
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < OF_THREAD; i++)
        if (i * CHOOSE_THREADS + own < pairs) atomicOr(&tokens_of[expert[i]], 1u << token[i]);
    __syncthreads();
    // Pairs, and tiles of them in the upper half, of all experts before a thread's
    u32 count[OF_THREAD], both = 0;
#pragma unroll
    for (u32 i = 0; i < OF_THREAD; i++) {
        count[i] = __popc(tokens_of[OF_THREAD * own + i]);
        both += count[i] | (count[i] + p.of_tile - 1) / p.of_tile << 16;
    }
    u32 before = both;
#pragma unroll
    for (u32 step = 1; step < WARP; step *= 2) {
        const u32 other = __shfl_up_sync(ALL, before, step);
        if (lane >= step) before += other;
    }
    if (lane == WARP - 1) sums[warp] = before;
    __syncthreads();
    before += warp_sum_redux(lane < warp ? sums[lane] : 0) - both;
    u32 first = before & 0xffff, tile = before >> 16;
#pragma unroll
    for (u32 i = 0; i < OF_THREAD; i++) {
        places[OF_THREAD * own + i] = first;
#pragma unroll 1
        for (u32 from = 0; from < count[i]; from += p.of_tile) ((uint4*)p.tiles)[1 + tile++] = make_uint4(OF_THREAD * own + i, first + from, min(p.of_tile, count[i] - from), 0);
        first += count[i];
    }
    if (own == CHOOSE_THREADS - 1) p.tiles[0] = tile;
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < OF_THREAD; i++) {
        const u32 pair = i * CHOOSE_THREADS + own;
        if (pair < pairs) p.order[places[expert[i]] + __popc(tokens_of[expert[i]] & ((1u << token[i]) - 1))] = pair;
    }
}

// Grid: tokens / TOPK_TOKENS. A warp takes a token; the last block to end orders all pairs.
extern "C" __global__ void __launch_bounds__(256) moe_topk_few(const __grid_constant__ TopkFew p) {
    const u32 token = blockIdx.x * TOPK_TOKENS + threadIdx.x / WARP;
    begin();
    if (token < p.route.tokens) {
        if (p.route.experts <= 4 * WARP) topk_warp<4>(p.route, token);
        else topk_warp<MAX_EXPERTS / WARP>(p.route, token);
    }
    if (is_last_block(p.counter, gridDim.x)) order_pairs(p);
}
