// For kernels of tokens that are the last of their sequence: the combination of a few partitions by the last block that ends.
#pragma once
#include "attention/attention.cuh"
#include "attention/cache.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"

// The most partitions that are combined here.
static const u32 MOST_NEAR = 4;

// The last of these heads' blocks, one for each partition, combines what all have left. All loads are issued together, and each thread combines its own column.
__device__ __forceinline__ void combine_near(const Attention& p, u32 first, u32 heads, u32 count) {
    const u32 t = blockIdx.x, v_dim = p.cache.v_dim, width = part_width(v_dim);
    const u64 next = (u64)p.partitions * width;
    if (!is_last_block(p.counters + t * gridDim.y + blockIdx.y, count)) return;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < heads * v_dim; i += blockDim.x) {
        u32 g = i / v_dim, d = i - g * v_dim;
        const float* own_parts = p.parts + ((u64)t * p.heads + first + g) * next;
        float m[MOST_NEAR], l[MOST_NEAR], o[MOST_NEAR];
#pragma unroll
        for (u32 n = 0; n < MOST_NEAR; n++) {
            if (n < count) {
                o[n] = __ldcg(own_parts + n * width + d);
                m[n] = __ldcg(own_parts + n * width + v_dim);
                l[n] = __ldcg(own_parts + n * width + v_dim + 1);
            }
        }
#pragma unroll
        for (u32 n = 1; n < MOST_NEAR; n++) {
            if (n < count) {
                float top = greater(m[n], m[0]), a = exp_below(sub(m[0], top)), b = exp_below(sub(m[n], top));
                l[0] = fma(l[0], a, mul(l[n], b));
                o[0] = fma(o[0], a, mul(o[n], b));
                m[0] = top;
            }
        }
        finish_joined(p, t, first + g, d, o[0], m[0], l[0]);
    }
}

// Two stored columns of a value as floats.
template <u32 TYPE> __device__ __forceinline__ float2 two(const u8* p) {
    if (TYPE == F32) return *(const float2*)p;
    if (TYPE == INT8) {
        u32 w = *(const u16*)p;
        return make_float2((float)(i8)w, (float)(i8)(w >> 8));
    }
    u32 w = *(const u32*)p;
    if (TYPE == BF16) return make_float2(bits(w << 16), bits(w & 0xffff0000u));
    return make_float2(from_f16((u16)w), from_f16((u16)(w >> 16)));
}
