// Pairs of a token and an expert in the order of their experts, and tiles of them.
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/reduce.cuh"

// Groups the output rows of many tokens by expert, so that all rows of a tile share a matrix.
struct Pairs {
    // [pairs]
    const u32* chosen;
    // [experts]: pairs of each expert.
    u32* counts;
    // The number of tiles and three unused words; then four words a tile: its expert, its first place in `order`, its pairs, unused.
    u32* tiles;
    // [pairs]: pairs by expert, ascending within one.
    u32* order;
    u32 pairs;
    u32 experts;
    // The most pairs of a tile.
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

// How many pairs of an expert the block's earlier warps have, and all of its warps.
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
extern "C" __global__ void __launch_bounds__(PAIR_THREADS) moe_count_pairs(const Pairs p) {
    begin();
    u32 count = pairs_before(p, blockIdx.x).y;
    if (threadIdx.x == 0) p.counts[blockIdx.x] = count;
}

extern "C" __global__ void __launch_bounds__(PAIR_THREADS) moe_group_pairs(const Pairs p) {
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
