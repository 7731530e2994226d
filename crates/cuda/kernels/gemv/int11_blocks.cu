// Products of weights in blocks with integers of 11 bits for one token, or for pairs of a token and an expert.
#include "gemv/int11_blocks.cuh"

#define GEMV(name, F) \
    extern "C" __global__ void __launch_bounds__(256) gemv_##name(const __grid_constant__ Products p) { gemv_int11_blocks<F, 1>(p.parts[blockIdx.z]); }

INT11_BLOCK_FORMATS(GEMV)
