// Attention of prompts on keys and values of eight bits.
#include "attention/integers.cuh"

extern "C" __global__ void __launch_bounds__(128, 3) attention_int8_64(const __grid_constant__ Attention p) { attend_integers<64, 1>(p); }
extern "C" __global__ void __launch_bounds__(128, 3) attention_int8_128(const __grid_constant__ Attention p) { attend_integers<128, 1>(p); }
extern "C" __global__ void __launch_bounds__(128, 2) attention_int8_256(const __grid_constant__ Attention p) { attend_integers<256, 1>(p); }
