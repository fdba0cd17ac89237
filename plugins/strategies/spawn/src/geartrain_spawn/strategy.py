"""ddp in processes that are started on a function: also from a notebook, a session or a test."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from geartrain import Run, UsageError, hookimpl
from geartrain.parallel import refuse_sparse
from geartrain_ddp import DDPStrategy
from geartrain_spawn.pickles import dump
from geartrain_spawn.starter import START_METHODS, run_in_ranks


class DDPSpawnStrategy(DDPStrategy):
    """Strategy ``ddp_spawn``: trains like ``ddp``, in one new process per device.

    The process that called ``fit`` waits. It gets the trained weights, optimizer state, plugins'
    state, metrics and counters back.

    Args:
        start_method: ``"forkserver"`` (fast: torch is loaded once), ``"spawn"``, or ``"fork"``,
            which pickles nothing and cannot be used after this process has used CUDA.
        process_group_backend: torch.distributed backend; default nccl on cuda, gloo elsewhere.
        timeout: seconds, or a timedelta, that a rank waits for the others in one collective before
            the run ends with an error.
        find_unused_parameters: find the parameters that a step did not use, instead of waiting for
            their gradients. This costs time.
        gradient_as_bucket_view: make gradients views of the buckets, which saves memory.
        static_graph: promise that every step uses the same parameters in the same order.
        bucket_cap_mb: MiB of gradients in one all-reduce; default torch's, 25.

    Raises:
        UsageError: an unknown start method, or ``timeout`` is not above 0.
    """

    #: A session must be launched with a function: its processes have no other entry point.
    needs_function = True
    #: Pickles objects for a rank; ``geartrain doctor --pickle`` uses it to find objects that fail.
    dump = staticmethod(dump)

    def __init__(
        self,
        start_method: str = "forkserver",
        process_group_backend: str | None = None,
        timeout: float | timedelta = 1800.0,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        bucket_cap_mb: float | None = None,
    ) -> None:
        if start_method not in START_METHODS:
            hint = " or ".join(START_METHODS)
            raise UsageError(f"start_method={start_method!r} cannot be used here. Fix: {hint}")
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
        refuse_sparse(run)
        return run_in_ranks(run, worker, self.start_method, self.timeout)
