"""Launch a run of several processes: join where something started this process as one of several, else start the others."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

# Imported before any process group is made: its functions keep the group that is the default when they are defined, optimizers import
# it by way of torch._dynamo, and a group that outlives destroy_process_group() may abort the interpreter at its end.
import torch.distributed.nn.functional

from geartrain.errors import UsageError
from geartrain.launch import cluster as environment, rendezvous
from geartrain.launch.cluster import STARTED_BY, ClusterEnvironment
from geartrain.launch.forks import adopt_temporary_folder, guard_forks
from geartrain.launch.reports import begin, disconnect_if_failed, report
from geartrain.launch.signals import raise_on_signals
from geartrain.launch.supervisor import Workers, at_exit

if TYPE_CHECKING:
    from geartrain.loop.run import Run

#: What this process has started; a second run of the same program works with the same ranks.
_workers: list[Workers] = []
_runs = 0
_excepthook = sys.excepthook


def launch(run: Run, worker: Callable[[int], Any], timeout: timedelta = timedelta(minutes=30)) -> Any:
    """Call ``worker`` as one of the plan's processes, after starting this node's others where nobody else has.

    Args:
        timeout: how long to wait for ranks to come.

    Returns:
        What ``worker`` returned in this process. Where ``worker`` has a method ``keep``, this process goes on as a rank: ``keep`` gets
        the ExitStack whose end ends that.
    """
    with ExitStack() as around:
        place = environment.detect()
        if place is None:
            before, place = dict(os.environ), start(run, timeout)
            if place.size == 1:  # what this program starts later is no rank of this run
                around.callback(_put_back, before, (*variables(place), "GLOO_SOCKET_IFNAME"))
        result = _launched(run, worker, place, timeout, around)
        if hasattr(worker, "keep"):
            worker.keep(around.pop_all())
        return result


def _launched(run: Run, worker: Callable[[int], Any], place: ClusterEnvironment, timeout: timedelta, around: ExitStack[bool | None]) -> Any:
    """Call ``worker`` as one of the ranks, which exist."""
    global _runs, _excepthook
    check(run, place)
    _runs += 1
    if getattr(sys.excepthook, "__name__", "") == "_distributed_excepthook":
        sys.excepthook = _excepthook  # each init_process_group() wraps it anew, and an error's lines would say [rank0] once a run
    _excepthook = sys.excepthook
    around.enter_context(_workers[0].supervised() if _workers else raise_on_signals())
    around.enter_context(_connected(run, place, f"launched/{_runs}", timeout))
    return worker(place.local_rank)


def join(run: Run, worker: Callable[[int], Any], place: ClusterEnvironment, number: int, timeout: timedelta = timedelta(minutes=30)) -> Any:
    """Call ``worker`` as the rank that ``place`` says, in a process that something else has started and watches; ``run`` is the
    caller's, unpickled or forked.

    Args:
        number: which run of the program this is; the same on every rank.
        timeout: how long to wait for ranks to come.

    Returns:
        What ``worker`` returned in this process.
    """
    run.trainer.cluster = place
    with raise_on_signals(), _connected(run, place, f"joined/{number}", timeout):
        return worker(place.local_rank)


@contextmanager
def _connected(run: Run, place: ClusterEnvironment, key: str, timeout: timedelta) -> Iterator[None]:
    """Meet the other ranks; after an error let go of them.

    Args:
        key: names the run among all runs of the program, the same on every rank.
    """
    guard_forks()
    adopt_temporary_folder()
    run.cluster = place
    before = _sockets()
    begin(lambda: _disconnect(_sockets() - before))
    try:
        name = rendezvous.interface(place)
        if name is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        run.store = rendezvous.run_store(place, key, timeout)
        yield
    except BaseException as error:
        report(error)
        # Neither shutdown(), abort() nor destroy_process_group() closes gloo's connections while something refers to the group.
        disconnect_if_failed()
        raise


def _sockets() -> set[tuple[int, str]]:
    """This process's open sockets: (descriptor, identity). Empty where there is no /proc."""
    found = set()
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the descriptor of the listing itself
            continue
        if target.startswith("socket:"):
            found.add((int(name), target))
    return found


def _disconnect(sockets: set[tuple[int, str]]) -> None:
    """Close the TCP connections of a run that failed; their owners keep the descriptors."""
    for descriptor, _ in sockets:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                connection.getpeername()  # raises for a listening one, which gloo must keep: it aborts when accept() fails
                connection.shutdown(socket.SHUT_RDWR)


def check(run: Run, place: ClusterEnvironment) -> None:
    """Refuse a plan and an environment that disagree.

    Raises:
        UsageError: with both numbers; or nobody knows where rank 0 is.
    """
    planned = run.plan.processes
    if place.master_addr is None:
        raise UsageError(
            f"{place.launcher} started {place.size} processes on {place.nodes} nodes, and does not say where rank 0 is, which "
            f"{run.plan.strategy.label} must know. Fix: set MASTER_ADDR and MASTER_PORT on every node, or --strategy horovod"
        )
    if planned is None or planned == place.size:
        return
    per_node, nodes = run.plan.layout.processes_per_node, run.plan.num_nodes
    who = "the first fit of this program" if place.launcher == "geartrain" else place.launcher
    raise UsageError(
        f"the plan has {planned} processes ({per_node} on each of {nodes} nodes), but {who} started {place.size} "
        f"({place.local_size} on each of {place.nodes} nodes). "
        f"Fix: --devices {place.local_size} --num-nodes {place.nodes}, or start {planned}"
    )


def start(run: Run, timeout: timedelta) -> ClusterEnvironment:
    """Start this node's other ranks and become its first."""
    places = reserve(run, timeout)
    if len(places) > 1:
        logs = None if run.output is None else run.output / "logs"
        _workers.append(Workers([variables(place) for place in places[1:]], logs))
        at_exit(_workers[0])
    os.environ.update(variables(places[0]))
    if len(places) > 1:
        torch.set_num_threads(threads(len(places)))
    return places[0]


def reserve(run: Run, timeout: timedelta) -> list[ClusterEnvironment]:
    """The places of this node's ranks; on node 0 this process serves the store through which all of them meet.

    Raises:
        UsageError: several nodes, and the environment does not say which this is or where rank 0 will be.
    """
    local_size, nodes = run.plan.layout.processes_per_node, run.plan.num_nodes
    assert local_size is not None
    node = environment.node_rank(nodes)
    address, port = environment.master(nodes)
    if node == 0:
        port = rendezvous.serve_program(address, port, timeout)
    assert port is not None
    return [
        ClusterEnvironment("geartrain", node * local_size + i, local_size * nodes, i, local_size, node, address, port)
        for i in range(local_size)
    ]


def threads(processes: int) -> int:
    """Threads for each of a node's processes: with torch's default, each would take all cores and they would take turns."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(os.environ.get("OMP_NUM_THREADS") or max(1, cores // processes))


def _put_back(before: Mapping[str, str], names: Iterable[str]) -> None:
    """Give variables of the environment the values that they had, or none."""
    for name in names:
        if name in before:
            os.environ[name] = before[name]
        else:
            os.environ.pop(name, None)


def variables(place: ClusterEnvironment) -> dict[str, str]:
    """What a rank's environment says of its place, for itself and for code that asks torch's variables."""
    return {
        STARTED_BY: str(os.getpid()),
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_size),
        "NODE_RANK": str(place.node_rank),
        "MASTER_ADDR": str(place.master_addr),
        "MASTER_PORT": str(place.master_port),
        "OMP_NUM_THREADS": str(threads(place.local_size)),
        # The store is served already: whoever calls init_process_group() must connect, not serve one of its own.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
