"""Launch a run of several processes: join a launcher's, or start this node's other ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

# Import this before any process group exists. Its functions keep the group that is the default when
# they are defined, and optimizers import it through torch._dynamo. A group that outlives
# destroy_process_group() may abort the interpreter at its end.
import torch.distributed.nn.functional

from geartrain.plugin_api import ClusterEnvironment, detect
from geartrain_parallel import nodes, rendezvous, sealed, sockets
from geartrain_parallel.forks import adopt_temporary_folder, guard_forks
from geartrain_parallel.reports import begin, disconnect_if_failed, leave, report
from geartrain_parallel.signals import raise_on_signals
from geartrain_parallel.workers import Workers, at_exit

if TYPE_CHECKING:
    from geartrain import Run

#: The ranks that this process has started; a second run of the same program works with the same
#: ranks.
_workers: list[Workers] = []
_runs = 0
_excepthook = sys.excepthook


def launch(
    run: Run, worker: Callable[[int], Any], timeout: timedelta = timedelta(minutes=30)
) -> Any:
    """Call ``worker`` as one of the plan's processes.

    Start this node's other ranks unless a launcher has started them. If ``worker`` has a method
    ``keep``, this process stays a rank after the call: ``keep`` gets an ExitStack that ends this
    when it is closed.

    Args:
        run: this process's run.
        worker: called with the local rank.
        timeout: how long to wait for ranks.

    Returns:
        The return value of ``worker`` in this process.
    """
    global _runs, _excepthook
    with ExitStack() as around:
        place = detect()
        if place is None:
            before, place = dict(os.environ), start(run, timeout)
            if place.size == 1:  # programs that start later must not be ranks of this run
                around.callback(_put_back, before, (*variables(place), "GLOO_SOCKET_IFNAME"))
        else:
            place = nodes.with_address(place)
        place.check(run.plan)
        _runs += 1
        # Each init_process_group() wraps excepthook again, and adds another [rank0] to each line.
        if getattr(sys.excepthook, "__name__", "") == "_distributed_excepthook":
            sys.excepthook = _excepthook
        _excepthook = sys.excepthook
        around.enter_context(_workers[0].supervised() if _workers else raise_on_signals())
        around.enter_context(_connected(run, place, f"launched/{_runs}", timeout))
        result = worker(place.local_rank)
        if hasattr(worker, "keep"):
            worker.keep(around.pop_all())
        return result


def join(
    run: Run,
    worker: Callable[[int], Any],
    place: ClusterEnvironment,
    number: int,
    timeout: timedelta = timedelta(minutes=30),
) -> Any:
    """Call ``worker`` as the rank of ``place``, in a process that a strategy has started.

    Args:
        run: the caller's run, unpickled or forked.
        worker: called with the local rank.
        place: the rank and the address of rank 0.
        number: the number of this run in the program, the same on every rank.
        timeout: how long to wait for ranks.

    Returns:
        The return value of ``worker`` in this process.
    """
    run.trainer.cluster = place
    with raise_on_signals(), _connected(run, place, f"joined/{number}", timeout):
        return worker(place.local_rank)


@contextmanager
def _connected(run: Run, place: ClusterEnvironment, key: str, timeout: timedelta) -> Iterator[None]:
    """Connect to the other ranks; after an error disconnect from them.

    Args:
        key: the run's name, unique in the program and the same on every rank.
    """
    guard_forks()
    adopt_temporary_folder()
    run.cluster, run.loop.report_failure, run.loop.report_teardown = place, report, leave
    before = sockets.open_sockets()
    begin(lambda: sockets.shut_down(sockets.open_sockets() - before))
    try:
        name = sockets.interface(place)
        if name is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        store = rendezvous.run_store(place, key, timeout)
        # Not for NCCL, whose threads ask the store when Python may have ended.
        is_sealed = run.plan.accelerator.name == "cpu" and sealed.SECRET in os.environ
        run.store = rendezvous.SealedStore(store) if is_sealed else store
        yield
    except BaseException as error:
        report(error)
        # While a reference to the group exists, shutdown(), abort() and destroy_process_group() do
        # not close gloo's connections.
        disconnect_if_failed()
        raise


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
    """Return the places of this node's ranks; on node 0, also serve the program's store.

    Raises:
        UsageError: with several nodes, the environment has no node rank or no address of rank 0.
    """
    local_size, num_nodes = run.plan.layout.processes_per_node, run.plan.num_nodes
    assert local_size is not None
    # The launchers of several nodes do not know each other.
    if num_nodes == 1 and local_size > 1:
        sealed.share_secret()
    node = nodes.node_rank(num_nodes)
    address, port = nodes.master(num_nodes)
    if node == 0:
        port = rendezvous.serve_program(address, port, timeout)
    assert port is not None
    return [
        ClusterEnvironment(
            "geartrain",
            node * local_size + i,
            local_size * num_nodes,
            i,
            local_size,
            node,
            address,
            port,
        )
        for i in range(local_size)
    ]


def threads(processes: int) -> int:
    """Return the number of threads for each of a node's processes.

    By default torch uses all cores in each process, which is slow if several processes compete.
    """
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    return int(os.environ.get("OMP_NUM_THREADS") or max(1, cores // processes))


def _put_back(before: Mapping[str, str], names: Iterable[str]) -> None:
    """Restore variables of the environment to their earlier values, or remove them."""
    for name in names:
        if name in before:
            os.environ[name] = before[name]
        else:
            os.environ.pop(name, None)


def variables(place: ClusterEnvironment) -> dict[str, str]:
    """Return the environment variables of a rank, including those that torch reads."""
    return {
        ClusterEnvironment.started_by: str(os.getpid()),
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_size),
        "NODE_RANK": str(place.node_rank),
        "MASTER_ADDR": str(place.master_addr),
        "MASTER_PORT": str(place.master_port),
        "OMP_NUM_THREADS": str(threads(place.local_size)),
        # A store exists: init_process_group() must connect to it and not start another one.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
