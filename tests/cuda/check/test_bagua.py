"""Bagua's compression: the codes of the device are those of the CPU."""

import pytest
import torch

from geartrain_bagua.minmax_uint8 import decode, encode, encode_plain

from .device import DEVICE, ON_DEVICE, Net, assert_equal, fit

pytestmark = ON_DEVICE

SHAPES = [(1, 1), (2, 1000), (8, 2**16 + 3), (3, 10_000)]


def chunks(shape, dtype, scale):
    random = torch.Generator().manual_seed(sum(shape))
    rows = torch.randn(shape, generator=random) * scale
    rows[0] = 0.25  # a constant chunk
    return rows.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("shape", SHAPES)
def test_codes_and_decoded_values_are_those_of_the_cpu(shape, dtype, scale):
    rows = chunks(shape, dtype, scale)
    codes, bounds = encode(rows.to(DEVICE))
    assert codes.device.type == DEVICE
    right, right_bounds = encode_plain(rows)
    assert torch.equal(codes.cpu(), right)
    assert torch.equal(bounds.cpu(), right_bounds)
    assert torch.equal(decode(codes, bounds).cpu(), decode(right, right_bounds))


def test_rows_that_are_not_finite_decode_to_nan():
    rows = chunks((3, 100), torch.float32, 1.0)
    rows[1, 7], rows[2, 9] = float("inf"), float("nan")
    decoded = decode(*encode(rows.to(DEVICE))).cpu()
    assert decoded[0].isfinite().all()
    assert decoded[1:].isnan().all()


@pytest.mark.parametrize("algorithm", ["bytegrad", "low_precision_decentralized"])
def test_a_run_has_the_result_of_the_cpu(algorithm):
    options = {"strategy": "bagua", "strategy_options": {"algorithm": algorithm}}
    on_cpu = fit(accelerator="cpu", **options)
    # A code that differs by one after other roundings changes a weight by a step of Adam.
    assert_equal(fit(Net(), **options), on_cpu, rtol=0, atol=0.05)
