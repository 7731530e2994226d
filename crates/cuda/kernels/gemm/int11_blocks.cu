// Products of weights in blocks with integers of 11 bits for tiles of eight tokens, without tensor cores.
#include "gemv/int11_blocks.cuh"

#define GEMM_8(name, F) \
    extern "C" __global__ void __launch_bounds__(256) gemm_8_##name(const __grid_constant__ Products p) { gemv_int11_blocks<F, 8>(p.parts[blockIdx.z]); }

INT11_BLOCK_FORMATS(GEMM_8)
