// Weights of any format as floats, for lane sums. A format has `weight`, one weight; and `Four`, four neighbouring columns of a row.
#pragma once
#include "format/affine.cuh"
#include "format/matrix.cuh"
#include "prim/numerics.cuh"

// Plain floats of a type.
template <u32 TYPE> struct Floats {
    static const bool IS_PACKED = false;

    __device__ static __forceinline__ float weight(const Matrix& m, u64 r, u32 i) {
        const u8* row = m.data + r * m.row_bytes;
        if (TYPE == F32) return ((const float*)row)[i];
        if (TYPE == F16) return from_f16(((const u16*)row)[i]);
        return from_bf16(((const u16*)row)[i]);
    }

    // Four neighbouring columns of a row, on their way from memory.
    struct Four {
        u32 w[4];

        __device__ __forceinline__ void load(const Matrix& m, u64 r, u32 i, u32 cols) {
            const u8* row = m.data + r * m.row_bytes;
#pragma unroll
            for (u32 e = 0; e < 4; e++) {
                w[e] = 0;
                if (TYPE == F32 && i + e < cols) w[e] = ((const u32*)row)[i + e];
                if (TYPE != F32 && i + e < cols) w[e] = ((const u16*)row)[i + e];
            }
        }

        __device__ __forceinline__ float4 values(const Matrix&) const {
            if (TYPE == F32) return make_float4(bits(w[0]), bits(w[1]), bits(w[2]), bits(w[3]));
            if (TYPE == F16) return make_float4(from_f16((u16)w[0]), from_f16((u16)w[1]), from_f16((u16)w[2]), from_f16((u16)w[3]));
            return make_float4(bits(w[0] << 16), bits(w[1] << 16), bits(w[2] << 16), bits(w[3] << 16));
        }
    };
};

// Affine integers of any width, as the floats that they encode.
struct AffineFloats {
    static const bool IS_PACKED = true;

    __device__ static __forceinline__ float weight(const Matrix& m, u64 r, u32 i) { return affine_weight(m, r, i); }

    struct Four {
        u32 w[4];

        __device__ __forceinline__ void load(const Matrix& m, u64 r, u32 i, u32 cols) {
            const u8* row = m.data + r * m.row_bytes;
            w[0] = w[1] = w[2] = w[3] = 0;
            if (i < cols) {
                u32 bit = i * m.bits, word = bit / 32, shift = bit % 32;
                u64 g = r * m.groups + (i >> (31 - __clz(m.group)));
                const u32* words = (const u32*)row;
                w[0] = __funnelshift_r(words[word], shift + 4 * m.bits > 32 ? words[word + 1] : 0, shift);
                w[1] = m.type == F32 ? ((const u32*)m.scales)[g] : ((const u16*)m.scales)[g];
                w[2] = m.type == F32 ? ((const u32*)m.biases)[g] : ((const u16*)m.biases)[g];
            }
        }

        __device__ __forceinline__ float4 values(const Matrix& m) const {
            float s = value(w[1], m.type), b = value(w[2], m.type), q[4];
#pragma unroll
            for (u32 e = 0; e < 4; e++) q[e] = fma((float)(w[0] >> e * m.bits & ((1u << m.bits) - 1)), s, b);
            return make_float4(q[0], q[1], q[2], q[3]);
        }
    };
};

// A lane sum of an affine row for one token, where no q crosses a word. Words and scales of 512 columns are loaded together. A group has a multiple of 32 columns,
// so both sixteens of a pair have the same scale.
__device__ __forceinline__ float affine_lanes(const Matrix& m, u64 row, const float* x, u32 cols) {
    const int DEEP = 32;
    u32 lane = threadIdx.x % 16, shift = 31 - __clz(m.group), mask = (1u << m.bits) - 1;
    const u32* words = (const u32*)(m.data + row * m.row_bytes);
    float acc = 0.0f;
    for (u32 from = 0; from < cols; from += 16 * DEEP) {
        u32 own[DEEP];
        float s[DEEP / 2], b[DEEP / 2], v[DEEP];
#pragma unroll
        for (int d = 0; d < DEEP; d++) {
            u32 i = from + 16 * d + lane;
            own[d] = i < cols ? __ldg(words + i * m.bits / 32) : 0;
            v[d] = i < cols ? x[i] : 0.0f;
            if (d % 2 == 0) {
                u64 g = row * m.groups + (min(i, cols - 1) >> shift);
                s[d / 2] = element(m.scales, m.type, g);
                b[d / 2] = element(m.biases, m.type, g);
            }
        }
#pragma unroll
        for (int d = 0; d < DEEP; d++) {
            u32 i = from + 16 * d + lane;
            if (from + 16 * d >= cols) break;
            float q = (float)(own[d] >> i * m.bits % 32 & mask);
            acc = fma(fma(q, s[d / 2], b[d / 2]), v[d], acc);
        }
    }
    return acc;
}
