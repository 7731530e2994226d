// Products of integers of 11 bits for prompts, by wgmma, from the records that gemm/int11_records.cu made of weights and tokens.
//
// Of 128 tokens one half is folded while the other, or the next piece's first, is multiplied.
//
// A weight's integer q is an f16 q 2^-20, and sums of a piece stay exact: below 2^24 units. Where they would not, q is q 2^-24 in a record, which is q itself in the lowest
// bits and a sign, and is multiplied in two slices of four bits.
#include "gemm/int11_records.cuh"
#include "gemm/wide.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// What a warp of a multiplying warpgroup has. A piece has COLUMNS columns, which are multiplied at once or in two slices; it may have a bias.
template <u32 COLUMNS, bool SLICED, bool BIASED> struct Fold {
    static const u32 PIECES = 64 / COLUMNS, PRODUCTS = COLUMNS / 16;
    // There are not registers enough for slices of 64 columns and sums of both halves of the tokens: one half comes after the other.
    static const u32 HALVES = SLICED && COLUMNS == 64 ? 1 : 2;
    static const u32 STAGES = 5, TOKEN_BYTES = TOKEN_INTEGERS + TOKEN_SUMS, RECORD_BYTES = RECORD_INTEGERS + (BIASED ? 2 : 1) * PIECES * RECORD_SCALES;
    static const u32 STAGE_BYTES = TOKEN_BYTES + RECORD_BYTES;

    float acc[2][32];
    // Of each half of the tokens, sums of a piece: of its integers, or of high and of low slices.
    float high[HALVES][32];
    float low[SLICED ? HALVES : 1][32];
    // Integers of 64 columns, or high slices of a piece and then low ones.
    u32 a[SLICED ? 8 * PRODUCTS : 16];
    u32 set;
    u32 lane;
    const u8* stage;
    u32 stage_at;

    __device__ __forceinline__ uint4 product(u32 s) const { return ((const uint4*)(stage + TOKEN_BYTES))[(set * 4 + s) * WARP + lane]; }

    // Cuts two integers into slices.
    __device__ static __forceinline__ void cut(u32 w, u32& high, u32& low) {
        high = w & 0x80f080f0u;
        low = (w & 0x000f000fu) << 4 | w & 0x80008000u;
    }

    // The slices of a piece.
    __device__ __forceinline__ void slices(const uint4 (&words)[PRODUCTS]) {
#pragma unroll
        for (u32 u = 0; u < PRODUCTS; u++) {
            const u32 h = 4 * u, l = SLICED ? 4 * (PRODUCTS + u) : 0;
            cut(words[u].x, a[h], a[l]);
            cut(words[u].y, a[h + 1], a[l + 1]);
            cut(words[u].z, a[h + 2], a[l + 2]);
            cut(words[u].w, a[h + 3], a[l + 3]);
        }
    }

    __device__ __forceinline__ void load(u32 piece, uint4 (&words)[PRODUCTS]) const {
#pragma unroll
        for (u32 u = 0; u < PRODUCTS; u++) words[u] = product(PRODUCTS * piece + u);
    }

    __device__ __forceinline__ void scales(u32 piece, float (&s)[2], float (&b)[2]) const {
        const float* from = (const float*)(stage + TOKEN_BYTES + RECORD_INTEGERS) + piece * ROWS + set * 16 + lane / 4;
#pragma unroll
        for (u32 k = 0; k < 2; k++) {
            s[k] = from[8 * k];
            b[k] = BIASED ? from[PIECES * ROWS + 8 * k] : 0.0f;
        }
    }

    template <u32 H> __device__ __forceinline__ void issue(u32 piece) {
        const u32 own = H % HALVES;
        const u64 b = rows_of_128(stage_at + H * 8192) + 2 * PRODUCTS * piece;
        wgmma_fence();
#pragma unroll
        for (u32 u = 0; u < PRODUCTS; u++) {
            wgmma_f16(high[own], a + 4 * (SLICED ? u : PRODUCTS * piece + u), b + 2 * u, u);
            if (SLICED) wgmma_f16(low[SLICED ? own : 0], a + 4 * (PRODUCTS + u), b + 2 * u, u);
        }
        wgmma_commit();
    }

    template <u32 H> __device__ __forceinline__ void fold(u32 piece, const float (&s)[2], const float (&b)[2]) {
        const u32 own = H % HALVES;
        const float* sums = (const float*)(stage + TOKEN_INTEGERS) + piece * TOKENS + H * 64 + lane % 4 * 2;
#pragma unroll
        for (u32 n = 0; n < 8; n++) {
            const float2 m = BIASED ? *(const float2*)(sums + 8 * n) : make_float2(0.0f, 0.0f);
#pragma unroll
            for (u32 k = 0; k < 4; k++) {
                const u32 i = 4 * n + k;
                float y = fma(s[k / 2], SLICED ? fma(16.0f, high[own][i], low[SLICED ? own : 0][i]) : high[own][i], acc[H][i]);
                if (BIASED) y = fma(b[k / 2], k % 2 ? m.y : m.x, y);
                acc[H][i] = y;
            }
        }
    }

    template <u32 H, int LEFT> __device__ __forceinline__ void wait() {
        wgmma_wait<LEFT>(high[H % HALVES]);
        if (SLICED) keep_sums(low[SLICED ? H % HALVES : 0]);
    }

    // All pieces, each in one pass: one half of the tokens is folded while the other is multiplied.
    __device__ __forceinline__ void whole() {
        float s[2], b[2];
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const uint4 w = product(i);
            a[4 * i] = w.x, a[4 * i + 1] = w.y, a[4 * i + 2] = w.z, a[4 * i + 3] = w.w;
        }
        issue<0>(0);
        issue<1>(0);
#pragma unroll
        for (u32 piece = 0; piece < PIECES; piece++) {
            const bool more = piece + 1 < PIECES;
            scales(piece, s, b);
            wait<0, 1>();
            fold<0>(piece, s, b);
            if (more) {
                issue<0>(piece + 1);
                wait<1, 1>();
            } else {
                wait<1, 0>();
                keep_until_here(a);
            }
            fold<1>(piece, s, b);
            if (more) issue<1>(piece + 1);
        }
    }

    // The same in slices of a piece, which lie where those of the piece before were.
    __device__ __forceinline__ void in_slices() {
        float s[2], b[2];
        uint4 words[PRODUCTS];
        load(0, words);
        slices(words);
        issue<0>(0);
        if (HALVES == 2) issue<1>(0);
#pragma unroll
        for (u32 piece = 0; piece < PIECES; piece++) {
            const bool more = piece + 1 < PIECES;
            scales(piece, s, b);
            if (HALVES == 1) {
                wait<0, 0>();
                fold<0>(piece, s, b);
                issue<1>(piece);
                wait<1, 0>();
                keep(a);
                fold<1>(piece, s, b);
                continue;
            }
            if (more) load(piece + 1, words);
            wait<0, 1>();
            fold<0>(piece, s, b);
            wait<1, 0>();
            keep(a);
            if (more) {
                slices(words);
                issue<0>(piece + 1);
            }
            fold<1>(piece, s, b);
            if (more) issue<1>(piece + 1);
        }
    }

    // Sixteen registers or 32 that wgmma has read.
    __device__ static __forceinline__ void keep(const u32 (&a)[16]) { keep_until_here(a); }
    __device__ static __forceinline__ void keep(const u32 (&a)[32]) {
        keep_until_here(*(const u32(*)[16])a);
        keep_until_here(*(const u32(*)[16])(a + 16));
    }

    // All pieces of 64 columns; nothing is under way before and behind.
    __device__ __forceinline__ void group(u32 empty) {
        if constexpr (SLICED) in_slices();
        else whole();
        release(empty);
    }

    // The same of the first half of the tokens alone.
    __device__ __forceinline__ void half_group(u32 empty) {
        float s[2], b[2];
#pragma unroll
        for (u32 piece = 0; piece < PIECES; piece++) {
            uint4 words[PRODUCTS];
            load(piece, words);
            if (SLICED) slices(words);
#pragma unroll
            for (u32 u = 0; u < PRODUCTS && !SLICED; u++) {
                u32* w = a + 4 * (PRODUCTS * piece + u);
                w[0] = words[u].x, w[1] = words[u].y, w[2] = words[u].z, w[3] = words[u].w;
            }
            issue<0>(piece);
            scales(piece, s, b);
            wait<0, 0>();
            keep(a);
            fold<0>(piece, s, b);
        }
        release(empty);
    }

    // Gives the stage back.
    __device__ __forceinline__ void release(u32 empty) {
        // What comes in bulk may overtake reads that are still under way.
        fence_async();
        __syncwarp();
        if (lane == 0) barrier_arrive(empty);
    }
};
#endif

// Products of some of a mixture's experts.
struct ExpertProducts {
    Products all;
    u32 first;
    u32 experts;
};

#define GEMM_WIDE(name, COLUMNS, SLICED, BIASED) \
    extern "C" __global__ void __launch_bounds__(384, 1) gemm_wide_##name(const __grid_constant__ Products p) { ON_HOPPER(gemm_wide<Fold<COLUMNS, SLICED, BIASED>>(p);) } \
    extern "C" __global__ void __launch_bounds__(384, 1) gemm_wide_##name##_grouped(const __grid_constant__ ExpertProducts p) { ON_HOPPER(gemm_wide<Fold<COLUMNS, SLICED, BIASED>, true>(p.all, {p.first, p.experts});) }

GEMM_WIDE(16, 16, false, false)
GEMM_WIDE(16_biased, 16, false, true)
GEMM_WIDE(32, 32, false, false)
GEMM_WIDE(32_biased, 32, false, true)
GEMM_WIDE(32_sliced, 32, true, false)
GEMM_WIDE(32_sliced_biased, 32, true, true)
GEMM_WIDE(64_biased, 64, false, true)
GEMM_WIDE(64_sliced_biased, 64, true, true)
