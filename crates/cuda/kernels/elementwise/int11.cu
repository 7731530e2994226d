// Rows of activations, normed or combined, as integers of 11 bits.
#include "format/int11.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/reduce.cuh"
#include "prim/smem.cuh"

static const u32 THREADS_MOST = 1024;

// A block takes a row at a time, a thread eight columns, so that eight threads have a group. Values are kept in shared memory if there is room for them
// (`to.unused`), and else made twice.
extern "C" __global__ void __launch_bounds__(1024) encode_int11(const Quantize p) {
    __shared__ float inverse;
    __shared__ u32 greatest[THREADS_MOST / WARP];
    const u32 lane = threadIdx.x % WARP, groups = (p.cols + 63) / 64;
    const float* w = p.norm.weight;
    const bool keeps = p.to.unused;
    begin();
    for (u64 r = blockIdx.x; r < p.rows; r += gridDim.x) {
        const u64 from = p.taken ? p.taken[r] : r;
        const float* x = p.x.row(from);
        const float* up = p.up.at ? p.up.row(from) : nullptr;
        const bool by_four = keeps && p.cols % 4 == 0 && (((u64)x | (u64)up | (u64)w) & 15) == 0;
        __syncthreads();
        if (w) {
            if (by_four) {
#pragma unroll 2
                for (u32 i = threadIdx.x; i < p.cols / 4; i += blockDim.x) ((float4*)smem)[i] = ((const float4*)x)[i];
                __syncthreads();
            } else if (keeps) {
#pragma unroll 4
                for (u32 c = threadIdx.x; c < p.cols; c += blockDim.x) smem[c] = x[c];
                __syncthreads();
            }
            if (threadIdx.x < WARP) {
                const float inv = !keeps ? inverse_rms(x, p.cols, p.norm.eps) : p.cols % 256 ? inverse_rms(smem, p.cols, p.norm.eps) : inverse_rms_256(smem, p.cols, p.norm.eps);
                if (lane == 0) inverse = inv;
            }
            __syncthreads();
        }
        auto value = [&](u32 c) {
            float v = w && keeps ? smem[c] : x[c];
            if (w) v = mul(mul(v, inverse), w[c]);
            if (up) v = mul(silu(v), up[c]);
            return v;
        };
        // 1. The token's exponent
        u32 most = 0;
        if (by_four) {
#pragma unroll 2
            for (u32 i = threadIdx.x; i < p.cols / 4; i += blockDim.x) {
                float4 v = w ? ((const float4*)smem)[i] : ((const float4*)x)[i];
                if (w) {
                    const float4 by = ((const float4*)w)[i];
                    v = make_float4(mul(mul(v.x, inverse), by.x), mul(mul(v.y, inverse), by.y), mul(mul(v.z, inverse), by.z), mul(mul(v.w, inverse), by.w));
                }
                if (up) {
                    const float4 by = ((const float4*)up)[i];
                    v = make_float4(mul(silu(v.x), by.x), mul(silu(v.y), by.y), mul(silu(v.z), by.z), mul(silu(v.w), by.w));
                }
                ((float4*)smem)[i] = v;
                most = max(max(most, max(bits(v.x) & 0x7fffffffu, bits(v.y) & 0x7fffffffu)), max(bits(v.z) & 0x7fffffffu, bits(v.w) & 0x7fffffffu));
            }
        } else {
#pragma unroll 4
            for (u32 c = threadIdx.x; c < p.cols; c += blockDim.x) {
                const float v = value(c);
                if (keeps) smem[c] = v;
                most = max(most, bits(v) & 0x7fffffffu);
            }
        }
        most = warp_max_redux(most);
        if (lane == 0) greatest[threadIdx.x / WARP] = most;
        __syncthreads();
        most = 0;
        for (u32 i = 0; i < blockDim.x / WARP; i++) most = max(most, greatest[i]);
        const TokenScale scale = scale_of_token(most);
        if (threadIdx.x == 0) p.to.tn[r] = scale.behind;
        // 2. Whole groups stay in a warp. Columns beyond the last are zeros.
        for (u32 i = threadIdx.x; i / WARP * WARP < 8 * groups; i += blockDim.x) {
            float x_own[8], v[8], sum;
            if (keeps && 8 * i + 8 <= p.cols) {
                const float4 low = ((const float4*)smem)[2 * i], high = ((const float4*)smem)[2 * i + 1];
                x_own[0] = low.x, x_own[1] = low.y, x_own[2] = low.z, x_own[3] = low.w, x_own[4] = high.x, x_own[5] = high.y, x_own[6] = high.z, x_own[7] = high.w;
            } else {
#pragma unroll
                for (u32 k = 0; k < 8; k++) x_own[k] = 8 * i + k >= p.cols ? 0.0f : keeps ? smem[8 * i + k] : value(8 * i + k);
            }
            round_eight(x_own, scale.before, v, sum);
            const u32 g = i / 8, j = i % 8 / 2, a = i % 2;
            if (g >= groups) continue;
            u8* row = (u8*)p.to.n + int11_row(r, g, groups);
#pragma unroll
            for (u32 c = 0; c < 4; c++) *(u32*)(row + ((4 * a + c ^ (u32)r & 7) * 16) + 4 * j) = to_f16(v[c]) | (u32)to_f16(v[c + 4]) << 16;
            // A sum of integers below 2^20: exact.
            if (i % 8 == 0) p.to.sn[(u64)g * p.to.padded + int11_place((u32)r)] = mul(sum, STEP);
        }
    }
}
