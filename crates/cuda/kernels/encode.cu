// Rows of activations, normed or combined, in the encodings that matrix products take; rows of an embedding.
#include "numerics.cuh"

struct Encode {
    Tensor x;
    // Where it is not null, what is encoded is silu(x) * up.
    Tensor up;
    Norm norm;
    // Which rows of x are taken; null: all.
    const u32* taken;
    u32 rows;
    u32 cols;
    Encoded to;
};

// Columns of a row that are kept in shared memory while it is normed, at most.
static const u32 NORMED = 8192;

// A block takes a row at a time, or where nothing is normed a part of one: grid (rows, parts). Where there is a norm, the first warp sums squares.
extern "C" __global__ void __launch_bounds__(1024) encode(const Encode p) {
    begin();
    __shared__ float inverse;
    __shared__ float kept[NORMED];
    u32 lane = threadIdx.x % WARP;
    for (u32 r = blockIdx.x; r < p.rows; r += gridDim.x) {
        u64 from = p.taken ? p.taken[r] : r;
        const float* x = p.x.row(from);
        if (p.norm.weight) {
            __syncthreads();
            bool keeps = p.cols <= NORMED;
            if (keeps) {
                for (u32 c = threadIdx.x; c < p.cols; c += blockDim.x) kept[c] = x[c];
                __syncthreads();
            }
            if (threadIdx.x < WARP) {
                float inv = keeps ? inverse_rms(kept, p.cols, p.norm.eps) : inverse_rms(x, p.cols, p.norm.eps);
                if (lane == 0) inverse = inv;
            }
            __syncthreads();
        }
        // Whole groups of 32 stay in a warp.
        for (u32 c = blockIdx.y * blockDim.x + threadIdx.x; c / WARP * WARP < p.cols; c += gridDim.y * blockDim.x) {
            bool inside = c < p.cols;
            float v = inside ? x[c] : 0.0f;
            if (p.norm.weight) v = inside ? mul(mul(v, inverse), p.norm.weight[c]) : 0.0f;
            if (p.up.at) v = inside ? mul(silu(v), p.up.row(from)[c]) : 0.0f;
            u64 at = (u64)r * p.cols + c;
            if (p.to.f && inside) p.to.f[at] = v;
            if (p.to.h && inside) p.to.h[at] = to_bf16(v);
            if (p.to.q) {
                // Sizes compare as integers, and a NaN is the greatest.
                float a = bits(warp_greatest(bits(v) & 0x7fffffffu));
                float inv = div(127.0f, a);
                if (!is_finite(inv)) inv = 0.0f;
                int q = to_i8(mul(v, inv));
                int sum = warp_sum(q);
                u32 eighth = c % 8;
                u64 place = at - eighth + (eighth / 2 + (eighth % 2) * 4);
                p.to.q[place] = (i8)q;
                if (lane == 0) {
                    float scale = div(a, 127.0f);
                    p.to.sx[at / 32] = scale;
                    p.to.mx[at / 32] = mul(scale, (float)sum);
                }
            }
        }
    }
}

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
            out[c] = p.table.group ? affine_weight(p.table, token, c)
                                   : element(p.table.data + token * p.table.row_bytes, p.table.type, c);
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
