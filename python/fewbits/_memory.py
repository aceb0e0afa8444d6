"""Memory of checkpoint files that are mapped."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from typing import Any

_MAPS = Path("/proc/self/maps")


class MappedFiles:
    """The address ranges of files that were mapped when this was created; none on systems other than Linux.

    A loaded checkpoint is mapped, and the pages that were read stay in memory as long as any tensor of the file is used.
    """

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        if not _MAPS.exists() or not hasattr(mmap, "MADV_DONTNEED"):
            return
        for line in _MAPS.read_text(errors="replace").splitlines():
            fields = line.split(maxsplit=5)
            # The fourth character of the permissions is `p` if changes are not written to the file. Shared memory and
            # anonymous memory have no inode or no path.
            if len(fields) == 6 and fields[1].endswith("p") and fields[4] != "0" and fields[5].startswith("/"):
                begin, end = (int(address, 16) for address in fields[0].split("-"))
                self._ranges.append((begin, end))

    def release(self, tensor: Any) -> None:
        """Returns the pages of a tensor that is no longer used to the system. Has no effect unless the tensor is part of
        a mapped file, from which its pages could be read again."""
        begin = tensor.data_ptr()
        end = begin + tensor.numel() * tensor.element_size()
        if not any(first <= begin and end <= last for first, last in self._ranges):
            return
        # Pages at both ends may also hold other tensors.
        begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)
