#!/usr/bin/env python3
"""Writes affine_golden.bin: what mlx.core.quantize (CPU package, tried with 0.32) makes of a row that holds easy and nasty groups.

    python make_affine_golden.py [OUT [COLUMNS [SEED]]]

Layout, little-endian: u32 columns; then for each type (f32, f16, bf16) the row and, for each group size (32, 64, 128) and each width
(2, 3, 4, 5, 6, 8), the packed bytes, the scales and the biases."""

import pathlib
import sys

import mlx.core as mx
import numpy as np

out = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).with_name("affine_golden.bin"))
columns = int(sys.argv[2]) if len(sys.argv) > 2 else 640
rng = np.random.default_rng(int(sys.argv[3]) if len(sys.argv) > 3 else 1)

blocks = []
for i in range(columns // 32):
    x = rng.standard_normal(32)
    kind = i % 20 if i < 20 else rng.integers(20)
    if kind == 0: x = x * 0
    elif kind == 1: x = np.full(32, x[0])
    elif kind == 2: x = np.abs(x) + 3
    elif kind == 3: x = -np.abs(x) - 3
    elif kind == 4: x = x * 1e-7
    elif kind == 5: x = x * 1e-38
    elif kind == 6: x = x * 1e4
    elif kind == 7: x[5] = 60000
    elif kind == 8: x = np.round(x * 2) / 2
    elif kind == 9: x = rng.integers(-8, 8, 32) * 0.125
    elif kind == 10: x = np.where(x > 0, 1.0, -1.0)
    elif kind == 11: x = -0.0 * np.ones(32)
    elif kind == 12: x = x * 0.02
    elif kind == 13: x = x * 10.0 ** rng.uniform(-8, 4)
    elif kind == 14: x = np.full(32, -x[0]); x[3] = 0
    elif kind == 15: x = np.full(32, abs(x[0])); x[3] *= 1.01
    blocks.append(x)
row = np.concatenate(blocks).astype(np.float32)


def raw(a):
    return np.array(a.view(mx.uint32 if a.itemsize == 4 else mx.uint16)).tobytes()


with out.open("wb") as f:
    f.write(np.uint32(len(row)).tobytes())
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        x = mx.array(row).astype(dtype)[None, :]
        f.write(raw(x))
        for group in (32, 64, 128):
            for bits in (2, 3, 4, 5, 6, 8):
                q, scales, biases = mx.quantize(x, group_size=group, bits=bits)
                f.write(np.array(q).tobytes() + raw(scales) + raw(biases))
