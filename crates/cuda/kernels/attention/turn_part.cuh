// The rotation of a part of a row, whose pairs are half of it apart or beside each other.
#pragma once
#include "prim/numerics.cuh"

// Turns `n` elements of `x` into `to`, which may not be the same, by a warp. `angles`: cosines, then sines.
__device__ __forceinline__ void turn_part(const float* x, float* to, u32 n, bool adjacent, const float* angles) {
    const u32 half = n / 2;
    for (u32 i = threadIdx.x % WARP; i < half; i += WARP) {
        const float a = x[adjacent ? 2 * i : i], b = x[adjacent ? 2 * i + 1 : half + i], cos = angles[i], sin = angles[half + i];
        to[i] = fma(b, sub(0.0f, sin), mul(a, cos));
        to[half + i] = fma(a, sin, mul(b, cos));
    }
}
