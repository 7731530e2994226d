// Asynchronous copies from global to shared memory. A thread commits its copies in groups and waits for groups.
#pragma once
#include "prim/numerics.cuh"

// Brings a line of memory to the second-level cache.
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Copies sixteen bytes to shared memory. They are there after a wait.
__device__ __forceinline__ void cp_async_16(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
    u32 at = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
#else
    *(uint4*)to = *(const uint4*)from;
#endif
}

__device__ __forceinline__ void cp_async_4(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
    u32 at = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(at), "l"(from) : "memory");
#else
    *(u32*)to = *(const u32*)from;
#endif
}

__device__ __forceinline__ void cp_async_8(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
    u32 at = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(at), "l"(from) : "memory");
#endif
}

// The same for a stream of weights. The second-level cache fetches the neighbouring bytes too, since memory delivers longer pieces faster.
__device__ __forceinline__ void cp_async_16_stream(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
    u32 at = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
#endif
}

// Copies pairs of bytes that lie at any address.
__device__ __forceinline__ void copy_slowly(u8* to, const u8* from, u32 pairs) {
#pragma unroll 1
    for (u32 i = 0; i < pairs; i++) ((u16*)to)[i] = (u16)(from[2 * i] | from[2 * i + 1] << 8);
}

__device__ __forceinline__ void cp_async_wait_all() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Ends a group of this thread's copies; `cp_async_wait<N>` waits for all groups but the last N.
__device__ __forceinline__ void cp_async_commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int N> __device__ __forceinline__ void cp_async_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}
