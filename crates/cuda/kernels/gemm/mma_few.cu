// Tiles of 64 rows and 16 tokens, several of which share a multiprocessor.
#include "format/list.cuh"
#include "gemm/mma.cuh"

#define GEMM_MMA_OF(name, F, of) \
    extern "C" __global__ void __launch_bounds__(256, 3) gemm_mma_##name##_##of##_few(const __grid_constant__ Products p) { \
        ON_TENSOR_CORES(gemm_mma<F, of, 2, 2, 74>(p.parts[blockIdx.z]);) \
    }
#define GEMM_MMA(name, F) GEMM_MMA_OF(name, F, 1) GEMM_MMA_OF(name, F, 2) GEMM_MMA_OF(name, F, 4)

INT8_FORMATS(GEMM_MMA)
