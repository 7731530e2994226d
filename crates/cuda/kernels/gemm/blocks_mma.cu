// Tiles of 64 rows and 64 tokens, or 16 where there are few.
#include "format/list.cuh"
#include "gemm/blocks_mma.cuh"

#define GEMM_BLOCKS(name, F) \
    extern "C" __global__ void __launch_bounds__(256, 2) gemm_blocks_##name(const __grid_constant__ Products p) { \
        ON_TENSOR_CORES(gemm_blocks<F, 4, 2>(p.parts[blockIdx.z]);) \
    } \
    extern "C" __global__ void __launch_bounds__(128, 4) gemm_blocks_##name##_few(const __grid_constant__ Products p) { \
        ON_TENSOR_CORES(gemm_blocks<F, 2, 1>(p.parts[blockIdx.z]);) \
    }

BLOCK_FORMATS(GEMM_BLOCKS)
