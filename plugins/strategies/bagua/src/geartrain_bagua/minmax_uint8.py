"""MinMaxUInt8, Bagua's compression: the minimum and maximum of a chunk, and one byte per element.

For each chunk, in float32::

    scale = 255 / (max - min + 1e-7)
    upper = rint(max * scale);  lower = upper - 255
    code  = min(rint(x * scale), upper) - lower
    x'    = (code + lower) / scale

``encode_plain`` and ``decode_plain`` are these lines. ``encode`` and ``decode`` return the same
bits faster: with Triton kernels on CUDA; on the CPU with the same operations in place, one tile of
the chunks at a time, so that intermediate values stay in the cache. (torch.compile would halve the
CPU's time again, but takes seconds to compile, and needs a C++ compiler.)

- Zeros stay exact. The error is at most 0.52 of a step, ``1 / scale``, in a chunk that is wider
  than 1/500 of its values, and 2 steps in a chunk that is wider than 1/65,000 of its values.
- In a narrower chunk, such as a constant one, float32 cannot hold ``lower`` exactly. The code 256
  then occurs and wraps to 0, as in Bagua. The error of x' is at most the chunk's width + 1e-7, or
  2e-5 of its greatest value.
- Rounding can put the minimum just below ``lower``. Its code is 0. A wrapped code would be 255,
  which stands for the maximum.
- Every element decodes to NaN if the chunk has an infinity or a NaN, or if its width overflows
  float32.
- Half precision and bfloat16 are computed in float32, which holds them exactly. float64 is first
  rounded to float32. The decoded tensor is float32.
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
# Elements: 1 MiB of float32 stays in a core's cache. Smaller tiles are no faster, and take the GIL
# more often.
TILE = 1 << 18


@torch.no_grad()
def encode(chunks: Tensor, codes: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the codes and bounds of chunks.

    Args:
        chunks: floats ``[n, d]``, one chunk per row.
        codes: output for the codes, uint8 ``[n, d]``; its rows need not be contiguous.

    Returns:
        The codes, uint8 ``[n, d]``, and the bounds (minimum and maximum), float32 ``[n, 2]``.

    Raises:
        ValueError: ``chunks`` is no matrix of floats.
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
    """Return the chunks of which ``encode`` made ``codes`` and ``bounds``, with the error above.

    Args:
        codes: uint8 ``[n, d]``.
        bounds: float32 ``[n, 2]``.
        out: output, float32 ``[n, d]``.

    Returns:
        The chunks, float32 ``[n, d]``; ``out`` if it is given.
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
    """Return the message for ``chunks``, floats ``[n, d]``.

    It is uint8 ``[n, 8 + d]``; each row holds a chunk's two bounds, then its codes.
    """
    rows, columns = chunks.shape
    wire = torch.empty(rows, BOUNDS_BYTES + columns, dtype=torch.uint8, device=chunks.device)
    _, bounds = encode(chunks, wire[:, BOUNDS_BYTES:])
    wire[:, :BOUNDS_BYTES] = bounds.view(torch.uint8)
    return wire


@torch.no_grad()
def decompress(wire: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the chunks of a message of ``compress``, float32 ``[n, d]``, in ``out`` if given."""
    # A copy, because the bounds may be unaligned in the message.
    bounds = wire[:, :BOUNDS_BYTES].clone(memory_format=torch.contiguous_format)
    return decode(wire[:, BOUNDS_BYTES:], bounds.view(torch.float32), out)


@torch.no_grad()
def encode_plain(chunks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result of ``encode`` by the plain formulas: the reference for tests."""
    chunks = _checked(chunks)
    bounds = _bounds(chunks)
    return _encoded(chunks, *_grid(bounds)), bounds


@torch.no_grad()
def decode_plain(codes: Tensor, bounds: Tensor) -> Tensor:
    """Return the result of ``decode`` by the plain formulas: the reference for tests."""
    scale, _, lower = _grid(bounds)
    return _decoded(codes, scale, lower)


def _encoded(chunks: Tensor, scale: Tensor, upper: Tensor, lower: Tensor) -> Tensor:
    raw = torch.minimum(torch.round(chunks * scale), upper) - lower
    # Conversion of a float outside of 0 to 255 to a byte is undefined. 256 wraps to 0; levels below
    # ``lower`` and NaN become 0 too.
    return torch.where((raw >= 0) & (raw < 256), raw, 0).to(torch.uint8)


def _decoded(codes: Tensor, scale: Tensor, lower: Tensor) -> Tensor:
    return (codes.to(torch.float32) + lower) / scale


def _encode_in_tiles(
    chunks: Tensor, scale: Tensor, upper: Tensor, lower: Tensor, codes: Tensor
) -> None:
    """Write the result of ``_encoded`` into ``codes``.

    Work in place for chunks whose raw codes are certainly 0 to 255; call ``_encoded`` for others.
    """
    scratch = chunks.new_empty(min(TILE, chunks.numel()))
    for rows, columns in _tiles(*chunks.shape):
        source = chunks[rows, columns]
        level = scratch[: source.numel()].view(source.shape)
        torch.mul(source, scale[rows], out=level).round_()
        torch.minimum(level, upper[rows], out=level)
        torch.maximum(level, lower[rows], out=level)  # levels below ``lower`` get the code 0
        codes[rows, columns].copy_(level.sub_(lower[rows]))
    strange = ~(upper.abs() < EXACT).squeeze(1)  # NaN too
    if strange.any():
        codes[strange] = _encoded(chunks[strange], scale[strange], upper[strange], lower[strange])


def _tiles(rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of tiles of at most ``TILE`` elements: short rows, or a part of a long row."""
    if not rows or not columns:
        return
    width = min(columns, TILE)
    height = TILE // width
    for row in range(0, rows, height):
        for column in range(0, columns, width):
            yield slice(row, row + height), slice(column, column + width)


def _bounds(chunks: Tensor) -> Tensor:
    """Return the minimum and maximum of each row, ``[n, 2]``, without negative zeros.

    They are NaN if the row has a NaN, and 0 if the row is empty.
    """
    if not chunks.numel():
        return chunks.new_zeros(chunks.shape[0], 2)
    return torch.stack((chunks.amin(1), chunks.amax(1)), 1) + 0.0


def _grid(bounds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``scale``, ``upper`` and ``lower`` of each chunk, ``[n, 1]``.

    The scale is NaN if the bounds or their difference are not finite.
    """
    least, greatest = bounds[:, :1], bounds[:, 1:]
    width = greatest - least + EPSILON
    # ``STEPS / width`` would be 255 times the reciprocal of ``width``, which rounds twice.
    scale = torch.full_like(width, STEPS) / width
    scale = torch.where(scale > 0, scale, torch.nan)
    upper = torch.round(greatest * scale)
    return scale, upper, upper - STEPS


def _checked(chunks: Tensor) -> Tensor:
    if chunks.dim() != 2 or not chunks.is_floating_point():
        raise ValueError(
            "MinMaxUInt8 compresses floats of shape [chunks, elements], not "
            f"{chunks.dtype} of shape {list(chunks.shape)}. "
            "Fix: give it one row per chunk, such as bucket.view(world_size, -1)"
        )
    return chunks.to(torch.float32)


@functools.cache
def _kernels() -> Any:
    """Return the module with the Triton kernels, or None without Triton.

    CUDA then uses the plain formulas, which give the same codes.
    """
    try:
        from geartrain_bagua import minmax_uint8_triton
    except ImportError:
        return None
    return minmax_uint8_triton
