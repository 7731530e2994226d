// Activations as integers of 11 bits in two slices of eight bits, n = 256 h + l, which `dp4a` multiplies exactly.
#pragma once
#include "format/int11.cuh"

// Rows in slices, in shared memory or as they lie in memory: of each group of 64 columns both slices, by quarters of sixteen columns; 2^(e-20); and the sum of its
// integers times that. `stride`: groups from a quarter to the next one.
struct Slices {
    uint4* high;
    uint4* low;
    u32 stride;
    float* powers;
    float* sums;
};

__device__ __forceinline__ Slices slices(void* at, u32 groups) {
    Slices to;
    to.stride = groups + 1;
    to.high = (uint4*)at;
    to.low = to.high + 4 * to.stride;
    to.powers = (float*)(to.low + 4 * to.stride);
    to.sums = to.powers + (groups + 3) / 4 * 4;
    return to;
}

// What lies behind them.
__device__ __forceinline__ float* behind(const Slices& x, u32 groups) { return x.sums + (groups + 3) / 4 * 4; }

// Two slices of four integers as bytes.
__device__ __forceinline__ void slice(u32 a, u32 b, u32 c, u32 d, u32& high, u32& low) {
    low = __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
    high = __byte_perm(__byte_perm(a + 128, b + 128, 0x0051), __byte_perm(c + 128, d + 128, 0x0051), 0x5410);
}

// Writes eight columns, the `i`-th, of v = n 2^e; `sum`: of v of their group.
__device__ __forceinline__ void put_slices(const Slices& to, u32 i, const float (&v)[8], int e, float sum) {
    // Adding 1.5 2^23 leaves an integer in the low bits; both are exact.
    const float by = power(-e);
    u32 n[8];
#pragma unroll
    for (u32 k = 0; k < 8; k++) n[k] = bits(fma(v[k], by, 12582912.0f));
    uint2 high, low;
    slice(n[0], n[2], n[4], n[6], high.x, low.x);
    slice(n[1], n[3], n[5], n[7], high.y, low.y);
    const u32 at = (i / 2 % 4 * to.stride + i / 8) * 2 + i % 2;
    ((uint2*)to.high)[at] = high;
    ((uint2*)to.low)[at] = low;
    if (i % 8 == 0) {
        to.powers[i / 8] = power(e - 20);
        // A sum of integers below 2^20: exact.
        to.sums[i / 8] = mul(sum, STEP);
    }
}

// The sum of a group of 64 columns of weights of format F with group `g`.
template <class F> __device__ __forceinline__ float slices_sum(const u32 (&words)[2 * F::BITS], const Slices& x, u32 g) {
    float high = 0.0f, low = 0.0f;
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        const u32 near = 2 * half * x.stride + g, far = near + x.stride;
        const float h = F::part_sum(words + half * F::BITS, x.high[near], x.high[far]), l = F::part_sum(words + half * F::BITS, x.low[near], x.low[far]);
        high = half ? add(high, h) : h;
        low = half ? add(low, l) : l;
    }
    // Both sums are exact; up to four bits of weights, so is this one.
    return mul(fma(256.0f, high, low), x.powers[g]);
}
