// Products of blocks for one token, or for pairs of a token and an expert.
#include "format/list.cuh"
#include "gemm/blocks.cuh"
#include "prim/smem.cuh"

#define GEMV(name, F) \
    extern "C" __global__ void __launch_bounds__(256) gemv_##name(const __grid_constant__ Products p) { blocks_dot<F, 1>(p.parts[blockIdx.z]); }

BLOCK_FORMATS(GEMV)

// Rows that a warp of `gemv_rows` takes, as src/kernels/choice.rs has it.
template <class F> constexpr int ROWS_OF = F::HALVES == 1 ? 8 : 4;
// From one row's groups in shared memory to the next's: rows that are read together begin half of all banks apart.
template <class F> constexpr int SPAN_OF = WARP * F::HALVES + 4;

// The same where there are many rows: a warp takes several, whose loads are under way together, and each lane carries one of their chains, to which groups come by way of
// shared memory.
template <class F> __device__ __forceinline__ void gemv_rows(const Matmul& p) {
    begin();
    const int HALVES = F::HALVES, ROWS = ROWS_OF<F>, SPAN = SPAN_OF<F>;
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, first = (blockIdx.x * (THREADS / WARP) + warp) * ROWS, parts = p.cols / 32;
    if (first >= p.rows) return;
    // Of each group of a row its sum, its scale and bias, and the mean that the bias meets.
    float4* groups = (float4*)smem + warp * ROWS * SPAN;
    for (u32 output = blockIdx.y; output < p.outputs; output += gridDim.y) {
        Work w;
        if (!work<1>(p, KIND_OF<F>, output, w)) continue;
        const typename F::Values values(w.m.type);
        u64 at[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) at[r] = p.in_matrix(min(first + r, p.rows - 1)) * w.m.row_bytes;
        float acc = 0.0f;
#pragma unroll 1
        for (u32 from = 0; from < parts; from += WARP) {
            const u32 part = from + lane;
            const bool there = part < parts;
            typename F::Wide packed[ROWS];
            u32 codes[ROWS], units[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                packed[r].load(w.m.data + at[r] + part * (4 * F::BITS), there);
                codes[r] = there ? F::codes(w.m.scales + at[r], w.m.type, part) : 0;
                units[r] = there ? unit_of_column(w.m.biases + at[r], w.m.type, part * 32) : 0;
            }
            const u64 column = w.x * p.cols + (there ? part : 0) * 32;
            const uint4 low = ((const uint4*)(p.x.q + column))[0], high = ((const uint4*)(p.x.q + column))[1];
            const float sx = p.x.sx[column / 32];
            float m[HALVES];
            if (HALVES == 1) {
                m[0] = p.x.mx[column / 32];
            } else {
                const u32 ONES = 0x01010101u;
                m[0] = mul(sx, (float)dp4a(ONES, low.x, dp4a(ONES, low.y, dp4a(ONES, low.z, dp4a(ONES, low.w, 0)))));
                m[HALVES - 1] = mul(sx, (float)dp4a(ONES, high.x, dp4a(ONES, high.y, dp4a(ONES, high.z, dp4a(ONES, high.w, 0)))));
            }
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float sums[HALVES];
                F::part_sums(packed[r].words, values, low, high, sx, sums);
#pragma unroll
                for (int h = 0; h < HALVES; h++) {
                    const float2 scale = scale_and_bias<F>(F::code(codes[r], h), units[r], w.m.type);
                    groups[r * SPAN + lane * HALVES + h] = make_float4(sums[h], scale.x, scale.y, m[h]);
                }
            }
            __syncwarp();
            if (lane < 4 * ROWS) {
                const float4* own = groups + lane / 4 * SPAN;
                const u32 links = min((u32)WARP, parts - from) * HALVES;
                for (u32 g = lane % 4; g < links; g += 4) {
                    const float4 group = own[g];
                    acc = fma(group.z, group.w, fma(group.y, group.x, acc));
                }
            }
            __syncwarp();
        }
        float y = add(acc, __shfl_xor_sync(ALL, acc, 2));
        y = add(y, __shfl_xor_sync(ALL, y, 1));
        const u32 row = first + lane / 4;
        if (lane % 4 == 0 && lane < 4 * ROWS && row < p.rows) put(p, output, row, y);
    }
}

#define GEMV_ROWS(name, F) \
    extern "C" __global__ void __launch_bounds__(256, F::BITS > 5 ? 1 : 2) gemv_##name##_rows(const __grid_constant__ Products p) { gemv_rows<F>(p.parts[blockIdx.z]); }

BLOCK_FORMATS(GEMV_ROWS)
