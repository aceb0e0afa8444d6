"""ggml's own quantizers, from the library that setup_llama_cpp.sh unpacks: the reference for the bytes of blocks."""

import ctypes
from pathlib import Path

import numpy


class Ggml:
    """The quantizers of libggml-base, by type ID."""

    def __init__(self, llama_cpp):
        self.library = ctypes.CDLL(str(Path(llama_cpp) / "bin/libggml-base.so"))
        self.library.ggml_quantize_chunk.restype = ctypes.c_size_t
        self.library.ggml_quantize_chunk.argtypes = [
            ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64,
            ctypes.c_void_p]
        self.library.ggml_row_size.restype = ctypes.c_size_t
        self.library.ggml_row_size.argtypes = [ctypes.c_int, ctypes.c_int64]

    def quantize(self, kind, rows, importance=None):
        """Bytes of rows `[n, k]` from `ggml_quantize_chunk`, with an importance `[k]`."""
        rows = numpy.ascontiguousarray(rows, dtype="<f4")
        count, columns = rows.shape
        out = numpy.zeros(count * self.library.ggml_row_size(kind, columns), dtype=numpy.uint8)
        self.library.ggml_quantize_init(kind)
        weights = None
        if importance is not None:
            weights = numpy.ascontiguousarray(importance, dtype="<f4")
        written = self.library.ggml_quantize_chunk(
            kind, rows.ctypes.data, out.ctypes.data, 0, count, columns,
            None if weights is None else weights.ctypes.data)
        if written != out.size:
            raise RuntimeError(f"type {kind}: {written} bytes of {out.size}")
        return out
