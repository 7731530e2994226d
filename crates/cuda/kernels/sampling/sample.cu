// What sampling needs of the logits, so that they stay on the device: the likeliest token, the likeliest few, and the sums of weights that
// crates/kernels/src/draw.rs defines, whole numbers, exact in any order.
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"

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
    // [rows, GROUPS]
    float* groups;
    u32 vocabulary;
    u32 unused;
};

// Rows that a kernel is asked about at once, at most.
static const u32 MOST_DRAWN = 32;

static const u32 TOPS_THREADS = 512, TOPS_BLOCKS = 16;

// A warp of `tops` looks at a group of a row's logits: `i` is in group `i / WARP % GROUPS`.
static const u32 GROUPS = TOPS_BLOCKS * TOPS_THREADS / WARP;

// Which of two comes first.
__device__ __forceinline__ void keep_higher(Top& own, float logit, u32 token) {
    if (logit > own.logit || (logit == own.logit && token < own.token)) own.logit = logit, own.token = token;
}

// Grid: (TOPS_BLOCKS, rows).
extern "C" __global__ void __launch_bounds__(512) sample_tops(const __grid_constant__ Tops p) {
    __shared__ Top of_warp[TOPS_THREADS / WARP];
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    Top own = {bits(NEGATIVE_INFINITY), 0xffffffffu, 0, 0};
    begin();
    const float* logits = p.logits + (u64)blockIdx.y * p.vocabulary;
#pragma unroll 8
    for (u32 i = blockIdx.x * TOPS_THREADS + threadIdx.x; i < p.vocabulary; i += TOPS_BLOCKS * TOPS_THREADS) {
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
        if (lane == 0) {
            of_warp[warp] = own;
            p.groups[blockIdx.y * GROUPS + blockIdx.x * (TOPS_THREADS / WARP) + warp] = own.logit;
        }
        __syncthreads();
        if (warp > 0) return;
        own = of_warp[lane % (TOPS_THREADS / WARP)];
    }
    if (lane == 0) p.out[blockIdx.y * TOPS_BLOCKS + blockIdx.x] = own;
}

// A row whose `rank` likeliest tokens are wanted.
struct Ranked {
    u32 row;
    u32 rank;
};

static const u32 BEST_THREADS = 1024, MAX_BEST = 512, LOGITS_AT_ONCE = 8;

struct Candidate {
    float logit;
    u32 token;
};

struct Best {
    const float* logits;
    // [rows, GROUPS], of `tops`
    const float* groups;
    // [rows that are wanted, 1 + MAX_BEST]: first the bar and how many reach it, then as many of those as there is room for, in any order.
    Candidate* out;
    Ranked of[MOST_DRAWN];
    u32 vocabulary;
    u32 unused;
};

// All logits of a row that are as high as the `rank`th of its groups' highest: `rank` of them at least, as groups share none. Groups that do not reach so high are
// not looked at. Grid: rows that are wanted.
extern "C" __global__ void __launch_bounds__(1024) sample_best(const __grid_constant__ Best p) {
    __shared__ float highest[GROUPS];
    __shared__ float bar;
    __shared__ u32 count;
    const Ranked own = p.of[blockIdx.x];
    const u32 lane = threadIdx.x % WARP;
    Candidate* out = p.out + (u64)blockIdx.x * (1 + MAX_BEST);
    begin();
    const float* logits = p.logits + (u64)own.row * p.vocabulary;
    if (threadIdx.x < GROUPS) highest[threadIdx.x] = __ldcg(p.groups + own.row * GROUPS + threadIdx.x);
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    if (threadIdx.x < GROUPS) {
        const float mine = highest[threadIdx.x];
        u32 before = 0;
#pragma unroll 8
        for (u32 g = 0; g < GROUPS; g++) before += highest[g] > mine || (highest[g] == mine && g < threadIdx.x);
        if (before + 1 == own.rank) bar = mine;
    }
    __syncthreads();
    const float least = bar;
#pragma unroll 1
    for (u32 group = threadIdx.x / WARP; group < GROUPS; group += BEST_THREADS / WARP) {
        if (!(highest[group] >= least)) continue;
#pragma unroll 1
        for (u32 from = group * WARP; from < p.vocabulary; from += LOGITS_AT_ONCE * GROUPS * WARP) {
            float there[LOGITS_AT_ONCE];
#pragma unroll
            for (u32 j = 0; j < LOGITS_AT_ONCE; j++) {
                const u32 token = from + j * GROUPS * WARP + lane;
                there[j] = token < p.vocabulary ? __ldcg(logits + token) : bits(NOT_A_NUMBER);
            }
#pragma unroll
            for (u32 j = 0; j < LOGITS_AT_ONCE; j++) {
                const bool kept = there[j] >= least;
                const u32 all = __ballot_sync(ALL, kept);
                if (all == 0) continue;
                u32 slot = 0;
                if (lane == 0) slot = atomicAdd(&count, __popc(all));
                slot = __shfl_sync(ALL, slot, 0) + __popc(all & ((1u << lane) - 1));
                if (kept && slot < MAX_BEST) out[1 + slot] = {there[j], from + j * GROUPS * WARP + lane};
            }
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) out[0] = {least, count};
}

// A row whose weights are wanted. They are made of `(logit - highest) * scale`.
struct Scaled {
    double scale;
    float highest;
    u32 row;
};

static const u32 SUM_THREADS = 256, SUMMED = 1024;

struct Sums {
    const float* logits;
    // [rows that are wanted, blocks of SUMMED logits]
    u64* out;
    Scaled of[MOST_DRAWN];
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
extern "C" __global__ void __launch_bounds__(256) sample_sums(const __grid_constant__ Sums p) {
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
