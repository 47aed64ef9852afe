"""Memory for kernel tests that kills the process when a kernel reads or writes outside of it."""

import ctypes
import mmap
import weakref

import torch

PAGE = mmap.PAGESIZE
_NORESERVE = 0x4000  # of Linux; Python 3.13 has a name for it
_LIBC = ctypes.CDLL(None, use_errno=True)


def guarded(tensor, *, at="end"):
    """Return a copy of ``tensor`` with forbidden memory before (at="start") or after it.

    The forbidden page touches the data: one element too far is a segmentation fault.
    """
    data = tensor.contiguous()
    size = data.numel() * data.element_size()
    inner = -(-max(size, 1) // PAGE) * PAGE
    area = mmap.mmap(-1, inner + 2 * PAGE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(area))
    for border in (base, base + PAGE + inner):
        if _LIBC.mprotect(ctypes.c_void_p(border), ctypes.c_size_t(PAGE), 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    if not size:
        return data
    begin = PAGE if at == "start" else PAGE + inner - size
    view = torch.frombuffer(area, dtype=torch.uint8, count=size, offset=begin)
    copy = view.view(data.dtype).view(data.shape)
    copy.copy_(data)
    weakref.finalize(view, lambda _: None, area)
    return copy


def sparse(size, dtype):
    """Return a flat tensor over ``size`` bytes that cost no memory until they are touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=dtype)
