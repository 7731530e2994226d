// Rows of an embedding, and copies of rows.
#include "format/matrix.cuh"
#include "format/weight.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/tensor.cuh"

struct Embed {
    Matrix table;
    const u32* tokens;
    Tensor out;
    u32 rows;
    u32 cols;
};

extern "C" __global__ void embed(const Embed p) {
    begin();
    for (u32 r = blockIdx.x; r < p.rows; r += gridDim.x) {
        u64 token = p.tokens[r];
        float* out = p.out.row(r);
        for (u32 c = threadIdx.x; c < p.cols; c += blockDim.x) {
            out[c] = weight_of(p.table, token, c);
        }
    }
}

struct CopyRows {
    Tensor from;
    Tensor to;
    u32 rows;
    u32 cols;
};

extern "C" __global__ void copy_rows(const CopyRows p) {
    begin();
    for (u32 r = blockIdx.x; r < p.rows; r += gridDim.x) {
        for (u32 c = threadIdx.x; c < p.cols; c += blockDim.x) p.to.row(r)[c] = p.from.row(r)[c];
    }
}
