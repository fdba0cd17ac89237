"""A test class may say which of the kit's cases it wants: ``chosen``, a regular expression."""

import re


def pytest_collection_modifyitems(config, items):
    unwanted = [item for item in items if not re.search(getattr(getattr(item, "cls", None), "chosen", ""), item.name)]
    if unwanted:
        config.hook.pytest_deselected(items=unwanted)
        items[:] = [item for item in items if item not in unwanted]
