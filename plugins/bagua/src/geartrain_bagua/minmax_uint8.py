"""MinMaxUInt8, Bagua's compression: of a chunk of floats its least and greatest, and one byte an element.

Per chunk, in float32::

    scale = 255 / (max - min + 1e-7)
    upper = rint(max * scale);  lower = upper - 255
    code  = min(rint(x * scale), upper) - lower
    x'    = (code + lower) / scale

``encode_plain`` and ``decode_plain`` are these lines. ``encode`` and ``decode`` give the same bits sooner: by Triton kernels on CUDA, and
on the CPU by the same operations in place, a tile of the chunks at a time, so that what is between stays in the cache. (torch.compile would
halve the CPU's time again, but takes seconds to compile, and a C++ compiler.)

- Zeros stay exact. The error is at most 0.52 of a step, ``1 / scale``, in a chunk wider than a 500th of its values, and 2 steps in one
  wider than a 65,000th.
- In a narrower chunk, a constant one among them, float32 cannot hold ``lower`` exactly. The code 256, which then occurs, wraps to 0, as in
  Bagua: x' is wrong by the chunk's width + 1e-7 at most, 2e-5 of its greatest value.
- Rounding can put the least element just under ``lower``. Its code is 0, not the 255 to which it would wrap: that is the greatest.
- Every element of a chunk that holds an infinity or a NaN, or is wider than float32 goes, decodes to NaN.
- Half precision and bfloat16 are computed in float32, which holds them exactly; float64 is rounded to float32 first. Decoded is float32.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

EPSILON = 1e-7
STEPS = 255.0
BOUNDS_BYTES = 8  # two float32
EXACT = 2.0**23  # below it float32 holds every integer, and ``x * scale`` to half a step
# Elements: 1 MiB of float32 stays in a core's cache. Smaller tiles are no faster, and take the interpreter's lock more often.
TILE = 1 << 18


@torch.no_grad()
def encode(chunks: Tensor, codes: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes, uint8 ``[n, d]``, and bounds, float32 ``[n, 2]``: least and greatest, of ``chunks``, floats ``[n, d]``.

    The codes are written into ``codes`` where it is given; its rows may lie apart. ValueError if ``chunks`` is no matrix of floats.
    """
    chunks = _checked(chunks)
    codes = chunks.new_empty(chunks.shape, dtype=torch.uint8) if codes is None else codes
    bounds = _bounds(chunks)
    scale, upper, lower = _grid(bounds)
    kernels = _kernels() if chunks.is_cuda else None
    if kernels is not None:
        kernels.encode(chunks, scale, upper, lower, codes)
    elif chunks.device.type == "cpu":
        _encode_in_tiles(chunks, scale, upper, lower, codes)
    else:
        codes.copy_(_encoded(chunks, scale, upper, lower))
    return codes, bounds


@torch.no_grad()
def decode(codes: Tensor, bounds: Tensor, out: Tensor | None = None) -> Tensor:
    """What ``encode`` made ``codes`` and ``bounds`` of, to within the error told above: float32 ``[n, d]``.

    Written into ``out`` where it is given, a float32 matrix of this shape.
    """
    out = torch.empty(codes.shape, dtype=torch.float32, device=codes.device) if out is None else out
    scale, _, lower = _grid(bounds)
    kernels = _kernels() if codes.is_cuda else None
    if kernels is not None:
        kernels.decode(codes, scale, lower, out)
    elif codes.device.type == "cpu":
        for tile in _tiles(*codes.shape):
            out[tile].copy_(codes[tile]).add_(lower[tile[0]]).div_(scale[tile[0]])
    else:
        out.copy_(_decoded(codes, scale, lower))
    return out


@torch.no_grad()
def compress(chunks: Tensor) -> Tensor:
    """What goes on the wire for ``chunks``, floats ``[n, d]``: uint8 ``[n, 8 + d]``, a row a chunk: its two bounds, then its codes."""
    wire = torch.empty(
        chunks.shape[0], BOUNDS_BYTES + chunks.shape[1], dtype=torch.uint8, device=chunks.device
    )
    _, bounds = encode(chunks, wire[:, BOUNDS_BYTES:])
    wire[:, :BOUNDS_BYTES] = bounds.view(torch.uint8)
    return wire


@torch.no_grad()
def decompress(wire: Tensor, out: Tensor | None = None) -> Tensor:
    """``decode`` of what ``compress`` made: float32 ``[n, d]``, in ``out`` where it is given."""
    bounds = (
        wire[:, :BOUNDS_BYTES].clone(memory_format=torch.contiguous_format).view(torch.float32)
    )  # they may lie unaligned
    return decode(wire[:, BOUNDS_BYTES:], bounds, out)


@torch.no_grad()
def encode_plain(chunks: Tensor) -> tuple[Tensor, Tensor]:
    """As ``encode``, line by line the formulas: what it is held to."""
    chunks = _checked(chunks)
    bounds = _bounds(chunks)
    return _encoded(chunks, *_grid(bounds)), bounds


@torch.no_grad()
def decode_plain(codes: Tensor, bounds: Tensor) -> Tensor:
    """As ``decode``, line by line the formulas: what it is held to."""
    scale, _, lower = _grid(bounds)
    return _decoded(codes, scale, lower)


def _encoded(chunks: Tensor, scale: Tensor, upper: Tensor, lower: Tensor) -> Tensor:
    raw = torch.minimum(torch.round(chunks * scale), upper) - lower
    # A float outside of 0 to 255 as a byte is undefined: 256 wraps, a level under ``lower`` and what is no number are 0 too.
    return torch.where((raw >= 0) & (raw < 256), raw, 0).to(torch.uint8)


def _decoded(codes: Tensor, scale: Tensor, lower: Tensor) -> Tensor:
    return (codes.to(torch.float32) + lower) / scale


def _encode_in_tiles(
    chunks: Tensor, scale: Tensor, upper: Tensor, lower: Tensor, codes: Tensor
) -> None:
    """As ``_encoded``, into ``codes``: in place where the raw codes of a chunk are 0 to 255 for certain, plainly where they may not be."""
    scratch = chunks.new_empty(min(TILE, chunks.numel()))
    for rows, columns in _tiles(*chunks.shape):
        source = chunks[rows, columns]
        level = scratch[: source.numel()].view(source.shape)
        torch.mul(source, scale[rows], out=level).round_()
        # Less than ``lower`` is ``lower``: its code is 0.
        torch.maximum(torch.minimum(level, upper[rows], out=level), lower[rows], out=level).sub_(
            lower[rows]
        )
        codes[rows, columns].copy_(level)
    strange = ~(upper.abs() < EXACT).squeeze(1)  # NaN too
    if strange.any():
        codes[strange] = _encoded(chunks[strange], scale[strange], upper[strange], lower[strange])


def _tiles(rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """Slices that cut a matrix into tiles of at most ``TILE`` elements: several short rows, or a part of a long one."""
    if not rows or not columns:
        return
    width = min(columns, TILE)
    height = TILE // width
    for row in range(0, rows, height):
        for column in range(0, columns, width):
            yield slice(row, row + height), slice(column, column + width)


def _bounds(chunks: Tensor) -> Tensor:
    """Least and greatest of each row, ``[n, 2]``; NaN where a row holds one, 0 where it holds nothing, and no negative zero."""
    if not chunks.numel():
        return chunks.new_zeros(chunks.shape[0], 2)
    return torch.stack((chunks.amin(1), chunks.amax(1)), 1) + 0.0


def _grid(bounds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``scale``, ``upper`` and ``lower`` of each chunk, ``[n, 1]``. The scale is NaN where bounds or range are not finite."""
    least, greatest = bounds[:, :1], bounds[:, 1:]
    width = greatest - least + EPSILON
    scale = (
        torch.full_like(width, STEPS) / width
    )  # a number over a tensor would be 255 times its reciprocal, which rounds twice
    scale = torch.where(scale > 0, scale, torch.nan)
    upper = torch.round(greatest * scale)
    return scale, upper, upper - STEPS


def _checked(chunks: Tensor) -> Tensor:
    if chunks.dim() != 2 or not chunks.is_floating_point():
        raise ValueError(
            f"MinMaxUInt8 compresses floats of shape [chunks, elements], not {chunks.dtype} of shape {list(chunks.shape)}. "
            "Fix: give it one row a chunk, such as bucket.view(world_size, -1)"
        )
    return chunks.to(torch.float32)


@functools.cache
def _kernels() -> Any:
    """The module with the Triton kernels, or None where there is no Triton: then CUDA takes the plain lines, which give the same codes."""
    try:
        from geartrain_bagua import minmax_uint8_triton
    except ImportError:
        return None
    return minmax_uint8_triton
