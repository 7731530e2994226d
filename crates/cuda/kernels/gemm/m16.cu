// Products of integer groups of 64 for a few tokens, on integer tensor cores, where larger blocks would leave most multiprocessors without one: a block has 16
// rows and 8 tokens, or 16, a warp one of their four chains. Weights come straight to registers, the first of them before the wait, each lane's as the product
// takes them; activations lie in shared memory.
#include "format/list.cuh"
#include "format/matrix.cuh"
#include "gemm/matmul.cuh"
#include "prim/cp_async.cuh"
#include "prim/mma.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/smem.cuh"

static const u32 M16_ROWS = 16;

template <class F, int EIGHTS> __device__ __forceinline__ void gemm_m16(const Matmul& p) {
    // Groups of a chain that are under way, and words of eight columns.
    const int DEEP = F::BITS == 4 ? 8 : 4, WORDS = F::BITS / 4;
    const u32 TOKENS = 8 * EIGHTS;
    const u32 lane = threadIdx.x % WARP, chain = threadIdx.x / WARP, quad = lane / 4, part = lane % 4, groups = p.cols / 64, first_row = blockIdx.x * M16_ROWS;
    if (first_row >= p.rows) {
        begin();
        return;
    }
    __shared__ float meet[4][TOKENS][M16_ROWS + 1];
    // Neighbours among the tokens meet different banks.
    const u32 stride = (p.cols + 127) / 128 * 128 + 32, steps = (groups + 3 - chain) / 4;
    u8* const q = (u8*)smem;
    float2* const sx = (float2*)(q + TOKENS * stride);
    float* const means = (float*)(sx + groups * TOKENS);
    // 1. Weights. A lane has eight columns of each half of a group, of two rows; of four groups it brings the scales of one.
    const u32 type = p.matrix.type;
    const u8* data[2];
    const u16 *scales[2], *biases[2];
#pragma unroll
    for (u32 r = 0; r < 2; r++) {
        const u64 row = p.in_matrix(min(first_row + quad + 8 * r, p.rows - 1));
        data[r] = p.matrix.data + row * p.matrix.row_bytes + part * F::BITS;
        scales[r] = (const u16*)p.matrix.scales + row * groups;
        biases[r] = (const u16*)p.matrix.biases + row * groups;
    }
    u32 words[DEEP][2][2][WORDS], both[DEEP / 4][2];
    auto load = [&](int d, u32 step) {
        const u32 at = min(chain + 4 * step, groups - 1) * (8 * F::BITS);
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
#pragma unroll
                for (u32 w = 0; w < WORDS; w++) words[d][r][half][w] = __ldg((const u32*)(data[r] + at + 4 * F::BITS * half) + w);
            }
        }
    };
    auto load_scales = [&](int four, u32 step) {
        const u32 group = min(chain + 4 * (step + part), groups - 1);
#pragma unroll
        for (u32 r = 0; r < 2; r++) both[four][r] = __ldg(scales[r] + group) | (u32)__ldg(biases[r] + group) << 16;
    };
#pragma unroll
    for (int d = 0; d < DEEP; d++) load(d, d);
#pragma unroll
    for (int four = 0; four < DEEP / 4; four++) load_scales(four, 4 * four);
    // 2. Activations
    begin();
    const u32 first = blockIdx.y * TOKENS;
#pragma unroll 1
    for (u32 t = chain; t < TOKENS; t += 4) {
        const u64 token = min(first + t, p.outputs - 1);
        const uint4* from = (const uint4*)(p.x.q + token * p.cols);
#pragma unroll 4
        for (u32 i = lane; i < p.cols / 16; i += WARP) cp_async_16(q + t * stride + 16 * i, from + i);
    }
    const u32 own_row = threadIdx.x % M16_ROWS;
    float* to[EIGHTS];
    float before[EIGHTS];
#pragma unroll
    for (u32 e = 0; e < EIGHTS; e++) {
        const u32 token = first + 8 * e + threadIdx.x / M16_ROWS;
        to[e] = token < p.outputs && first_row + own_row < p.rows ? p.out.row(token) + p.in_output(first_row + own_row) : nullptr;
        before[e] = p.accumulate && to[e] ? __ldcg(to[e]) : 0.0f;
    }
#pragma unroll 1
    for (u32 t = chain; t < TOKENS; t += 8) {
        // Two tokens' are under way together.
        const u64 near = min(first + t, p.outputs - 1), far = min(first + t + 4, p.outputs - 1);
#pragma unroll 2
        for (u32 i = lane; i < groups; i += WARP) {
            const float2 scale = __ldcg((const float2*)(p.x.sx + near * (p.cols / 32)) + i), mean = __ldcg((const float2*)(p.x.mx + near * (p.cols / 32)) + i);
            const float2 far_scale = __ldcg((const float2*)(p.x.sx + far * (p.cols / 32)) + i), far_mean = __ldcg((const float2*)(p.x.mx + far * (p.cols / 32)) + i);
            sx[i * TOKENS + t] = scale;
            sx[i * TOKENS + t + 4] = far_scale;
            means[i * TOKENS + t] = add(mean.x, mean.y);
            means[i * TOKENS + t + 4] = add(far_mean.x, far_mean.y);
        }
    }
    cp_async_wait_all();
    __syncthreads();
    // 3. Chains
    float acc[EIGHTS][4];
#pragma unroll
    for (u32 e = 0; e < EIGHTS; e++) acc[e][0] = acc[e][1] = acc[e][2] = acc[e][3] = 0.0f;
#pragma unroll 1
    for (u32 from = 0; from < steps; from += DEEP) {
#pragma unroll
        for (int d = 0; d < DEEP; d++) {
            const bool there = from + d < steps;
            const u32 group = min(chain + 4 * (from + d), groups - 1);
            u32 a[2][4];
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
#pragma unroll
                for (u32 r = 0; r < 2; r++) {
                    const u32 low = words[d][r][half][0], high = words[d][r][half][WORDS - 1];
                    F::unpack_eight(low, high, a[half][r], a[half][2 + r]);
                }
            }
            float s[2], b[2];
#pragma unroll
            for (u32 r = 0; r < 2; r++) {
                const u32 raw = __shfl_sync(ALL, both[d / 4][r], (lane & ~3u) + d % 4);
                s[r] = half_value(raw & 0xffff, type);
                b[r] = half_value(raw >> 16, type);
            }
            load(d, from + d + DEEP);
            if (d % 4 == 3) load_scales(d / 4, from + d - 3 + DEEP);
#pragma unroll
            for (u32 e = 0; e < EIGHTS; e++) {
                const uint2* x = (const uint2*)(q + (8 * e + quad) * stride + 64 * group) + part;
                const uint2 low = x[0], high = x[4];
                u32 sums[2][4];
                mma_u8_i8(sums[0], a[0], low.x, low.y);
                mma_u8_i8(sums[1], a[1], high.x, high.y);
                const float4 scale = *(const float4*)(sx + group * TOKENS + 8 * e + 2 * part);
                const float2 mean = *(const float2*)(means + group * TOKENS + 8 * e + 2 * part);
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    float t = mul(i % 2 ? scale.z : scale.x, sub(bits(sums[0][i]), MAGIC_FLOAT));
                    t = fma(i % 2 ? scale.w : scale.y, sub(bits(sums[1][i]), MAGIC_FLOAT), t);
                    const float y = fma(b[i / 2], i % 2 ? mean.y : mean.x, fma(s[i / 2], t, acc[e][i]));
                    acc[e][i] = there ? y : acc[e][i];
                }
            }
        }
    }
    // 4. They meet
#pragma unroll
    for (u32 e = 0; e < EIGHTS; e++) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) meet[chain][8 * e + 2 * part + i % 2][quad + i / 2 * 8] = acc[e][i];
    }
    __syncthreads();
#pragma unroll
    for (u32 e = 0; e < EIGHTS; e++) {
        if (!to[e]) continue;
        const u32 t = 8 * e + threadIdx.x / M16_ROWS;
        float y = add(add(meet[0][t][own_row], meet[2][t][own_row]), add(meet[1][t][own_row], meet[3][t][own_row]));
        if (p.bias) y = add(y, p.bias[first_row + own_row]);
        *to[e] = p.accumulate ? add(before[e], y) : y;
    }
}

#define GEMM_M16(name, F) \
    extern "C" __global__ void __launch_bounds__(128) gemm_m16_##name##_8(const __grid_constant__ Products p) { gemm_m16<F, 1>(p.parts[blockIdx.z]); } \
    extern "C" __global__ void __launch_bounds__(128) gemm_m16_##name##_16(const __grid_constant__ Products p) { gemm_m16<F, 2>(p.parts[blockIdx.z]); }

BYTE_FORMATS(GEMM_M16)
