"""Select the kit's cases for a test class.

A class attribute ``chosen`` is a regular expression of the cases to run. ``matrix`` is one of the
cases to mark as ``matrix``.
"""

import re

import pytest
from command_line import chip, command, folder, install, installed, python, refused

__all__ = ["chip", "command", "folder", "install", "installed", "python", "refused"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    unwanted = [
        item
        for item in items
        if not re.search(getattr(getattr(item, "cls", None), "chosen", ""), item.name)
    ]
    if unwanted:
        config.hook.pytest_deselected(items=unwanted)
        items[:] = [item for item in items if item not in unwanted]
    for item in items:
        matrix = getattr(getattr(item, "cls", None), "matrix", None)
        if matrix is not None and re.search(matrix, item.name):
            item.add_marker(pytest.mark.matrix)
