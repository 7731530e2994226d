// Products of bf16 pairs for tiles of eight tokens.
#include "format/list.cuh"
#include "gemm/bf16_pairs.cuh"

#define GEMM_8(name, F) \
    extern "C" __global__ void __launch_bounds__(256) gemm_8_##name(const __grid_constant__ Products p) { bf16_dot<F, 8>(p.parts[blockIdx.z]); }

BF16_FORMATS(GEMM_8)
