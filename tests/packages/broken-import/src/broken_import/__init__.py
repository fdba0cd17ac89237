"""``--strategy broken_import``: its import fails, because it needs another library version."""

import sys

from geartrain import hookimpl

print("broken_import is imported", file=sys.stderr)  # tests look for this line


class BrokenStrategy:
    """This class can never be imported."""

    @hookimpl
    def barrier(self):
        pass


raise RuntimeError("libcollectives.so.3: undefined symbol")
