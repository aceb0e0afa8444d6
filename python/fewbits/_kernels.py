"""The extension's kernels, called through its C interface with ctypes."""

from __future__ import annotations

import ctypes
import os
import threading
from ctypes import POINTER, Structure, byref, c_char, c_float, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

from fewbits._call import code
from fewbits._errors import InternalError, UsageError

#: Rows of a panel, the smallest part of a matrix that can be packed by itself.
PANEL_ROWS = 16
#: `QZ1_TYPE_…` by torch's name of the type.
TYPES = {"float32": 1, "float16": 2, "bfloat16": 3}


class _Weights(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("bits", c_uint32),
        ("n", c_size_t),
        ("k", c_size_t),
        ("group_size", c_size_t),
        ("codes", c_void_p),
        ("codes_len", c_size_t),
        ("scales", c_void_p),
        ("scales_len", c_size_t),
        ("group_scales", c_void_p),
        ("group_scales_len", c_size_t),
        ("zeros", c_void_p),
        ("zeros_len", c_size_t),
        ("format", c_uint32),
        ("reserved", c_uint32),
    ]


class Layout(Structure):
    """The C struct `qz1_layout`: the positions of the parts within the packed bytes."""

    _fields_ = [
        ("struct_size", c_uint32),
        ("code_bits", c_uint32),
        ("scales", c_uint32),
        ("zeros", c_uint32),
        ("middle", c_uint32),
        ("sums", c_uint32),
        ("n", c_uint64),
        ("k", c_uint64),
        ("group_size", c_uint64),
        ("panels", c_uint64),
        ("panel_bytes", c_uint64),
        ("bytes", c_uint64),
        ("id", c_uint64),
        ("format", c_uint32),
        ("reserved", c_uint32),
    ]


class _Values(Structure):
    _fields_ = [("struct_size", c_uint32), ("kind", c_uint32), ("data", c_void_p), ("len", c_size_t)]


class _Static(Structure):
    _fields_ = [("struct_size", c_uint32), ("scale", c_float), ("zero", c_int32), ("reserved", c_uint32)]


class _Parallel(Structure):
    _fields_ = [("struct_size", c_uint32), ("threads", c_uint32), ("ctx", c_void_p), ("for_each", c_void_p)]


class _OpenMP(Structure):
    _fields_ = [("gomp_parallel", c_void_p), ("threads", c_uint32)]


class _Message(Structure):
    _fields_ = [("struct_size", c_uint32), ("reserved", c_uint32), ("text", c_void_p), ("capacity", c_size_t)]


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(code())
    message, parallel, layout = POINTER(_Message), POINTER(_Parallel), POINTER(Layout)
    status: dict[str, list[Any]] = {
        "qz1_layout_of": [POINTER(_Weights), c_uint32, layout, message],
        "qz1_pack": [POINTER(_Weights), layout, c_size_t, c_size_t, c_void_p, c_size_t, parallel, message],
        "qz1_dequantize_rows": [layout, c_void_p, c_size_t, c_size_t, c_size_t, c_void_p, c_size_t, message],
        "qz1_float_rows_new": [c_uint32, POINTER(c_void_p), message],
        "qz1_float_rows_pack": [c_void_p, layout, POINTER(_Values), parallel, message],
        "qz1_int8_rows_new": [c_uint32, POINTER(c_void_p), message],
        "qz1_int8_rows_quantize": [c_void_p, layout, POINTER(_Values), POINTER(_Static), parallel, message],
        "qz1_multiply_float": [
            *(layout, c_void_p, c_size_t, c_void_p, c_void_p, c_size_t, c_void_p, c_size_t),
            *(parallel, message),
        ],
        "qz1_multiply": [
            *(layout, c_void_p, c_size_t, c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, c_uint32),
            *(parallel, message),
        ],
        "qz1_pool_new": [c_size_t, POINTER(c_void_p), message],
    }
    for name, arguments in status.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, c_uint32
    for name in ("qz1_float_rows_free", "qz1_int8_rows_free", "qz1_pool_free"):
        function = getattr(library, name)
        function.argtypes, function.restype = [c_void_p], None
    return library


_LIBRARY = _library()


def _check(status: int, text: ctypes.Array[c_char]) -> None:
    if status:
        reason = text.value.decode(errors="replace") or f"status {status}"
        raise (InternalError if status == 37 else UsageError)(f"the kernels rejected the call: {reason}", "report this")


def _message() -> tuple[_Message, ctypes.Array[c_char]]:
    text = ctypes.create_string_buffer(200)
    return _Message(ctypes.sizeof(_Message), 0, ctypes.addressof(text), 200), text


class _Rows(threading.local):
    """Buffers for rows of activations. Each thread has its own and reuses them in every call."""

    def __init__(self) -> None:
        self.float = self._new("qz1_float_rows_new")
        self.int8 = self._new("qz1_int8_rows_new")

    @staticmethod
    def _new(function: str) -> c_void_p:
        handle = c_void_p()
        message, text = _message()
        _check(getattr(_LIBRARY, function)(0, byref(handle), byref(message)), text)
        return handle

    def __del__(self, library: ctypes.CDLL = _LIBRARY) -> None:
        # At interpreter exit, the module's names may already be cleared.
        library.qz1_float_rows_free(self.float)
        library.qz1_int8_rows_free(self.int8)


_ROWS = _Rows()
_POOLS: dict[tuple[int, int], _Parallel] = {}
#: The process that may use the threads of OpenMP, and `GOMP_parallel` of its runtime.
_OPENMP: list[tuple[int, int]] = []
#: Contexts of `for_each`, to which `_POOLS` has pointers.
_CONTEXTS: list[_OpenMP] = []


def use_openmp(gomp_parallel: int | None) -> None:
    """Lets the kernels run on the threads of an OpenMP runtime, given the address of its ``GOMP_parallel``. Its threads
    spin for a while after each parallel region, and a pool of our own would compete with them for the processors."""
    if gomp_parallel is not None:
        _OPENMP[:] = [(os.getpid(), gomp_parallel)]


def _parallel(threads: int) -> _Parallel | None:
    """Returns the threads to run on; None for a single one. A forked child creates its own, because threads are not
    inherited."""
    if threads <= 1:
        return None
    process = os.getpid()
    known = _POOLS.get((process, threads))
    if known is None:
        known = _Parallel(ctypes.sizeof(_Parallel), threads)
        function = next((function for owner, function in _OPENMP if owner == process), None)
        if function is not None:
            _CONTEXTS.append(_OpenMP(function, threads))
            known.ctx = ctypes.addressof(_CONTEXTS[-1])
            known.for_each = ctypes.cast(_LIBRARY.qz1_openmp_for_each, c_void_p)
        else:
            pool = c_void_p()
            message, text = _message()
            _check(_LIBRARY.qz1_pool_new(threads, byref(pool), byref(message)), text)
            known.ctx = pool
            known.for_each = ctypes.cast(_LIBRARY.qz1_pool_for_each, c_void_p)
        _POOLS[process, threads] = known
    return known


def layout_of(bits: int, shape: tuple[int, int], group_size: int, codes: int, scales: int, sums: bool) -> tuple[_Weights, Layout]:
    """Describes a matrix ``[n, k]`` with one code per byte and ``f32`` scales ``[n, k / group_size]`` at these
    addresses, and returns it with its layout, which does not depend on the codes. ``sums`` adds the sums that static
    activations with a zero point need."""
    n, k = shape
    weights = _Weights(
        struct_size=ctypes.sizeof(_Weights),
        bits=bits,
        n=n,
        k=k,
        group_size=group_size,
        codes=codes,
        codes_len=n * k,
        scales=scales,
        scales_len=n * (k // group_size),
    )
    layout = Layout(struct_size=ctypes.sizeof(Layout))
    message, text = _message()
    _check(_LIBRARY.qz1_layout_of(byref(weights), int(sums), byref(layout), byref(message)), text)
    return weights, layout


def pack(weights: _Weights, layout: Layout, first: int, rows: int, out: int, threads: int) -> None:
    """Packs some rows of the matrix, beginning with ``first``, into their place in the ``layout.bytes`` bytes at
    ``out``. Both numbers are multiples of :data:`PANEL_ROWS`, except at the end of the matrix."""
    message, text = _message()
    parallel = _parallel(threads)
    panel, panels = first // PANEL_ROWS, -(-rows // PANEL_ROWS)
    status = _LIBRARY.qz1_pack(
        byref(weights),
        byref(layout),
        panel,
        panels,
        out + panel * layout.panel_bytes,
        panels * layout.panel_bytes,
        None if parallel is None else byref(parallel),
        byref(message),
    )
    _check(status, text)


def layout_numbers(layout: Layout) -> list[int]:
    """Converts a layout to a list of integers, which a torch operator can take. ``id`` becomes a signed integer."""
    numbers = [int(getattr(layout, field[0])) for field in Layout._fields_]
    return [number - (1 << 64) if number >= 1 << 63 else number for number in numbers]


_LAYOUTS: dict[tuple[int, ...], Layout] = {}


def _layout(numbers: list[int]) -> Layout:
    key = tuple(numbers)
    known = _LAYOUTS.get(key)
    if known is None:
        known = Layout(*(number % (1 << 64) for number in numbers))
        _LAYOUTS[key] = known
    return known


def linear(
    numbers: list[int],
    packed: int,
    x: int,
    kind: int,
    count: int,
    bias: int | None,
    out: int,
    activations: str,
    static: tuple[float, int] | None,
    threads: int,
) -> None:
    """Computes ``out = x · Wᵀ + bias``. ``x`` has ``count`` values of the type ``kind`` (see :data:`TYPES`); ``bias``
    and ``out`` are ``f32``. Arrays are passed by address.

    ``activations`` is ``float`` or ``int8``. For ``int8``, ``static`` is the scale and zero point of all rows; None
    gives each row its own scale.
    """
    layout = _layout(numbers)
    message, text = _message()
    pool = _parallel(threads)
    parallel = None if pool is None else byref(pool)
    values = _Values(ctypes.sizeof(_Values), kind, x, count)
    n, rows = layout.n, count // layout.k
    bias_len = 0 if bias is None else n
    common = (byref(layout), packed, layout.bytes)
    end = (bias, bias_len, out, rows * n)
    if activations == "float":
        # Waking up threads takes longer than packing a few rows.
        few = parallel if rows > 4 else None
        _check(_LIBRARY.qz1_float_rows_pack(_ROWS.float, byref(layout), byref(values), few, byref(message)), text)
        status = _LIBRARY.qz1_multiply_float(*common, _ROWS.float, *end, parallel, byref(message))
    else:
        few = parallel if rows > 4 else None
        by = None if static is None else byref(_Static(ctypes.sizeof(_Static), static[0], static[1], 0))
        status = _LIBRARY.qz1_int8_rows_quantize(_ROWS.int8, byref(layout), byref(values), by, few, byref(message))
        _check(status, text)
        status = _LIBRARY.qz1_multiply(*common, _ROWS.int8, *end, 0, parallel, byref(message))
    _check(status, text)
