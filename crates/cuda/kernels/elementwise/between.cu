// Work on each element or head between the fused operations: scales, soft caps, orders of columns, SwiGLU, GELU, squared ReLU, norms of rows, heads and outputs, pairs that are beside each other.
#include "prim/nonlinear.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/reduce.cuh"
#include "prim/tensor.cuh"

struct Between {
    Tensor x;
    // `up`, the residual, what is normed, or factors.
    Tensor other;
    Norm norm;
    const u32* positions;
    u32 rows;
    u32 cols;
    // Elements of a head, or of what a norm takes; positions that share a factor.
    u32 head;
    float by;
    // The number of factors.
    u32 steps;
    u32 unused;
};

// Grid (rows, parts).
extern "C" __global__ void between_scale(const Between p) {
    begin();
    for (u32 r = blockIdx.x; r < p.rows; r += gridDim.x) {
        float* x = p.x.row(r);
        for (u32 c = blockIdx.y * blockDim.x + threadIdx.x; c < p.cols; c += gridDim.y * blockDim.x) x[c] = mul(x[c], p.by);
    }
}

extern "C" __global__ void between_geglu(const Between p) {
    begin();
    for (u32 r = blockIdx.x; r < p.rows; r += gridDim.x) {
        float* gate = p.x.row(r);
        const float* up = p.other.row(r);
        for (u32 c = blockIdx.y * blockDim.x + threadIdx.x; c < p.cols; c += gridDim.y * blockDim.x) gate[c] = mul(gelu(gate[c]), up[c]);
    }
}

extern "C" __global__ void between_swiglu(const Between p) {
    begin();
    for (u32 r = blockIdx.x; r < p.rows; r += gridDim.x) {
        float* gate = p.x.row(r);
        const float* up = p.other.row(r);
        for (u32 c = blockIdx.y * blockDim.x + threadIdx.x; c < p.cols; c += gridDim.y * blockDim.x) gate[c] = mul(silu(gate[c]), up[c]);
    }
}

extern "C" __global__ void between_clamped_swiglu(const Between p) {
    begin();
    for (u32 r = blockIdx.x; r < p.rows; r += gridDim.x) {
        float* gate = p.x.row(r);
        const float* up = p.other.row(r);
        for (u32 c = blockIdx.y * blockDim.x + threadIdx.x; c < p.cols; c += gridDim.y * blockDim.x) gate[c] = clamped_swiglu(gate[c], up[c], 1.0f, p.by, 0.0f);
    }
}

// The second bound is where a norm has its epsilon.
extern "C" __global__ void between_situ(const Between p) {
    begin();
    for (u32 r = blockIdx.x; r < p.rows; r += gridDim.x) {
        float* gate = p.x.row(r);
        const float* up = p.other.row(r);
        for (u32 c = blockIdx.y * blockDim.x + threadIdx.x; c < p.cols; c += gridDim.y * blockDim.x) gate[c] = situ(gate[c], up[c], p.by, p.norm.eps);
    }
}

extern "C" __global__ void between_sigmoid_gate(const Between p) {
    begin();
    for (u32 r = blockIdx.x; r < p.rows; r += gridDim.x) {
        float* x = p.x.row(r);
        const float* gate = p.other.row(r);
        for (u32 c = blockIdx.y * blockDim.x + threadIdx.x; c < p.cols; c += gridDim.y * blockDim.x) x[c] = mul(x[c], sigmoid(gate[c]));
    }
}

extern "C" __global__ void between_squared_relu(const Between p) {
    begin();
    for (u32 r = blockIdx.x; r < p.rows; r += gridDim.x) {
        float* x = p.x.row(r);
        for (u32 c = blockIdx.y * blockDim.x + threadIdx.x; c < p.cols; c += gridDim.y * blockDim.x) x[c] = squared_relu(x[c]);
    }
}

extern "C" __global__ void between_scale_rows(const Between p) {
    begin();
    for (u32 r = blockIdx.x; r < p.rows; r += gridDim.x) {
        float* x = p.x.row(r);
        const float by = p.other.row(0)[min(p.positions[r] / p.head, p.steps - 1)];
        for (u32 c = blockIdx.y * blockDim.x + threadIdx.x; c < p.cols; c += gridDim.y * blockDim.x) x[c] = mul(x[c], by);
    }
}

// The numbers of columns are where a norm has its weights.
extern "C" __global__ void between_gather(const Between p) {
    begin();
    for (u32 r = blockIdx.x; r < p.rows; r += gridDim.x) {
        const float* x = p.x.row(r);
        float* out = p.other.row(r);
        for (u32 c = blockIdx.y * blockDim.x + threadIdx.x; c < p.cols; c += gridDim.y * blockDim.x) out[c] = x[(u32)p.norm.weight[c]];
    }
}

extern "C" __global__ void between_zero(const Between p) {
    begin();
    for (u32 r = blockIdx.x; r < p.rows; r += gridDim.x) {
        float* x = p.x.row(r);
        for (u32 c = blockIdx.y * blockDim.x + threadIdx.x; c < p.cols; c += gridDim.y * blockDim.x) x[c] = 0.0f;
    }
}

extern "C" __global__ void between_soft_cap(const Between p) {
    begin();
    for (u32 r = blockIdx.x; r < p.rows; r += gridDim.x) {
        float* x = p.x.row(r);
        for (u32 c = blockIdx.y * blockDim.x + threadIdx.x; c < p.cols; c += gridDim.y * blockDim.x) x[c] = mul(tanh_(div(x[c], p.by)), p.by);
    }
}

// Norms a run of each row's columns by a block, whose first warp sums squares. OWN: each run has weights of its own.
template <bool OWN> __device__ __forceinline__ void norm_runs(const Between& p) {
    __shared__ float inverse;
    begin();
    const u64 from = (u64)blockIdx.y * p.head;
    const float* weight = p.norm.weight + (OWN ? from : 0);
    for (u32 r = blockIdx.x; r < p.rows; r += gridDim.x) {
        const float* x = p.x.row(r) + from;
        float* out = p.other.row(r) + from;
        __syncthreads();
        if (threadIdx.x < WARP) {
            float inv = inverse_rms(x, p.head, p.norm.eps);
            if (threadIdx.x == 0) inverse = inv;
        }
        __syncthreads();
        for (u32 c = threadIdx.x; c < p.head; c += blockDim.x) out[c] = mul(mul(x[c], inverse), weight[c]);
    }
}

// Grid (rows, runs).
extern "C" __global__ void between_norm(const Between p) { norm_runs<false>(p); }
extern "C" __global__ void between_norm_groups(const Between p) { norm_runs<true>(p); }

extern "C" __global__ void between_divided_silu(const Between p) {
    begin();
    for (u32 r = blockIdx.x; r < p.rows; r += gridDim.x) {
        float* x = p.x.row(r);
        for (u32 c = blockIdx.y * blockDim.x + threadIdx.x; c < p.cols; c += gridDim.y * blockDim.x) x[c] = silu(div(x[c], p.by));
    }
}

extern "C" __global__ void between_add_normed(const Between p) {
    __shared__ float inverse;
    begin();
    const u64 from = (u64)blockIdx.y * p.head;
    for (u32 r = blockIdx.x; r < p.rows; r += gridDim.x) {
        const float* x = p.x.row(r) + from;
        float* residual = p.other.row(r) + from;
        __syncthreads();
        if (threadIdx.x < WARP) {
            float inv = inverse_rms(x, p.head, p.norm.eps);
            if (threadIdx.x == 0) inverse = inv;
        }
        __syncthreads();
        for (u32 c = threadIdx.x; c < p.head; c += blockDim.x) residual[c] = add(residual[c], mul(mul(x[c], inverse), p.norm.weight[c]));
    }
}

// A block takes a head of a row, a thread a pair. Grid (rows, heads).
extern "C" __global__ void between_split_pairs(const Between p) {
    begin();
    const u32 half = p.head / 2, i = threadIdx.x;
    for (u32 r = blockIdx.x; r < p.rows; r += gridDim.x) {
        float *head = p.x.row(r) + (u64)blockIdx.y * p.head, first = 0.0f, second = 0.0f;
        if (i < half) first = head[2 * i], second = head[2 * i + 1];
        __syncthreads();
        if (i < half) head[i] = first, head[half + i] = second;
    }
}

// Turns the last `2 * steps` elements of each head where they are, pairs beside each other, or back. `norm.weight` has the angles, [positions, 2 * steps]; `by` is 1 or -1. Grid (rows, heads).
extern "C" __global__ void between_turn_pairs(const Between p) {
    begin();
    for (u32 r = blockIdx.x; r < p.rows; r += gridDim.x) {
        const float* angles = p.norm.weight + (u64)p.positions[r] * 2 * p.steps;
        float* x = p.x.row(r) + (u64)(blockIdx.y + 1) * p.head - 2 * p.steps;
        for (u32 i = threadIdx.x; i < p.steps; i += blockDim.x) {
            const float a = x[2 * i], b = x[2 * i + 1], cos = angles[i], s = angles[p.steps + i], sin = p.by < 0.0f ? sub(0.0f, s) : s;
            x[2 * i] = fma(b, sub(0.0f, sin), mul(a, cos));
            x[2 * i + 1] = fma(a, sin, mul(b, cos));
        }
    }
}
