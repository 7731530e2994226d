//! `quantize` against `mlx.core.quantize`. `AFFINE_GOLDEN` names another file from `make_affine_golden.py` to check.

use sluice_kernels::Isa;
use sluice_kernels::affine::{dequantize_row, unpack};
use sluice_kernels::format::{Float, WeightFormat};
use sluice_kernels::matrix::Matrix;
use sluice_kernels::quantize::{Rounding, quantize};

/// `n` bytes from the front.
fn take<'a>(bytes: &mut &'a [u8], n: usize) -> &'a [u8] {
    let (head, tail) = bytes.split_at(n);
    *bytes = tail;
    head
}

#[test]
fn quantises_to_the_bytes_of_mlx() {
    let path = std::env::var("AFFINE_GOLDEN")
        .unwrap_or_else(|_| concat!(env!("CARGO_MANIFEST_DIR"), "/tests/affine_golden.bin").into());
    let file = std::fs::read(path).expect("the golden file is beside this test");
    let mut bytes = &file[..];
    let cols = u32::from_le_bytes(take(&mut bytes, 4).try_into().unwrap()) as usize;
    for float in [Float::F32, Float::F16, Float::Bf16] {
        let raw = take(&mut bytes, cols * float.size());
        let mut x = vec![0f32; cols];
        dequantize_row(Isa::GENERIC, &Matrix::new(WeightFormat::Float(float), 1, cols, [raw]).unwrap(), 0, &mut x);
        for group in [32u16, 64, 128] {
            let scale_bytes = cols / group as usize * float.size();
            for bits in [2u8, 3, 4, 5, 6, 8] {
                let wanted: [&[u8]; 3] =
                    [cols / 8 * bits as usize, scale_bytes, scale_bytes].map(|n| take(&mut bytes, n));
                let mut got = wanted.map(|w| vec![0; w.len()]);
                let [data, scales, biases] = &mut got;
                quantize(Isa::GENERIC, Rounding::Mlx, &x, bits, group, float, data, scales, biases);
                let case = format!("{float:?}, {bits} bits, groups of {group}");
                if got[0] != wanted[0] {
                    let (mut a, mut b) = (vec![0; cols], vec![0; cols]);
                    unpack(bits, &got[0], &mut a);
                    unpack(bits, wanted[0], &mut b);
                    let i = (0..cols).find(|&i| a[i] != b[i]).unwrap();
                    panic!("{case}: column {i} of {:e} became {}, not {}", x[i], a[i], b[i]);
                }
                assert!(got[1] == wanted[1], "{case}: scales differ");
                assert!(got[2] == wanted[2], "{case}: biases differ");
            }
        }
    }
    assert!(bytes.is_empty());
}
