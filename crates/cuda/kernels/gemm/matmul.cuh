// A product of a weight matrix with encoded activations: `out[t, r] (+)= W[r] x[t] (+ bias[r])`. One warp, or half of one, always sums a whole element of the
// result, in the order that docs/numerics.md gives.
//
// In a mixture each output row has an expert of its own, whose matrix comes from a table. A kernel skips rows whose matrix has another format.
#pragma once
#include "format/activations.cuh"
#include "format/matrix.cuh"
#include "prim/numerics.cuh"
#include "prim/tensor.cuh"

struct Matmul {
    // The matrix, if there is no table.
    Matrix matrix;
    const Matrix* table;
    // [outputs]: which matrix of the table each output row takes.
    const u32* experts;
    // Output rows in the order of their matrices, and tiles of them: `Pairs` of moe/pairs.cu; null: all rows have one matrix, or are taken one by one.
    const u32* tiles;
    const u32* order;
    // With a table: output rows per row of x.
    u32 per_row;
    u32 rows;
    u32 cols;
    // Output rows.
    u32 outputs;
    Encoded x;
    Tensor out;
    // Null: none.
    const float* bias;
    u32 accumulate;
    // Rows come in runs of `run` rows; from run to run it is `run_rows` further in the matrix, and `run_columns` in the output.
    u32 run;
    u32 run_rows;
    u32 run_columns;

    // The row in the matrix, and the column in the output, of the product's row `r`.
    __device__ __forceinline__ u64 in_matrix(u64 r) const { return run == rows ? r : r / run * run_rows + r % run; }
    __device__ __forceinline__ u64 in_output(u32 r) const { return run == rows ? r : (u64)(r / run) * run_columns + r % run; }
};

// Products of one input that a kernel computes side by side, along z of the grid.
struct Products {
    Matmul parts[3];
};

static const u32 THREADS = 256;

// What a warp or half-warp works on.
struct Work {
    Matrix m;
    // Row of x of the first token.
    u64 x;
    // First output row, and how many.
    u32 first;
    u32 count;
};

// Finds what a tile works on. False if its matrix has another format.
template <int T> __device__ __forceinline__ bool work(const Matmul& p, u32 kind, u32 tile, Work& w) {
    w.first = tile * T;
    w.count = min((u32)T, p.outputs - w.first);
    if (p.table) {
        w.m = p.table[p.experts[w.first]];
        w.x = w.first / p.per_row;
    } else {
        w.m = p.matrix;
        w.x = w.first;
    }
    return w.m.kind == kind;
}

__device__ __forceinline__ void put(const Matmul& p, u32 output, u32 r, float y) {
    float* to = p.out.row(output) + p.in_output(r);
    if (p.bias) y = add(y, p.bias[r]);
    *to = p.accumulate ? add(*to, y) : y;
}
