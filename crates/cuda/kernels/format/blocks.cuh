// Weights that a file has in blocks, of GGUF or of four-bit floats, as rows lie on a device (elementwise/rearrange.cu). A row is a stream of numbers of a few bits,
// as affine weights have it, then what the scales of its groups are made of, then the units of its blocks. A weight is `fma(q - zero, s, b)`, where q is the number
// itself or what a table of values has for it.
#pragma once
#include "format/affine.cuh"
#include "format/matrix.cuh"
#include "prim/numerics.cuh"

// `Matrix::type` of such rows. In its lowest byte, what a group has: an f16 scale; an f16 scale and an f16 bias; a power of two, of which the last may be no number; an unsigned e4m3
// number; a signed byte, times the f32 unit of the block; an e4m3 number times that unit, or divided by it; four bits, times the first f16 unit, and four, times the
// second; the same as two bytes.
static const u32 SCALE_F16 = 3, SCALE_BIAS_F16 = 4, SCALE_POWER = 5, SCALE_POWER_NAN = 6, SCALE_E4M3 = 7, SCALE_BYTE = 8, SCALE_E4M3_TIMES = 9, SCALE_E4M3_OVER = 10;
static const u32 SCALE_NIBBLES = 11, SCALE_PAIR = 12;

// Columns that share a unit.
static const u32 UNIT_COLUMNS = 256;

// Tables of values: of IQ4; of twice an e2m1 number, and 12; of IQ3_XXS; of IQ3_S; of IQ2; of IQ1. The last bit of the number of one of IQ3 and IQ2 is its sign; of
// IQ1 it shifts down instead of up.
static __constant__ const u32 VALUES[6][4] = {
    {0x3f2d1801u, 0x766a5d4fu, 0xa6998d81u, 0xf1d9c5b5u},
    {0x0f0e0d0cu, 0x18141210u, 0x090a0b0cu, 0x00040608u},
    {0x5a524a42u, 0x7c726a62u, 0x222a323au, 0x000a121au},
    {0x16141210u, 0x1e1c1a18u, 0x080a0c0eu, 0x00020406u},
    {0x00564433u, 0x00001223u, 0, 0},
    {0x00120a02u, 0x00100800u, 0, 0},
};

// In its second byte the integer that stands for 0; in its third the number of a table of values, from 1 on.
__device__ __forceinline__ u32 scale_of(u32 type) { return type & 0xff; }
__device__ __forceinline__ float zero_of(u32 type) { return (float)(type >> 8 & 0xff); }
__device__ __forceinline__ const u32* values_of(u32 type) { return VALUES[max(type >> 16, 1u) - 1]; }

// Biases are the block's own. Otherwise they are `-zero * s`, where integers are multiplied, and none where floats are.
__device__ __forceinline__ bool is_biased(u32 type) { return scale_of(type) == SCALE_BIAS_F16 || scale_of(type) >= SCALE_NIBBLES; }

// What group `g` has.
__device__ __forceinline__ u32 code_of(const u8* codes, u32 type, u32 g) {
    const u32 scale = scale_of(type);
    if (scale == SCALE_BIAS_F16) return ((const u32*)codes)[g];
    return scale == SCALE_F16 || scale == SCALE_PAIR ? ((const u16*)codes)[g] : codes[g];
}

// The units of the block with column `i`.
__device__ __forceinline__ u32 unit_of_column(const u8* units, u32 type, u32 i) { return scale_of(type) >= SCALE_BYTE ? ((const u32*)units)[i / UNIT_COLUMNS] : 0; }

// 2^(exponent - 128), of which the two least are denormal.
__device__ __forceinline__ float half_of_power(u32 exponent) { return bits(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23); }

// Half of an unsigned e4m3 number, whose NaN is 0.
__device__ __forceinline__ float half_of_e4m3(u32 raw) {
    const u32 exponent = raw >> 3 & 15, mantissa = raw & 7;
    if (exponent == 0) return mul((float)mantissa, bits((127u - 10) << 23));
    return raw == 0x7f ? 0.0f : bits((exponent + 127 - 7 - 1) << 23 | mantissa << 20);
}

// An e4m3 number: no infinities, and one NaN of each sign.
__device__ __forceinline__ float from_e4m3(u32 raw) {
    const u32 sign = raw << 24 & 0x80000000u, size = raw & 0x7f;
    return bits(sign | (size == 0x7f ? 0x7fc00000u : bits(mul(bits(size << 20), bits((127u + 120) << 23)))));
}

// Scale and bias of a group.
__device__ __forceinline__ float2 block_scale(u32 code, u32 unit, u32 of) {
    const u32 type = scale_of(of);
    float s;
    if (type == SCALE_BIAS_F16) return make_float2(from_f16((u16)code), from_f16((u16)(code >> 16)));
    if (type >= SCALE_NIBBLES) {
        const u32 c = type == SCALE_PAIR ? code & 0xff : code & 15, n = type == SCALE_PAIR ? code >> 8 : code >> 4;
        return make_float2(mul(from_f16((u16)unit), (float)c), -mul(from_f16((u16)(unit >> 16)), (float)n));
    }
    if (type == SCALE_F16) s = from_f16((u16)code);
    else if (type == SCALE_POWER_NAN && code == 0xff) s = bits(NOT_A_NUMBER);
    else if (type <= SCALE_POWER_NAN) s = half_of_power(code);
    else if (type == SCALE_E4M3) s = half_of_e4m3(code);
    else if (type == SCALE_E4M3_TIMES) s = mul(0.5f, mul(from_e4m3(code), bits(unit)));
    else if (type == SCALE_E4M3_OVER) s = mul(0.5f, div(from_e4m3(code), bits(unit)));
    else s = mul(bits(unit), (float)(i8)code);
    return make_float2(s, mul(-zero_of(of), s));
}

// The value of a number.
__device__ __forceinline__ u32 value_of(u32 type, u32 n) { return type >> 16 ? values_of(type)[n / 4] >> n % 4 * 8 & 0xff : n; }

// The weight at column `i` of row `r`.
__device__ __forceinline__ float block_weight(const Matrix& m, u64 r, u32 i) {
    const u64 row = r * m.row_bytes;
    const float2 scale = block_scale(code_of(m.scales + row, m.type, i / m.group), unit_of_column(m.biases + row, m.type, i), m.type);
    const u32 q = value_of(m.type, quantum(m.data + row, m.bits, i));
    return fma(sub((float)q, zero_of(m.type)), scale.x, is_biased(m.type) ? scale.y : 0.0f);
}

// Blocks of any kind, as the floats that they encode.
struct BlockFloats {
    // Not as affine weights are.
    static const bool IS_PACKED = false;

    __device__ static __forceinline__ float weight(const Matrix& m, u64 r, u32 i) { return block_weight(m, r, i); }

    // Four neighbouring columns of a row, on their way from memory.
    struct Four {
        u32 w[3];

        __device__ __forceinline__ void load(const Matrix& m, u64 r, u32 i, u32 cols) {
            w[0] = w[1] = w[2] = 0;
            if (i >= cols) return;
            const u64 row = r * m.row_bytes;
            const u32 bit = i * m.bits, word = bit / 32, shift = bit % 32;
            const u32* words = (const u32*)(m.data + row);
            w[0] = __funnelshift_r(words[word], shift + 4 * m.bits > 32 ? words[word + 1] : 0, shift);
            w[1] = code_of(m.scales + row, m.type, i / m.group);
            w[2] = unit_of_column(m.biases + row, m.type, i);
        }

        __device__ __forceinline__ float4 values(const Matrix& m) const {
            const float2 scale = block_scale(w[1], w[2], m.type);
            const float zero = zero_of(m.type), b = is_biased(m.type) ? scale.y : 0.0f;
            float q[4];
#pragma unroll
            for (u32 e = 0; e < 4; e++) q[e] = fma(sub((float)value_of(m.type, w[0] >> e * m.bits & ((1u << m.bits) - 1)), zero), scale.x, b);
            return make_float4(q[0], q[1], q[2], q[3]);
        }
    };
};

// The same, rounded to bf16.
struct BlockBf16 {
    static const bool IS_PLAIN = false;

    __device__ static __forceinline__ void pair(const Matrix& m, u64 r, u32 i, u32, float& even, float& odd) {
        even = from_bf16(to_bf16(block_weight(m, r, i)));
        odd = from_bf16(to_bf16(block_weight(m, r, i + 1)));
    }
};

// Four numbers, a byte each, become their values.
template <int BITS> __device__ __forceinline__ u32 look_up(u32 n, const u32 (&values)[4]) {
    // Selectors are side by side, four bits each.
    u32 both = n | n >> 4;
    both = __byte_perm(both, 0, 0x4420);
    const u32 low = __byte_perm(values[0], values[1], both & 0x7777);
    if (BITS == 3) return low;
    const u32 high = __byte_perm(values[2], values[3], both & 0x7777);
    return __byte_perm(low, high, 0x3210 | (both & 0x8888) >> 1);
}

// Blocks for integer products: numbers of BITS bits in groups of GROUP columns, which are looked up in a table or not. Functions of `Affine` take numbers.
template <int BITS_, int GROUP_, bool LOOKED_UP> struct Blocks : Affine<BITS_> {
    typedef Affine<BITS_> Numbers;
    static const int BITS = BITS_, GROUP = GROUP_;
    // Groups in 32 columns.
    static const int HALVES = 32 / GROUP_;

    struct Values {
        u32 of[4];

        __device__ __forceinline__ explicit Values(u32 type) {
            const u32* from = values_of(type);
#pragma unroll
            for (int i = 0; i < 4; i++) of[i] = LOOKED_UP ? from[i] : 0;
        }
    };

    // Unpacks 32 columns to bytes, in the order of quantized activations.
    __device__ static __forceinline__ void unpack(const u32 (&words)[BITS_], u32 (&w)[8], const Values& values) {
        Numbers::unpack(words, w);
        if (!LOOKED_UP) return;
#pragma unroll
        for (int i = 0; i < 8; i++) w[i] = look_up<BITS_>(w[i], values.of);
    }

    // What the groups of 32 columns have, the first in the lowest bits.
    __device__ static __forceinline__ u32 codes(const u8* codes, u32 type, u32 part) {
        return HALVES == 2 ? ((const u16*)codes)[part] : code_of(codes, type, part);
    }

    // That of one of them.
    __device__ static __forceinline__ u32 code(u32 codes, u32 half) { return HALVES == 2 ? codes >> 8 * half & 0xff : codes; }

    // 32 columns, packed, on their way from memory, in pieces as large as their alignment allows.
    struct Wide {
        u32 words[BITS_];

        __device__ __forceinline__ void load(const u8* p, bool there) {
            const int PIECE = BITS_ % 4 == 0 ? 4 : BITS_ % 2 == 0 ? 2 : 1;
#pragma unroll
            for (int i = 0; i < BITS_ / PIECE; i++) {
                if (PIECE == 4) {
                    const uint4 v = there ? __ldcs((const uint4*)p + i) : make_uint4(0, 0, 0, 0);
                    words[4 * i] = v.x, words[(4 * i + 1) % BITS_] = v.y, words[(4 * i + 2) % BITS_] = v.z, words[(4 * i + 3) % BITS_] = v.w;
                } else if (PIECE == 2) {
                    const uint2 v = there ? __ldcs((const uint2*)p + i) : make_uint2(0, 0);
                    words[2 * i] = v.x, words[(2 * i + 1) % BITS_] = v.y;
                } else {
                    words[i] = there ? __ldcs((const u32*)p + i) : 0;
                }
            }
        }
    };

    // The integer sums of the groups of 32 columns, times the scale of the activations.
    __device__ static __forceinline__ void part_sums(const u32 (&words)[BITS_], const Values& values, uint4 low, uint4 high, float sx, float (&t)[HALVES]) {
        if (HALVES == 1 && !LOOKED_UP) {
            t[0] = mul(sx, Numbers::part_sum(words, low, high));
            return;
        }
        u32 q[8];
        unpack(words, q, values);
        int first = dp4a(q[0], low.x, 0), second = dp4a(q[4], high.x, 0);
        first = dp4a(q[1], low.y, first), second = dp4a(q[5], high.y, second);
        first = dp4a(q[2], low.z, first), second = dp4a(q[6], high.z, second);
        first = dp4a(q[3], low.w, first), second = dp4a(q[7], high.w, second);
        t[0] = mul(sx, (float)(HALVES == 1 ? first + second : first));
        t[HALVES - 1] = HALVES == 1 ? t[0] : mul(sx, (float)second);
    }
};

// Integers in the groups that types have them in, and numbers of values in groups of 32 and of 16.
typedef Blocks<2, 16, false> B2;
typedef Blocks<3, 16, false> B3;
typedef Blocks<4, 32, false> B4;
typedef Blocks<5, 32, false> B5;
typedef Blocks<6, 16, false> B6;
typedef Blocks<8, 32, false> B8;
typedef Blocks<3, 32, true> V3;
typedef Blocks<3, 16, true> H3;
typedef Blocks<4, 32, true> V4;
typedef Blocks<4, 16, true> H4;

// The same where activations are integers of 11 bits.
template <class B> struct Int11Blocks {
    typedef B Integers;
};
