"""Memory that is free goes back to the system: glibc keeps what blocks of weights have left behind."""

from __future__ import annotations

import ctypes
import gc
from functools import lru_cache
from typing import Any

_MMAP_THRESHOLD = -3  # glibc's name for the size from which an allocation is a mapping of its own
_SIZE = 1 << 20
_WORTH = 1 << 28  # bytes


@lru_cache
def _libc() -> Any:
    try:
        libc = ctypes.CDLL("libc.so.6")
        # Fixed, so that it does not grow with the tensors that were freed: those above it go back at once.
        libc.mallopt(_MMAP_THRESHOLD, _SIZE)
        return libc if hasattr(libc, "malloc_trim") else None
    except (OSError, AttributeError):
        return None  # another system: its allocator does as it likes


_freed = 0


def freed(size: int) -> None:
    """So many bytes more are free: given back in large parts, for collecting garbage takes a tenth of a second."""
    global _freed
    _freed += size
    if _freed > _WORTH:
        _freed = 0
        give_back()


def give_back() -> None:
    """Collect what nobody holds, and return free pages."""
    gc.collect()
    libc = _libc()
    if libc is not None:
        libc.malloc_trim(0)
