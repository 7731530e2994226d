// Gate, up and down of a mixture for one token, whose activations are integers of 11 bits (moe/single.cuh). Gate and up leave floats, since an encoding needs a whole
// row; each block of down encodes them for itself.
#include "format/list.cuh"
#include "moe/down_int11.cuh"
#include "moe/gate_up_int11.cuh"

#define GATE_UP(name, F) \
    extern "C" __global__ void __launch_bounds__(256, F::BITS <= 4 ? 2 : 1) moe_gate_up_##name(const __grid_constant__ SingleToken p) { gate_up<F, false>(p); } \
    extern "C" __global__ void __launch_bounds__(256, F::BITS <= 4 ? 2 : 1) moe_gate_up_##name##_mailbox(const __grid_constant__ SingleToken p) { gate_up<F, true>(p); }

INT11_FORMATS(GATE_UP)

#define DOWN(name, F) \
    extern "C" __global__ void __launch_bounds__(256, 2) moe_down_##name(const __grid_constant__ SingleToken p) { down<F>(p); }

INT11_FORMATS(DOWN)
