// Sums and maxima over the threads of a warp, in the order of docs/numerics.md.
#pragma once
#include "prim/numerics.cuh"

// Sums sixteen lanes, lane i in thread i of each sixteen, as a tree: i and i+8, i and i+4, i and i+2, 0 and 1. All threads get the sum.
__device__ __forceinline__ float lane_tree(float x) {
    for (u32 step = 8; step > 0; step /= 2) x = add(x, __shfl_xor_sync(ALL, x, step));
    return x;
}

// Sums 64 lanes, lanes t and t+32 in thread t. All threads get the sum.
__device__ __forceinline__ float wide_tree(float low, float high) {
    float x = add(low, high);
    for (u32 step = 16; step > 0; step /= 2) x = add(x, __shfl_xor_sync(ALL, x, step));
    return x;
}

// The wide sum of squares of `n` elements, by a warp.
__device__ __forceinline__ float squares(const float* x, u32 n) {
    u32 lane = threadIdx.x % WARP;
    float low = 0.0f, high = 0.0f;
#pragma unroll 4
    for (u32 i = lane; i < n; i += 64) {
        float a = x[i];
        low = fma(a, a, low);
        if (i + 32 < n) {
            float b = x[i + 32];
            high = fma(b, b, high);
        }
    }
    return wide_tree(low, high);
}

// `1 / sqrt(mean of squares + eps)` of `n` elements, by a whole warp.
__device__ __forceinline__ float inverse_rms(const float* x, u32 n, float eps) {
    return div(1.0f, __fsqrt_rn(add(div(squares(x, n), (float)n), eps)));
}

// `1 / sqrt(mean of squares + eps)` of `n` elements in shared memory, a multiple of 256: loads are issued before the sums that need them.
__device__ __forceinline__ float inverse_rms_256(const float* x, u32 n, float eps) {
    float low = 0.0f, high = 0.0f, next[8];
    x += threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < 8; i++) next[i] = x[32 * i];
#pragma unroll 1
    for (u32 from = 256; from <= n; from += 256) {
        float own[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            own[i] = next[i];
            if (from < n) next[i] = x[from + 32 * i];
        }
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            low = fma(own[i], own[i], low);
            high = fma(own[i + 1], own[i + 1], high);
        }
    }
    float sum = wide_tree(low, high), mean;
    // Dividing by a power of two is exactly a multiplication.
    if (n & (n - 1)) mean = div(sum, (float)n);
    else mean = mul(sum, bits((u32)(127 - 31 + __clz(n)) << 23));
    return div(1.0f, __fsqrt_rn(add(mean, eps)));
}

// The maximum over a warp.
__device__ __forceinline__ float warp_max(float x) {
    for (u32 step = 16; step > 0; step /= 2) x = greater(__shfl_xor_sync(ALL, x, step), x);
    return x;
}

__device__ __forceinline__ u32 warp_max(u32 x) {
    for (u32 step = 16; step > 0; step /= 2) x = max(__shfl_xor_sync(ALL, x, step), x);
    return x;
}

__device__ __forceinline__ int warp_sum(int x) {
    for (u32 step = 16; step > 0; step /= 2) x += __shfl_xor_sync(ALL, x, step);
    return x;
}

__device__ __forceinline__ u32 warp_max_redux(u32 x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(ALL, x);
#else
    return warp_max(x);
#endif
}

__device__ __forceinline__ int warp_sum_redux(int x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_add_sync(ALL, x);
#else
    return warp_sum(x);
#endif
}
