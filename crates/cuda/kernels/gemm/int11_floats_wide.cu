// Products of integers of 11 bits for prompts with weights that are floats of sixteen bits, by wgmma, from the integers that gemm/int11_split.cu made of them.
//
// A piece is four products, two of each slice. Of 128 tokens one half is folded while the other, or the next piece's first, is multiplied.
#include "format/list.cuh"
#include "gemm/int11_split.cuh"
#include "gemm/wide.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// What a warp of a multiplying warpgroup has.
struct Fold {
    static const u32 STAGES = 6, TOKEN_BYTES = TILE_BYTES, RECORD_BYTES = ::RECORD_BYTES, STAGE_BYTES = TOKEN_BYTES + RECORD_BYTES;

    float acc[2][32];
    // Of each half of the tokens, sums of high and of low slices.
    float high[2][32];
    float low[2][32];
    u32 a[16];
    u32 set;
    u32 lane;
    const u8* stage;
    u32 stage_at;

    // Those of the next piece, before they are cut.
    uint4 words[2];

    __device__ __forceinline__ void load(u32 piece) {
        const uint4* from = (const uint4*)(stage + TOKEN_BYTES) + (set * 4 + 2 * piece) * WARP + lane;
        words[0] = from[0];
        words[1] = from[WARP];
    }

    // The words of a piece in slices: two products' high ones, and their low ones.
    __device__ __forceinline__ void fragments() {
#pragma unroll
        for (u32 u = 0; u < 2; u++) {
            const uint4 w = words[u];
            slice_pair(w.x, a[4 * u], a[8 + 4 * u]);
            slice_pair(w.y, a[4 * u + 1], a[8 + 4 * u + 1]);
            slice_pair(w.z, a[4 * u + 2], a[8 + 4 * u + 2]);
            slice_pair(w.w, a[4 * u + 3], a[8 + 4 * u + 3]);
        }
    }

    __device__ __forceinline__ void units(u32 piece, float (&unit)[2]) const {
        const float* from = (const float*)(stage + TOKEN_BYTES + RECORD_UNITS) + piece * ROWS + set * 16 + lane / 4;
        unit[0] = from[0];
        unit[1] = from[8];
    }

    template <u32 H> __device__ __forceinline__ void issue(u32 piece) {
        const u64 b = rows_of_128(stage_at + H * 8192) + 4 * piece;
        wgmma_fence();
        wgmma_f16(high[H], a, b, 0);
        wgmma_f16(low[H], a + 8, b, 0);
        wgmma_f16(high[H], a + 4, b + 2, 1);
        wgmma_f16(low[H], a + 12, b + 2, 1);
        wgmma_commit();
    }

    template <u32 H> __device__ __forceinline__ void fold(const float (&unit)[2]) {
#pragma unroll
        for (u32 i = 0; i < 32; i++) acc[H][i] = fma(unit[i / 2 % 2], add(high[H][i], low[H][i]), acc[H][i]);
    }

    template <u32 H, int LEFT> __device__ __forceinline__ void wait() {
        wgmma_wait<LEFT>(high[H]);
        keep_sums(low[H]);
    }

    // Both pieces of a group; nothing is under way before and behind.
    __device__ __forceinline__ void group(u32 empty) {
        float first[2], second[2];
        load(0);
        fragments();
        issue<0>(0);
        issue<1>(0);
        load(1);
        units(0, first);
        units(1, second);
        wait<0, 1>();
        fold<0>(first);
        wait<1, 0>();
        keep_until_here(a);
        fragments();
        issue<0>(1);
        fold<1>(first);
        issue<1>(1);
        wait<0, 1>();
        fold<0>(second);
        wait<1, 0>();
        keep_until_here(a);
        // What comes in bulk may overtake reads that are still under way.
        fence_async();
        __syncwarp();
        if (lane == 0) barrier_arrive(empty);
        fold<1>(second);
    }
};
#endif

#define GEMM_WIDE(name, F) \
    extern "C" __global__ void __launch_bounds__(384, 1) gemm_wide_##name(const __grid_constant__ Products p) { ON_HOPPER(gemm_wide<Fold>(p);) }

INT11_FLOAT_FORMATS(GEMM_WIDE)
