// Weights that are floats of sixteen bits as integers of 11 bits under an exponent of their piece (docs/numerics.md), on a GPU as f16 m 2^-24: up to 2^11 the bits of
// such an f16 are m itself and a sign. In two slices, m = 64 h + l with h and l of -32..=32, they give products with activations (int11.cuh) whose sums of a piece are
// exact in f32, in any order.
//
// A piece is half of 64 columns: the runs of eight whose number is even, or odd. Of sixteen columns 16 j to 16 j + 15 those of a piece are 8 a to 8 a + 7; of them o and
// o + 4 are side by side in word o, and o = 2 u + h: the order of int11.cuh.
#pragma once
#include "format/matrix.cuh"
#include "prim/numerics.cuh"

// What a piece's elements are multiplied with, and a piece's sum of products.
struct Piece {
    float before;
    float unit;
};

// The greater of each sixteen bits.
__device__ __forceinline__ u32 max_pair(u32 a, u32 b) {
#if __CUDA_ARCH__ >= 900
    u32 d;
    asm("max.u16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
#else
    return max(a >> 16, b >> 16) << 16 | max(a & 0xffff, b & 0xffff);
#endif
}

// Two numbers as f16, to nearest even.
__device__ __forceinline__ u32 to_f16_pair(float low, float high) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(d) : "f"(low), "f"(high));
    return d;
}

// a - b of two f16 each.
__device__ __forceinline__ u32 sub_f16_pair(u32 a, u32 b) {
    u32 d;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

// Two words of integers in slices, the high one times 64.
__device__ __forceinline__ void slice_pair(u32 w, u32& high, u32& low) {
    high = w + 0x00200020u & 0x8fc08fc0u;
    low = sub_f16_pair(w, high);
}

template <u32 TYPE> struct BlockIntegers {
    // The greatest size of eight elements, as its bits, which are ordered as those of integers.
    __device__ static __forceinline__ u32 greatest(uint4 w) {
        const u32 SIZE = 0x7fff7fffu;
        const u32 most = max_pair(max_pair(w.x & SIZE, w.y & SIZE), max_pair(w.z & SIZE, w.w & SIZE));
        return max(most >> 16, most & 0xffff);
    }

    __device__ static __forceinline__ Piece piece(u32 most) {
        int e;
        bool infinite;
        if (TYPE == BF16) {
            e = (int)(most >> 7) - 126;
            // From 2^100 on.
            infinite = most >= (100 + 127) << 7;
        } else {
            e = most < 0x400 ? 8 - __clz((int)most) : (int)(most >> 10) - 14;
            infinite = most >= 0x7c00;
        }
        e = max(e, -60);
        // 2^(11 - e - 24), and 2^(e - 11) for sums with activations that are 2^-4 of theirs on a CPU.
        return {bits((u32)(-13 - e + 127) << 23), infinite ? bits(NOT_A_NUMBER) : bits((u32)(e - 7 + 127) << 23)};
    }

    __device__ static __forceinline__ float low(u32 two) { return TYPE == BF16 ? bits(two << 16) : from_f16((u16)two); }
    __device__ static __forceinline__ float high(u32 two) { return TYPE == BF16 ? bits(two & 0xffff0000u) : from_f16((u16)(two >> 16)); }

    // Eight elements as words of integers.
    __device__ static __forceinline__ void round(uint4 w, float before, u32 (&to)[4]) {
        to[0] = to_f16_pair(mul(low(w.x), before), mul(low(w.z), before));
        to[1] = to_f16_pair(mul(high(w.x), before), mul(high(w.z), before));
        to[2] = to_f16_pair(mul(low(w.y), before), mul(low(w.w), before));
        to[3] = to_f16_pair(mul(high(w.y), before), mul(high(w.w), before));
    }
};
