"""Bagua's compression: fast code, plain code and the formula on Python floats agree bit by bit."""

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from geartrain_bagua import minmax_uint8
from geartrain_bagua.minmax_uint8 import (
    compress,
    decode,
    decode_plain,
    decompress,
    encode,
    encode_plain,
)

from . import formula

WIDTHS = [0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257]
ODD = torch.tensor(
    [
        0.0,
        -0.0,
        torch.inf,
        -torch.inf,
        torch.nan,
        1e-45,
        -1e-40,
        1.2e-38,
        3.4e38,
        -3.4e38,
        1e30,
        1e-7,
        1.0,
        -1.0,
    ]
)


@st.composite
def chunks(draw) -> torch.Tensor:
    """Draw chunks: numbers of one size, with an offset, of all sizes, constants, and any floats."""
    columns = draw(st.sampled_from(WIDTHS))
    noise = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows = [row(draw, columns, noise) for _ in range(draw(st.integers(0, 2)))]
    return torch.stack(rows) if rows else torch.empty(0, columns)


def row(draw, columns: int, noise: torch.Generator) -> torch.Tensor:
    kind = draw(st.sampled_from(["sized", "offset", "all sizes", "constant", "odd", "any"]))
    if kind == "any":
        few = draw(st.lists(st.floats(width=32), min_size=1, max_size=8))
        return torch.tensor(few).repeat(columns // len(few) + 1)[:columns]
    if kind == "constant":
        return torch.full((columns,), draw(st.floats(width=32)))
    values = torch.randn(columns, generator=noise)
    if kind == "odd":
        places = torch.randint(0, max(columns, 1), (min(columns, 2),), generator=noise)
        values[places] = ODD[torch.randint(0, len(ODD), places.shape, generator=noise)]
        return values
    if kind == "all sizes":
        return values * 10 ** torch.empty(columns).uniform_(-44, 38, generator=noise)
    scaled = values * draw(st.sampled_from([1e-43, 1e-20, 1e-9, 1e-7, 1e-4, 1.0, 1e4, 1e37]))
    if kind == "offset":
        scaled = scaled + draw(st.sampled_from([1e-30, 0.01, 1.0, -3.0, 1e6]))
    return scaled


def bits(x: torch.Tensor) -> list:
    """Return the bits of floats; every NaN has the same bits."""
    return torch.where(x.isnan(), torch.nan, x).contiguous().view(torch.int32).tolist()


def assert_same(got: tuple, expected: tuple) -> None:
    """Compare codes, bounds and decoded values."""
    assert got[0].dtype == expected[0].dtype == torch.uint8
    assert got[0].tolist() == expected[0].tolist()
    assert [bits(x) for x in got[1:]] == [bits(x) for x in expected[1:]]


def by_formula(x: torch.Tensor) -> tuple:
    parts = [formula.encode(chunk) for chunk in x.tolist()]
    back = [formula.decode(*part) for part in parts]
    codes = torch.tensor([codes for codes, _ in parts], dtype=torch.uint8).view(x.shape)
    bounds = torch.tensor([bounds for _, bounds in parts]).view(-1, 2)
    return codes, bounds, torch.tensor(back).view(x.shape)


def plainly(x: torch.Tensor) -> tuple:
    codes, bounds = encode_plain(x)
    return codes, bounds, decode_plain(codes, bounds)


def fast(x: torch.Tensor) -> tuple:
    codes, bounds = encode(x)
    return codes, bounds, decode(codes, bounds)


@settings(suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
@given(chunks(), st.sampled_from([4, 24, 200, minmax_uint8.TILE]))
def test_equal_codes_for_any_input(x, tile):
    expected = by_formula(x)
    assert_same(plainly(x), expected)
    with mock.patch.object(minmax_uint8, "TILE", tile):
        assert_same(fast(x), expected)
        wire = compress(x)
        assert bits(decompress(wire)) == bits(expected[2])


@pytest.mark.parametrize("shape", [(1, 1_000_003), (700, 1_001), (300_000, 3)])
def test_equal_codes_if_tiles_and_threads_divide_the_work(shape):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        x[0, 0] = torch.nan
        x[-1] += 1e6
        got, expected = fast(x), plainly(x)
        assert torch.equal(got[0], expected[0])
        torch.testing.assert_close(got[1:], expected[1:], rtol=0, atol=0, equal_nan=True)
    finally:
        torch.set_num_threads(before)


def test_a_chunk_of_d_elements_has_8_bytes_of_bounds_and_d_codes():
    x = torch.randn(3, 1001)
    wire, (codes, bounds) = compress(x), encode(x)
    assert (wire.dtype, wire.shape, wire.is_contiguous()) == (torch.uint8, (3, 1009), True)
    sent = wire[1, :8].clone().view(torch.float32).tolist()
    assert sent == [x[1].min(), x[1].max()] == bounds[1].tolist()
    assert torch.equal(wire[:, 8:], codes)
    out = torch.empty_like(x)
    assert decompress(wire, out) is out
    assert torch.equal(out, decode(codes, bounds))
    assert torch.equal(decompress(wire[1:2].clone()), out[1:2])  # one chunk decodes alone


# If ``lower`` is not exact, the maximum may wrap: the error is 256 steps, the chunk's width.
@pytest.mark.parametrize(
    ("times", "steps"), [(0, 0.52), (400, 0.52), (60_000, 2), (1_000_000, 300)]
)
def test_the_error_in_steps_and_zeros_are_exact(times, steps):
    x = torch.randn(64, 4097, generator=torch.Generator().manual_seed(2))
    x += times * (x.amax(1) - x.amin(1))[:, None]  # an offset of ``times`` the width
    x *= torch.logspace(-2, 6, 64)[:, None]
    if not times:
        x[:, ::7] = 0
    back = decompress(compress(x))
    step = (x.amax(1) - x.amin(1) + 1e-7) / 255
    assert ((back - x).abs().amax(1) <= steps * step).all()
    assert ((back - x).abs().amax(1) <= 2e-5 * x.abs().amax(1) + 0.52 * step).all()
    assert not back[x == 0].any()


def test_the_raw_code_256_wraps_to_0():
    x = torch.ones(1, 40)
    scale, upper, lower = minmax_uint8._grid(torch.tensor([[1.0, 1.0]]))
    assert (torch.round(1.0 * scale) - lower).item() == (upper - lower).item() == 256
    assert encode(x)[0].tolist() == encode_plain(x)[0].tolist() == [[0] * 40]


@pytest.mark.parametrize("value", [1.0, 1e30, torch.nan, torch.inf])
def test_only_floats_of_0_to_255_are_converted_to_bytes(value):
    """Other conversions are undefined: the result on one processor proves nothing about others."""
    x = torch.cat([torch.randn(1, 40), torch.full((1, 40), value)])
    with mock.patch.object(minmax_uint8, "_encoded", wraps=minmax_uint8._encoded) as by_plain_lines:
        encode(x)
    (chunk, *_), _ = by_plain_lines.call_args
    torch.testing.assert_close(chunk, x[1:], rtol=0, atol=0, equal_nan=True)


# The minimum's level is ``lower`` - 1. If it wrapped to 255, it would decode to the maximum.
@pytest.mark.parametrize(
    ("least", "greatest"),
    [
        ("0x1.d3f5d4p-1", "0x1.daec78p-1"),
        ("-0x1.a5eafcp+9", "-0x1.a5baf8p+9"),
        ("0x1.157ecep+66", "0x1.15b012p+66"),
    ],
)
def test_the_minimum_never_decodes_to_the_maximum(least, greatest):
    x = torch.tensor([float.fromhex(least), float.fromhex(greatest)]).repeat(1, 20)
    scale, _, lower = minmax_uint8._grid(torch.tensor([[x[0, 0], x[0, 1]]]))
    assert (torch.round(x[0, 0] * scale) - lower).item() == -1
    for codes, bounds in (encode(x), encode_plain(x)):
        assert codes[0, :2].tolist() == [0, 255]
        assert (decode(codes, bounds) - x).abs().max() <= 0.6 / scale


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_shorter_floats_are_computed_in_float32(dtype):
    x = torch.randn(3, 100).to(dtype)
    assert_same(fast(x), fast(x.float()))
    assert decompress(compress(x)).dtype == torch.float32


def test_float64_is_rounded_to_float32_first():
    x = torch.randn(3, 100, dtype=torch.float64)
    assert_same(fast(x), fast(x.float()))
    x[1, 1] = 1e300
    assert decompress(compress(x)).isnan().all(1).tolist() == [False, True, False]


def test_torchs_settings_do_not_change_the_result():
    x = torch.randn(2, 100)
    expected = fast(x)
    x.requires_grad_()
    torch.set_default_dtype(torch.float64)
    try:
        got = fast(x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(got, expected)
    assert not got[2].requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(fast(x), expected)


def test_rows_and_elements_need_not_be_contiguous():
    x = torch.randn(200, 90)
    assert_same(fast(x.t()), fast(x.t().contiguous()))
    assert_same(fast(x[::3, 5:60]), fast(x[::3, 5:60].contiguous()))
    out = torch.zeros(200, 180)
    decode(*encode(x), out[:, ::2])
    assert torch.equal(out[:, ::2], decode(*encode(x)))
    assert not out[:, 1::2].any()


@pytest.mark.parametrize(
    "wrong", [torch.zeros(4), torch.zeros(2, 2, 2), torch.zeros(2, 2, dtype=torch.int32)]
)
def test_only_a_matrix_of_floats_is_accepted(wrong):
    for compressing in (encode, encode_plain):
        with pytest.raises(ValueError, match=r"floats of shape \[chunks, elements\].*Fix: "):
            compressing(wrong)


# --- the Triton kernels ---------------------------------------------------------------------------

INTERPRETED = """
import torch
from tests.bagua.test_minmax_uint8 import kernels_agree
kernels_agree("cpu")
print("agreed")
"""


def kernels_agree(device: str) -> None:
    """Compare the kernels with the plain code, on chunks like those of ``chunks``."""
    from geartrain_bagua import minmax_uint8_triton as kernels

    noise = torch.Generator().manual_seed(3)
    for columns in (1, 2, 31, 33, 129, 4096, 5001):
        x = torch.randn(12, columns, generator=noise)
        sizes = [1e-43, 1e-20, 1e-9, 1e-7, 1e-4, 1.0, 10.0, 1e4, 1e37, 1.0, 0.0, 1.0]
        x *= torch.tensor(sizes)[:, None]
        x += torch.tensor([0, 0, 0, 0, 0.01, 1.0, -3.0, 1e6, 0, 0, 1.0, 1e30])[:, None]
        x[9, :: max(columns // 14, 1)] = ODD.repeat(2)[: len(x[9, :: max(columns // 14, 1)])]
        if columns > 1:
            pair = [float.fromhex("0x1.d3f5d4p-1"), float.fromhex("0x1.daec78p-1")]
            x[11] = torch.tensor(pair).repeat(columns)[:columns]
        x = x.to(device)
        scale, upper, lower = minmax_uint8._grid(minmax_uint8._bounds(x))
        wire = torch.full((12, columns + 8), 77, dtype=torch.uint8, device=device)
        kernels.encode(x, scale, upper, lower, wire[:, 8:])
        expected = plainly(x)
        assert torch.equal(wire[:, 8:], expected[0])
        assert (wire[:, :8] == 77).all()
        out = torch.full_like(x, 7.0)
        kernels.decode(wire[:, 8:], scale, lower, out)
        assert bits(out) == bits(expected[2])


def test_triton_kernels_in_tritons_interpreter():
    pytest.importorskip("triton", reason="triton is not installed: CPU builds of torch lack it")
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout.strip() == "agreed", done.stderr


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_with_triton_and_without():
    pytest.importorskip("triton", reason="triton is not installed")
    kernels_agree("cuda")
    x = torch.randn(3, 100_003)
    expected = fast(x)
    assert_same(tuple(part.cpu() for part in fast(x.cuda())), expected)
    with mock.patch.object(minmax_uint8, "_kernels", return_value=None):
        assert_same(tuple(part.cpu() for part in fast(x.cuda())), expected)
