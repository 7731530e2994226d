// GatedDeltaNet: the short convolution, norms and gates, the delta rule token by token, the gated norm of its output.
#include "numerics.cuh"

struct Delta {
    Tensor qkv;
    Tensor z;
    Tensor b;
    Tensor a;
    Tensor out;
    // [taps, channels]
    Tensor conv;
    // [rows, ..]: from this layer's part on.
    Tensor states;
    const float* a_log;
    const float* dt_bias;
    Norm norm;
    // [tokens, channels], [tokens, value_heads] each: what the kernels leave for one another.
    float* mixed;
    float* g;
    float* beta;
    // [tokens]
    const u32* sequences;
    // [sequences + 1], [sequences]
    const u32* starts;
    const u32* rows;
    u32 tokens;
    u32 count;
    u32 key_heads;
    u32 value_heads;
    u32 key_dim;
    u32 value_dim;
    u32 taps;
    float scale;
};

static const float L2_EPS = 1e-6f;

__device__ __forceinline__ u32 channels(const Delta& p) { return 2 * p.key_heads * p.key_dim + p.value_heads * p.value_dim; }

// The last inputs of the convolution of a sequence: [taps - 1, channels].
__device__ __forceinline__ float* window(const Delta& p, u32 sequence) {
    return p.states.row(p.rows[sequence]) + (u64)p.value_heads * p.key_dim * p.value_dim;
}

// Input `i` of a channel, counted from the window's start.
__device__ __forceinline__ float input(const Delta& p, u32 sequence, u32 i, u32 channel) {
    u32 before = p.taps - 1;
    if (i < before) return window(p, sequence)[(u64)i * channels(p) + channel];
    return p.qkv.row(p.starts[sequence] + i - before)[channel];
}

// A thread takes a channel of a token.
extern "C" __global__ void convolve(const Delta p) {
    begin();
    u32 all = channels(p), channel = blockIdx.x * blockDim.x + threadIdx.x;
    if (channel >= all) return;
    for (u32 t = blockIdx.y; t < p.tokens; t += gridDim.y) {
        u32 sequence = p.sequences[t], i = t - p.starts[sequence];
        float y = 0.0f;
        for (u32 tap = 0; tap < p.taps; tap++) y = fma(p.conv.row(tap)[channel], input(p, sequence, i + tap, channel), y);
        p.mixed[(u64)t * all + channel] = silu(y);
    }
}

// The last inputs become the window: a thread takes a channel of a sequence. Ascending, so that what is read was not written.
extern "C" __global__ void slide(const Delta p) {
    begin();
    u32 all = channels(p), channel = blockIdx.x * blockDim.x + threadIdx.x;
    if (channel >= all) return;
    for (u32 s = blockIdx.y; s < p.count; s += gridDim.y) {
        u32 n = p.starts[s + 1] - p.starts[s];
        for (u32 i = 0; i + 1 < p.taps; i++) window(p, s)[(u64)i * all + channel] = input(p, s, i + n, channel);
    }
}

// A warp takes a head of q or k of a token; the block's first threads, its gates.
extern "C" __global__ void gates(const Delta p) {
    begin();
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    for (u32 t = blockIdx.x; t < p.tokens; t += gridDim.x) {
        for (u32 h = warp; h < 2 * p.key_heads; h += blockDim.x / WARP) {
            float* head = p.mixed + (u64)t * channels(p) + (u64)h * p.key_dim;
            float inv = div(1.0f, __fsqrt_rn(add(squares(head, p.key_dim), L2_EPS)));
            float scale = h < p.key_heads ? p.scale : 1.0f;
            __syncwarp();
            for (u32 i = lane; i < p.key_dim; i += WARP) head[i] = mul(mul(head[i], inv), scale);
        }
        for (u32 h = threadIdx.x; h < p.value_heads; h += blockDim.x) {
            u64 at = (u64)t * p.value_heads + h;
            p.g[at] = mul(sub(0.0f, exp_(p.a_log[h])), softplus(add(p.a.row(t)[h], p.dt_bias[h])));
            p.beta[at] = sigmoid(p.b.row(t)[h]);
        }
    }
}

// A thread takes a column of a value head's state of a sequence through all its tokens; grid: (blocks of columns, value heads, sequences). Shared memory:
// q and k of a token [key_dim] each.
extern "C" __global__ void recur(const Delta p) {
    begin();
    float *q = room, *k = room + p.key_dim;
    u32 h = blockIdx.y, all = channels(p), keys = p.key_heads * p.key_dim;
    u32 key_head = h / (p.value_heads / p.key_heads);
    u32 j = blockIdx.x * blockDim.x + threadIdx.x;
    bool inside = j < p.value_dim;
    for (u32 s = blockIdx.z; s < p.count; s += gridDim.z) {
        float* state = p.states.row(p.rows[s]) + (u64)h * p.key_dim * p.value_dim + j;
        for (u32 t = p.starts[s]; t < p.starts[s + 1]; t++) {
            const float* mixed = p.mixed + (u64)t * all;
            __syncthreads();
            for (u32 i = threadIdx.x; i < p.key_dim; i += blockDim.x) {
                q[i] = mixed[key_head * p.key_dim + i];
                k[i] = mixed[keys + key_head * p.key_dim + i];
            }
            __syncthreads();
            if (!inside) continue;
            float decay = exp_(p.g[(u64)t * p.value_heads + h]), beta = p.beta[(u64)t * p.value_heads + h];
            float v = mixed[2 * keys + h * p.value_dim + j];
            float held[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            for (u32 i = 0; i < p.key_dim; i += 4) {
#pragma unroll
                for (u32 lane = 0; lane < 4; lane++) {
                    if (i + lane < p.key_dim) {
                        held[lane] = fma(mul(state[(u64)(i + lane) * p.value_dim], decay), k[i + lane], held[lane]);
                    }
                }
            }
            float d = mul(sub(v, add(add(held[0], held[2]), add(held[1], held[3]))), beta);
            float o[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            for (u32 i = 0; i < p.key_dim; i += 4) {
#pragma unroll
                for (u32 lane = 0; lane < 4; lane++) {
                    if (i + lane < p.key_dim) {
                        float* at = state + (u64)(i + lane) * p.value_dim;
                        float next = fma(k[i + lane], d, mul(*at, decay));
                        *at = next;
                        o[lane] = fma(next, q[i + lane], o[lane]);
                    }
                }
            }
            p.out.row(t)[h * p.value_dim + j] = add(add(o[0], o[2]), add(o[1], o[3]));
        }
    }
}

// The same where keys have KEYS elements: the column stays in registers through all tokens.
template <int KEYS> __device__ __forceinline__ void recur_kept(const Delta& p) {
    float *q = room, *k = room + KEYS;
    u32 h = blockIdx.y, all = channels(p), keys = p.key_heads * KEYS, key_head = h / (p.value_heads / p.key_heads);
    u32 j = blockIdx.x * blockDim.x + threadIdx.x;
    bool inside = j < p.value_dim;
    for (u32 s = blockIdx.z; s < p.count; s += gridDim.z) {
        float* state = p.states.row(p.rows[s]) + (u64)h * KEYS * p.value_dim + j;
        float column[KEYS];
#pragma unroll
        for (int i = 0; i < KEYS; i++) column[i] = inside ? state[(u64)i * p.value_dim] : 0.0f;
        for (u32 t = p.starts[s]; t < p.starts[s + 1]; t++) {
            const float* mixed = p.mixed + (u64)t * all;
            __syncthreads();
            for (u32 i = threadIdx.x; i < KEYS; i += blockDim.x) {
                q[i] = mixed[key_head * KEYS + i];
                k[i] = mixed[keys + key_head * KEYS + i];
            }
            __syncthreads();
            float decay = exp_(p.g[(u64)t * p.value_heads + h]), beta = p.beta[(u64)t * p.value_heads + h];
            float v = inside ? mixed[2 * keys + h * p.value_dim + j] : 0.0f;
            float held[4] = {0.0f, 0.0f, 0.0f, 0.0f}, o[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int i = 0; i < KEYS; i++) {
                column[i] = mul(column[i], decay);
                held[i % 4] = fma(column[i], k[i], held[i % 4]);
            }
            float d = mul(sub(v, add(add(held[0], held[2]), add(held[1], held[3]))), beta);
#pragma unroll
            for (int i = 0; i < KEYS; i++) {
                column[i] = fma(k[i], d, column[i]);
                o[i % 4] = fma(column[i], q[i], o[i % 4]);
            }
            if (inside) p.out.row(t)[h * p.value_dim + j] = add(add(o[0], o[2]), add(o[1], o[3]));
        }
#pragma unroll
        for (int i = 0; i < KEYS; i++) {
            if (inside) state[(u64)i * p.value_dim] = column[i];
        }
    }
}

extern "C" __global__ void __launch_bounds__(64) recur_64(const Delta p) { begin(); recur_kept<64>(p); }
extern "C" __global__ void __launch_bounds__(64) recur_128(const Delta p) { begin(); recur_kept<128>(p); }

// A warp takes a value head of a token: its norm, gated by z, where it lies.
extern "C" __global__ void norm_gated(const Delta p) {
    begin();
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    for (u32 t = blockIdx.x; t < p.tokens; t += gridDim.x) {
        for (u32 h = warp; h < p.value_heads; h += blockDim.x / WARP) {
            float* out = p.out.row(t) + h * p.value_dim;
            const float* z = p.z.row(t) + h * p.value_dim;
            float inv = inverse_rms(out, p.value_dim, p.norm.eps);
            __syncwarp();
            for (u32 i = lane; i < p.value_dim; i += WARP) {
                out[i] = mul(mul(mul(out[i], inv), p.norm.weight[i]), silu(z[i]));
            }
        }
    }
}
