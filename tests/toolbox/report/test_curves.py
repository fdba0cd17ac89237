"""metrics.jsonl: half written, resumed, with NaN, and much longer than a page can show."""

import json

import pytest

from geartrain_tools.report.curves import Curve, read_metrics, reduced


@pytest.fixture
def read(tmp_path):
    """``read(text or objects)``: return (stage, name) -> points, and the notes."""

    def read(*lines):
        file = tmp_path / "metrics.jsonl"
        text = (one if isinstance(one, str) else f"{json.dumps(one)}\n" for one in lines)
        file.write_text("".join(text))
        found = read_metrics(file)
        points = {
            key: list(zip(curve.steps, curve.values, strict=True))
            for key, curve in found.curves.items()
        }
        return points, found.notes

    return read


def line(step, stage="train", **metrics):
    return {"step": step, "epoch": 0, "stage": stage, **metrics}


def curve(values):
    made = Curve("loss", "train")
    for step, value in enumerate(values):
        made.steps.append(step)
        made.values.append(value)
    return made


def test_an_empty_file_has_no_curves(read):
    assert read() == ({}, [])


def test_a_metric_may_begin_late(read):
    points, notes = read(line(1, loss=3), line(2, loss=2.0, late=5.0))
    assert points == {("train", "loss"): [(1, 3.0), (2, 2.0)], ("train", "late"): [(2, 5.0)]}
    assert notes == []


def test_a_half_written_last_line_is_a_run_in_progress(read):
    points, notes = read(line(1, loss=3.0), '{"step": 2, "sta')
    assert points == {("train", "loss"): [(1, 3.0)]}
    assert notes == [
        "metrics.jsonl: the last line is not complete: the run is in progress, or was killed."
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        "\0\0\0\n",
        "[1]\n",
        '{"loss": 1.0}\n',
        '{"step": "many", "loss": 1.0}\n',
        '{"step": -1, "loss": 1.0}\n',
        '{"step": NaN, "loss": 1.0}\n',
        '{"step": 2, "stage": 3, "loss": 1.0}\n',
        '{"step": 2, "loss": "low"}\n',
        '{"step": 2, "loss": {}}\n',
        '{"step": 2, "loss": 1.0} {}\n',
        f'{{"step": 2, "loss": 1{"0" * 400}}}\n',
        "[" * 100_000 + "\n",
        "\n",
    ],
    ids=lambda text: text[:30].strip() or "blank",
)
def test_a_wrong_line_is_counted_and_the_others_are_kept(read, wrong):
    points, notes = read(line(1, loss=3.0), wrong, line(3, loss=2.0))
    assert points[("train", "loss")] == [(1, 3.0), (3, 2.0)]
    assert notes == ["metrics.jsonl: 1 line is not valid and left out; the first is line 2."]


def test_nan_as_geartrain_and_as_python_write_it(read):
    points, notes = read(
        line(1, loss="inf"), line(2, loss="-inf"), '{"step": 3, "stage": "train", "loss": NaN}\n'
    )
    assert str(points["train", "loss"]) == "[(1, inf), (2, -inf), (3, nan)]"
    assert notes == []


def test_the_newer_values_of_a_resumed_run_replace_the_older(read):
    """The test stage does not belong to the steps of the fit, so it stays."""
    points, notes = read(
        line(10, loss=3.0),
        line(10, "validate", val=0.5),
        line(20, loss=2.0),
        line(20, "validate", val=0.6),
        line(20, "test", val=0.7),
        line(15, loss=2.5),
        line(20, loss=1.9),
    )
    assert points == {
        ("train", "loss"): [(10, 3.0), (15, 2.5), (20, 1.9)],
        ("validate", "val"): [(10, 0.5)],
        ("test", "val"): [(20, 0.7)],
    }
    assert notes == [
        "metrics.jsonl: the steps go back from 20 to 15 in line 6 (a resumed run, or a second "
        "fit). The page shows the newer values; 2 older values are left out."
    ]


def test_steps_of_a_curve_rise_also_if_another_stage_logs_late(read):
    points, notes = read(
        line(20, "validate", val=2.0), line(0, "validate", val=1.0), line(20, "validate", val=3.0)
    )
    assert points == {("validate", "val"): [(0, 1.0), (20, 3.0)]}
    assert notes == []


def test_device_figures_of_all_stages_are_one_curve(read):
    points, _ = read(
        line(1, process_rss_mib=100.0, disk_free_gib=5.0),
        line(2, "validate", process_rss_mib=110.0, disk_free_gib=4.0),
        line(3, node1_gpu0_power_watt=300.0),
    )
    assert set(points) == {
        ("device", "process_rss_mib"),
        ("device", "disk_free_gib"),
        ("device", "node1_gpu0_power_watt"),
    }
    assert points["device", "disk_free_gib"] == [(1, 5.0), (2, 4.0)]


def test_a_short_curve_keeps_each_value():
    found = reduced(curve([1.0, float("nan"), 1 / 3]), 3)
    assert found == {"x": [0, 1, 2], "y": [1.0, None, 0.333333]}


def test_a_long_curve_keeps_each_peak_and_gap():
    values = [1.0] * 10_000
    values[7_777], values[2_222] = 50.0, -50.0
    values[4_000:4_200] = [float("inf")] * 200
    found = reduced(curve(values), 300)
    assert {len(part) for part in found.values()} == {100}
    assert found["x"][-1] == 9_999
    assert (found["y"][40], found["lo"][40], found["hi"][40]) == (None, None, None)
    finite = [value for value in found["hi"] if value is not None]
    assert (max(finite), min(low for low in found["lo"] if low is not None)) == (50.0, -50.0)
    assert found["y"][0] == 1.0


def test_a_huge_value_is_not_taken_for_infinity():
    assert reduced(curve([1e308, 1e308, 1e308]), 3)["y"] == [1e308] * 3
    assert curve([1e308, 1e308]).not_finite == []
