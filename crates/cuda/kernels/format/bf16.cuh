// Weights as bf16, in pairs of columns.
#pragma once
#include "format/affine.cuh"
#include "format/matrix.cuh"
#include "prim/numerics.cuh"

// Columns i and i + 1 of a row of bf16; zero for the second if it does not exist.
__device__ __forceinline__ void bf16_pair(const u16* row, u32 i, u32 cols, float& even, float& odd) {
    if (cols % 2 == 0) {
        u32 both = *(const u32*)(row + i);
        even = bits(both << 16);
        odd = bits(both & 0xffff0000u);
    } else {
        even = from_bf16(row[i]);
        odd = i + 1 < cols ? from_bf16(row[i + 1]) : 0.0f;
    }
}

// bf16 as it is.
struct Bf16Pairs {
    static const bool IS_PLAIN = true;

    __device__ static __forceinline__ void pair(const Matrix& m, u64 r, u32 i, u32 cols, float& even, float& odd) {
        bf16_pair((const u16*)(m.data + r * m.row_bytes), i, cols, even, odd);
    }
};

// Affine integers of any width, rounded to bf16.
struct AffineBf16 {
    static const bool IS_PLAIN = false;

    __device__ static __forceinline__ void pair(const Matrix& m, u64 r, u32 i, u32, float& even, float& odd) {
        even = from_bf16(to_bf16(affine_weight(m, r, i)));
        odd = from_bf16(to_bf16(affine_weight(m, r, i + 1)));
    }
};
