// Large tiles: 128 rows and 64 tokens, of half the rows where four stages of these would be too much.
#include "format/list.cuh"
#include "gemm/mma.cuh"

#define GEMM_MMA_OF(name, F, of) \
    extern "C" __global__ void __launch_bounds__(of * F::BITS < 20 ? 512 : 256, 1) gemm_mma_##name##_##of(const __grid_constant__ Products p) { \
        ON_TENSOR_CORES(gemm_mma<F, of, 8, of * F::BITS < 20 ? 4 : 2, of * F::BITS < 20 ? 212 : 112>(p.parts[blockIdx.z]);) \
    }
#define GEMM_MMA(name, F) GEMM_MMA_OF(name, F, 1) GEMM_MMA_OF(name, F, 2) GEMM_MMA_OF(name, F, 4)

INT8_FORMATS(GEMM_MMA)
