// What becomes of gate and up of a mixture's experts where it is another thing than `silu(gate) * up`: biases, clamps, gates and ups that take turns, GELU, SiTU, no gates. It is left encoded for
// down.
#include "format/activations.cuh"
#include "prim/nonlinear.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/reduce.cuh"
#include "prim/tensor.cuh"

struct Activate {
    // [rows, cols]: gates, and ups; where `up` is null, gates and ups take turns in [rows, 2 cols]. Without gates there are ups alone, where gates would be.
    Tensor gate;
    Tensor up;
    // [experts, cols]: what is added to them; null: nothing.
    Tensor gate_bias;
    Tensor up_bias;
    // [rows]: the expert of each row.
    const u32* experts;
    u32 rows;
    u32 cols;
    // What is computed; a clamped SwiGLU with `alpha`, `limit` and what is added to ups, or SiTU with its bounds in `alpha` and `limit`.
    u32 activation;
    float alpha;
    float limit;
    float added;
    Encoded to;
};

static const u32 CLAMPED_SWIGLU = 1, GEGLU = 2, SQUARED_RELU = 3, SITU = 4;

// A thread takes a column: grid (rows, parts).
extern "C" __global__ void __launch_bounds__(256) moe_activate(const __grid_constant__ Activate p) {
    begin();
    const u32 lane = threadIdx.x % WARP;
    for (u32 r = blockIdx.x; r < p.rows; r += gridDim.x) {
        const u32 expert = p.experts[r];
        // Whole groups of 32 stay in a warp.
        for (u32 c = blockIdx.y * blockDim.x + threadIdx.x; c - lane < p.cols; c += gridDim.y * blockDim.x) {
            const bool inside = c < p.cols;
            float v = 0.0f;
            if (inside) {
                float gate, up = 0.0f;
                if (p.activation == SQUARED_RELU) {
                    gate = p.gate.row(r)[c];
                } else if (p.up.at) {
                    gate = p.gate.row(r)[c], up = p.up.row(r)[c];
                } else {
                    const float2 both = ((const float2*)p.gate.row(r))[c];
                    gate = both.x, up = both.y;
                }
                if (p.gate_bias.at) {
                    gate = add(gate, p.gate_bias.row(expert)[c]);
                    up = add(up, p.up_bias.row(expert)[c]);
                }
                switch (p.activation) {
                    case CLAMPED_SWIGLU: v = clamped_swiglu(gate, up, p.alpha, p.limit, p.added); break;
                    case SITU: v = situ(gate, up, p.alpha, p.limit); break;
                    case GEGLU: v = mul(gelu(gate), up); break;
                    case SQUARED_RELU: v = squared_relu(gate); break;
                    default: v = mul(silu(gate), up);
                }
            }
            const u64 at = (u64)r * p.cols + c;
            if (p.to.f && inside) p.to.f[at] = v;
            if (p.to.h && inside) p.to.h[at] = to_bf16(v);
            if (p.to.q) quantize_lanes(v, at - lane, p.to);
        }
    }
}
