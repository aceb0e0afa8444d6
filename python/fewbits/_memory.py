"""Memory of weights: of mapped checkpoint files, and for packed weights."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from typing import Any

_MAPS = Path("/proc/self/maps")
_HUGE_PAGE = 2 << 20


def anonymous(size: int, huge_pages: bool = False) -> memoryview:
    """Returns ``size`` zero bytes at an address that is a multiple of 64. They occupy memory once they are written.
    Weights are read faster from huge pages; the system may not have them."""
    private = getattr(mmap, "MAP_PRIVATE", None)
    if private is None:
        memory = bytearray(size + 63)
        offset = -_address(memory) % 64
        return memoryview(memory)[offset : offset + size]
    mapped = mmap.mmap(-1, size + _HUGE_PAGE, flags=private | mmap.MAP_ANONYMOUS)
    offset = -_address(mapped) % _HUGE_PAGE
    # The rest stays in small pages, so that no more memory is used than needed.
    whole = size // _HUGE_PAGE * _HUGE_PAGE
    if huge_pages and whole and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            mapped.madvise(mmap.MADV_HUGEPAGE, offset, whole)
        except OSError:
            # A kernel without them.
            pass
    return memoryview(mapped)[offset : offset + size]


def _address(buffer: Any) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def release(tensor: Any) -> None:
    """Returns the pages of a contiguous tensor to the system, so that it contains zeros, or what a mapped file has
    there. Pages at both ends stay, since they may also hold other tensors. Has no effect on systems without
    ``madvise``."""
    begin = tensor.data_ptr()
    end = (begin + tensor.numel() * tensor.element_size()) // mmap.PAGESIZE * mmap.PAGESIZE
    begin = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    if begin < end and hasattr(mmap, "MADV_DONTNEED"):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def trim() -> None:
    """Returns memory that was freed, but that the C library keeps for later allocations, to the system. Has no effect
    with C libraries other than glibc."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(ctypes.c_size_t(0))


class MappedFiles:
    """The address ranges of files that were mapped when this was created; none on systems other than Linux.

    A loaded checkpoint is mapped, and the pages that were read stay in memory as long as any tensor of the file is used.
    """

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        if not _MAPS.exists():
            return
        for line in _MAPS.read_text(errors="replace").splitlines():
            fields = line.split(maxsplit=5)
            # The fourth character of the permissions is `p` if changes are not written to the file. Shared memory and
            # anonymous memory have no inode or no path.
            if len(fields) == 6 and fields[1].endswith("p") and fields[4] != "0" and fields[5].startswith("/"):
                begin, end = (int(address, 16) for address in fields[0].split("-"))
                self._ranges.append((begin, end))

    def release(self, tensor: Any) -> None:
        """Returns the pages of a contiguous tensor that is no longer used to the system, if it is part of a mapped file,
        from which its pages could be read again."""
        begin = tensor.data_ptr()
        end = begin + tensor.numel() * tensor.element_size()
        if any(first <= begin and end <= last for first, last in self._ranges):
            release(tensor)
