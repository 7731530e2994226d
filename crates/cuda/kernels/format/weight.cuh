// One weight of any format, as a float.
#pragma once
#include "format/affine.cuh"
#include "format/list.cuh"
#include "format/matrix.cuh"
#include "prim/numerics.cuh"

// The weight at column `i` of row `r`, of any format.
__device__ __forceinline__ float weight_of(const Matrix& m, u64 r, u32 i) {
    if (!m.group) return element(m.data + r * m.row_bytes, m.type, i);
    if (!m.bits) return fp8_weight(m, r, i);
    return scale_of(m.type) >= SCALE_F16 ? block_weight(m, r, i) : affine_weight(m, r, i);
}
