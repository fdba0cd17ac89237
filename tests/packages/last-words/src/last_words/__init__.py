"""``geartrain last-words RUN``: a complete command."""

import json
from pathlib import Path


def command(name, argv):
    """Print the status that a run ended with."""
    print(json.loads(Path(argv[0], "summary.json").read_text())["status"])
