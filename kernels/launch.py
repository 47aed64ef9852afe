"""What all kernels share: choosing a path, checking arguments, launching, configurations.

Every public function of this package runs its Triton kernel on tensors of a CUDA or HIP
device, or under Triton's interpreter (``TRITON_INTERPRET=1`` set before Triton is first
imported, a test tool), and its plain-PyTorch reference on CPU tensors.  Without Triton the
reference runs everywhere.  Modules of this package import Triton only through this one, so
that they can be imported, and their references used, where Triton is not installed.

Launches neither allocate results nor wait: work is queued on the current stream.  Arguments
on the host are checked before; the contents of tables that lie on a device are not read back
(that would wait for the stream), so whoever builds them vouches for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tierkv.errors import InvalidInputError, UnsupportedError

if TYPE_CHECKING:
    import triton
    import triton.language as tl
else:
    try:
        import triton
        import triton.language as tl
    except ImportError:
        triton = tl = None

__all__ = [
    "CONFIGS",
    "HAS_TRITON",
    "INTERPRETED",
    "VECTOR_BYTES",
    "Config",
    "as_words",
    "check_dtype",
    "check_head_dim",
    "check_int64",
    "check_same_device",
    "jit",
    "launch",
    "next_power_of_2",
    "tl",
    "use_triton",
]

HAS_TRITON: bool = triton is not None
INTERPRETED: bool = HAS_TRITON and bool(triton.knobs.runtime.interpret)
VECTOR_BYTES = 16  # the widest access of one thread
MAX_HEAD_DIM = 512


@dataclass(frozen=True, slots=True)
class Config:
    """How a kernel is launched.

    Attributes:
        block: elements (or rows, as the kernel says) that a program handles at a time.
        num_warps: warps of a program.
        num_stages: loads that the compiler keeps in flight in a loop.
        programs: number of programs, for kernels whose programs loop; 0 where the work says.
    """

    block: int
    num_warps: int
    num_stages: int = 1
    programs: int = 0


# All configurations, chosen once and written down, so that results and timings repeat: no
# autotuning at run time.  The committed tables of registers under tests/kernels are of these.
CONFIGS: dict[str, Config] = {
    # Elements: 2048 are a 16-byte vector for each of 4 warps of AMD's 64 lanes.
    "append": Config(block=2048, num_warps=4),
    "gather": Config(block=2048, num_warps=4),
    "scatter": Config(block=2048, num_warps=4),
    # In bytes: 16 programs x 128 threads x 8 vectors of 16 bytes are 256 KiB on their way.  At
    # 55 GB/s and 1.5 us of latency 83 KB must be, and a program waits twice for each tile
    # (for the page's place, then for its bytes).  The other multiprocessors stay free.
    "layer_copy": Config(block=16 << 10, num_warps=4, programs=16),
    "quantise": Config(block=2048, num_warps=4),
    "dequantise": Config(block=2048, num_warps=4),
    # Words of 8 bytes; programs of each range.
    "checksum": Config(block=1024, num_warps=4, programs=8),
}


class _Unavailable:
    """Stands for a kernel where Triton is not installed."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        raise UnsupportedError(
            f"kernel {self.fn.__name__} needs Triton: pip install 'tierkv-store[triton]'"
        )


def jit(fn: Callable[..., Any]) -> Any:
    """Make a Triton kernel (or a function for use in kernels) of ``fn``."""
    return triton.jit(fn) if HAS_TRITON else _Unavailable(fn)


def use_triton(*tensors: Tensor) -> bool:
    """Return whether the kernel, not the reference, handles these tensors.

    One tensor on a GPU is enough: the others may be pinned host memory that the GPU reads.
    """
    return INTERPRETED or (HAS_TRITON and any(t.device.type == "cuda" for t in tensors))


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    config: Config,
    fp_fusion: bool = True,
    **constants: Any,
) -> None:
    """Queue ``kernel`` on the current stream of the first GPU tensor's device.

    Args:
        kernel: what ``jit`` returned.
        grid: programs per axis; nothing happens when one is 0.
        args: tensors and numbers, in the kernel's order.
        config: warps and stages.
        fp_fusion: whether ``a * b + c`` may be rounded once.  Codecs say False: their bytes
            must be those of the reference.
        constants: the kernel's ``constexpr`` parameters.
    """
    if 0 in grid:
        return
    device = next((a.device for a in args if isinstance(a, Tensor) and a.is_cuda), None)
    with nullcontext() if device is None else torch.cuda.device(device):
        kernel[grid](
            *args,
            **constants,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            enable_fp_fusion=fp_fusion,
        )


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least ``n`` (and 1)."""
    return 1 << max(0, n - 1).bit_length()


def as_words(tensor: Tensor) -> Tensor:
    """Return the tensor as integers of the same width, so that a copy moves bits, not numbers."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(words[tensor.element_size()])


def check_dtype(where: str, tensor: Tensor, allowed: Sequence[torch.dtype]) -> None:
    """Raise UnsupportedError unless the tensor's dtype is one of ``allowed``."""
    if tensor.dtype not in allowed:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise UnsupportedError(f"{where}: dtype {tensor.dtype} is not supported; use {names}")


def check_head_dim(where: str, dim: int, *, multiple: int = 1) -> None:
    """Raise UnsupportedError unless kernels handle heads of ``dim`` elements."""
    if not 0 < dim <= MAX_HEAD_DIM or dim % multiple:
        raise UnsupportedError(
            f"{where}: heads of {dim} elements are not supported; from {multiple} to "
            f"{MAX_HEAD_DIM}, in multiples of {multiple}, are"
        )


def check_int64(where: str, name: str, tensor: Tensor, shape: Sequence[int | None]) -> None:
    """Raise InvalidInputError unless ``tensor`` is contiguous int64 of ``shape`` (None: any)."""
    fits = tensor.dim() == len(shape) and all(
        want is None or want == have for want, have in zip(shape, tensor.shape, strict=True)
    )
    if tensor.dtype != torch.int64 or not fits or not tensor.is_contiguous():
        wanted = ", ".join("*" if want is None else str(want) for want in shape)
        raise InvalidInputError(
            f"{where}: {name} must be a contiguous int64 tensor [{wanted}], got {tensor.dtype} "
            f"{list(tensor.shape)}"
        )


def check_same_device(where: str, **tensors: Tensor | None) -> None:
    """Raise InvalidInputError unless the tensors lie on one device."""
    devices = {name: t.device for name, t in tensors.items() if t is not None}
    if len(set(devices.values())) > 1:
        raise InvalidInputError(f"{where}: tensors lie on different devices: {devices}")
