"""Leave the cores to the tests, which tox runs at the same time."""

import os


def leave_cores_to_others() -> None:
    """Let this process and its children run when a core would be idle."""
    if hasattr(os, "nice"):
        os.nice(19)
