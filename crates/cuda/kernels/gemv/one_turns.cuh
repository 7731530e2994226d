// How blocks of a product of one token go through sets of rows, in turns of a row's groups of 64 columns.
#pragma once
#include "gemv/one_token.cuh"

static const u32 WARPS = 16;

// A place among turns of sets of rows, which all threads of a block go through together.
struct Turn {
    u32 set;
    u32 from;

    // `gated`: sets of gate are even, those of up odd, and a block takes both.
    __device__ __forceinline__ void next(u32 lanes, u32 groups, bool gated) {
        from += lanes;
        if (from >= groups) {
            from = 0;
            set += !gated ? gridDim.x : set % 2 ? 2 * gridDim.x - 1 : 1;
        }
    }
};

// Which product a set of ROWS rows belongs to, in which it then has that number.
template <u32 ROWS> __device__ __forceinline__ const Matmul& part_of(const OneToken& p, u32& set) {
    if (p.gated) {
        const u32 part = set % 2;
        set /= 2;
        return p.parts[part];
    }
    u32 k = 0;
    for (; k < 2 && p.parts[k + 1].rows && set * ROWS >= p.parts[k].rows; k++) set -= (p.parts[k].rows + ROWS - 1) / ROWS;
    return p.parts[k];
}

// The chain of row `r` of a set has ended in y: gate's waits for up's, and what is there goes to its place.
__device__ __forceinline__ void end_chain(const OneToken& p, const Matmul& part, u32 set, u32 r, bool there, float y, float& gate) {
    if (p.gated && set % 2 == 0) gate = y;
    else if (there) {
        if (p.gated) p.parts[0].out.row(0)[r] = mul(silu(gate), y);
        else put(part, 0, r, y);
    }
}
