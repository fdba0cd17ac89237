"""The set-up and teardown of each process of a Session, around the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from geartrain import Run, UsageError, seed_everything
from geartrain_session.session_run import SessionRun


@contextmanager
def process_context(run: Run, local_rank: int) -> Iterator[None]:
    """Set up this process. At the end report metrics; tear down, also after an error."""
    session: Any = run.trainer
    with run.torn_down() as undo:
        undo.append(run.hooks.teardown_device)
        run.device = run.hooks.setup_device(run=run, local_rank=local_rank)
        undo.append(run.hooks.teardown_process_group)
        run.join_processes()
        session_run = SessionRun(run)
        undo.append(session_run.release_models)
        # The batch is empty: metrics that plugins log belong to steps.
        run.reset_logs()
        run.batch = ()
        run.coordinator.check(run)
        run.hooks.freeze()
        session.attach_run(session_run)
        yield
        session_run.finish()
        session.callbacks.warn_if_never_called()


class FunctionWorker:
    """The worker of ``launch(function)``: the whole run in one process."""

    def __init__(
        self, run: Run, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.run, self.function, self.args, self.kwargs = run, function, args, kwargs

    @property
    def pickled_arguments(self) -> dict[str, Any]:
        """Return the objects that travel to another process, by the user's names for them."""
        args = {f"argument {i} of launch": value for i, value in enumerate(self.args, start=1)}
        return {
            "the function of launch": self.function,
            **args,
            **{f"{name}= of launch": value for name, value in self.kwargs.items()},
        }

    def __call__(self, local_rank: int) -> Any:
        with process_context(self.run, local_rank):
            seed = self.run.plan.options.seed
            if seed is not None:
                seed_everything(seed)  # a new process has no seed yet
            return self.function(self.run.trainer, *self.args, **self.kwargs)


class ScriptWorker:
    """The worker of ``launch()``: it sets up this process and returns.

    The script then runs inside this context, until the contexts of :meth:`stack` close.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._inside: ExitStack | None = None
        self._around = ExitStack()

    def __call__(self, local_rank: int) -> None:
        with ExitStack() as inside:
            inside.enter_context(process_context(self._run, local_rank))
            self._inside = inside.pop_all()

    def keep(self, around: ExitStack) -> None:
        """Keep the contexts that a launcher opened around this rank."""
        self._around = around

    def stack(self) -> ExitStack:
        """Return the contexts that end the run.

        Raises:
            UsageError: the strategy did not set up this process.
        """
        if self._inside is None:
            label = self._run.plan.strategy.label
            raise UsageError(
                f"{label} runs in other processes than this one. "
                "Fix: session.launch(train), which calls train(session)"
            )
        whole = ExitStack()
        whole.push(self._around)
        whole.push(self._inside)
        return whole
