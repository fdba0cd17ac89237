"""ddp in processes that are started on a function: from a notebook, an interactive session or a test, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from geartrain import Run, UsageError, hookimpl
from geartrain_ddp import DDPStrategy
from geartrain_spawn.pickles import dump
from geartrain_spawn.starter import START_METHODS, run_in_ranks


class DDPSpawnStrategy(DDPStrategy):
    """Starts one fresh process a device and trains there as ``ddp`` does; the process that called ``fit`` waits, and gets the trained
    weights, optimizer state, plugins' state, metrics and counters back.

    Args:
        start_method: ``"forkserver"`` (fast: torch is loaded once), ``"spawn"``, or ``"fork"``, which hands nothing over by pickling
            and cannot be used once this process has used CUDA.
        process_group_backend: torch.distributed's backend; default nccl on cuda, gloo elsewhere.
        timeout: seconds that a rank waits for the others in one collective before the run ends with an error.
        find_unused_parameters: look for parameters that a step did not use, at a cost, instead of waiting for their gradients.
        gradient_as_bucket_view: make gradients views of the buckets, which saves their memory.
        static_graph: promise that every step uses the same parameters in the same order.
        bucket_cap_mb: MiB of gradients that one all-reduce carries; default torch's, 25.

    Raises:
        UsageError: an unknown start method, or a timeout that is not above 0.
    """

    #: A session is launched with a function: there is nothing else that its processes could begin with.
    needs_function = True
    #: How it pickles what goes to a rank, by which ``geartrain doctor --pickle`` looks for what cannot.
    dump = staticmethod(dump)

    def __init__(
        self,
        start_method: str = "forkserver",
        process_group_backend: str | None = None,
        timeout: float = 1800.0,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        bucket_cap_mb: float | None = None,
    ) -> None:
        if start_method not in START_METHODS:
            raise UsageError(
                f"start_method={start_method!r} cannot be used here. Fix: {' or '.join(START_METHODS)}"
            )
        super().__init__(
            process_group_backend,
            timeout,
            find_unused_parameters,
            gradient_as_bucket_view,
            static_graph,
            bucket_cap_mb,
        )
        self.start_method = start_method

    @hookimpl
    def launch(self, run: Run, worker: Callable[[int], Any]) -> Any:
        self.refuse_buckets(run)
        return run_in_ranks(run, worker, self.start_method, self.timeout)
