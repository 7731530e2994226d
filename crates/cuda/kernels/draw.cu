// What drawing a token needs of its logits, so that they stay on the device: the likeliest token, and the sums of weights that crates/kernels/src/draw.rs defines, whole
// numbers, exact in any order.
#pragma once
#include "numerics.cuh"

// The highest logit of a part of a row and the first token that has it; `bad`: one of them is NaN.
struct Top {
    float logit;
    u32 token;
    u32 bad;
    u32 unused;
};

struct Tops {
    // [rows, vocabulary]
    const float* logits;
    // [rows, blocks]
    Top* out;
    u32 vocabulary;
    u32 unused;
};

static const u32 TOPS_THREADS = 512;

// Which of two comes first.
__device__ __forceinline__ void keep_higher(Top& own, float logit, u32 token) {
    if (logit > own.logit || (logit == own.logit && token < own.token)) own.logit = logit, own.token = token;
}

// Grid: (parts of a row, rows).
extern "C" __global__ void __launch_bounds__(512) tops(const __grid_constant__ Tops p) {
    __shared__ Top of_warp[TOPS_THREADS / WARP];
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, part = (p.vocabulary + gridDim.x - 1) / gridDim.x;
    const u32 from = blockIdx.x * part, to = min(from + part, p.vocabulary);
    Top own = {bits(NEGATIVE_INFINITY), 0xffffffffu, 0, 0};
    begin();
    const float* logits = p.logits + (u64)blockIdx.y * p.vocabulary;
#pragma unroll 8
    for (u32 i = from + threadIdx.x; i < to; i += TOPS_THREADS) {
        const float logit = __ldcg(logits + i);
        own.bad |= is_nan(logit);
        keep_higher(own, logit, i);
    }
#pragma unroll 1
    for (u32 round = 0; round < 2; round++) {
#pragma unroll
        for (u32 step = WARP / 2; step > 0; step /= 2) {
            const float logit = __shfl_xor_sync(ALL, own.logit, step);
            const u32 token = __shfl_xor_sync(ALL, own.token, step);
            own.bad |= __shfl_xor_sync(ALL, own.bad, step);
            keep_higher(own, logit, token);
        }
        if (round == 1) break;
        if (lane == 0) of_warp[warp] = own;
        __syncthreads();
        if (warp > 0) return;
        own = of_warp[lane % (TOPS_THREADS / WARP)];
    }
    if (lane == 0) p.out[blockIdx.y * gridDim.x + blockIdx.x] = own;
}

// A row whose weights are wanted: of `(logit - highest) * scale`.
struct Scaled {
    double scale;
    float highest;
    u32 row;
};

static const u32 MOST_SCALED = 32, SUM_THREADS = 256, SUMMED = 1024;

struct Sums {
    const float* logits;
    // [rows that are wanted, blocks of SUMMED logits]
    u64* out;
    Scaled of[MOST_SCALED];
    u32 vocabulary;
    u32 unused;
};

// exp(x) in units of 2^-40, for x of 0 or less: `weight` of crates/kernels/src/draw.rs, operation by operation.
__device__ __forceinline__ u64 weight(double x) {
    const double ROUND = 6755399441055744.0, WHOLE = 4503599627370496.0;
    x = x > -40.0 ? x : -40.0;
    const double shifted = x * 1.44269504088896340735992468100189214 + ROUND, n = shifted - ROUND;
    const double r = (x - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10;
    double sum = 1.0 / 479001600.0;
    const double terms[12] = {1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0, 1.0 / 40320.0, 1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0};
#pragma unroll
    for (u32 i = 0; i < 12; i++) sum = sum * r + terms[i];
    const double power = __longlong_as_double((long long)(u64)(__double_as_longlong(shifted) - __double_as_longlong(ROUND) + 1023 + 40) << 52);
    return (u64)(__double_as_longlong(sum * power + WHOLE) - __double_as_longlong(WHOLE));
}

// Grid: (blocks of SUMMED logits, rows that are wanted).
extern "C" __global__ void __launch_bounds__(256) sums(const __grid_constant__ Sums p) {
    __shared__ u64 of_warp[SUM_THREADS / WARP];
    const Scaled own = p.of[blockIdx.y];
    begin();
    const float* logits = p.logits + (u64)own.row * p.vocabulary;
    u64 sum = 0;
#pragma unroll
    for (u32 i = 0; i < SUMMED; i += SUM_THREADS) {
        const u32 at = blockIdx.x * SUMMED + i + threadIdx.x;
        if (at < p.vocabulary) sum += weight(((double)__ldcg(logits + at) - (double)own.highest) * own.scale);
    }
#pragma unroll
    for (u32 step = WARP / 2; step > 0; step /= 2) sum += __shfl_xor_sync(ALL, sum, step);
    if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
#pragma unroll
    for (u32 w = 1; w < SUM_THREADS / WARP; w++) sum += of_warp[w];
    p.out[(u64)blockIdx.y * gridDim.x + blockIdx.x] = sum;
}
