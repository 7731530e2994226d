// Small structs that many kernels take. src/parameters.rs has their counterparts on the host.
#pragma once
#include "prim/numerics.cuh"

// A row-major matrix of f32.
struct Tensor {
    float* at;
    // Elements from row to row.
    u64 stride;

    __device__ __forceinline__ float* row(u64 i) const { return at + i * stride; }
};

struct Norm {
    // Null: no norm.
    const float* weight;
    float eps;
    u32 unused;
};
