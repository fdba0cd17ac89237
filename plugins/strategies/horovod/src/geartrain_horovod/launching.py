"""Start of the ranks, and initialisation of Horovod.

Under ``horovodrun``, and under MPI if Horovod was built with MPI, Horovod connects the launcher's
processes itself. Otherwise geartrain starts or finds the ranks as it does for ddp. Rank 0 then runs
Horovod's rendezvous server, and the run's store holds its address.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from geartrain import Run, TrainingError
from geartrain.parallel import launch, name_absent_ranks, raise_on_signals
from geartrain.plugin_api import ClusterEnvironment, detect

if TYPE_CHECKING:
    from geartrain_horovod.elastic import Elastic

_MPI = ("Open MPI", "MPICH", "LSF")
#: The shortest time in seconds to wait for ranks to start.
_TO_COME = 60.0
#: Default variable of Horovod, if the user has set no other: a timeline can be started later.
_DEFAULTS = {"HOROVOD_TIMELINE": "DYNAMIC"}
#: Default if geartrain runs the rendezvous: seconds that Horovod's background threads wait for a
#: silent rank. A stopped or disconnected rank blocks the others for this time. Horovod's default is
#: 30; less than 20 would end healthy runs on a busy machine.
_SILENCE = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "20"}
#: Default in elastic mode: a new worker needs more than Horovod's 30 seconds to join.
_PATIENT = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "120"}
#: The process sets that Horovod was initialised with, by their ranks.
_process_sets: dict[tuple[int, ...], Any] = {}
#: True after this process has shut Horovod down under MPI.
_left_mpi = False


def horovod() -> Any:
    """Import and return ``horovod.torch``. Late, because a plan can be made without Horovod."""
    import horovod.torch as hvd

    return hvd


def launcher() -> ClusterEnvironment | None:
    """Return this process's environment if a launcher other than geartrain started it."""
    place = detect()
    return None if place is None or place.launcher == "geartrain" else place


def meets_by_itself(place: ClusterEnvironment | None) -> bool:
    """True if Horovod finds the other ranks itself, from its environment."""
    return place is not None and (place.launcher == "horovodrun" or meets_by_mpi(place))


def meets_by_mpi(place: ClusterEnvironment | None) -> bool:
    """True if ranks meet by MPI: a launcher of MPI started them and Horovod was built with MPI."""
    return place is not None and place.launcher in _MPI and bool(horovod().mpi_built())


def left_mpi() -> bool:
    """True if this process has left MPI; initialising Horovod again would abort it."""
    return _left_mpi


def start(
    run: Run, worker: Callable[[int], Any], timeout: float, elastic: Elastic | None = None
) -> Any:
    """Call ``worker`` in this process as one rank. Without a launcher, start the other ranks first.

    Args:
        elastic: calls the worker again after the world has changed.

    Returns:
        The return value of ``worker`` in this process.
    """
    place, timeout = detect(), max(timeout, _TO_COME)
    if place is None or not meets_by_itself(place):
        return launch(run, worker, timedelta(seconds=timeout))
    run.cluster = place
    with ExitStack() as around:
        around.enter_context(raise_on_signals())
        local_rank = place.local_rank  # does not change with the world
        result = (
            worker(local_rank)
            if elastic is None
            else elastic.keep_going(run, lambda: worker(local_rank))
        )
        if hasattr(worker, "keep"):  # a Session continues inside these contexts
            worker.keep(around.pop_all())
        return result


class Meeting:
    """An initialised Horovod, and how to leave it.

    Args:
        timeout: seconds to wait for the other ranks.
        ranks: the ranks of the process set, or ``None``.
        timeline: a file for Horovod's timeline, or ``None``.
        elastic: True if the world may differ from the one in which this process was started.
    """

    def __init__(
        self,
        run: Run,
        timeout: float,
        ranks: Sequence[int] | None = None,
        timeline: str | None = None,
        elastic: bool = False,
    ) -> None:
        place = run.cluster
        assert place is not None
        self.hvd = horovod()
        self._stays, self._by_mpi = meets_by_itself(place), meets_by_mpi(place)
        self._server: Any = None
        self._timeline = timeline
        #: Address and port of Horovod's rendezvous; ``None`` if ranks met without it, as under MPI.
        self.rendezvous = _prepared()
        #: Horovod's process set of ``ranks``; ``None`` for all ranks: Horovod refuses that set.
        self.process_set = None if ranks is None or len(ranks) == place.size else self._kept(ranks)
        sets = [] if self.process_set is None else [self.process_set]
        try:
            if not self._stays:
                self._meet(run, timeout, sets)
            elif not self.hvd.is_initialized():
                self._initialise(
                    place, {}, sets, {**_DEFAULTS, **_PATIENT} if elastic else _DEFAULTS
                )
            if elastic:
                hvd = self.hvd
                numbers = {
                    "local_rank": hvd.local_rank(),
                    "local_size": hvd.local_size(),
                    "node_rank": hvd.cross_rank(),
                }
                place = run.cluster = replace(place, rank=hvd.rank(), size=hvd.size(), **numbers)
            self._check_world(place)
        except BaseException:  # no caller has this object yet, so leave Horovod here
            self._timeline = None
            self.end(True, lambda shutdown, failed: shutdown())
            raise

    def _check_world(self, place: ClusterEnvironment) -> None:
        """Check that Horovod's world has all ranks, and start the timeline.

        Raises:
            TrainingError: Horovod's world differs from the launcher's, or Horovod was initialised
                without a timeline.
        """
        if self.hvd.size() != place.size:
            raise TrainingError(
                f"{place.launcher} started {place.size} processes, and Horovod made a world of "
                f"{self.hvd.size()}: each would train alone. Fix: build Horovod for this launcher "
                "(HOROVOD_WITH_MPI=1), or use horovodrun --gloo"
            )
        if self._timeline is not None:
            try:
                self.hvd.start_timeline(self._timeline)
            except ValueError as error:
                raise TrainingError(
                    f"timeline={self._timeline!r}: Horovod was initialised before the run and "
                    f"cannot write a timeline now ({error}). "
                    "Fix: leave out hvd.init(), which geartrain calls, or set "
                    "HOROVOD_TIMELINE=DYNAMIC"
                ) from error

    def _kept(self, ranks: Sequence[int]) -> Any:
        """Return the process set of these ranks: a new one, or one that Horovod already has.

        Raises:
            TrainingError: Horovod stays initialised under this launcher and lacks the set.
        """
        if not (self._stays and self.hvd.is_initialized()):
            _process_sets.clear()
            _process_sets[tuple(ranks)] = self.hvd.ProcessSet(list(ranks))
        elif tuple(ranks) not in _process_sets:
            raise TrainingError(
                f"process_set={list(ranks)}: Horovod was initialised before without this set, by "
                "the program's first run or its hvd.init(), and stays initialised under this "
                "launcher. Fix: pass the same process_set in every run of the program, and do not "
                "call hvd.init()"
            )
        return _process_sets[tuple(ranks)]

    def _meet(self, run: Run, timeout: float, sets: list[Any]) -> None:
        """Initialise Horovod with a rendezvous server that rank 0 runs for this run."""
        place, store = run.cluster, run.store
        assert place is not None
        assert store is not None
        with name_absent_ranks(run):
            if place.rank == 0:
                self._server = _Rendezvous(store.host)  # type: ignore[attr-defined]  # TCPStore
                store.set("horovod", self._server.address)
            address, port = store.get("horovod").decode().rsplit(" ", 1)
            self.rendezvous = (address, int(port))
            store.wait(
                [f"here/{rank}" for rank in range(place.size)],
                timedelta(seconds=max(timeout, _TO_COME)),
            )
        self._initialise(place, _variables(place, address, port), sets, {**_DEFAULTS, **_SILENCE})

    def _initialise(
        self,
        place: ClusterEnvironment,
        variables: Mapping[str, str],
        sets: list[Any],
        defaults: Mapping[str, str] = _DEFAULTS,
    ) -> None:
        more = {name: value for name, value in defaults.items() if name not in os.environ}
        with _environment({**variables, **more}):
            try:
                self.hvd.init(process_sets=sets)
            except ValueError as error:
                raise TrainingError(
                    f"rank {place.rank}: Horovod could not connect to its peers: {error}"
                ) from error

    def end(self, failed: bool, leave: Callable[[Callable[[], Any], bool], None]) -> None:
        """Leave Horovod; after an error this ends the other ranks' operations.

        If Horovod found the ranks itself, it stays initialised for the program's next run: an MPI
        build cannot be initialised twice, and horovodrun's rendezvous may mix up two
        initialisations.

        Args:
            leave: calls the function that it gets, which may hang.
        """
        try:
            if self._timeline is not None and not failed:
                self.hvd.stop_timeline()
            if failed and self._by_mpi:
                global _left_mpi
                _left_mpi = True
            leave(self.hvd.shutdown if failed or not self._stays else lambda: None, failed)
        finally:
            if self._server is not None:
                self._server.stop()


class _Rendezvous:
    """Horovod's rendezvous server on one address; Horovod's class would listen on all addresses."""

    def __init__(self, host: str) -> None:
        from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

        self._server = RendezvousHTTPServer((host, 0), RendezvousHandler, 0)
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.05},
            name="horovod-rendezvous",
        )
        self._thread.daemon = True
        self._thread.start()
        self.address = f"{host} {self._server.server_address[1]}"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _prepared() -> tuple[str, int] | None:
    """Return address and port of horovodrun's rendezvous, or ``None``."""
    address = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    port = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT", "")
    return (address, int(port)) if address and port.isdigit() else None


def _variables(place: ClusterEnvironment, address: str, port: str) -> dict[str, str]:
    """Return the variables that horovodrun sets for a rank that meets by Gloo."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return {
        "HOROVOD_RANK": str(place.rank),
        "HOROVOD_SIZE": str(place.size),
        "HOROVOD_LOCAL_RANK": str(place.local_rank),
        "HOROVOD_LOCAL_SIZE": str(place.local_size),
        "HOROVOD_CROSS_RANK": str(place.node_rank),
        "HOROVOD_CROSS_SIZE": str(place.nodes),
        "HOROVOD_HOSTNAME": f"node{place.node_rank}",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": socket.gethostbyname(address),
        "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
        "HOROVOD_GLOO_IFACE": os.environ.get("HOROVOD_GLOO_IFACE", interface),
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", interface),
    }


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables while Horovod is initialised.

    Processes that this rank starts later are not ranks, and the next run has other values.
    """
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
