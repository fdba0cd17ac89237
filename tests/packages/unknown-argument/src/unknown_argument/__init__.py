"""``--plugin unknown_argument``: its hook takes ``batch``, which ``on_step_end`` does not have."""

from geartrain import hookimpl


class UnknownArgument:
    """Count samples; but the hook is never called."""

    def __init__(self) -> None:
        self.samples = 0

    @hookimpl
    def on_step_end(self, run, batch):
        self.samples += len(batch)
