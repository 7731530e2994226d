// Rearranges rows of blocks, as files have them, to rows as kernels take them (format/blocks.cuh), and back. A file's blocks begin at any byte.
#include "format/blocks.cuh"
#include "prim/numerics.cuh"
#include "prim/pdl.cuh"

struct Rearrange {
    // The file's rows from the first one on; of four-bit floats the scales, too.
    u8* file;
    u8* scales;
    // The rows for kernels.
    u8* own;
    // Entries of a codebook: eight bytes each, or four; null: there is none. On the way back the number of the entry, two bytes, for what its values are numbered.
    const u8* codebook;
    // Bytes of a row for kernels.
    u64 own_bytes;
    u32 rows;
    u32 cols;
    // Which type: BLOCK_...
    u32 format;
    // A row's bytes before what groups have, and before the units of blocks.
    u32 codes_at;
    u32 units_at;
    // The f32 that scales of four-bit floats are multiplied with or divided by.
    u32 global;
};

// Types of blocks, in the order of the host's `BlockFormat::ALL`; then four-bit floats of safetensors.
enum : u32 {
    BLOCK_Q4_0, BLOCK_Q4_1, BLOCK_Q5_0, BLOCK_Q5_1, BLOCK_Q8_0, BLOCK_Q2_K, BLOCK_Q3_K, BLOCK_Q4_K, BLOCK_Q5_K, BLOCK_Q6_K, BLOCK_IQ4_NL, BLOCK_IQ4_XS, BLOCK_IQ3_XXS,
    BLOCK_IQ3_S, BLOCK_IQ2_XXS, BLOCK_IQ2_XS, BLOCK_IQ2_S, BLOCK_IQ1_S, BLOCK_IQ1_M, BLOCK_MXFP4, BLOCK_NVFP4, BLOCK_E2M1_POWER, BLOCK_E2M1_E4M3
};

__device__ __forceinline__ u32 word_at(const u8* p) { return p[0] | p[1] << 8; }
__device__ __forceinline__ u32 long_at(const u8* p) { return word_at(p) | word_at(p + 2) << 16; }

// What becomes of 32 columns: their numbers, and what their groups have. `unit` is the block's.
struct Part {
    u8 n[32];
    u32 code;
    u32 unit;
};

// Four bits of each: the low halves of bytes, then the high halves.
__device__ __forceinline__ void nibbles(Part& to, const u8* bytes) {
    for (u32 i = 0; i < 16; i++) to.n[i] = bytes[i] & 15, to.n[16 + i] = bytes[i] >> 4;
}

// Two bits of each, of columns 32 j to 32 j + 31 of 256.
__device__ __forceinline__ void pairs(Part& to, const u8* bytes, u32 j) {
    for (u32 i = 0; i < 32; i++) to.n[i] = bytes[j / 4 * 32 + i] >> j % 4 * 2 & 3;
}

__device__ __forceinline__ void fives(Part& to, u32 high, const u8* bytes) {
    nibbles(to, bytes);
    for (u32 i = 0; i < 32; i++) to.n[i] |= (high >> i & 1) << 4;
}

// Of 6 bits each, scale and minimum of group g of eight.
__device__ __forceinline__ u32 sixes(const u8* scales, u32 g) {
    if (g < 4) return (scales[g] & 63) | (scales[4 + g] & 63) << 8;
    const u32 low = scales[4 + g];
    return (low & 15 | scales[g - 4] >> 2 & 48) | (low >> 4 | scales[g] >> 2 & 48) << 8;
}

__device__ __forceinline__ u32 unit_f32(float unit) { return bits(unit); }

// Numbers of eight values of entry `e` of a codebook: which of the values a byte is, and a bit for the sign. `shift`: what tells the values apart.
__device__ __forceinline__ void eight(Part& to, u32 i, const u8* codebook, u32 e, u32 shift, u32 signs) {
    for (u32 k = 0; k < 8; k++) to.n[8 * i + k] = codebook[8 * e + k] >> shift | (signs >> k & 1) << 2;
}

// The same of four values of three bits.
__device__ __forceinline__ void four(Part& to, u32 i, const u8* codebook, u32 e, u32 offset, u32 shift, u32 signs) {
    for (u32 k = 0; k < 4; k++) to.n[4 * i + k] = (u32)(codebook[4 * e + k] - offset) >> shift | (signs >> k & 1) << 3;
}

// Of seven bits: the eighth makes the number of signs even.
__device__ __forceinline__ u32 even_signs(u32 bits) { return bits | (__popc(bits) & 1) << 7; }

// Columns 32 j to 32 j + 31 of a block.
__device__ __forceinline__ void part_of(Part& to, const Rearrange& p, const u8* b, u32 j) {
    const u8* codebook = p.codebook;
    to.code = to.unit = 0;
    switch (p.format) {
    case BLOCK_Q4_0:
    case BLOCK_IQ4_NL:
        to.code = word_at(b);
        nibbles(to, b + 2);
        break;
    case BLOCK_Q4_1:
        to.code = long_at(b);
        nibbles(to, b + 4);
        break;
    case BLOCK_Q5_0:
        to.code = word_at(b);
        fives(to, long_at(b + 2), b + 6);
        break;
    case BLOCK_Q5_1:
        to.code = long_at(b);
        fives(to, long_at(b + 4), b + 8);
        break;
    case BLOCK_Q8_0:
        to.code = word_at(b);
        for (u32 i = 0; i < 32; i++) to.n[i] = b[2 + i] ^ 0x80;
        break;
    case BLOCK_Q2_K:
        to.code = word_at(b + 2 * j);
        to.unit = long_at(b + 80);
        pairs(to, b + 16, j);
        break;
    case BLOCK_Q3_K:
        pairs(to, b + 32, j);
        for (u32 i = 0; i < 32; i++) to.n[i] |= (b[i] >> j & 1) << 2;
        for (u32 h = 0; h < 2; h++) {
            const u8* scales = b + 96;
            const u32 g = 2 * j + h, low = scales[g % 8] >> g / 8 * 4 & 15, high = scales[8 + g % 4] >> g / 4 * 2 & 3;
            to.code |= ((low | high << 4) - 32 & 0xff) << 8 * h;
        }
        to.unit = unit_f32(from_f16((u16)word_at(b + 108)));
        break;
    case BLOCK_Q4_K:
    case BLOCK_Q5_K: {
        const u8* low = b + (p.format == BLOCK_Q4_K ? 16 : 48) + j / 2 * 32;
        for (u32 i = 0; i < 32; i++) {
            to.n[i] = low[i] >> j % 2 * 4 & 15;
            if (p.format == BLOCK_Q5_K) to.n[i] |= (b[16 + i] >> j & 1) << 4;
        }
        to.code = sixes(b + 4, j);
        to.unit = long_at(b);
        break;
    }
    case BLOCK_Q6_K: {
        const u8 *low = b + j / 4 * 64 + j % 2 * 32, *high = b + 128 + j / 4 * 32;
        for (u32 i = 0; i < 32; i++) to.n[i] = (low[i] >> j % 4 / 2 * 4 & 15) | (high[i] >> j % 4 * 2 & 3) << 4;
        to.code = word_at(b + 192 + 2 * j);
        to.unit = unit_f32(from_f16((u16)word_at(b + 208)));
        break;
    }
    case BLOCK_IQ4_XS:
        nibbles(to, b + 8 + 16 * j);
        to.code = (b[4 + j / 2] >> j % 2 * 4 & 15 | (word_at(b + 2) >> 2 * j & 3) << 4) - 32 & 0xff;
        to.unit = unit_f32(from_f16((u16)word_at(b)));
        break;
    case BLOCK_IQ3_XXS: {
        const u32 signs = long_at(b + 66 + 4 * j);
        for (u32 i = 0; i < 8; i++) four(to, i, codebook, b[2 + 8 * j + i], 4, 3, even_signs(signs >> 7 * (i / 2) & 127) >> i % 2 * 4);
        to.code = 2 * (signs >> 28) + 1;
        to.unit = unit_f32(mul(from_f16((u16)word_at(b)), 0.25f));
        break;
    }
    case BLOCK_IQ3_S:
        for (u32 i = 0; i < 8; i++) four(to, i, codebook, b[2 + 8 * j + i] | (b[66 + j] >> i & 1) << 8, 0, 1, b[74 + 4 * j + i / 2] >> i % 2 * 4);
        to.code = 2 * (b[106 + j / 2] >> j % 2 * 4 & 15) + 1;
        to.unit = unit_f32(from_f16((u16)word_at(b)));
        break;
    case BLOCK_IQ2_XXS: {
        const u32 signs = long_at(b + 6 + 8 * j);
        for (u32 i = 0; i < 4; i++) eight(to, i, codebook, b[2 + 8 * j + i], 4, even_signs(signs >> 7 * i & 127));
        to.code = 2 * (signs >> 28) + 1;
        to.unit = unit_f32(mul(from_f16((u16)word_at(b)), 0.125f));
        break;
    }
    case BLOCK_IQ2_XS:
    case BLOCK_IQ2_S: {
        const bool xs = p.format == BLOCK_IQ2_XS;
        for (u32 i = 0; i < 4; i++) {
            const u32 at = 4 * j + i, number = xs ? word_at(b + 2 + 2 * at) : b[2 + at] | (b[66 + j] >> 2 * i & 3) << 8;
            eight(to, i, codebook, xs ? number & 511 : number, 4, xs ? even_signs(number >> 9) : b[34 + at]);
        }
        const u32 two = b[(xs ? 66 : 74) + j];
        to.code = (2 * (two & 15) + 1) | (2 * (two >> 4) + 1) << 8;
        to.unit = unit_f32(mul(from_f16((u16)word_at(b)), 0.125f));
        break;
    }
    case BLOCK_IQ1_S: {
        const u32 high = word_at(b + 34 + 2 * j);
        for (u32 i = 0; i < 4; i++) eight(to, i, codebook, b[2 + 4 * j + i] | (high >> 3 * i & 7) << 8, 3, high & 0x8000 ? 0xff : 0);
        to.code = 2 * (high >> 12 & 7) + 1;
        to.unit = unit_f32(mul(from_f16((u16)word_at(b)), 0.125f));
        break;
    }
    case BLOCK_IQ1_M: {
        u32 unit = 0;
        for (u32 i = 0; i < 4; i++) {
            const u32 at = 4 * j + i, high = b[32 + at / 2] >> at % 2 * 4 & 15;
            eight(to, i, codebook, b[at] | (high & 7) << 8, 3, high & 8 ? 0xff : 0);
            unit |= word_at(b + 48 + 2 * i) >> 12 << 4 * i;
        }
        for (u32 h = 0; h < 2; h++) to.code |= (2 * (word_at(b + 48 + j / 2 * 2) >> (2 * j + h) % 4 * 3 & 7) + 1) << 8 * h;
        to.unit = unit_f32(mul(from_f16((u16)unit), 0.125f));
        break;
    }
    case BLOCK_MXFP4:
        to.code = b[0];
        nibbles(to, b + 1);
        break;
    case BLOCK_NVFP4:
        for (u32 h = 0; h < 2; h++) {
            const u8* bytes = b + 4 + 16 * j + 8 * h;
            for (u32 i = 0; i < 8; i++) to.n[16 * h + i] = bytes[i] & 15, to.n[16 * h + 8 + i] = bytes[i] >> 4;
        }
        to.code = word_at(b + 2 * j);
        break;
    default:
        break;
    }
}

// Bits of a number, and columns and bytes of a block, of BLOCK_...
__device__ __forceinline__ void shape_of(u32 format, u32& bits, u32& columns, u32& bytes) {
    const u8 BITS[] = {4, 4, 5, 5, 8, 2, 3, 4, 5, 6, 4, 4, 4, 4, 3, 3, 3, 3, 3, 4, 4, 4, 4};
    const u8 BYTES[] = {18, 20, 22, 24, 34, 84, 110, 144, 176, 210, 18, 136, 98, 110, 66, 74, 82, 50, 56, 17, 36, 16, 16};
    bits = BITS[format], bytes = BYTES[format];
    columns = format <= BLOCK_Q8_0 || format == BLOCK_IQ4_NL || format == BLOCK_MXFP4 || format >= BLOCK_E2M1_POWER ? 32 : format == BLOCK_NVFP4 ? 64 : 256;
}

// From a file's rows, a thread takes 32 columns.
extern "C" __global__ void __launch_bounds__(256) rearrange(const __grid_constant__ Rearrange p) {
    begin();
    u32 width, columns, bytes;
    shape_of(p.format, width, columns, bytes);
    const u32 parts = p.cols / 32, of_block = columns / 32;
    const u64 all = (u64)p.rows * parts;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < all; i += (u64)gridDim.x * blockDim.x) {
        const u64 row = i / parts;
        const u32 part = (u32)(i % parts);
        const u8* block = p.file + (row * (parts / of_block) + part / of_block) * bytes;
        u8* to = p.own + row * p.own_bytes;
        Part own;
        if (p.format >= BLOCK_E2M1_POWER) {
            // Already one stream of numbers.
            for (u32 k = 0; k < 16; k++) own.n[2 * k] = block[k] & 15, own.n[2 * k + 1] = block[k] >> 4;
            own.code = p.format == BLOCK_E2M1_POWER ? p.scales[i] : word_at(p.scales + 2 * i);
            own.unit = p.global;
        } else {
            part_of(own, p, block, part % of_block);
        }
        u32* words = (u32*)(to + part * 4 * width);
        u64 stream = 0;
        u32 fill = 0;
        for (u32 k = 0; k < 32; k++) {
            stream |= (u64)own.n[k] << fill;
            fill += width;
            if (fill < 32) continue;
            *words++ = (u32)stream;
            stream >>= 32;
            fill -= 32;
        }
        // What groups have, in as many bytes as are left for it.
        u8* codes = to + p.codes_at;
        const bool one = p.format == BLOCK_MXFP4 || p.format == BLOCK_E2M1_POWER || p.format == BLOCK_IQ4_XS || p.format == BLOCK_IQ3_XXS || p.format == BLOCK_IQ3_S ||
                         p.format == BLOCK_IQ2_XXS || p.format == BLOCK_IQ1_S;
        if (one) codes[part] = (u8)own.code;
        else if (p.format == BLOCK_Q4_1 || p.format == BLOCK_Q5_1) ((u32*)codes)[part] = own.code;
        else ((u16*)codes)[part] = (u16)own.code;
        if (p.units_at && part % 8 == 0) ((u32*)(to + p.units_at))[part / 8] = own.unit;
    }
}

// A row for kernels, by columns and groups of a block whose first column is `first`.
struct Row {
    const u8* data;
    const u8* codes;
    u32 width;
    u32 first;
    u32 unit;
    const u16* entries;

    // A number, a byte of groups of 16 or 32 columns, and the number of six bits that a byte was made of by taking 32.
    __device__ __forceinline__ u32 n(u32 i) const { return quantum(data, width, first + i); }
    __device__ __forceinline__ u32 nibbles(u32 i, u32 j) const { return n(i) & 15 | (n(j) & 15) << 4; }
    __device__ __forceinline__ u32 byte(u32 g, u32 group) const { return codes[first / group + g]; }
    __device__ __forceinline__ u32 six(u32 g, u32 group) const { return byte(g, group) + 32 & 63; }
    // Scale and minimum of a group of 32 columns.
    __device__ __forceinline__ u32 c(u32 g) const { return codes[2 * (first / 32 + g)]; }
    __device__ __forceinline__ u32 m(u32 g) const { return codes[2 * (first / 32 + g) + 1]; }
    // Byte `o` of the f16 unit.
    __device__ __forceinline__ u32 half(u32 o) const { return to_f16(bits(unit)) >> 8 * o & 0xff; }

    // Two bits of four numbers, from bit `from` on: of those 32 columns apart.
    __device__ __forceinline__ u32 twos(u32 i, u32 from) const {
        u32 all = 0;
        for (u32 k = 0; k < 4; k++) all |= (n(i + 32 * k) >> from & 3) << 2 * k;
        return all;
    }

    // A bit of eight numbers that are `step` columns apart.
    __device__ __forceinline__ u32 ones(u32 i, u32 step, u32 bit) const {
        u32 all = 0;
        for (u32 k = 0; k < 8; k++) all |= (n(i + step * k) >> bit & 1) << k;
        return all;
    }

    // The entry of a codebook that eight columns are, or four; the signs of eight columns, whose bit is `bit`.
    __device__ __forceinline__ u32 eight(u32 i) const {
        u32 key = 0;
        for (u32 k = 0; k < 8; k++) key |= (n(i + k) & 3) << 2 * k;
        return entries[key];
    }
    __device__ __forceinline__ u32 four(u32 i) const {
        u32 key = 0;
        for (u32 k = 0; k < 4; k++) key |= (n(i + k) & 7) << 3 * k;
        return entries[key];
    }
    __device__ __forceinline__ u32 signs(u32 i, u32 bit) const { return ones(i, 1, bit); }

    // Of a group's odd code, which is twice the scale and one.
    __device__ __forceinline__ u32 scale(u32 g, u32 group) const { return byte(g, group) >> 1; }
    __device__ __forceinline__ u32 scales(u32 g, u32 group) const { return scale(g, group) | scale(g + 1, group) << 4; }

    // Four times seven signs of 32 columns, and their scale.
    __device__ __forceinline__ u32 signs_and_scale(u32 j, u32 bit) const {
        u32 all = scale(j, 32) << 28;
        for (u32 g = 0; g < 4; g++) all |= (signs(32 * j + 8 * g, bit) & 127) << 7 * g;
        return all;
    }

    // Bits of the f16 that the unit is `by` times smaller than.
    __device__ __forceinline__ u32 f16(float by) const { return to_f16(mul(bits(unit), by)); }

    // Byte `o` of twelve with eight scales and minima of six bits.
    __device__ __forceinline__ u32 sixes(u32 o) const {
        if (o < 4) return c(o) | c(o + 4) >> 4 << 6;
        if (o < 8) return m(o - 4) | m(o) >> 4 << 6;
        return c(o - 4) & 15 | (m(o - 4) & 15) << 4;
    }
};

// Byte `o` of a block as the file has it.
__device__ __forceinline__ u32 byte_of(u32 format, const Row& r, u32 o) {
    const u8* codes = r.codes;
    u32 all = 0;
    switch (format) {
    case BLOCK_Q4_0:
    case BLOCK_IQ4_NL: return o < 2 ? codes[r.first / 16 + o] : r.nibbles(o - 2, o + 14);
    case BLOCK_Q4_1: return o < 4 ? codes[r.first / 8 + o] : r.nibbles(o - 4, o + 12);
    case BLOCK_Q5_0: return o < 2 ? codes[r.first / 16 + o] : o < 6 ? r.ones(8 * (o - 2), 1, 4) : r.nibbles(o - 6, o + 10);
    case BLOCK_Q5_1: return o < 4 ? codes[r.first / 8 + o] : o < 8 ? r.ones(8 * (o - 4), 1, 4) : r.nibbles(o - 8, o + 8);
    case BLOCK_Q8_0: return o < 2 ? codes[r.first / 16 + o] : r.n(o - 2) ^ 0x80;
    case BLOCK_Q2_K: return o < 16 ? r.byte(o, 16) : o < 80 ? r.twos((o - 16) / 32 * 128 + (o - 16) % 32, 0) : r.unit >> 8 * (o - 80) & 0xff;
    case BLOCK_Q3_K:
        if (o < 32) return r.ones(o, 32, 2);
        if (o < 96) return r.twos((o - 32) / 32 * 128 + o % 32, 0);
        if (o < 104) return r.six(o - 96, 16) & 15 | (r.six(o - 88, 16) & 15) << 4;
        if (o >= 108) return r.half(o - 108);
        for (u32 k = 0; k < 4; k++) all |= r.six(4 * k + o - 104, 16) >> 4 << 2 * k;
        return all;
    case BLOCK_Q4_K:
    case BLOCK_Q5_K: {
        if (o < 4) return r.unit >> 8 * o & 0xff;
        if (o < 16) return r.sixes(o - 4);
        if (format == BLOCK_Q5_K && o < 48) return r.ones(o - 16, 32, 4);
        const u32 i = o - (format == BLOCK_Q5_K ? 48 : 16), column = i / 32 * 64 + i % 32;
        return r.nibbles(column, column + 32);
    }
    case BLOCK_Q6_K:
        if (o < 128) return r.nibbles(o / 64 * 128 + o % 64, o / 64 * 128 + o % 64 + 64);
        return o < 192 ? r.twos((o - 128) / 32 * 128 + o % 32, 4) : o < 208 ? r.byte(o - 192, 16) : r.half(o - 208);
    case BLOCK_IQ4_XS:
        if (o < 2) return r.half(o);
        if (o >= 8) return r.nibbles((o - 8) / 16 * 32 + (o - 8) % 16, (o - 8) / 16 * 32 + (o - 8) % 16 + 16);
        if (o >= 4) return r.six(2 * (o - 4), 32) & 15 | (r.six(2 * (o - 4) + 1, 32) & 15) << 4;
        for (u32 k = 0; k < 4; k++) all |= r.six(4 * (o - 2) + k, 32) >> 4 << 2 * k;
        return all;
    case BLOCK_IQ3_XXS: {
        if (o < 2) return r.f16(4.0f) >> 8 * o & 0xff;
        return o < 66 ? r.four(4 * (o - 2)) : r.signs_and_scale((o - 66) / 4, 3) >> 8 * ((o - 66) % 4) & 0xff;
    }
    case BLOCK_IQ3_S:
        if (o < 2) return r.half(o);
        if (o < 66) return r.four(4 * (o - 2)) & 0xff;
        if (o >= 106) return r.scales(2 * (o - 106), 32);
        if (o >= 74) return r.signs(8 * (o - 74), 3);
        for (u32 k = 0; k < 8; k++) all |= r.four(32 * (o - 66) + 4 * k) >> 8 << k;
        return all;
    case BLOCK_IQ2_XXS: {
        if (o < 2) return r.f16(8.0f) >> 8 * o & 0xff;
        const u32 j = (o - 2) / 8, at = (o - 2) % 8;
        return at < 4 ? r.eight(32 * j + 8 * at) : r.signs_and_scale(j, 2) >> 8 * (at - 4) & 0xff;
    }
    case BLOCK_IQ2_XS: {
        if (o < 2) return r.f16(8.0f) >> 8 * o & 0xff;
        if (o >= 66) return r.scales(2 * (o - 66), 16);
        const u32 i = (o - 2) / 2 * 8;
        return (r.eight(i) | (r.signs(i, 2) & 127) << 9) >> 8 * (o % 2) & 0xff;
    }
    case BLOCK_IQ2_S:
        if (o < 2) return r.f16(8.0f) >> 8 * o & 0xff;
        if (o < 34) return r.eight(8 * (o - 2)) & 0xff;
        if (o < 66) return r.signs(8 * (o - 34), 2);
        if (o >= 74) return r.scales(2 * (o - 74), 16);
        for (u32 k = 0; k < 4; k++) all |= r.eight(32 * (o - 66) + 8 * k) >> 8 << 2 * k;
        return all;
    case BLOCK_IQ1_S: {
        if (o < 2) return r.f16(8.0f) >> 8 * o & 0xff;
        if (o < 34) return r.eight(8 * (o - 2)) & 0xff;
        const u32 j = (o - 34) / 2;
        all = r.scale(j, 32) << 12 | (r.n(32 * j) >> 2) << 15;
        for (u32 k = 0; k < 4; k++) all |= r.eight(32 * j + 8 * k) >> 8 << 3 * k;
        return all >> 8 * (o % 2) & 0xff;
    }
    case BLOCK_IQ1_M: {
        if (o < 32) return r.eight(8 * o) & 0xff;
        if (o < 48) {
            const u32 i = 16 * (o - 32);
            return r.eight(i) >> 8 | (r.n(i) >> 2) << 3 | (r.eight(i + 8) >> 8 | (r.n(i + 8) >> 2) << 3) << 4;
        }
        const u32 word = (o - 48) / 2;
        all = (r.f16(8.0f) >> 4 * word & 15) << 12;
        for (u32 k = 0; k < 4; k++) all |= r.scale(4 * word + k, 16) << 3 * k;
        return all >> 8 * (o % 2) & 0xff;
    }
    case BLOCK_MXFP4: return o < 1 ? r.byte(0, 32) : r.nibbles(o - 1, o + 15);
    case BLOCK_NVFP4: return o < 4 ? r.byte(o, 16) : r.nibbles((o - 4) / 8 * 16 + (o - 4) % 8, (o - 4) / 8 * 16 + (o - 4) % 8 + 8);
    case BLOCK_E2M1_POWER:
    case BLOCK_E2M1_E4M3: return r.nibbles(2 * o, 2 * o + 1);
    default: return 0;
    }
}

// From rows for kernels, a thread takes a byte.
extern "C" __global__ void __launch_bounds__(256) restore(const __grid_constant__ Rearrange p) {
    begin();
    u32 width, columns, bytes;
    shape_of(p.format, width, columns, bytes);
    const bool apart = p.format >= BLOCK_E2M1_POWER;
    const u32 row_bytes = p.cols / columns * bytes, scales = apart ? p.cols / (p.format == BLOCK_E2M1_POWER ? 32 : 16) : 0;
    const u64 all = (u64)p.rows * (row_bytes + scales);
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < all; i += (u64)gridDim.x * blockDim.x) {
        const u64 row = i / (row_bytes + scales);
        const u32 at = (u32)(i % (row_bytes + scales));
        const u8* own = p.own + row * p.own_bytes;
        if (at >= row_bytes) {
            p.scales[row * scales + at - row_bytes] = own[p.codes_at + at - row_bytes];
            continue;
        }
        const u32 first = at / bytes * columns;
        const u32 unit = p.units_at ? ((const u32*)(own + p.units_at))[first / UNIT_COLUMNS] : 0;
        p.file[row * row_bytes + at] = (u8)byte_of(p.format, {own, own + p.codes_at, width, first, unit, (const u16*)p.codebook}, at % bytes);
    }
}
