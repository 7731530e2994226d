// A weight matrix, as the host describes it.
#pragma once
#include "prim/numerics.cuh"

// A weight matrix from its first used row on, with the checkpoint's bytes, or in blocks (format/blocks.cuh), all parts of whose rows are `row_bytes` apart.
struct Matrix {
    const u8* data;
    const u8* scales;
    const u8* biases;
    u64 row_bytes;
    // Groups in a row.
    u32 groups;
    // Its format: KIND_... of format/list.cuh.
    u32 kind;
    // Element type of scales and biases, or of the elements if there are none; of blocks: format/blocks.cuh.
    u32 type;
    // Columns of a group; 0 if there are no groups.
    u32 group;
    u32 bits;
    u32 unused;
};

// A scale or bias from its stored bits.
__device__ __forceinline__ float value(u32 raw, u32 type) {
    if (type == BF16) return bits(raw << 16);
    return type == F32 ? bits(raw) : from_f16((u16)raw);
}

// The same for sixteen bits.
__device__ __forceinline__ float half_value(u32 raw, u32 type) { return type == BF16 ? bits(raw << 16) : from_f16((u16)raw); }
