"""``--plugin unknown_hook``: its hook has another name, so it would never be called."""

from geartrain import hookimpl


class UnknownHook:
    """Count steps; but the hook is never called."""

    def __init__(self) -> None:
        self.steps = 0

    @hookimpl
    def on_step_ends(self, run):
        self.steps += 1
