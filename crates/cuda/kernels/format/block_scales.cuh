// Scales of blocks where the kind of their numbers is known: of what a group may have, that leaves little to be told apart when a kernel runs.
#pragma once
#include "format/list.cuh"

// A bit for each of what groups of a format may have.
template <class F> constexpr u32 SCALES_OF = 0;
template <> constexpr u32 SCALES_OF<B2> = 1 << SCALE_NIBBLES;
template <> constexpr u32 SCALES_OF<B3> = 1 << SCALE_BYTE;
template <> constexpr u32 SCALES_OF<B4> = 1 << SCALE_F16 | 1 << SCALE_BIAS_F16 | 1 << SCALE_PAIR;
template <> constexpr u32 SCALES_OF<B5> = 1 << SCALE_F16 | 1 << SCALE_BIAS_F16 | 1 << SCALE_PAIR;
template <> constexpr u32 SCALES_OF<B6> = 1 << SCALE_BYTE;
template <> constexpr u32 SCALES_OF<B8> = 1 << SCALE_F16;
template <> constexpr u32 SCALES_OF<V3> = 1 << SCALE_BYTE;
template <> constexpr u32 SCALES_OF<H3> = 1 << SCALE_BYTE;
template <> constexpr u32 SCALES_OF<V4> = 1 << SCALE_F16 | 1 << SCALE_BYTE | 1 << SCALE_POWER | 1 << SCALE_POWER_NAN;
template <> constexpr u32 SCALES_OF<H4> = 1 << SCALE_E4M3 | 1 << SCALE_E4M3_TIMES | 1 << SCALE_E4M3_OVER;

// `block_scale` for a format.
template <class F> __device__ __forceinline__ float2 scale_and_bias(u32 code, u32 unit, u32 type) {
    const u32 MAY = SCALES_OF<F>;
    const bool ONE = (MAY & (MAY - 1)) == 0;
#pragma unroll
    for (u32 kind = SCALE_F16; kind <= SCALE_PAIR; kind++) {
        if ((MAY >> kind & 1) && (ONE || scale_of(type) == kind)) return block_scale(code, unit, kind | (type & ~0xffu));
    }
    return make_float2(0.0f, 0.0f);
}
