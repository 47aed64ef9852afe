"""The format of quantised pages, and how their codes are read.

One layer's part of a quantised page is bytes:

    K values  [token][head][dim]             8 or 4 bits an element
    V values  [token][head][value_dim]
    K scales  [token][head][dim / group]     2 bytes each
    V scales  [token][head][value_dim / group]

Each of the four sections begins at a multiple of 16 bytes, and so does the whole; bytes in
the gaps between them are unspecified (there are none where sections are multiples of 16).  A
page table of quantised pages holds *byte* offsets, multiples of 16, into a uint8 tensor.

A scale belongs to ``group`` adjacent elements of one head of one token.  It is the upper half
of a float32, rounded away from zero: the range of float32 in two bytes, and a code times its
scale never has to be cut off.  With ``top`` the largest code (127, 448, 7) and ``m`` the
largest magnitude of the group:

    scale = upper half of (m * float32(1 / top)), rounded up; 0 where m < 2**-100
    code  = round(x * (1 / scale)), ties to even, cut off at -top and top; 0 where scale = 0
    value = code * scale, in float32, then rounded to the page's type, ties to even

NaN counts as 0, and magnitudes above 2**126, infinities among them, as 2**126; float16 values
are cut off at 65504.  So no infinity ever comes out.  All of it is float32 arithmetic with
one rounding an operation, and the bytes are the same on every machine.

    int8        two's complement
    fp8_e4m3    the bits of float8_e4m3fn; read by hand, since sm_80 has no such type
    int4        code + 8 in 4 bits.  Byte j of a head holds element j in its low half and
                element j + dim / 2 in its high half, so that both halves of a head come out
                of a load as tiles without interleaving; group divides dim / 2
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tierkv.errors import InvalidInputError, UnsupportedError
from tierkv.kernels.launch import VECTOR_BYTES, check_head_dim, check_int64, jit, tl

# Codes of schemes, for kernels' constants.
INT8, FP8_E4M3, INT4 = 0, 1, 2
SCHEMES = {"int8": INT8, "fp8_e4m3": FP8_E4M3, "int4": INT4}
TOP = {INT8: 127.0, FP8_E4M3: 448.0, INT4: 7.0}
SCALE_BYTES = 2


def _round_up(n: int) -> int:
    return -(-n // VECTOR_BYTES) * VECTOR_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedLayout:
    """Where values and scales of one layer lie in a quantised page.

    Attributes:
        scheme: "int8", "fp8_e4m3" or "int4".
        page_tokens: rows of a page.
        heads: KV heads of a row.
        dim: elements of a head in K (or a latent).
        value_dim: elements of a head in V; ``dim`` when None; 0 where there is no V.
        group: elements that share a scale.  0: the whole head for 8-bit schemes; for int4 the
            largest of 32, 16, 8 that divides half of a head.
    """

    scheme: str
    page_tokens: int
    heads: int
    dim: int
    value_dim: int | None = None
    group: int = 0

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise UnsupportedError(
                f"quantised layout: scheme {self.scheme!r} is not one of {sorted(SCHEMES)}"
            )
        for name in ("page_tokens", "heads"):
            if getattr(self, name) <= 0:
                raise InvalidInputError(
                    f"quantised layout: {name} must be positive, got {getattr(self, name)}"
                )
        for dim in self.dims:
            check_head_dim("quantised layout", dim, multiple=2 if self.bits == 4 else 1)
            span, group = self.span(dim), self.group_of(dim)
            if group <= 0 or span % group:
                raise UnsupportedError(
                    f"quantised layout: groups of {group} elements do not fill {span} elements "
                    f"of a head of {dim}; give a group that divides them"
                )

    @property
    def code(self) -> int:
        """The scheme's number, as kernels know it."""
        return SCHEMES[self.scheme]

    @property
    def bits(self) -> int:
        """Bits of a value."""
        return 4 if self.scheme == "int4" else 8

    @property
    def dims(self) -> tuple[int, ...]:
        """Elements of a head, for each component."""
        v_dim = self.dim if self.value_dim is None else self.value_dim
        return (self.dim, v_dim) if v_dim else (self.dim,)

    def span(self, dim: int) -> int:
        """Adjacent elements of a head that lie in adjacent bytes: a half of it for int4."""
        return dim // 2 if self.bits == 4 else dim

    def group_of(self, dim: int) -> int:
        """Elements that share a scale, in a head of ``dim``."""
        if self.group:
            return self.group
        if self.bits == 8:
            return dim
        return next((g for g in (32, 16, 8) if dim // 2 % g == 0), dim // 2)

    def value_bytes(self, dim: int) -> int:
        """Bytes of a head's values."""
        return dim * self.bits // 8

    @property
    def offsets(self) -> tuple[tuple[int, int], ...]:
        """Bytes from a table's entry to values and to scales, for each component."""
        rows, at = self.page_tokens * self.heads, 0
        values, scales = list[int](), list[int]()
        for dim in self.dims:
            values.append(at)
            at += _round_up(rows * self.value_bytes(dim))
        for dim in self.dims:
            scales.append(at)
            at += _round_up(rows * (dim // self.group_of(dim)) * SCALE_BYTES)
        return tuple(zip(values, scales, strict=True))

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's part of a page."""
        rows, dim = self.page_tokens * self.heads, self.dims[-1]
        scales = rows * (dim // self.group_of(dim)) * SCALE_BYTES
        return _round_up(self.offsets[-1][1] + scales)

    def sections(self, data: Tensor, at: int, component: int) -> tuple[Tensor, Tensor]:
        """Return views of a component in the page at byte ``at`` of flat uint8 ``data``.

        Values, uint8 ``[token, head, bytes]``, and scales, uint16 ``[token, head, groups]``.
        """
        dim, rows = self.dims[component], (self.page_tokens, self.heads)
        width, groups = self.value_bytes(dim), dim // self.group_of(dim)
        first, second = (at + offset for offset in self.offsets[component])
        values = data[first : first + rows[0] * rows[1] * width].view(*rows, width)
        scales = data[second : second + rows[0] * rows[1] * groups * SCALE_BYTES]
        return values, scales.view(torch.uint16).view(*rows, groups)

    def check_table(
        self, where: str, data: Tensor, table: Tensor, shape: tuple[int | None, ...]
    ) -> None:
        """Check quantised pages and their table; entries only where the table is on the host.

        Negative entries mark pages that are not there.

        Raises:
            InvalidInputError: data that is not flat uint8; a table of another shape or type; an
                entry that is no multiple of 16 bytes or leads out of the data.
        """
        if data.dim() != 1 or data.dtype != torch.uint8 or not data.is_contiguous():
            raise InvalidInputError(
                f"{where}: quantised pages must be a flat contiguous uint8 tensor, got "
                f"{data.dtype} {list(data.shape)}"
            )
        check_int64(where, "table of quantised pages", table, shape)
        if table.device.type != "cpu" or not table.numel():
            return
        worst = int(table.max())
        uneven = (table % VECTOR_BYTES != 0) & (table >= 0)
        if worst + self.layer_bytes > data.numel() or bool(uneven.any()):
            raise InvalidInputError(
                f"{where}: byte offsets of quantised pages must be multiples of {VECTOR_BYTES} "
                f"and leave room for {self.layer_bytes} bytes in {data.numel()}, got up to {worst}"
            )


@jit
def decode_scale(bits: tl.tensor) -> tl.tensor:
    """In a kernel: the float32 scale of its 16 bits."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@jit
def decode_byte(byte: tl.tensor, SCHEME: tl.constexpr) -> tl.tensor:
    """In a kernel: the float32 code of a byte of the int8 (0) or fp8_e4m3 (1) scheme."""
    if SCHEME == 0:
        return byte.to(tl.int8, bitcast=True).to(tl.float32)
    code = byte.to(tl.int32)
    low = code & 0x7F
    normal = (low << 20) + 0x3C000000  # exponents differ by 127 - 7
    small = (low.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)  # 2**-9
    bits = tl.where(low < 8, small, normal) | ((code & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True)


@jit
def decode_low(byte: tl.tensor) -> tl.tensor:
    """In a kernel: the float32 code in the low half of an int4 byte (elements 0 .. dim/2)."""
    return ((byte.to(tl.int32) & 15) - 8).to(tl.float32)


@jit
def decode_high(byte: tl.tensor) -> tl.tensor:
    """In a kernel: the float32 code in the high half of an int4 byte (elements dim/2 .. dim)."""
    return ((byte.to(tl.int32) >> 4) - 8).to(tl.float32)


def decode_reference(values: Tensor, scales: Tensor, layout: QuantisedLayout) -> Tensor:
    """Return float32 ``[..., dim]`` of bytes ``[..., bytes]`` and uint16 scales ``[..., groups]``.

    The specification of reading: ``code * scale``.
    """
    if layout.code == INT8:
        codes = values.view(torch.int8).float()
    elif layout.code == FP8_E4M3:
        codes = values.view(torch.float8_e4m3fn).float()
    else:
        codes = torch.cat(((values & 15).float() - 8, (values >> 4).float() - 8), dim=-1)
    groups = codes.reshape(*scales.shape, codes.shape[-1] // scales.shape[-1])
    return torch.mul(groups, scale_of_bits(scales).unsqueeze(-1)).flatten(-2)


def scale_of_bits(bits: Tensor) -> Tensor:
    """Return the float32 scales of their 16 bits (uint16)."""
    return (bits.view(torch.int16).int() << 16).view(torch.float32)
