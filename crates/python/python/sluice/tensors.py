"""Tensors of safetensors files, read past the page cache at the disk's speed. They are views of the memory that was read into: nothing is copied."""

import ctypes
import os
from typing import Any, Iterator

from . import _sluice
from .errors import ModelError

_TORCH = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?"}


def _buffer(owner: Any, address: int, size: int) -> Any:
    # An instance of an array type of ctypes has the buffer protocol, without a copy, and attributes.
    buffer: Any = (ctypes.c_ubyte * size).from_address(address)
    buffer.owner = owner
    return buffer


def _read(path: "str | os.PathLike[str]", reader: str) -> Any:
    return _sluice.LoadedFile(os.fspath(path), reader)


def _buffers(file: Any) -> "Iterator[tuple[str, str, list[int], int, Any]]":
    for name, dtype, shape, address, size in file.tensors():
        yield name, dtype, shape, address, _buffer(file, address, size) if size else None


def load_file(filename: "str | os.PathLike[str]", device: Any = "cpu", *, reader: str = "auto") -> "dict[str, Any]":
    """The tensors of a safetensors file as torch tensors, with the signature of ``safetensors.torch.load_file``.

    On the CPU they are the memory that the file was read into. ``reader``: ``direct`` reads past the page cache, ``pread`` through it; ``auto`` takes what is faster: the page
    cache if most of the file is there. Each tensor keeps the memory of its whole file alive; ``clone()`` one to keep it alone.
    """
    import torch

    tensors = {}
    for name, dtype, shape, address, buffer in _buffers(_read(filename, reader)):
        kind = getattr(torch, _TORCH[dtype], None)
        if kind is None:
            raise ModelError(f"{os.fspath(filename)}: {name} is {dtype}, which this torch does not have")
        if buffer is None:
            tensor = torch.empty(shape, dtype=kind)
        else:
            if address % kind.itemsize:
                # Files promise no alignment, and torch needs one.
                tensor = torch.frombuffer(bytearray(buffer), dtype=torch.uint8).view(kind)
            else:
                tensor = torch.frombuffer(buffer, dtype=kind)
            tensor = tensor.view(shape)
        tensors[name] = tensor if str(device) == "cpu" else tensor.to(device)
    return tensors


def load_tensors(filename: "str | os.PathLike[str]", *, reader: str = "auto") -> "dict[str, Any]":
    """The same as numpy arrays, which may be written to. Types that numpy lacks (bfloat16, 8-bit floats) are an error that names the tensor."""
    import numpy

    arrays = {}
    for name, dtype, shape, _, buffer in _buffers(_read(filename, reader)):
        if dtype not in _NUMPY:
            raise ModelError(f"{os.fspath(filename)}: {name} is {dtype}, which numpy does not have")
        kind = numpy.dtype(_NUMPY[dtype])
        arrays[name] = numpy.empty(shape, kind) if buffer is None else numpy.frombuffer(buffer, kind).reshape(shape)
    return arrays
