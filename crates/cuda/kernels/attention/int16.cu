// Attention of prompts on keys and values of sixteen bits.
#include "attention/integers.cuh"

extern "C" __global__ void __launch_bounds__(128, 2) attention_int16_64(const __grid_constant__ Attention p) { attend_integers<64, 2>(p); }
extern "C" __global__ void __launch_bounds__(128, 2) attention_int16_128(const __grid_constant__ Attention p) { attend_integers<128, 2>(p); }
extern "C" __global__ void __launch_bounds__(128, 1) attention_int16_256(const __grid_constant__ Attention p) { attend_integers<256, 2>(p); }
