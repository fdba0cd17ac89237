"""examples/digits.py reaches a validation accuracy of 0.97 with each algorithm, on two ranks."""

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
def test_digits_are_learnt_with_every_algorithm(tmp_path):
    arguments = (str(HERE / "digits.py"), str(HERE.parents[1]), *ALGORITHMS)
    with launched(*arguments, folder=tmp_path) as run:
        run.succeed(380)
    lines = map(str.split, run.out.splitlines())
    reached = {algorithm: float(accuracy) for algorithm, accuracy, _ in lines}
    assert list(reached) == list(ALGORITHMS)
    assert min(reached.values()) >= 0.97, reached
