// Affine integer weights: groups of columns share a scale and a bias, and a weight is `fma(q, scale, bias)`.
#pragma once
#include "format/activations.cuh"
#include "format/matrix.cuh"
#include "prim/mma.cuh"
#include "prim/numerics.cuh"

// The q at column `i` of a row: `bits` bits of a little-endian stream.
__device__ __forceinline__ u32 quantum(const u8* row, u32 bits, u32 i) {
    const u32* words = (const u32*)row;
    u32 bit = i * bits, word = bit / 32, shift = bit % 32;
    u32 q = words[word] >> shift;
    if (shift + bits > 32) q |= words[word + 1] << (32 - shift);
    return q & ((1u << bits) - 1);
}

// The weight at column `i` of row `r`.
__device__ __forceinline__ float affine_weight(const Matrix& m, u64 r, u32 i) {
    // The size of a group is a power of two; a division would take as long as everything else here.
    u64 g = r * m.groups + (i >> (31 - __clz(m.group)));
    float q = (float)quantum(m.data + r * m.row_bytes, m.bits, i);
    return fma(q, element(m.scales, m.type, g), element(m.biases, m.type, g));
}

// Affine weights of BITS bits for integer products. 32 columns are BITS words.
template <int BITS_> struct Affine {
    static const int BITS = BITS_;

    // Eight columns as bytes, even and odd columns apart. 4-bit weights are all in `low`, 8-bit ones in `low` and `high`.
    __device__ static __forceinline__ void unpack_eight(u32 low, u32 high, u32& even, u32& odd) {
        even = BITS == 4 ? low & 0x0f0f0f0fu : __byte_perm(low, high, 0x6420);
        odd = BITS == 4 ? low >> 4 & 0x0f0f0f0fu : __byte_perm(low, high, 0x7531);
    }

    // The two halves of a group of 64 4-bit columns, from `ldmatrix_x4`, as operands of `mma_u8_i8`: [half][even columns of row and row + 8, then odd ones].
    __device__ static __forceinline__ void unpack_matrix(const u32 (&words)[4], u32 (&a)[2][4]) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            a[i / 2][i % 2] = words[i] & 0x0f0f0f0fu;
            a[i / 2][i % 2 + 2] = words[i] >> 4 & 0x0f0f0f0fu;
        }
    }

    // Unpacks 32 columns to bytes, in the order of quantized activations.
    __device__ static __forceinline__ void unpack(const u32 (&words)[BITS], u32 (&w)[8]) {
        if (BITS == 4) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                unpack_eight(words[e % BITS], words[e % BITS], w[2 * e], w[2 * e + 1]);
            }
        } else if (BITS == 8) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                unpack_eight(words[2 * e % BITS], words[(2 * e + 1) % BITS], w[2 * e], w[2 * e + 1]);
            }
        } else {
            const u32 mask = (1u << BITS) - 1;
#pragma unroll
            for (int e = 0; e < 4; e++) {
                u32 even = 0, odd = 0;
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    const int bit = (e * 8 + j) * BITS, word = bit / 32;
                    const u32 q = __funnelshift_r(words[word], word + 1 < BITS ? words[(word + 1) % BITS] : 0, bit % 32) & mask;
                    if (j % 2 == 0) even |= q << (j / 2 * 8);
                    else odd |= q << (j / 2 * 8);
                }
                w[2 * e] = even;
                w[2 * e + 1] = odd;
            }
        }
    }

    // 32 columns, packed, on their way from memory.
    struct Part {
        u32 words[BITS];

        __device__ __forceinline__ void load(const u8* p, bool there) {
            if (BITS == 4 || BITS == 8) {
#pragma unroll
                for (int i = 0; i < BITS / 4; i++) {
                    uint4 v = there ? __ldcs((const uint4*)p + i) : make_uint4(0, 0, 0, 0);
                    words[4 * i] = v.x;
                    words[4 * i + 1] = v.y;
                    words[4 * i + 2] = v.z;
                    words[4 * i + 3] = v.w;
                }
            } else {
#pragma unroll
                for (int i = 0; i < BITS; i++) words[i] = there ? __ldcs((const u32*)p + i) : 0;
            }
        }
    };

    // Columns 8 j to 8 j + 7 of 32 in shared memory as bytes, even and odd columns apart.
    __device__ static __forceinline__ void unpack_lane(const u8* part, u32 j, u32& even, u32& odd) {
        if (BITS == 4) {
            u32 word = ((const u32*)part)[j];
            unpack_eight(word, word, even, odd);
        } else if (BITS == 8) {
            uint2 words = ((const uint2*)part)[j];
            unpack_eight(words.x, words.y, even, odd);
        } else {
            const u32 mask = (1u << BITS) - 1;
            const u32* words = (const u32*)part;
            even = odd = 0;
            u32 bit = j * 8 * BITS, word = bit / 32, shift = bit % 32;
            u32 first = words[word], second = words[min(word + 1, (u32)BITS - 1)];
            // Eight columns are at most 48 bits and begin at a byte.
            u32 low = __funnelshift_r(first, second, shift);
            u32 third = words[min(word + 2, (u32)BITS - 1)];
            u32 high = __funnelshift_r(second, third, shift);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int at = i * BITS;
                u32 q = (at < 32 ? __funnelshift_r(low, high, at % 32) : high >> (at - 32)) & mask;
                if (i % 2 == 0) even |= q << (i / 2 * 8);
                else odd |= q << (i / 2 * 8);
            }
        }
    }

    // The exact integer sum of 32 products, as a float.
    __device__ static __forceinline__ float part_sum(const u32* words, uint4 low, uint4 high) {
        // Adding a sum below 2^22 to these bits gives the float 2^23 + 2^22 + sum.
        const u32 MAGIC_BITS = 0x4b400000u;
        int sum;
        if (BITS == 4) {
            const u32 EVEN = 0x0f0f0f0fu, ODD = 0xf0f0f0f0u;
            // Odd columns are exactly sixteen times too large.
            int even = dp4a(words[0] & EVEN, low.x, (int)MAGIC_BITS), odd = dp4a(words[0] & ODD, low.y, 0);
            int even1 = dp4a(words[1 % BITS] & EVEN, low.z, 0), odd1 = dp4a(words[1 % BITS] & ODD, low.w, 0);
            even = dp4a(words[2 % BITS] & EVEN, high.x, even);
            odd = dp4a(words[2 % BITS] & ODD, high.y, odd);
            even1 = dp4a(words[3 % BITS] & EVEN, high.z, even1);
            odd1 = dp4a(words[3 % BITS] & ODD, high.w, odd1);
            sum = even + even1 + (odd + odd1 >> 4);
        } else {
            u32 own[BITS], w[8];
#pragma unroll
            for (int i = 0; i < BITS; i++) own[i] = words[i];
            unpack(own, w);
            int even = dp4a(w[0], low.x, (int)MAGIC_BITS), odd = dp4a(w[1], low.y, 0);
            even = dp4a(w[2], low.z, even);
            odd = dp4a(w[3], low.w, odd);
            even = dp4a(w[4], high.x, even);
            odd = dp4a(w[5], high.y, odd);
            even = dp4a(w[6], high.z, even);
            odd = dp4a(w[7], high.w, odd);
            sum = even + odd;
        }
        return sub(bits((u32)sum), 12582912.0f);
    }

    // Issues the loads of a group of 64 columns with its scale and bias; zeros if it is not `there`. `from` has the addresses of the matrix.
    template <class Place>
    __device__ static __forceinline__ void load_unit(u32 (&words)[2 * BITS], u32& s, u32& b, const Place& from, u64 row, u64 row_bytes, u32 groups, u32 group, bool there) {
        const u8* data = from.data + row * row_bytes + group * (8 * BITS);
        if (BITS % 2 == 0) {
#pragma unroll
            for (int i = 0; i < BITS / 2; i++) {
                uint4 v = make_uint4(0, 0, 0, 0);
                if (there) v = __ldcs((const uint4*)data + i);
                words[4 * i % (2 * BITS)] = v.x;
                words[(4 * i + 1) % (2 * BITS)] = v.y;
                words[(4 * i + 2) % (2 * BITS)] = v.z;
                words[(4 * i + 3) % (2 * BITS)] = v.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < BITS; i++) {
                uint2 v = make_uint2(0, 0);
                if (there) v = __ldcs((const uint2*)data + i);
                words[2 * i] = v.x;
                words[2 * i + 1] = v.y;
            }
        }
        u64 scale = row * groups + group;
        s = b = 0;
        if (there) {
            s = __ldcs((const u16*)from.scales + scale);
            b = __ldcs((const u16*)from.biases + scale);
        }
    }

    // The factors of a group's scale (`t`) and bias (`m`), for group `g` of x.
    __device__ static __forceinline__ void unit_sum(const u32 (&words)[2 * BITS], const Quarters& x, u32 g, float& t, float& m) {
        const uint4* q = x.q + g;
        float first = part_sum(words, q[0], q[x.stride]), second = part_sum(words + BITS, q[2 * x.stride], q[3 * x.stride]);
        float2 sx = x.sx[g];
        m = x.m[g];
        t = fma(sx.y, second, mul(sx.x, first));
    }
};

// The same weights where activations are integers of 11 bits.
template <int BITS> struct Int11 : Affine<BITS> {};
