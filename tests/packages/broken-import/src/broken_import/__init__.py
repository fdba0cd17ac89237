"""``--strategy broken_import``: built for a library that is not the one here, as its import finds out."""

import sys

from geartrain import hookimpl

print("broken_import is imported", file=sys.stderr)  # so that a test sees whether anyone tried


class BrokenStrategy:
    """Nobody ever gets this class."""

    @hookimpl
    def barrier(self):
        pass


raise RuntimeError("libcollectives.so.3: undefined symbol")
