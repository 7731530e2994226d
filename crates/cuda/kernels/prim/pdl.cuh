// Order between kernels (programmatic dependent launch) and between the blocks of one.
#pragma once
#include "prim/numerics.cuh"

// Waits until everything that earlier kernels have written is visible. Code before the wait may read only what no kernel of a step writes. Every block that has
// work waits, so that when a kernel has ended, all earlier ones have ended too.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void pdl_launch() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void begin() {
    pdl_wait();
    pdl_launch();
}

// Whether this block is the last of `count` to reach this point; all threads of each block call it. The last block can read what the others have written, past the
// first-level cache. `counter` is zero before and after.
__device__ __forceinline__ bool is_last_block(u32* counter, u32 count) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicInc(counter, count - 1) == count - 1;
        __threadfence();
    }
    __syncthreads();
    return last;
}
