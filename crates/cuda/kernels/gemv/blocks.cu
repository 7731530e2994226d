// Products of blocks for one token, or for pairs of a token and an expert.
#include "format/list.cuh"
#include "gemm/blocks.cuh"

#define GEMV(name, F) \
    extern "C" __global__ void __launch_bounds__(256) gemv_##name(const __grid_constant__ Products p) { blocks_dot<F, 1>(p.parts[blockIdx.z]); }

BLOCK_FORMATS(GEMV)
