// The short convolution before recurrent layers, with silu behind it.
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "recurrent/convolution.cuh"

__device__ __forceinline__ float* window_of(const Convolution& p, u32 row, u32 channel) { return p.windows.row(row) + channel; }

// Input `i` of a channel, counted from the window's start.
__device__ __forceinline__ float input(const Convolution& p, u32 sequence, u32 i, u32 channel) {
    u32 before = p.taps - 1;
    if (i < before) return window_of(p, p.rows[sequence], channel)[(u64)i * p.channels];
    return p.x.row(p.starts[sequence] + i - before)[channel];
}

__device__ __forceinline__ void put(const Convolution& p, u32 t, u32 channel, float y) { p.out[(u64)t * p.channels + channel] = mul(y, inverse(add(1.0f, exp_(sub(0.0f, y))))); }

// A thread takes a channel of CONVOLVED tokens, of which each has the inputs of those before it but for one.
extern "C" __global__ void convolve(const __grid_constant__ Convolution p) {
    begin();
    const u32 channel = blockIdx.x * blockDim.x + threadIdx.x;
    if (channel >= p.channels) return;
    const float bias = p.bias ? p.bias[channel] : 0.0f;
    for (u32 first = blockIdx.y * CONVOLVED; first < p.tokens; first += gridDim.y * CONVOLVED) {
        const u32 end = min(first + CONVOLVED, p.tokens);
        if (p.taps != MAX_TAPS) {
            for (u32 t = first; t < end; t++) {
                const u32 sequence = p.sequences[t], i = t - p.starts[sequence];
                float y = bias;
                for (u32 tap = 0; tap < p.taps; tap++) y = fma(p.weights.row(tap)[channel], input(p, sequence, i + tap, channel), y);
                put(p, t, channel, y);
            }
            continue;
        }
        float weights[MAX_TAPS], past[MAX_TAPS];
#pragma unroll
        for (u32 tap = 0; tap < MAX_TAPS; tap++) weights[tap] = p.weights.row(tap)[channel];
        for (u32 t = first, next; t < end; t = next) {
            const u32 sequence = p.sequences[t], i = t - p.starts[sequence];
            next = min(end, p.starts[sequence + 1]);
#pragma unroll
            for (u32 tap = 0; tap + 1 < MAX_TAPS; tap++) past[tap] = input(p, sequence, i + tap, channel);
            const float* from = p.x.row(t) + channel;
#pragma unroll 4
            for (; t < next; t++, from += p.x.stride) {
                past[MAX_TAPS - 1] = *from;
                float y = bias;
#pragma unroll
                for (u32 tap = 0; tap < MAX_TAPS; tap++) {
                    y = fma(weights[tap], past[tap], y);
                    if (tap > 0) past[tap - 1] = past[tap];
                }
                put(p, t, channel, y);
            }
        }
    }
}

// The last inputs become the window, and those after tokens whose state is kept a window of its row: a thread takes a channel of a sequence. It goes upwards, so that it reads each
// input before it overwrites it.
extern "C" __global__ void convolve_slide(const __grid_constant__ Convolution p) {
    begin();
    const u32 channel = blockIdx.x * blockDim.x + threadIdx.x;
    if (channel >= p.channels) return;
    for (u32 s = blockIdx.y; s < p.count; s += gridDim.y) {
        u32 n = p.starts[s + 1] - p.starts[s];
        for (u32 t = 0; p.kept && t < n; t++) {
            const u32 row = p.kept[p.starts[s] + t];
            for (u32 i = 0; row != NOT_KEPT && i + 1 < p.taps; i++) window_of(p, row, channel)[(u64)i * p.channels] = input(p, s, i + t + 1, channel);
        }
        for (u32 i = 0; i + 1 < p.taps; i++) window_of(p, p.rows[s], channel)[(u64)i * p.channels] = input(p, s, i + n, channel);
    }
}

// Both where no sequence has more than one token, and no state is kept: a thread takes a channel of a sequence.
extern "C" __global__ void convolve_one(const __grid_constant__ Convolution p) {
    begin();
    const u32 channel = blockIdx.x * blockDim.x + threadIdx.x;
    if (channel >= p.channels) return;
    const float bias = p.bias ? p.bias[channel] : 0.0f;
    for (u32 s = blockIdx.y; s < p.count; s += gridDim.y) {
        const u32 t = p.starts[s];
        if (p.starts[s + 1] == t) continue;
        float *window = window_of(p, p.rows[s], channel), y = bias;
        const float now = p.x.row(t)[channel];
        if (p.taps == MAX_TAPS) {
            float past[MAX_TAPS - 1];
#pragma unroll
            for (u32 tap = 0; tap + 1 < MAX_TAPS; tap++) past[tap] = window[(u64)tap * p.channels];
#pragma unroll
            for (u32 tap = 0; tap + 1 < MAX_TAPS; tap++) {
                y = fma(p.weights.row(tap)[channel], past[tap], y);
                if (tap > 0) window[(u64)(tap - 1) * p.channels] = past[tap];
            }
        } else {
            for (u32 tap = 0; tap + 1 < p.taps; tap++) {
                const float past = window[(u64)tap * p.channels];
                y = fma(p.weights.row(tap)[channel], past, y);
                if (tap > 0) window[(u64)(tap - 1) * p.channels] = past;
            }
        }
        if (p.taps > 1) window[(u64)(p.taps - 2) * p.channels] = now;
        put(p, t, channel, fma(p.weights.row(p.taps - 1)[channel], now, y));
    }
}
