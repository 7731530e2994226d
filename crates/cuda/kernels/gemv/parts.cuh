// What the kernels for one token share: a matrix of a launch, and the row that goes in.
#pragma once
#include "prim/numerics.cuh"

// A matrix. The rows of a launch are numbered across its matrices, and each address is that of the launch's row 0.
struct FusedMatrix {
    const u8* data;
    const u8* scales;
    const u8* biases;
    float* out;
};

// The row that goes in, [cols], to be normed or not, and quantized.
struct NormedRow {
    const float* x;
    // Null: no norm.
    const float* norm;
    float eps;
    u32 cols;
};
