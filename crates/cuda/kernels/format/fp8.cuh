// Numbers of eight bits (e4m3) with a scale for some columns of a row, as the floats that they are: `w = e4m3 * s`, rounded once.
#pragma once
#include "format/blocks.cuh"
#include "format/matrix.cuh"
#include "prim/numerics.cuh"

// `Matrix::type` where a scale is 2^(byte - 127), and 255 is no number; else it is the scales' float type.
static const u32 SCALE_EXPONENT = 13;

__device__ __forceinline__ float fp8_scale(const Matrix& m, u64 at) {
    if (m.type != SCALE_EXPONENT) return element(m.scales, m.type, at);
    const u32 exponent = m.scales[at];
    return exponent == 0xff ? bits(NOT_A_NUMBER) : bits(exponent ? exponent << 23 : 0x00400000u);
}

// The weight at column `i` of row `r`.
__device__ __forceinline__ float fp8_weight(const Matrix& m, u64 r, u32 i) { return mul(from_e4m3(m.data[r * m.row_bytes + i]), fp8_scale(m, r * m.groups + i / m.group)); }

struct Fp8Floats {
    static const bool IS_PACKED = false;

    __device__ static __forceinline__ float weight(const Matrix& m, u64 r, u32 i) { return fp8_weight(m, r, i); }

    // Four neighbouring columns of a row, on their way from memory. They may have two scales.
    struct Four {
        float w[4];

        __device__ __forceinline__ void load(const Matrix& m, u64 r, u32 i, u32 cols) {
#pragma unroll
            for (u32 e = 0; e < 4; e++) w[e] = i + e < cols ? fp8_weight(m, r, i + e) : 0.0f;
        }

        __device__ __forceinline__ float4 values(const Matrix&) const { return make_float4(w[0], w[1], w[2], w[3]); }
    };
};

// The same, rounded to bf16.
struct Fp8Bf16 {
    static const bool IS_PLAIN = false;

    __device__ static __forceinline__ void pair(const Matrix& m, u64 r, u32 i, u32, float& even, float& odd) {
        even = from_bf16(to_bf16(fp8_weight(m, r, i)));
        odd = from_bf16(to_bf16(fp8_weight(m, r, i + 1)));
    }
};
