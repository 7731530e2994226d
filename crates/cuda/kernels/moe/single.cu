// Gate, up and down of a mixture for one token. They are one unit: in units of their own the compiler made other code of them.
#include "format/list.cuh"
#include "moe/down.cuh"
#include "moe/gate_up.cuh"

#define GATE_UP(name, F) \
    extern "C" __global__ void __launch_bounds__(256, F::BITS <= 4 ? 2 : 1) moe_gate_up_##name(const __grid_constant__ SingleToken p) { gate_up<F, false>(p); } \
    extern "C" __global__ void __launch_bounds__(256, F::BITS <= 4 ? 2 : 1) moe_gate_up_##name##_mailbox(const __grid_constant__ SingleToken p) { gate_up<F, true>(p); }

INT8_FORMATS(GATE_UP)

#define DOWN(name, F) \
    extern "C" __global__ void __launch_bounds__(256, F::BITS <= 4 ? 3 : 2) moe_down_##name(const __grid_constant__ SingleToken p) { \
        if ((p.slots + OCTET - 1) / OCTET * ((p.intermediate / 64 + 3) / 4) % 3) down<F, 4>(p); \
        else down<F, 3>(p); \
    }

INT8_FORMATS(DOWN)
