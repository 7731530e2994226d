// How a launch of several products is cut into tiles.
#pragma once
#include "gemm/matmul.cuh"

// Which of `count` products a tile of ROWS rows belongs to, and what is left of its number there, where there are `across` tiles of tokens.
template <u32 ROWS> __device__ __forceinline__ const Matmul& part_of(const Products& all, u32 count, u32 across, u32& tile) {
    u32 k = 0;
    for (; k + 1 < count; k++) {
        const u32 tiles = (all.parts[k].rows + ROWS - 1) / ROWS * across;
        if (tile < tiles) break;
        tile -= tiles;
    }
    return all.parts[k];
}
