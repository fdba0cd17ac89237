"""The combinations under strategies that start processes; each program has a deadline.

One program runs all cases of a strategy that end well. Each other case is a separate program, and
one more program resumes all of these.
"""

import json
import signal
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pytest
import torch

from geartrain_testing.launching import HAS_PROC, launched

from .case import FACTORS, INTERRUPTED, OWN, Case, differences, train, unexpected_files
from .pairwise import Pair, pairwise

STRATEGIES = ["ddp", "ddp_spawn", "dp", "bagua", "horovod"]
#: dp splits a batch's tensors without regard to the graph of a node. Autocast does not reach its
#: threads.
NEVER = [
    Pair([("strategy", "dp"), other]) for other in (("data", "graphs"), ("precision", "bf16-mixed"))
]
CASES = [Case(**row) for row in pairwise({"strategy": STRATEGIES, **FACTORS}, NEVER)]
FAILS = ("error", "killed")
#: Seconds for a program that trains one case, with time for the peers of a killed rank to end.
ONE_CASE = 60

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.skipif(not HAS_PROC, reason="finds processes through /proc"),
    pytest.mark.timeout(600),  # the first test of a strategy runs its programs
]


def program(folder, name, part, cases):
    """Run a program and return what went wrong, in words and with its output."""
    fails = cases[0].ending in FAILS and part == 1
    words = [json.dumps(asdict(case)) for case in cases]
    with launched(
        str(Path(__file__).with_name("program.py")), str(part), *words, folder=folder, name=name
    ) as run:
        code = run.wait(ONE_CASE + 5 * len(cases))
        printed = run.out + run.err
        wrong = [f"{name} left {left}" for left in run.left_behind()]
    if cases[0].ending == "killed" and cases[0].world == 1 and fails:
        expected = code == -signal.SIGKILL
    elif fails:
        expected = code == 1 and (OWN if cases[0].ending == "error" else "SIGKILL") in printed
    else:
        expected = code == 0
    return wrong if expected else [*wrong, f"{name} ended with {code}:\n{printed}"]


@pytest.fixture(scope="module")
def ended(request, tmp_path_factory):
    """Return a function: by strategy, the folder of its selected cases and their failures."""
    selected = [
        item.callspec.params["case"] for item in request.session.items if item.path == request.path
    ]

    @cache
    def run(strategy):
        folder = tmp_path_factory.mktemp(strategy)
        cases = [case for case in selected if case.strategy == strategy]
        for case in cases:
            (folder / case.id).mkdir()
        wrong = {case: [] for case in cases}
        groups = [("well", 1, [case for case in cases if case.ending not in FAILS])]
        groups += [
            (f"failing-{number}", 1, [case])
            for number, case in enumerate(cases)
            if case.ending in FAILS
        ]
        groups += [("resumed", 2, [case for case in cases if case.ending in INTERRUPTED])]
        for name, part, group in groups:
            found = program(folder, name, part, group) if group else []
            for case in group:
                wrong[case] += found
        return folder, wrong

    return run


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.horovod] * (case.strategy == "horovod"), id=case.id)
        for case in CASES
    ],
)
def test_a_run_has_the_result_of_one_process_and_leaves_nothing(ended, case, tmp_path):
    folder, wrong = ended(case.strategy)
    assert not wrong[case], "\n".join(wrong[case])
    kept = [
        torch.load(path, weights_only=False)
        for path in sorted((folder / case.id).glob("rank-*.pt"))
    ]
    assert len(kept) == (1 if case.strategy == "ddp_spawn" else case.world)
    expected = train(case, tmp_path, 1, reference=True)
    for found in kept:
        assert differences(case, found, expected) == []
    assert unexpected_files(folder / case.id / "run") == []
