"""Tensors of safetensors files."""

import json
import struct

import numpy
import pytest

import sluice


def write(path, tensors, shift=0, metadata=None):
    """A file of safetensors, written by hand: `tensors` are (name, type, shape, bytes)."""
    header, data = {"__metadata__": metadata} if metadata else {}, b""
    for name, dtype, shape, raw in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + shift)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize("reader", ["auto", "direct", "pread"])
def test_arrays_are_those_of_the_file(tmp_path, reader):
    numbers = numpy.random.default_rng(1).standard_normal((300, 500)).astype("f4")
    ids = numpy.arange(7, dtype="<i8")
    path = tmp_path / "x.safetensors"
    write(path, [("w", "F32", [300, 500], numbers.tobytes()), ("ids", "I64", [7], ids.tobytes()), ("none", "F16", [0, 4], b""), ("one", "U8", [], b"\x05")])
    found = sluice.load_tensors(path, reader=reader)
    assert list(found) == ["w", "ids", "none", "one"]
    assert numpy.array_equal(found["w"], numbers) and numpy.array_equal(found["ids"], ids)
    assert found["none"].shape == (0, 4) and found["one"] == 5
    # They are memory like any other: writable, and alive as long as one of them is.
    found["w"][0, 0] = 5.0
    kept = found["w"]
    del found
    assert kept[0, 0] == 5.0 and numpy.array_equal(kept[1:], numbers[1:])
    assert sluice.load_tensors(path)["w"][0, 0] == numbers[0, 0]


def test_torch_tensors_are_those_of_safetensors(tmp_path):
    torch = pytest.importorskip("torch", reason="SKIPPED: there is no torch")
    safetensors = pytest.importorskip("safetensors.torch", reason="SKIPPED: there is no safetensors")
    kinds = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool]
    kinds += [kind for name in ("float8_e4m3fn", "float8_e5m2", "uint16") if (kind := getattr(torch, name, None))]
    generator = torch.Generator().manual_seed(1)
    tensors = {f"t{i}": torch.randint(0, 2, (3 + i, 1 << i), generator=generator).to(kind) for i, kind in enumerate(kinds)}
    tensors["large"] = torch.randn(1500, 1000, generator=generator)
    path = tmp_path / "x.safetensors"
    safetensors.save_file(tensors, path, metadata={"format": "pt"})
    for found in (sluice.load_file(path), sluice.load_file(str(path), device="cpu", reader="direct")):
        expected = safetensors.load_file(path)
        assert set(found) == set(expected)
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
            assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert found["large"].add_(1).sum().isfinite()


def test_tensors_at_odd_places_are_read_too(tmp_path):
    path = tmp_path / "x.safetensors"
    numbers = numpy.arange(50, dtype="f4")
    write(path, [("w", "F32", [50], numbers.tobytes())], shift=1)
    assert numpy.array_equal(sluice.load_tensors(path)["w"], numbers)
    torch = pytest.importorskip("torch", reason="SKIPPED: there is no torch")
    assert torch.equal(sluice.load_file(path)["w"], torch.arange(50, dtype=torch.float32))


def test_broken_files_are_errors_that_name_them(tmp_path):
    path = tmp_path / "x.safetensors"
    for content in [b"", b"\x05", struct.pack("<Q", 2) + b"{}" + b"left", struct.pack("<Q", 1 << 60), struct.pack("<Q", 5) + b"[1,2]"]:
        path.write_bytes(content)
        with pytest.raises(sluice.ModelError, match="x.safetensors"):
            sluice.load_tensors(path)
    write(path, [("w", "F32", [50], b"\0" * 8)])
    with pytest.raises(sluice.ModelError, match="w"):
        sluice.load_tensors(path)
    with pytest.raises(sluice.ModelError, match="gone.safetensors"):
        sluice.load_tensors(tmp_path / "gone.safetensors")
    with pytest.raises(sluice.ModelError):
        sluice.load_tensors(tmp_path)
    write(path, [("w", "BF16", [1], b"\0\0")])
    with pytest.raises(sluice.ModelError, match="w is BF16"):
        sluice.load_tensors(path)
    with pytest.raises(sluice.RequestError, match="reader must be"):
        sluice.load_tensors(path, reader="mmap")
