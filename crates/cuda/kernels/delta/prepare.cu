// GatedDeltaNet, any number of tokens: the short convolution, and norms and gates.
#include "delta/delta.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/reduce.cuh"

// A thread takes a channel of CONVOLVED tokens, of which each has the inputs of those before it but for one.
extern "C" __global__ void delta_convolve(const __grid_constant__ Delta p) {
    begin();
    const u32 all = channels(p), channel = blockIdx.x * blockDim.x + threadIdx.x;
    if (channel >= all) return;
    auto put = [&](u32 t, float y) { p.mixed[(u64)t * all + channel] = mul(y, inverse(add(1.0f, exp_(sub(0.0f, y))))); };
    for (u32 first = blockIdx.y * CONVOLVED; first < p.tokens; first += gridDim.y * CONVOLVED) {
        const u32 end = min(first + CONVOLVED, p.tokens);
        if (p.taps != MAX_TAPS) {
            for (u32 t = first; t < end; t++) {
                const u32 sequence = p.sequences[t], i = t - p.starts[sequence];
                float y = 0.0f;
                for (u32 tap = 0; tap < p.taps; tap++) y = fma(p.conv.row(tap)[channel], input(p, sequence, i + tap, channel), y);
                put(t, y);
            }
            continue;
        }
        float weights[MAX_TAPS], past[MAX_TAPS];
#pragma unroll
        for (u32 tap = 0; tap < MAX_TAPS; tap++) weights[tap] = p.conv.row(tap)[channel];
        for (u32 t = first, next; t < end; t = next) {
            const u32 sequence = p.sequences[t], i = t - p.starts[sequence];
            next = min(end, p.starts[sequence + 1]);
#pragma unroll
            for (u32 tap = 0; tap + 1 < MAX_TAPS; tap++) past[tap] = input(p, sequence, i + tap, channel);
            const float* from = p.qkv.row(t) + channel;
#pragma unroll 4
            for (; t < next; t++, from += p.qkv.stride) {
                past[MAX_TAPS - 1] = *from;
                float y = 0.0f;
#pragma unroll
                for (u32 tap = 0; tap < MAX_TAPS; tap++) {
                    y = fma(weights[tap], past[tap], y);
                    if (tap > 0) past[tap - 1] = past[tap];
                }
                put(t, y);
            }
        }
    }
}

// The last inputs become the window, and those after tokens whose state is kept a window of its row: a thread takes a channel of a sequence. It goes upwards, so that it reads each
// input before it overwrites it.
extern "C" __global__ void delta_slide(const Delta p) {
    begin();
    u32 all = channels(p), channel = blockIdx.x * blockDim.x + threadIdx.x;
    if (channel >= all) return;
    for (u32 s = blockIdx.y; s < p.count; s += gridDim.y) {
        u32 n = p.starts[s + 1] - p.starts[s];
        for (u32 t = 0; p.kept && t < n; t++) {
            const u32 row = p.kept[p.starts[s] + t];
            for (u32 i = 0; row != NOT_KEPT && i + 1 < p.taps; i++) window_of(p, row)[(u64)i * all + channel] = input(p, s, i + t + 1, channel);
        }
        for (u32 i = 0; i + 1 < p.taps; i++) window(p, s)[(u64)i * all + channel] = input(p, s, i + n, channel);
    }
}

// A warp takes a head of q or k of a token; the block's first threads, its gates.
extern "C" __global__ void delta_gates(const Delta p) {
    begin();
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    for (u32 t = blockIdx.x; t < p.tokens; t += gridDim.x) {
        for (u32 h = warp; h < 2 * p.key_heads; h += blockDim.x / WARP) {
            float* head = p.mixed + (u64)t * channels(p) + (u64)h * p.key_dim;
            float inv = div(1.0f, __fsqrt_rn(add(squares(head, p.key_dim), L2_EPS)));
            float scale = h < p.key_heads ? p.scale : 1.0f;
            if (p.by_lanes) {
                float x[MOST_BY_LANES / WARP];
#pragma unroll
                for (u32 m = 0; m < MOST_BY_LANES / WARP; m++) {
                    if (m * WARP < p.key_dim) x[m] = head[m * WARP + lane];
                }
                __syncwarp();
#pragma unroll
                for (u32 m = 0; m < MOST_BY_LANES / WARP; m++) {
                    if (m * WARP < p.key_dim) head[lane % 4 * (p.key_dim / 4) + m * WARP / 4 + lane / 4] = mul(mul(x[m], inv), scale);
                }
                continue;
            }
            __syncwarp();
            for (u32 i = lane; i < p.key_dim; i += WARP) head[i] = mul(mul(head[i], inv), scale);
        }
        for (u32 h = threadIdx.x; h < p.value_heads; h += blockDim.x) {
            u64 at = (u64)t * p.value_heads + h;
            p.decays[at] = exp_(mul(p.decay[h], softplus(add(p.a.row(t)[h], p.dt_bias[h]))));
            p.beta[at] = sigmoid(p.b.row(t)[h]);
        }
    }
}
