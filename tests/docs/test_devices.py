"""The table of docs/devices.md describes ``devices=``."""

import re
from pathlib import Path

import pytest

import geartrain as gt
from geartrain import UsageError
from geartrain.planning.devices import parse_devices

PAGE = (Path(__file__).parents[2] / "docs" / "devices.md").read_text(encoding="utf-8")
KINDS = {
    "cuda": {"available": 4},
    "mps": {"available": 4},
    "cpu": {"available": 4, "indexed": False},
}


def cells(head):
    """Return the rows of the table whose first cell is ``head``."""
    lines = PAGE.partition(f"| {head} |")[2].splitlines()[2:]
    found = []
    for line in lines:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split(" |")])
    assert found
    return found


def spans(cell):
    return re.findall(r"`([^`]+)`", cell)


ROWS = [
    pytest.param(kind, typed, means, id=f"{kind}: {typed}")
    for first, indexed, cpu in cells("`devices=`")
    for typed in spans(first)
    for kind, means in (("cuda", indexed), ("mps", indexed), ("cpu", cpu))
]


@pytest.mark.parametrize(("kind", "typed", "means"), ROWS)
def test_row_of_the_table_is_true(kind, typed, means):
    value = eval(typed, {})  # as a user types it: numbers, text, lists and range()
    if means.startswith("error"):
        with pytest.raises(UsageError) as caught:
            parse_devices(value, accelerator=kind, **KINDS[kind])
        assert means.removeprefix("error").removeprefix(": ") in str(caught.value)
        return
    count = re.fullmatch(r"(\d+) process(es)?", means)
    expected = list(range(int(count[1]))) if count else eval(means, {})
    assert parse_devices(value, accelerator=kind, **KINDS[kind]) == expected


def test_the_table_has_every_spelling_of_devices():
    typed = {span for row in cells("`devices=`") for span in spans(row[0])}
    assert {
        "3",
        '"3"',
        "-1",
        '"-1"',
        '"auto"',
        "[0]",
        '"2,"',
        "range(2)",
        "0",
        '""',
        "[]",
        "[1, 1]",
        "[9]",
        "None",
        "True",
    } <= typed


@pytest.mark.parametrize(
    "old", [span for row in cells("early Lightning") for span in spans(row[0])]
)
def test_old_argument_is_refused_with_the_new_one(old):
    name, _, value = old.partition("=")
    with pytest.raises(UsageError) as caught:
        gt.Trainer(**{name: eval(value, {})})
    assert ("strategy=" if name == "accelerator" else "devices=N") in str(caught.value)


def test_priorities_of_the_page():
    from geartrain.builtin.cpu import CPUAccelerator
    from geartrain_cuda import CUDAAccelerator
    from geartrain_devices import NPUAccelerator, XPUAccelerator
    from geartrain_mps import MPSAccelerator
    from geartrain_tpu import TPUAccelerator

    assert dict(re.findall(r"\b([a-z]pu|cuda|mps) (\d+)[,\s]", PAGE)) == {
        "tpu": str(TPUAccelerator.priority),
        "cuda": str(CUDAAccelerator.priority),
        "xpu": str(XPUAccelerator.priority),
        "npu": str(NPUAccelerator.priority),
        "mps": str(MPSAccelerator.priority),
        "cpu": str(CPUAccelerator.priority),
    }
