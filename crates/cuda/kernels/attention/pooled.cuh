// Rows of the cache whose elements are averaged.
#pragma once
#include "attention/cache.cuh"
#include "prim/numerics.cuh"

// Element `i` of a position's row: of its key, or of what weighs it.
__device__ __forceinline__ float pooled(const Cache& c, const u32* table, u32 at, u32 kv_head, u32 i) {
    const Place row = place(c, c.k, c.k_scales, c.k_dim, table[at / c.block_tokens], at % c.block_tokens, kv_head);
    const float x = cached(row.row, c.type, i);
    return c.type == INT8 ? mul(x, read_scale(row.scale)) : x;
}
