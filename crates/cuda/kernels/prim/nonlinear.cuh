// What feed-forward layers do between their products, beside silu.
#pragma once
#include "prim/numerics.cuh"

// The tanh form.
__device__ __forceinline__ float gelu(float x) {
    float inner = mul(fma(mul(mul(x, x), 0.044715f), x, x), 0.7978846f);
    return mul(mul(0.5f, x), add(1.0f, tanh_(inner)));
}

// NaN stays NaN.
__device__ __forceinline__ float squared_relu(float x) {
    x = greater(0.0f, x);
    return mul(x, x);
}

// NaN wins over the bounds, as in the CPU's minimum and maximum.
__device__ __forceinline__ float situ(float gate, float up, float beta, float linear) {
    const float bounded = mul(tanh_(div(gate, beta)), beta);
    return mul(mul(bounded, sigmoid(gate)), mul(tanh_(div(up, linear)), linear));
}

__device__ __forceinline__ float clamped_swiglu(float gate, float up, float alpha, float limit, float added) {
    gate = limit < gate ? limit : gate;
    up = greater(-limit, up);
    up = limit < up ? limit : up;
    return mul(add(up, added), mul(gate, sigmoid(mul(gate, alpha))));
}
