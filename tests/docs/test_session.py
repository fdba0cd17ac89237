"""docs/session.md: the ported loop differs in few lines and trains to the same weights."""

import difflib
import runpy
from pathlib import Path

import torch

from .blocks import read_blocks

PAGE = Path(__file__).parents[2] / "docs" / "session.md"


def listings():
    found = {block.file: block.text for block in read_blocks(PAGE) if block.file}
    return found["raw.py"].splitlines()[1:], found["ported.py"].splitlines()[1:]


def test_seven_lines_change_as_the_page_says():
    changed = [line for line in difflib.ndiff(*listings()) if line.startswith("+ ")]
    assert len(changed) == 7


def test_both_train_to_the_same_weights(tmp_path, capsys):
    trained = []
    for name, lines in zip(("raw.py", "ported.py"), listings(), strict=True):
        (tmp_path / name).write_text("\n".join(lines))
        names = runpy.run_path(str(tmp_path / name))
        trained.append((names["model"].state_dict(), capsys.readouterr().out))
        if "session" in names:
            names["session"].close()
    (one, printed), (other, also) = trained
    assert printed == also
    assert printed.count("\n") == 5
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
