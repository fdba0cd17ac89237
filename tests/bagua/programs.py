"""Run programs of several ranks once for all of xdist's workers and for several test files."""

import fcntl
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from geartrain_testing.launching import launched

HERE = Path(__file__).parent
#: Seconds for a program, on a busy machine.
DEADLINE = 300


class Programs:
    """The programs of one pytest run.

    Args:
        folder: a folder that all workers share.
        wanted: names of the parts whose results the chosen tests read.
    """

    def __init__(self, folder: Path, wanted: Sequence[str]) -> None:
        self.folder, self.wanted = folder, list(wanted)
        folder.mkdir(exist_ok=True)

    def once(self, name: str, run: Callable[[Path], None]) -> Path:
        """Call ``run`` in one of the workers, the others wait; return its folder."""
        folder = self.folder / name
        with (self.folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                folder.mkdir()
                try:
                    run(folder)
                except AssertionError as error:
                    (folder / "failure").write_text(str(error))
        return folder

    @functools.cache  # noqa: B019  one object per session
    def kept(self, part: str) -> list[dict]:
        """Return the results that each of two ranks saved in ``PART_program.py``.

        One program of two ranks runs all wanted parts.

        Raises:
            AssertionError: the program failed in this part or earlier, or after all parts.
        """
        folder = self.once("two-ranks", self._run)
        results = {
            name: [folder / name / f"kept-{rank}.pt" for rank in range(2)] for name in self.wanted
        }
        missing = [name for name in self.wanted if not all(path.exists() for path in results[name])]
        if (failure := folder / "failure").exists() and (part in missing or not missing):
            raise AssertionError(failure.read_text())
        return [torch.load(path, weights_only=False) for path in results[part]]

    def _run(self, folder: Path) -> None:
        with launched(str(HERE / "parts.py"), str(folder), *self.wanted, folder=folder) as program:
            program.succeed(DEADLINE)
