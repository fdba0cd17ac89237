"""examples/digits.py learns under every algorithm: 0.97 of the digits it has not seen, on two ranks."""

from pathlib import Path

import pytest

from geartrain_testing.launching import launched

HERE = Path(__file__).parent
ALGORITHMS = (
    "gradient_allreduce",
    "bytegrad",
    "qadam",
    "decentralized",
    "low_precision_decentralized",
    "async",
    "half",
    "power_sgd",
)


@pytest.mark.example
@pytest.mark.timeout(400)
def test_digits_are_learnt_under_every_algorithm(tmp_path):
    with launched(
        str(HERE / "digits.py"), str(HERE.parents[1]), *ALGORITHMS, folder=tmp_path
    ) as run:
        run.succeed(380)
    reached = {
        algorithm: float(accuracy)
        for algorithm, accuracy, _ in map(str.split, run.out.splitlines())
    }
    assert list(reached) == list(ALGORITHMS)
    assert min(reached.values()) >= 0.97, reached
