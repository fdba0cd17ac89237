# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator"
"""The inner loops of MinMaxUInt8 as Triton kernels; ``minmax_uint8`` has the formulas.

Import this module on CUDA only. torch computes the bounds, scale, upper and lower, with one
reduction. A kernel then reads each element once and writes its code, or the reverse. Kernels must
not contract, reorder or approximate; otherwise ranks would decode different values. So they use no
fused multiply-add, an exact rounding, and a division that rounds as in IEEE 754.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # elements per program


def encode(chunks: Tensor, scale: Tensor, upper: Tensor, lower: Tensor, codes: Tensor) -> None:
    """Write the codes of ``chunks`` into ``codes``, both ``[n, d]``; the others are ``[n, 1]``.

    Rows need not be contiguous; a matrix whose elements in a row are not contiguous is copied.
    """
    chunks, codes_, (rows, columns) = _rows(chunks), _rows(codes), chunks.shape
    if chunks.numel():
        grid = (triton.cdiv(columns, BLOCK), rows)
        _encode[grid](
            chunks,
            codes_,
            scale,
            upper,
            lower,
            columns,
            chunks.stride(0),
            codes_.stride(0),
            BLOCK=BLOCK,
            enable_fp_fusion=False,
        )
    if codes_ is not codes:
        codes.copy_(codes_)


def decode(codes: Tensor, scale: Tensor, lower: Tensor, out: Tensor) -> None:
    """Write the values of ``codes`` into ``out``, both ``[n, d]``; the others are ``[n, 1]``.

    Rows need not be contiguous; a matrix whose elements in a row are not contiguous is copied.
    """
    codes, out_, (rows, columns) = _rows(codes), _rows(out), codes.shape
    if codes.numel():
        grid = (triton.cdiv(columns, BLOCK), rows)
        _decode[grid](
            codes,
            out_,
            scale,
            lower,
            columns,
            codes.stride(0),
            out_.stride(0),
            BLOCK=BLOCK,
            enable_fp_fusion=False,
        )
    if out_ is not out:
        out.copy_(out_)


def _rows(matrix: Tensor) -> Tensor:
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


@triton.jit
def _rint(x):
    # The rounding of the sum rounds halves to even; from 2**23 on every float32 is an integer.
    size = tl.abs(x)
    whole = tl.where(size < 8388608.0, (size + 8388608.0) - 8388608.0, size)
    return tl.where(x < 0, -whole, whole)


@triton.jit
def _encode(
    chunks, codes, scale, upper, lower, columns, chunk_stride, code_stride, BLOCK: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(chunks + row * chunk_stride + column, mask=inside, other=0.0)
    raw = tl.minimum(_rint(x * tl.load(scale + row)), tl.load(upper + row)) - tl.load(lower + row)
    code = tl.where((raw >= 0.0) & (raw < 256.0), raw, 0.0)
    tl.store(codes + row * code_stride + column, code.to(tl.int32).to(tl.uint8), mask=inside)


@triton.jit
def _decode(codes, out, scale, lower, columns, code_stride, out_stride, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    code = tl.load(codes + row * code_stride + column, mask=inside, other=0)
    x = tl.div_rn(code.to(tl.float32) + tl.load(lower + row), tl.load(scale + row))
    tl.store(out + row * out_stride + column, x, mask=inside)
