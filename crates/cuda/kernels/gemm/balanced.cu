// Products of integer groups of 64 for some tens of tokens, on integer tensor cores, by blocks that are as large as an even share of the work: of sixteen
// tokens, as many sets of sixteen rows as the launch has, be they of one matrix or of several. Four warps have a set, one of its four chains each. All of a
// block's weights, with their scales as floats, come to shared memory before the wait; activations come behind it, a chunk of columns after the other.
#include "format/activations.cuh"
#include "format/list.cuh"
#include "format/matrix.cuh"
#include "gemm/matmul.cuh"
#include "prim/cp_async.cuh"
#include "prim/mma.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"
#include "prim/smem.cuh"

static const u32 BALANCED_ROWS = 16, BALANCED_TOKENS = 16, SLAB_CHUNK = 1024;

// Of a group's scales of tokens, in scales: neighbours among the groups meet different banks when they are written.
static const u32 SLAB_STRIDE = BALANCED_TOKENS + 2;

template <class F> __device__ __forceinline__ void gemm_balanced(const Products& all) {
    // Rows of a group of 4 bits lie as `ldmatrix` meets all banks.
    const u32 PIECES = F::BITS / 2, ROW = F::BITS == 4 ? 32 : 8 * F::BITS + 32, BYTES = BALANCED_ROWS * ROW;
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP, chain = warp % 4, sets = warps / 4, quad = lane / 4, part = lane % 4;
    const u32 cols = all.parts[0].cols, groups = cols / 64, most_steps = (groups + 3) / 4, steps = (groups + 3 - chain) / 4, chunks = (cols + SLAB_CHUNK - 1) / SLAB_CHUNK;
    const u32 stride = (cols + 127) / 128 * 128 + 32, of_scales = BALANCED_ROWS * sets + 1;
    // Sets are counted on from matrix to matrix; one that is not there is computed as the last row, and not stored.
    u32 set = blockIdx.x * sets + warp / 4, number = 0;
#pragma unroll 1
    while (number < 2 && set >= (all.parts[number].rows + BALANCED_ROWS - 1) / BALANCED_ROWS && all.parts[number + 1].rows) {
        set -= (all.parts[number].rows + BALANCED_ROWS - 1) / BALANCED_ROWS;
        number++;
    }
    const Matmul& p = all.parts[number];
    const Encoded& x = all.parts[0].x;
    const u32 first_row = set * BALANCED_ROWS, last = p.rows - 1;
    u8* const q = (u8*)smem;
    float(*const meet)[BALANCED_TOKENS][BALANCED_ROWS + 1] = (float(*)[BALANCED_TOKENS][BALANCED_ROWS + 1])smem + warp / 4 * 4;
    float2* const sx = (float2*)(q + max(BALANCED_TOKENS * stride, sets * 4 * BALANCED_TOKENS * (BALANCED_ROWS + 1) * 4));
    u8* const weights = (u8*)(sx + groups * SLAB_STRIDE) + warp * most_steps * BYTES;
    float2* const of_rows = (float2*)(weights + (warps - warp) * most_steps * BYTES);
    float* const means = (float*)(of_rows + groups * of_scales);
    // 1. Weights
    {
        const u32 r = lane / 2, half = lane % 2;
        const u8* from = p.matrix.data + p.in_matrix(min(first_row + r, last)) * p.matrix.row_bytes + chain * (8 * F::BITS) + half * 16;
        u8* to = weights + r * ROW + (F::BITS == 4 ? half ^ r / 4 % 2 : half) * 16;
#pragma unroll 4
        for (u32 step = 0; step < steps; step++) {
#pragma unroll
            for (u32 k = 0; k < PIECES; k += 2) cp_async_16(to + 16 * k, from + 16 * k);
            from += 32 * F::BITS;
            to += BYTES;
        }
        cp_async_commit();
    }
    const u32 type = p.matrix.type;
    const u16 *scales[4], *biases[4];
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
        const u64 row = p.in_matrix(min(first_row + 4 * chain + k, last)) * groups;
        scales[k] = (const u16*)p.matrix.scales + row;
        biases[k] = (const u16*)p.matrix.biases + row;
    }
#pragma unroll 2
    for (u32 g = lane; g < groups; g += WARP) {
        u32 s[4], b[4];
#pragma unroll
        for (u32 k = 0; k < 4; k++) s[k] = __ldg(scales[k] + g), b[k] = __ldg(biases[k] + g);
#pragma unroll
        for (u32 k = 0; k < 4; k++) of_rows[g * of_scales + warp / 4 * BALANCED_ROWS + 4 * chain + k] = make_float2(half_value(s[k], type), half_value(b[k], type));
    }
    // 2. Activations; a token that is not there is computed as the last
    const u32 first = blockIdx.y * BALANCED_TOKENS, last_token = all.parts[0].outputs - 1, lines = (groups + WARP - 1) / WARP * BALANCED_TOKENS;
    begin();
    auto bring = [&]() {
        const u32 piece = threadIdx.x % (SLAB_CHUNK / 16);
#pragma unroll 1
        for (u32 c = 0; c < chunks; c++) {
            const u32 column = c * SLAB_CHUNK + 16 * piece;
#pragma unroll 2
            for (u32 t = threadIdx.x / (SLAB_CHUNK / 16); t < BALANCED_TOKENS && column < cols; t += blockDim.x / (SLAB_CHUNK / 16))
                cp_async_16(q + t * stride + column, x.q + (u64)min(first + t, last_token) * cols + column);
            cp_async_commit();
        }
    };
#pragma unroll 1
    for (u32 from = warp; from < lines || from == warp; from += 4 * warps) {
        float2 scale[4], mean[4];
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            const u32 line = from + k * warps, g = line / BALANCED_TOKENS * WARP + lane;
            const u64 at = (u64)min(first + line % BALANCED_TOKENS, last_token) * groups + g;
            if (line >= lines || g >= groups) continue;
            scale[k] = __ldcg((const float2*)x.sx + at);
            mean[k] = __ldcg((const float2*)x.mx + at);
        }
        if (from == warp) bring();
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            const u32 line = from + k * warps, g = line / BALANCED_TOKENS * WARP + lane, at = g * SLAB_STRIDE + line % BALANCED_TOKENS;
            if (line >= lines || g >= groups) continue;
            sx[at] = scale[k];
            means[at] = add(mean[k].x, mean[k].y);
        }
    }
    const u32 own_row = first_row + threadIdx.x % BALANCED_ROWS;
    float* to[2];
    float before[2];
#pragma unroll
    for (u32 k = 0; k < 2; k++) {
        const u32 token = first + 8 * k + threadIdx.x % 128 / BALANCED_ROWS;
        to[k] = token <= last_token && own_row < p.rows ? p.out.row(token) + p.in_output(own_row) : nullptr;
        before[k] = p.accumulate && to[k] ? __ldcg(to[k]) : 0.0f;
    }
    // 3. Chains
    float acc[2][4];
#pragma unroll
    for (u32 i = 0; i < 8; i++) acc[i / 4][i % 4] = 0.0f;
    u32 step = 0;
    const u8* here = weights + (F::BITS == 4 ? lane % 16 * ROW + (lane / 16 ^ lane / 4 % 2) * 16 : quad * ROW);
#pragma unroll 1
    for (u32 c = 0; c < chunks; c++) {
        const u32 left = chunks - 1 - c;
        if (left >= 3) cp_async_wait<3>();
        else if (left == 2) cp_async_wait<2>();
        else if (left == 1) cp_async_wait<1>();
        else cp_async_wait<0>();
        __syncthreads();
        const u32 end = min(steps, (c + 1) * (SLAB_CHUNK / 256));
#pragma unroll 2
        for (; step < end; step++) {
            const u32 group = chain + 4 * step;
            u32 a[2][4];
            if (F::BITS == 4) {
                u32 words[4];
                ldmatrix_x4(words, here);
                F::unpack_matrix(words, a);
            } else {
#pragma unroll
                for (u32 i = 0; i < 4; i++) F::unpack_lane(here + i % 2 * 8 * ROW + i / 2 * 4 * F::BITS, part, a[i / 2][i % 2], a[i / 2][i % 2 + 2]);
            }
            here += BYTES;
            float2 of_row[2];
#pragma unroll
            for (u32 r = 0; r < 2; r++) of_row[r] = of_rows[group * of_scales + warp / 4 * BALANCED_ROWS + quad + 8 * r];
#pragma unroll
            for (u32 n = 0; n < 2; n++) {
                const uint2* x = (const uint2*)(q + (8 * n + quad) * stride + 64 * group) + part;
                const uint2 low = x[0], high = x[4];
                u32 sums[2][4];
                mma_u8_i8(sums[0], a[0], low.x, low.y);
                mma_u8_i8(sums[1], a[1], high.x, high.y);
                const float4 scale = *(const float4*)(sx + group * SLAB_STRIDE + 8 * n + 2 * part);
                const float2 mean = *(const float2*)(means + group * SLAB_STRIDE + 8 * n + 2 * part);
#pragma unroll
                for (u32 e = 0; e < 4; e++) {
                    float t = mul(e % 2 ? scale.z : scale.x, sub(bits(sums[0][e]), MAGIC_FLOAT));
                    t = fma(e % 2 ? scale.w : scale.y, sub(bits(sums[1][e]), MAGIC_FLOAT), t);
                    acc[n][e] = fma(of_row[e / 2].y, e % 2 ? mean.y : mean.x, fma(of_row[e / 2].x, t, acc[n][e]));
                }
            }
        }
    }
    // 4. They meet
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < 8; i++) meet[chain][i / 4 * 8 + 2 * part + i % 2][quad + i % 4 / 2 * 8] = acc[i / 4][i % 4];
    __syncthreads();
#pragma unroll
    for (u32 k = 0; k < 2; k++) {
        if (!to[k]) continue;
        const u32 t = 8 * k + threadIdx.x % 128 / BALANCED_ROWS, r = threadIdx.x % BALANCED_ROWS;
        float y = add(add(meet[0][t][r], meet[2][t][r]), add(meet[1][t][r], meet[3][t][r]));
        if (p.bias) y = add(y, p.bias[own_row]);
        *to[k] = p.accumulate ? add(before[k], y) : y;
    }
}

#define GEMM_BALANCED(name, F) \
    extern "C" __global__ void __launch_bounds__(640, 1) gemm_balanced_##name(const __grid_constant__ Products p) { ON_TENSOR_CORES(gemm_balanced<F>(p);) }

BYTE_FORMATS(GEMM_BALANCED)
