// All weight formats, once. A format is how weights are stored together with the arithmetic that multiplies with them: a name, which is part of its kernels'
// names, and the type that unpacks it. Families of kernels make an instance of each format in a list; build.rs reads the same lists for the host.
//
// To add a format: write its unpacker in a file of this folder, include it here, and add a line to its list. A type of blocks needs no line: elementwise/rearrange.cu
// makes rows of it that these unpackers read.
#pragma once
#include "format/affine.cuh"
#include "format/bf16.cuh"
#include "format/block_integers.cuh"
#include "format/blocks.cuh"
#include "format/floats.cuh"
#include "format/fp8.cuh"

// Weights as floats, activations as floats: lane sums.
#define F32_FORMATS(X)          \
    X(f32_f32, Floats<F32>)     \
    X(f16_f32, Floats<F16>)     \
    X(bf16_f32, Floats<BF16>)   \
    X(affine_f32, AffineFloats) \
    X(blocks_f32, BlockFloats)  \
    X(fp8_f32, Fp8Floats)

// Weights as bf16, activations as bf16.
#define BF16_FORMATS(X)         \
    X(bf16_bf16, Bf16Pairs)     \
    X(affine_bf16, AffineBf16)  \
    X(blocks_bf16, BlockBf16)   \
    X(fp8_bf16, Fp8Bf16)

// Weights and activations as integers. The number in a name is the bits of a weight.
#define INT8_FORMATS(X)         \
    X(q2_int8, Affine<2>)       \
    X(q3_int8, Affine<3>)       \
    X(q4_int8, Affine<4>)       \
    X(q5_int8, Affine<5>)       \
    X(q6_int8, Affine<6>)       \
    X(q8_int8, Affine<8>)

// Those of them whose weights do not cross a byte, for kernels that take whole words of them.
#define BYTE_FORMATS(X)         \
    X(q4_int8, Affine<4>)       \
    X(q8_int8, Affine<8>)

// Weights as integers, activations as integers of 11 bits.
#define INT11_FORMATS(X)        \
    X(q2_int11, Int11<2>)       \
    X(q3_int11, Int11<3>)       \
    X(q4_int11, Int11<4>)       \
    X(q5_int11, Int11<5>)       \
    X(q6_int11, Int11<6>)       \
    X(q8_int11, Int11<8>)

// Those of them that tensor cores take.
#define INT11_TENSOR_FORMATS(X) \
    X(q4_int11, Int11<4>)

// Weights in blocks and activations, as integers. The number in a name is the bits of what is stored for a weight: an integer (b), or the number of a value in a table,
// in groups of 32 columns (v) or of 16 (h).
#define BLOCK_FORMATS(X)        \
    X(b2_int8, B2)              \
    X(b3_int8, B3)              \
    X(b4_int8, B4)              \
    X(b5_int8, B5)              \
    X(b6_int8, B6)              \
    X(b8_int8, B8)              \
    X(v3_int8, V3)              \
    X(h3_int8, H3)              \
    X(v4_int8, V4)              \
    X(h4_int8, H4)

// The same with activations that are integers of 11 bits.
#define INT11_BLOCK_FORMATS(X)  \
    X(b2_int11, Int11Blocks<B2>) \
    X(b3_int11, Int11Blocks<B3>) \
    X(b4_int11, Int11Blocks<B4>) \
    X(b5_int11, Int11Blocks<B5>) \
    X(b6_int11, Int11Blocks<B6>) \
    X(b8_int11, Int11Blocks<B8>) \
    X(v3_int11, Int11Blocks<V3>) \
    X(h3_int11, Int11Blocks<H3>) \
    X(v4_int11, Int11Blocks<V4>) \
    X(h4_int11, Int11Blocks<H4>)

// Weights as floats of sixteen bits that become integers of 11 bits, activations as integers of 11 bits.
#define INT11_FLOAT_FORMATS(X)              \
    X(f16_int11, BlockIntegers<F16>)        \
    X(bf16_int11, BlockIntegers<BF16>)

// `Matrix::kind`: the number of a format in the order of the lists.
enum : u32 {
#define KIND(name, F) KIND_##name,
    F32_FORMATS(KIND) BF16_FORMATS(KIND) INT8_FORMATS(KIND) INT11_FORMATS(KIND) BLOCK_FORMATS(KIND) INT11_BLOCK_FORMATS(KIND) INT11_FLOAT_FORMATS(KIND)
#undef KIND
};

template <class F> constexpr u32 KIND_OF = 0;
#define KIND(name, F) template <> constexpr u32 KIND_OF<F> = KIND_##name;
F32_FORMATS(KIND) BF16_FORMATS(KIND) INT8_FORMATS(KIND) INT11_FORMATS(KIND) BLOCK_FORMATS(KIND) INT11_BLOCK_FORMATS(KIND) INT11_FLOAT_FORMATS(KIND)
#undef KIND
