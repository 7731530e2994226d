// What kernels of gate and up of one token's experts share: questions to the host, and rows fetched ahead.
#pragma once
#include "moe/single.cuh"
#include "moe/topk.cuh"
#include "prim/cp_async.cuh"

static const u32 GATE_UP_THREADS = 256;

// Set in a request: all experts are there, and nothing waits for an answer.
static const u32 GOES_ON = 1u << 31;

// The first block tells the host which experts the token takes, and waits for the answer if some are `absent`.
__device__ __forceinline__ void ask(const SingleToken& p, const Taken& taken, u32 absent) {
    volatile u32* question = p.question;
    if (absent && p.input) {
#pragma unroll 1
        for (u32 i = threadIdx.x; i < p.cols / 4; i += GATE_UP_THREADS) ((float4*)p.input)[i] = __ldcg((const float4*)p.normed + i);
        // The data is visible before the host sees the question.
        __threadfence_system();
        __syncthreads();
    }
    if (threadIdx.x < p.route.k) question[threadIdx.x] = taken.experts[threadIdx.x] | (absent ? 0 : GOES_ON);
    __syncwarp();
    if (absent && threadIdx.x == 0) {
        u32 answer;
        while ((answer = question[MOST_SLOTS]) == 0) __nanosleep(20);
        __threadfence_system();
        *(volatile u32*)p.answer = answer;
        __threadfence();
    }
}

// Waits until the first block has the answer. Bits of the slots whose experts the host has computed.
__device__ __forceinline__ u32 answered(const SingleToken& p) {
    u32 answer;
    while ((answer = *(volatile u32*)p.answer) == 0) __nanosleep(20);
    __threadfence();
    return answer >> 1;
}

// Prefetches a row of a matrix from byte `from` on, by `lanes` lanes, of which this is `lane`.
__device__ __forceinline__ void prefetch_row(const u8* row, u32 from, u32 row_bytes, u32 lane, u32 lanes) {
#pragma unroll 1
    for (u32 at = from + 128 * lane; at < row_bytes; at += 128 * lanes) prefetch(row + at);
}
