// Products of blocks for one token, or for pairs of a token and an expert.
#include "format/list.cuh"
#include "gemm/blocks.cuh"
#include "prim/smem.cuh"

#define GEMV(name, F) \
    extern "C" __global__ void __launch_bounds__(256) gemv_##name(const __grid_constant__ Products p) { blocks_dot<F, 1>(p.parts[blockIdx.z]); }

BLOCK_FORMATS(GEMV)

// Rows that a block of `gemv_rows` takes, as src/kernels/choice.rs has it.
template <class F> constexpr int ROWS_OF = F::HALVES == 1 ? 8 : 4;

// The same where there are many rows. A block takes several, and each of its warps 1,024 columns of all of them, so that their loads are under way together. Groups go
// to shared memory, and each lane of the first warp carries one chain of a row.
template <class F> __device__ __forceinline__ void gemv_rows(const Matmul& p) {
    const int HALVES = F::HALVES, ROWS = ROWS_OF<F>;
    const u32 lane = threadIdx.x % WARP, first = blockIdx.x * ROWS, parts = p.cols / 32;
    typename F::Wide packed[ROWS];
    u32 codes[ROWS], units[ROWS];
    auto load = [&](const Matrix& m, u32 part) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const u64 at = p.in_matrix(min(first + r, p.rows - 1)) * m.row_bytes;
            packed[r].load(m.data + at + part * (4 * F::BITS), true);
            codes[r] = F::codes(m.scales + at, m.type, part);
            units[r] = unit_of_column(m.biases + at, m.type, part * 32);
        }
    };
    // Weights, where they do not depend on what runs before.
    bool loaded = !p.table && first < p.rows && threadIdx.x < parts;
    if (loaded) load(p.matrix, threadIdx.x);
    begin();
    if (first >= p.rows) return;
    // From one row's groups to the next's: rows that are read together begin half of all banks apart.
    const u32 span = (parts * HALVES + 7) / 8 * 8 + 4;
    // Of each group of a row its sum, its scale and bias, and the mean that the bias meets.
    float4* groups = (float4*)smem;
    for (u32 output = blockIdx.y; output < p.outputs; output += gridDim.y) {
        Work w;
        if (!work<1>(p, KIND_OF<F>, output, w)) continue;
        const typename F::Values values(w.m.type);
#pragma unroll 1
        for (u32 part = threadIdx.x; part < parts; part += blockDim.x) {
            if (!loaded) load(w.m, part);
            loaded = false;
            const u64 column = w.x * p.cols + part * 32;
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
                    groups[r * span + part * HALVES + h] = make_float4(sums[h], scale.x, scale.y, m[h]);
                }
            }
        }
        __syncthreads();
        if (threadIdx.x < WARP) {
            const float4* own = groups + min(lane / 4, (u32)ROWS - 1) * span;
            float acc = 0.0f;
#pragma unroll 8
            for (u32 g = lane % 4; g < parts * HALVES; g += 4) {
                const float4 group = own[g];
                acc = fma(group.z, group.w, fma(group.y, group.x, acc));
            }
            // Lanes may have had a group more than others.
            __syncwarp();
            float y = add(acc, __shfl_xor_sync(ALL, acc, 2));
            y = add(y, __shfl_xor_sync(ALL, y, 1));
            const u32 row = first + lane / 4;
            if (lane % 4 == 0 && lane < 4 * ROWS && row < p.rows) put(p, output, row, y);
        }
        __syncthreads();
    }
}

#define GEMV_ROWS(name, F) \
    extern "C" __global__ void __launch_bounds__(256, F::BITS > 5 ? 1 : 2) gemv_rows_##name(const __grid_constant__ Products p) { gemv_rows<F>(p.parts[blockIdx.z]); }

BLOCK_FORMATS(GEMV_ROWS)
