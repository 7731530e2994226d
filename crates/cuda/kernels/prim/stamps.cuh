// Where a kernel's time goes: cycles of each block's first thread from stamp to stamp, and how many stamps there were. `scripts/kernels --option=-DSTAMPS --out
// DIR` makes kernels that count them; programs with the feature `tuning` print them.
#pragma once
#include "prim/numerics.cuh"

#ifdef STAMPS

extern "C" __device__ u64 stamps[16][8][2] = {};
#define WATCH() u64 watched = clock64()
#define STAMP(kernel, n)                                  \
    if (threadIdx.x == 0) {                               \
        u64 stamped = clock64();                          \
        atomicAdd(&stamps[kernel][n][0], stamped - watched); \
        atomicAdd(&stamps[kernel][n][1], 1ull);           \
        watched = clock64();                              \
    }
#else
#define WATCH()
#define STAMP(kernel, n)
#endif
