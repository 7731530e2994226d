#!/usr/bin/env python3
"""Writes blocks_golden.txt beside it: what the gguf package dequantises random blocks of every type to.

A line is a type, its columns and bytes, the hash of many blocks' values, and the values of the first of them as hexadecimal bits of f32. The bytes of block i come from a
generator that the test has too. Half of the blocks have any bytes, infinite and NaN scales too; in the others the f16 scales are small.

    pip install gguf==0.19.0
    python crates/kernels/tests/make_blocks_golden.py
"""
import pathlib
import warnings

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

BLOCKS = 4096
# Where the f16 units are, as in crates/kernels/src/format/blocks/mod.rs.
UNITS = {"Q4_1": [0, 2], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q2_K": [80, 82], "Q3_K": [108], "Q6_K": [208], "IQ1_M": [], "MXFP4": [], "NVFP4": []}
TYPES = ("Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS IQ3_XXS IQ3_S IQ2_XXS IQ2_XS IQ2_S IQ1_S IQ1_M MXFP4 NVFP4").split()


def random_bytes(n):
    """Of splitmix64 from seed 1, eight little-endian bytes at a time."""
    with np.errstate(over="ignore"):
        z = np.uint64(1) + np.arange(1, -(-n // 8) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))).view(np.uint8)[:n]


def main():
    lines = []
    for name in TYPES:
        columns, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
        blocks = random_bytes(BLOCKS * size).reshape(BLOCKS, size).copy()
        for at in UNITS.get(name, [0]):
            # Even blocks: an exponent of 8 to 15, either sign.
            blocks[::2, at + 1] = blocks[::2, at + 1] & 0x9F | 0x20
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            values = dequantize(blocks, GGMLQuantizationType[name]).astype(np.float32).ravel()
        # One bit pattern for every NaN, and for both zeros.
        bits = np.where(np.isnan(values), np.uint32(0x7FC00000), np.where(values == 0, np.uint32(0), values.view(np.uint32)))
        with np.errstate(over="ignore"):
            sums = bits.astype(np.uint64) * (2 * np.arange(bits.size, dtype=np.uint64) + np.uint64(1))
            total = int(sums.sum(dtype=np.uint64))
        first = " ".join(f"{b:x}" for b in bits[:columns])
        lines.append(f"{name} {columns} {size} {total:016x} {first}\n")
    out = pathlib.Path(__file__).parent / "blocks_golden.txt"
    out.write_text("".join(lines))


main()
