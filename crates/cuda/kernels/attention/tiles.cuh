// For kernels that take tiles of tokens: where keys and values of a partition are, and how they come to shared memory.
#pragma once
#include "attention/attention.cuh"
#include "attention/cache.cuh"
#include "prim/cp_async.cuh"
#include "prim/numerics.cuh"

// Rows of most kernels here.
static const u32 ATTEND_ROWS = 64;

// Where a partition's keys lie, and the scales of their integers; null for positions that no row sees. Keys and values of a head have the same length here, so values lie at the same
// distance behind their keys everywhere.
struct Places {
    const u8* keys[PARTITION];
    float k_scales[PARTITION], v_scales[PARTITION];
};

__device__ __forceinline__ u64 values_behind(const Cache& c) { return c.v - c.k; }

__device__ __forceinline__ void find_places(const Cache& c, const u32* table, u32 kv_head, u32 base, u32 from, u32 to, Places& places) {
    u32 position = threadIdx.x;
    if (position >= PARTITION) return;
    u32 at = base + position, in_table = at / c.block_tokens, offset = at - in_table * c.block_tokens;
    Place key = {0, 0};
    float k_scale = 0.0f, v_scale = 0.0f;
    if (at >= from && at < to) {
        u32 block = table[in_table];
        key = place(c, c.k, c.k_scales, c.k_dim, block, offset, kv_head);
        if (has_scales(c.type)) k_scale = read_scale(key.scale), v_scale = read_scale(key.scale + (c.v_scales - c.k_scales));
    }
    places.keys[position] = key.row;
    places.k_scales[position] = k_scale, places.v_scales[position] = v_scale;
}

// Brings sixteen bytes that lie so far behind this key, or zeros where there is none.
__device__ __forceinline__ void bring_later(const u8* key, u64 behind, u8* to) {
    if (key) cp_async_16(to, key + behind);
    else *(uint4*)to = make_uint4(0, 0, 0, 0);
}
