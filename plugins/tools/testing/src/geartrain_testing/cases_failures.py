"""Conformance cases about failures: the run ends in time, names the cause, and leaves nothing."""

from __future__ import annotations

from typing import Any

import pytest

from geartrain_testing.cases_launch import NO_PROC
from geartrain_testing.cases_training import uses
from geartrain_testing.checks import differing
from geartrain_testing.kit import Kit, Run, need
from geartrain_testing.launching import HAS_PROC, until
from geartrain_testing.nets import MEANT

#: Phases in which the last rank raises an error, in order.
PHASES = (
    "setup",
    "configure_optimizers",
    "training_step",
    "validation_step",
    "on_train_end",
    "test_step",
)
SIGNALS = ("SIGKILL", "SIGSEGV", "SIGTERM", "SIGSTOP")


def _ends(run: Run, seconds: float) -> None:
    """Check that the program fails within ``seconds`` of its fault and that no call returns."""
    until(
        lambda: (run.folder / "fault").exists() or run.program.process.poll() is not None,
        run.deadline,
        f"a fault\n{run.shown()}",
    )
    code = run.finish(seconds)
    assert (run.folder / "fault").exists(), f"the program ended before its fault\n{run.shown()}"
    assert code != 0, f"the program succeeded, although its last rank failed\n{run.shown()}"
    survived = sorted(path.name for path in run.folder.glob("survived-*"))
    assert not survived, f"the call returned after a rank had failed, in {survived}\n{run.shown()}"


def _named(run: Run, kit: Kit, *words: str) -> None:
    """Check that the program printed the cause, and the rank if there are several."""
    ranks = (f"rank {kit.ranks - 1}",) if kit.ranks > 1 else ()
    for word in (*words, *ranks):
        assert word in run.program.err, f"the output does not name {word!r}\n{run.shown()}"


def _nothing_left(run: Run) -> None:
    remaining = run.program.left_behind()
    assert remaining == [], f"left behind after the failure: {remaining}\n{run.shown()}"


def _as_quiet(run: Run, kit: Kit, where: str) -> None:
    """Check that the caller has the weights and metrics of the scenario ``adam``, bit for bit."""
    (found,), (expected,) = run.report.caller, kit.report("adam").caller
    off = differing(found["weights"], expected["weights"], rtol=0.0, atol=0.0)
    assert not off, f"{where}, the weights differ from those of a quiet run, by at most {off}"
    assert found["metrics"] == expected["metrics"], (
        f"{where}, the metrics are {found['metrics']}, and in a quiet run {expected['metrics']}"
    )


class FailureCases:
    """Cases in which a rank fails."""

    @pytest.mark.parametrize("phase", PHASES)
    def test_error_in(self, kit: Kit, phase: str) -> None:
        """After an exception on the last rank the run ends, names it, and tears every rank down."""
        need(HAS_PROC, NO_PROC)
        with kit.program(
            "fault", f"error-in-{phase}", {"fault": {"kind": "exception", "where": phase}}
        ) as run:
            _ends(run, kit.deadline)
            _named(run, kit, f"{MEANT} {phase}")
            _nothing_left(run)
            marks = {path.name for path in run.folder.iterdir()}
            for message, mark in (
                ("the module's teardown", "teardown"),
                ("teardown_process_group", "left"),
            ):
                missing = [rank for rank in range(kit.ranks) if f"{mark}-{rank}" not in marks]
                assert not missing, f"{message} was not called on ranks {missing}\n{run.shown()}"

    @uses("adam")
    def test_recovers(self, kit: Kit) -> None:
        """If a rank is killed once, the run ends with the bits of a quiet one."""
        need(kit.can.recovers, "recovers is not declared")
        need(HAS_PROC, NO_PROC)
        with kit.program("killed", "recovers", {}) as run:
            code = run.finish()
            assert (run.folder / "killed").exists(), f"no rank was killed\n{run.shown()}"
            assert code == 0, f"the run has not recovered\n{run.shown()}"
            _as_quiet(run, kit, "after a kill")
            _nothing_left(run)

    @uses("adam")
    def test_ranks_on_one_device(self, kit: Kit) -> None:
        """All ranks on one device, by ``ranks_option``, have the bits of one rank a device."""
        option = kit.can.ranks_option
        need(option is not None, "ranks_option is None: each device has a fixed number of ranks")
        options = {**kit.request.options, str(option): kit.ranks}
        with kit.program("adam", "ranks-on-one", {"devices": 1, "options": options}) as run:
            code = run.finish()
            assert code == 0, f"the run failed\n{run.shown()}"
            _as_quiet(run, kit, "on one device")

    @pytest.mark.parametrize("kind", SIGNALS)
    def test_signal(self, kit: Kit, kind: str) -> None:
        """After a signal to the last rank the run ends, names rank and signal, and leaves nothing.

        If the signal stops the rank, the run ends at the strategy's timeout or sooner.
        """
        need(kit.ranks > 1, "one process that is killed cannot report it")
        need(HAS_PROC, NO_PROC)
        option, seconds = kit.can.timeout_option, kit.deadline
        changes: dict[str, Any] = {"fault": {"kind": kind, "where": "training_step"}}
        if kind == "SIGSTOP":
            need(
                option is not None,
                "timeout_option is None: the strategy has no timeout for a rank that hangs",
            )
            changes["options"] = {**kit.request.options, str(option): kit.timeout}
            seconds += kit.timeout
        with kit.program("fault", kind, changes) as run:
            _ends(run, seconds)
            _named(run, kit, *(() if kind == "SIGSTOP" else (kind,)))
            _nothing_left(run)
