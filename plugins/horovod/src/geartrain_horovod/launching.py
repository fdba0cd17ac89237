"""How ranks are started and how Horovod brings them together.

Under ``horovodrun``, and under MPI where Horovod was built with it, Horovod meets by itself, and every process that something has
started joins. Anywhere else geartrain starts or finds the ranks as it does for ddp, and Horovod's own rendezvous, served by rank 0 and
named in the run's store, brings them together.
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
#: Seconds that ranks have to come, at the least.
_TO_COME = 60.0
#: What Horovod is initialised with unless the user says otherwise: a timeline can be started, and starts when it is asked for.
_DEFAULTS = {"HOROVOD_TIMELINE": "DYNAMIC"}
#: Where geartrain serves the rendezvous, unless the user says otherwise: seconds for which Horovod's background threads bear that another's
#: says nothing. A rank that was stopped or cut off stops the others' for so long, whatever they do. Horovod's own default is 30; on a busy
#: machine less than this would end runs in which nothing is wrong.
_SILENCE = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "20"}
#: In elastic mode, unless the user says otherwise: a worker that was just started takes longer than Horovod's 30 seconds to come.
_PATIENT = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "120"}
#: The process sets that Horovod was initialised with, by their ranks.
_process_sets: dict[tuple[int, ...], Any] = {}
#: Whether Horovod was shut down here after it had met by MPI.
_left_mpi = False


def horovod() -> Any:
    """The module ``horovod.torch``; imported where it is needed, because a plan can be made and shown without it."""
    import horovod.torch as hvd

    return hvd


def launcher() -> ClusterEnvironment | None:
    """This process's place, where something else than geartrain has started it as one of several."""
    place = detect()
    return None if place is None or place.launcher == "geartrain" else place


def meets_by_itself(place: ClusterEnvironment | None) -> bool:
    """Whether Horovod knows from the environment where the others are."""
    return place is not None and (place.launcher == "horovodrun" or meets_by_mpi(place))


def meets_by_mpi(place: ClusterEnvironment | None) -> bool:
    """Whether ranks meet by MPI: one of its launchers has started them, and Horovod was built with it."""
    return place is not None and place.launcher in _MPI and bool(horovod().mpi_built())


def left_mpi() -> bool:
    """Whether this process has left MPI, for good: a second initialisation would abort it."""
    return _left_mpi


def start(
    run: Run, worker: Callable[[int], Any], timeout: float, elastic: Elastic | None = None
) -> Any:
    """Call ``worker`` in this process as one of the ranks, after starting this node's others where nobody else has.

    Args:
        elastic: calls the worker again where the world has changed.

    Returns:
        What ``worker`` returned here.
    """
    place, timeout = detect(), max(timeout, _TO_COME)
    if place is None or not meets_by_itself(place):
        return launch(run, worker, timedelta(seconds=timeout))
    run.cluster = place
    with ExitStack() as around:
        around.enter_context(raise_on_signals())
        local_rank = place.local_rank  # stays as it is when the world changes
        result = (
            worker(local_rank)
            if elastic is None
            else elastic.keep_going(run, lambda: worker(local_rank))
        )
        if hasattr(worker, "keep"):  # a Session goes on in here
            worker.keep(around.pop_all())
        return result


class Meeting:
    """Horovod, initialised, and what must be undone.

    Args:
        timeout: seconds to wait for the others.
        ranks: of a process set that must be there; ``None``: none.
        timeline: a file to write Horovod's timeline to, or ``None``.
        elastic: whether the world may be another than the one that this process was started in.
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
        #: Address and port of Horovod's rendezvous; ``None`` where ranks met without one, as under MPI.
        self.rendezvous = _prepared()
        #: Horovod's process set of ``ranks``; ``None``: all ranks, which Horovod refuses as a set of its own.
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
        except BaseException:  # nobody else could undo what was done so far
            self._timeline = None
            self.end(True, lambda shutdown, failed: shutdown())
            raise

    def _check_world(self, place: ClusterEnvironment) -> None:
        """Begin in a world of all ranks, with its timeline.

        Raises:
            TrainingError: Horovod's world is another than the launcher's, or Horovod was initialised so that it writes no timeline.
        """
        if self.hvd.size() != place.size:
            raise TrainingError(
                f"{place.launcher} started {place.size} processes, and Horovod made a world of {self.hvd.size()}: each would "
                "train alone. Fix: a Horovod built for this launcher (HOROVOD_WITH_MPI=1), or horovodrun --gloo"
            )
        if self._timeline is not None:
            try:
                self.hvd.start_timeline(self._timeline)
            except ValueError as error:
                raise TrainingError(
                    f"timeline={self._timeline!r}: Horovod was initialised before, so that it writes none ({error}) "
                    "Fix: leave out hvd.init(), which geartrain calls, or HOROVOD_TIMELINE=DYNAMIC"
                ) from error

    def _kept(self, ranks: Sequence[int]) -> Any:
        """The process set of these ranks: where Horovod stays initialised, the one that it was initialised with."""
        if not (self._stays and self.hvd.is_initialized()):
            _process_sets.clear()
            _process_sets[tuple(ranks)] = self.hvd.ProcessSet(list(ranks))
        elif tuple(ranks) not in _process_sets:
            raise TrainingError(
                f"process_set={list(ranks)}: Horovod was initialised before, by this program's first run or its hvd.init(), without it, "
                "and under its launcher stays so. Fix: the same process_set in every run of the program, and no hvd.init()"
            )
        return _process_sets[tuple(ranks)]

    def _meet(self, run: Run, timeout: float, sets: list[Any]) -> None:
        """Meet at a rendezvous of the run's own."""
        place, store = run.cluster, run.store
        assert place is not None
        assert store is not None
        with name_absent_ranks(run):
            if place.rank == 0:
                self._server = _Rendezvous(store.host)  # type: ignore[attr-defined]  # a TCPStore; of it the stubs know less
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
        """Leave the others; after an error they hear of it. Where Horovod meets by itself it stays initialised for the program's next
        run: an MPI build cannot be initialised twice, and horovodrun's rendezvous may mix two meetings up.

        Args:
            leave: calls what it is given, and bears that it may hang.
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
    """Horovod's rendezvous on one address; its own class would listen on all of them."""

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
    """The rendezvous of horovodrun."""
    address, port = (
        os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"),
        os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT", ""),
    )
    return (address, int(port)) if address and port.isdigit() else None


def _variables(place: ClusterEnvironment, address: str, port: str) -> dict[str, str]:
    """What horovodrun sets for a rank that meets by Gloo."""
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
    """Variables for as long as Horovod is initialised: what this rank starts later is no rank, and the next run has others."""
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
