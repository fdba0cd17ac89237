"""A broken distribution is skipped with one warning that names its folder."""

import os
import subprocess
import sys

import pytest

from geartrain.errors.distributions import entry_points

POINT, NAMED = b"[geartrain.plugins]\nbroken = acme:X\n", b"Name: acme\nVersion: 1.0\n"
RUN = "import sys; from geartrain.commands import main; sys.exit(main(sys.argv[1:]))"
BROKEN = {
    "has entry points that are not UTF-8": (b"\xff\xfe" + POINT, NAMED),
    "has malformed entry points": (b"[geartrain.plugins]\nbroken\n", NAMED),
    "has no METADATA": (POINT, None),
    "has METADATA that is not UTF-8": (POINT, b"\xff" + NAMED),
    "has no version": (POINT, b"Name: acme\n"),
}


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")

    def add(points, metadata, place="a"):
        info = tmp_path / place / "acme-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "entry_points.txt").write_bytes(points)
        if metadata is not None:
            (info / "METADATA").write_bytes(metadata)
        monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / place)])
        return info

    return add


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_distribution_is_left_out_with_one_warning(site, recwarn, how):
    info = site(*BROKEN[how])
    for _ in range(2):
        assert "broken" not in entry_points(group="geartrain.plugins").names
        assert "cpu" in entry_points(group="geartrain.accelerators").names
    (warned,) = [str(one.message) for one in recwarn]
    assert warned.startswith(f"{info} is skipped, because its metadata cannot be read (")
    assert warned.endswith("Fix: install that distribution again, or remove the folder")


def test_a_broken_distribution_hides_no_other_of_its_name(site):
    site(*BROKEN["has no METADATA"])
    site(POINT, NAMED, place="b")
    with pytest.warns(UserWarning, match="is skipped"):
        assert "broken" in entry_points(group="geartrain.plugins").names


def test_a_distribution_that_declares_nothing_of_geartrains_needs_no_metadata(site, recwarn):
    site(b"[console_scripts]\nacme = acme:X\n", None)
    entry_points()
    assert not recwarn.list


def test_a_command_works_beside_a_broken_distribution(site, tmp_path):
    """``new`` imports torch, which reads all entry points."""
    info = site(*BROKEN["has entry points that are not UTF-8"])
    env = {k: v for k, v in os.environ.items() if k != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    result = subprocess.run(
        [sys.executable, "-c", RUN, "new", "plugin", "tandem", "--output", "package"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env=env | {"PYTHONPATH": str(info.parent)},
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.count(str(info)) == 1
