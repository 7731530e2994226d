// Products of blocks for tiles of eight tokens, without tensor cores.
#include "format/list.cuh"
#include "gemm/blocks.cuh"

#define GEMM_8(name, F) \
    extern "C" __global__ void __launch_bounds__(256) gemm_8_##name(const __grid_constant__ Products p) { blocks_dot<F, 8>(p.parts[blockIdx.z]); }

BLOCK_FORMATS(GEMM_8)
