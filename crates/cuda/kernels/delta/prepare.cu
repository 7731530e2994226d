// The delta rule, any number of tokens: norms and gates behind the short convolution.
#include "delta/delta.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/reduce.cuh"

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
            if (!p.by_channel) p.decays[at] = exp_(mul(p.decay[h], softplus(add(p.a.row(t)[h], p.dt_bias[h]))));
            p.beta[at] = sigmoid(p.b.row(t)[h]);
        }
        for (u32 i = threadIdx.x; p.by_channel && i < p.value_heads * p.key_dim; i += blockDim.x) {
            const u32 h = i / p.key_dim, channel = i % p.key_dim, place = p.by_lanes ? channel % 4 * (p.key_dim / 4) + channel / 4 : channel;
            float* decays = p.decays + ((u64)t * p.value_heads + h) * p.key_dim;
            decays[place] = channel_decay(p, p.decay[h], add(p.a.row(t)[i], p.dt_bias[i]));
        }
    }
}
