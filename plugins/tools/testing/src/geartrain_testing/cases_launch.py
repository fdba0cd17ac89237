"""Conformance cases about metadata, several nodes, and leftovers."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys

from geartrain_testing.cases_training import uses
from geartrain_testing.checks import equal_weights
from geartrain_testing.kit import ONE_DEVICE, TWO_NODES, Kit, fits, need
from geartrain_testing.launching import HAS_PROC, LOOPBACK, free_port

NO_PROC = "processes and sockets are found through Linux's /proc"

_LISTED = """
import json, sys
from geartrain.commands import main
main(["plugins", "--json"])
print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


class LaunchCases:
    """Cases about the start and the end of a run."""

    def test_metadata(self, kit: Kit) -> None:
        """The strategy is an entry point of an installed wheel, and its options have types.

        ``geartrain plugins`` lists it without importing it.
        """
        entry, label = kit.candidate.entry_point, kit.candidate.label
        assert entry.dist is not None, f"{label}: no installed distribution has this entry point"
        assert entry.dist.read_text("WHEEL"), (
            f"{label}: {kit.candidate.distribution} has no WHEEL metadata. Fix: install it with pip"
        )
        listed = subprocess.run(
            [sys.executable, "-c", _LISTED],
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )
        assert listed.returncode == 0, listed.stderr
        row = next(
            row
            for row in json.loads(listed.stdout)
            if (row["kind"], row["name"]) == ("strategy", kit.candidate.name)
        )
        assert (row["state"], row["distribution"]) == ("installed", kit.candidate.distribution), row
        if entry.module.partition(".")[0] != "geartrain":
            assert entry.module not in json.loads(listed.stderr.splitlines()[-1]), (
                f"geartrain plugins imported {entry.module}"
            )
        cls = entry.load()
        assert inspect.isclass(cls), f"{label}: its entry point gives {cls!r}, not a class"
        untyped = [
            name
            for name, parameter in inspect.signature(cls).parameters.items()
            if parameter.annotation is parameter.empty
            or parameter.kind is parameter.VAR_POSITIONAL
            or (parameter.kind is parameter.VAR_KEYWORD and not hasattr(cls, "more_options"))
        ]
        assert not untyped, (
            f"{label}: options without a type: {untyped}, so the command line cannot read them"
        )

    @uses("sgd")
    def test_nothing_is_left(self, kit: Kit) -> None:
        """Successful programs leave no process, no shared memory and no temporary file."""
        need(HAS_PROC, NO_PROC)
        assert kit.reports.left_behind == [], "left behind by programs that succeeded"

    @uses("sgd")
    def test_process_group_is_left(self, kit: Kit) -> None:
        """``teardown_process_group`` ran on every rank and destroyed torch.distributed's group."""
        for report in kit.reports.by_name.values():
            if report.error is not None:  # another test's failure
                continue
            marks = {path.name for path in report.folder.iterdir()}
            missing = [rank for rank in range(kit.ranks) if f"left-{rank}" not in marks]
            assert not missing, (
                f"{report.name}: teardown_process_group was not called on ranks {missing}"
            )
            stays = sorted(mark for mark in marks if mark.startswith("group-stays"))
            assert not stays, (
                f"{report.name}: torch.distributed is still initialized after "
                f"teardown_process_group: {stays}"
            )
            assert not any(seen["group stays"] for seen in report.caller), (
                f"{report.name}: torch.distributed is still initialized in the caller after the run"
            )

    @uses("sgd", start=ONE_DEVICE)
    def test_one_device(self, kit: Kit) -> None:
        """On one device the weights equal those of one process."""
        need(kit.request.devices > 1, "the other cases run on one device")
        (record,) = kit.report("sgd", ONE_DEVICE).ranks()
        expected = kit.reference("sgd", ONE_DEVICE).ranks()[0]
        if kit.can.convergence is None:
            equal_weights(kit, record, expected, "the one rank")

    @uses("sgd", start=TWO_NODES)
    def test_multi_node(self, kit: Kit) -> None:
        """Two programs with NODE_RANK, MASTER_ADDR and MASTER_PORT equal one process.

        Each has one device. If several nodes are declared unsupported, they are refused before
        anything starts.
        """
        if not kit.can.multi_node:
            node = {"NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            with kit.program("sgd", "multi-node", {"devices": 1, "num_nodes": 2}, node) as run:
                code = run.finish()
                assert code == 2, (
                    "multi_node is declared unsupported: "
                    f"num_nodes=2 must be a UsageError (exit code 2)\n{run.shown()}"
                )
                assert not list(run.folder.glob("fit-*")), "a run started before the error"
            return
        records = kit.report("sgd", TWO_NODES).ranks()
        assert [record["rank"] for record in records] == [0, 1], (
            f"ranks {[record['rank'] for record in records]} of two nodes"
        )
        if kit.can.convergence is None:
            expected = kit.reference("sgd", TWO_NODES).ranks()[0]
            for record in records:
                equal_weights(kit, record, expected, f"rank {record['rank']} of two nodes")

    @uses("listens")
    def test_loopback_only(self, kit: Kit) -> None:
        """On one machine nothing listens outside loopback during training."""
        need(kit.ranks > 1, "one process has no peer")
        need(HAS_PROC, NO_PROC)
        addresses = kit.report("listens").ranks()[0]["notes"]["listening"]
        found = sorted(set(addresses) - set(LOOPBACK))
        if kit.can.loopback_only:
            where = f"listens on addresses outside loopback (as in /proc/net): {found}"
            assert not found, where + fits("loopback_only=False")
        else:
            assert found, "loopback_only is declared off, and nothing listens outside loopback"
