// Several residual streams: the weights of a block, what it takes of the streams, what becomes of them behind it, their mean, and a mixture of them by scores.
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/reduce.cuh"
#include "prim/tensor.cuh"

struct Streams {
    // [rows, count * hidden]
    Tensor streams;
    // [rows, hidden]: what a block takes or has put out, or the mean.
    Tensor x;
    // [rows, (2 + count) * count]: logits, and then weights.
    Tensor weights;
    const float* bias;
    float scales[3];
    float eps;
    u32 rounds;
    u32 count;
    u32 rows;
    u32 hidden;
    // Whether there are only weights of what goes in, [rows, count].
    u32 alone;
    u32 unused;
};

static const u32 MOST_STREAMS = 8, MOST_ATTENDED = 16;

// Weights of their logits, a thread each. A block takes a row.
extern "C" __global__ void __launch_bounds__(96) stream_weights(const Streams p) {
    __shared__ float own[(2 + MOST_STREAMS) * MOST_STREAMS];
    begin();
    // Behind the last block there are only those that go in.
    const u32 n = p.count, all = p.alone ? n : (2 + n) * n, i = threadIdx.x;
    const bool ends = i < min(2 * n, all), between = !ends && i < all;
    // Where the row and the column of what streams exchange begin.
    const float *row = own + i / n * n, *column = own + 2 * n + i % n;
    for (u32 r = blockIdx.x; r < p.rows; r += gridDim.x) {
        float* weights = p.weights.row(r);
        float w = 0.0f;
        if (i < all) own[i] = w = fma(weights[i], p.scales[min(i / n, 2)], p.bias[i]);
        __syncthreads();
        // 1. In, out, and softmaxes of rows
        if (ends) w = i < n ? add(sigmoid(w), p.eps) : mul(2.0f, sigmoid(w));
        if (between) {
            float most = row[0];
            for (u32 k = 0; k < n; k++) most = greater(row[k], most);
            w = exp_(sub(w, most));
        }
        __syncthreads();
        if (i < all) own[i] = w;
        __syncthreads();
        if (between) {
            float sum = 0.0f;
            for (u32 k = 0; k < n; k++) sum = add(sum, row[k]);
            w = add(div(w, sum), p.eps);
        }
        __syncthreads();
        if (between) own[i] = w;
        __syncthreads();
        // 2. Rows and columns by their sums, in turns
        for (u32 half = 1; !p.alone && half < 2 * p.rounds; half++) {
            if (between) {
                float sum = 0.0f;
                for (u32 k = 0; k < n; k++) sum = add(sum, half % 2 ? column[k * n] : row[k]);
                w = div(w, add(sum, p.eps));
            }
            __syncthreads();
            if (between) own[i] = w;
            __syncthreads();
        }
        if (i < all) weights[i] = w;
    }
}

// A block's input. Grid (rows, parts).
extern "C" __global__ void stream_collapse(const Streams p) {
    begin();
    for (u32 r = blockIdx.x; r < p.rows; r += gridDim.x) {
        const float *weights = p.weights.row(r), *streams = p.streams.row(r);
        float* x = p.x.row(r);
        for (u32 c = blockIdx.y * blockDim.x + threadIdx.x; c < p.hidden; c += gridDim.y * blockDim.x) {
            float sum = 0.0f;
            for (u32 s = 0; s < p.count; s++) sum = fma(weights[s], streams[(u64)s * p.hidden + c], sum);
            x[c] = sum;
        }
    }
}

// What a block takes of streams that are attended to. `weights` is one row, of normed elements in scores. A block takes a row: its warps take streams in turns.
extern "C" __global__ void __launch_bounds__(256) stream_attend(const Streams p) {
    __shared__ float shares[MOST_ATTENDED];
    begin();
    const u32 n = p.count, hidden = p.hidden, lane = threadIdx.x % 16;
    const float* weights = p.weights.row(0);
    for (u32 r = blockIdx.x; r < p.rows; r += gridDim.x) {
        const float* streams = p.streams.row(r);
        float* x = p.x.row(r);
        __syncthreads();
        for (u32 s = threadIdx.x / WARP; s < n; s += blockDim.x / WARP) {
            const float* stream = streams + (u64)s * hidden;
            float dot = 0.0f;
            // Both halves of the warp have the same sixteen lanes.
            for (u32 i = lane; i < (hidden + 15) / 16 * 16; i += 16) dot = fma(i < hidden ? stream[i] : 0.0f, i < hidden ? weights[i] : 0.0f, dot);
            const float score = mul(lane_tree(dot), inverse_rms(stream, hidden, p.eps));
            if (threadIdx.x % WARP == 0) shares[s] = score;
        }
        __syncthreads();
        // All threads have the same softmax.
        float most = shares[0], sum = 0.0f;
        for (u32 s = 1; s < n; s++) most = greater(shares[s], most);
        for (u32 s = 0; s < n; s++) sum = add(sum, exp_(sub(shares[s], most)));
        __syncthreads();
        if (threadIdx.x < n) shares[threadIdx.x] = div(exp_(sub(shares[threadIdx.x], most)), sum);
        __syncthreads();
        for (u32 c = threadIdx.x; c < hidden; c += blockDim.x) {
            float mixed = 0.0f;
            for (u32 s = 0; s < n; s++) mixed = fma(shares[s], streams[(u64)s * hidden + c], mixed);
            x[c] = mixed;
        }
    }
}

// Grid (rows, parts).
extern "C" __global__ void stream_expand(const Streams p) {
    begin();
    const u32 n = p.count;
    for (u32 r = blockIdx.x; r < p.rows; r += gridDim.x) {
        const float *x = p.x.row(r), *out = p.weights.row(r) + n, *between = out + n;
        float* streams = p.streams.row(r);
        for (u32 c = blockIdx.y * blockDim.x + threadIdx.x; c < p.hidden; c += gridDim.y * blockDim.x) {
            float before[MOST_STREAMS];
#pragma unroll
            for (u32 s = 0; s < MOST_STREAMS; s++) before[s] = s < n ? streams[(u64)s * p.hidden + c] : 0.0f;
            for (u32 to = 0; to < n; to++) {
                float sum = mul(out[to], x[c]);
#pragma unroll
                for (u32 from = 0; from < MOST_STREAMS; from++) {
                    if (from < n) sum = fma(between[from * n + to], before[from], sum);
                }
                streams[(u64)to * p.hidden + c] = sum;
            }
        }
    }
}

// Grid (rows, parts).
extern "C" __global__ void stream_mean(const Streams p) {
    begin();
    for (u32 r = blockIdx.x; r < p.rows; r += gridDim.x) {
        const float* streams = p.streams.row(r);
        float* x = p.x.row(r);
        for (u32 c = blockIdx.y * blockDim.x + threadIdx.x; c < p.hidden; c += gridDim.y * blockDim.x) {
            float sum = 0.0f;
            for (u32 s = 0; s < p.count; s++) sum = add(sum, streams[(u64)s * p.hidden + c]);
            x[c] = div(sum, (float)p.count);
        }
    }
}

// The mean of streams, each element times the sigmoid of its gate. Gates are where weights are. Grid (rows, parts).
extern "C" __global__ void stream_gated_mean(const Streams p) {
    begin();
    for (u32 r = blockIdx.x; r < p.rows; r += gridDim.x) {
        const float *streams = p.streams.row(r), *gates = p.weights.row(r);
        float* x = p.x.row(r);
        for (u32 c = blockIdx.y * blockDim.x + threadIdx.x; c < p.hidden; c += gridDim.y * blockDim.x) {
            float sum = 0.0f;
            for (u32 s = 0; s < p.count; s++) sum = fma(sigmoid(gates[(u64)s * p.hidden + c]), streams[(u64)s * p.hidden + c], sum);
            x[c] = div(sum, (float)p.count);
        }
    }
}

// To each stream twice the sigmoid of its logit over their number, times what a block has put out. Logits are where weights are. Grid (rows, parts).
extern "C" __global__ void stream_inject(const Streams p) {
    begin();
    for (u32 r = blockIdx.x; r < p.rows; r += gridDim.x) {
        const float *x = p.x.row(r), *logits = p.weights.row(r);
        float* streams = p.streams.row(r);
        float shares[MOST_STREAMS];
#pragma unroll
        for (u32 s = 0; s < MOST_STREAMS; s++) shares[s] = s < p.count ? mul(2.0f, sigmoid(div(logits[s], (float)p.count))) : 0.0f;
        for (u32 c = blockIdx.y * blockDim.x + threadIdx.x; c < p.hidden; c += gridDim.y * blockDim.x) {
#pragma unroll
            for (u32 s = 0; s < MOST_STREAMS; s++) {
                if (s < p.count) streams[(u64)s * p.hidden + c] = fma(shares[s], x[c], streams[(u64)s * p.hidden + c]);
            }
        }
    }
}
