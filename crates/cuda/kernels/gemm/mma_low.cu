// Tiles of 64 rows and 64 tokens that fit into the shared memory of most cards.
#include "format/list.cuh"
#include "gemm/mma.cuh"

#define GEMM_MMA_OF(name, F, of) \
    extern "C" __global__ void __launch_bounds__(256, 1) gemm_mma_##name##_##of##_low(const __grid_constant__ Products p) { \
        ON_TENSOR_CORES(gemm_mma<F, of, 8, 2, 87>(p.parts[blockIdx.z]);) \
    }
#define GEMM_MMA(name, F) GEMM_MMA_OF(name, F, 1) GEMM_MMA_OF(name, F, 2) GEMM_MMA_OF(name, F, 4)

INT8_FORMATS(GEMM_MMA)
