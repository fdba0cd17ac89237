"""A third party's accelerator for a device unknown to torch, installed from its wheel."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils import backend_registration

TARGET = Path(__file__).with_name("sides.py")
LOADED = {"TOY_DRIVER": "loaded"}
REASON = "the toy driver is not loaded. Fix: set TOY_DRIVER=loaded"
#: Hide the GPUs of this machine, whose accelerators would compete in "auto".
NO_GPU = {"GEARTRAIN_BLOCK": "cuda,mps"}

needs_a_python_backend = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason=f"torch {torch.__version__} accepts no device written in Python",
)


def row(done):
    assert done.returncode == 0, done.stderr
    (found,) = (row for row in json.loads(done.stdout) if row["distribution"] == "toy-accelerator")
    return found


@pytest.fixture
def trained(site, tmp_path):
    """Return a function: ``trained("auto")`` runs the script; returns its folder and output."""

    def run(accelerator, *arguments, **env):
        folder = tmp_path / f"on {accelerator}"
        options = (
            "--accelerator",
            accelerator,
            "--max-epochs",
            "4",
            "--output",
            folder,
            *arguments,
        )
        done = site.run(site.warm_python, TARGET, *options, cwd=tmp_path, **NO_GPU, **env)
        assert done.returncode == 0, done.stderr
        return folder, done.stdout

    return run


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder):
    return torch.load(folder / "last.ckpt", weights_only=True)["model"]


# --- listed and probed ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "state", "reason"), [({}, "unavailable", REASON), (LOADED, "available", "")]
)
def test_probe_asks_it(geartrain, env, state, reason):
    found = row(geartrain("plugins", "--probe", "--json", **env))
    assert (found["state"], found["reason"]) == (state, reason)


def test_asking_does_not_make_the_device(site, tmp_path):
    code = (
        "import torch, geartrain as gt; t = gt.Trainer(); assert t.plan.accelerator.name == "
        "'toy', t.plan.accelerator; "
        "assert not hasattr(torch, 'toy')"
    )
    done = site.run(site.python, "-c", code, cwd=tmp_path, **LOADED)
    assert done.returncode == 0, done.stderr


# --- selected -------------------------------------------------------------------------------------


@needs_a_python_backend
def test_same_script_trains_on_each_with_nothing_else_changed(trained):
    """The toy uses the CPU's operators: after four epochs all weights are bitwise equal."""
    cpu, printed = trained("cpu")
    assert "trained on cpu" in printed
    assert "toy" not in printed
    for accelerator in ("toy", "auto"):
        folder, printed = trained(accelerator, **LOADED)
        assert "trained on toy:0" in printed
        assert int(printed.partition("toy: operators run: ")[2].split()[0]) > 500
        plan = json.loads((folder / "plan.json").read_text())
        assert (plan["accelerator"]["distribution"], plan["devices"]) == ("toy-accelerator", [0])
        assert ("highest priority (50)" in plan["accelerator"]["reason"]) == (accelerator == "auto")
        assert lines(folder) == lines(cpu)
        same = weights(cpu)
        assert same.keys() == weights(folder).keys()
        for name, tensor in weights(folder).items():
            assert tensor.device.type == "cpu"
            assert torch.equal(tensor, same[name]), name


@needs_a_python_backend
def test_the_loss_falls_and_the_checkpoint_loads_without_toy(trained, geartrain):
    folder, _ = trained("toy", **LOADED)
    losses = [line["loss"] for line in lines(folder) if "loss" in line]
    assert len(losses) == 4
    assert losses[-1] < 0.6 * losses[0]
    accuracies = {}
    for accelerator in ("cpu", "toy"):
        done = geartrain(
            "validate",
            TARGET,
            "--accelerator",
            accelerator,
            "--checkpoint",
            folder / "last.ckpt",
            "--output",
            accelerator,
            **LOADED,
        )
        assert done.returncode == 0, done.stderr
        accuracies[accelerator] = json.loads(
            (folder.parent / accelerator / "summary.json").read_text()
        )["metrics"]["accuracy"]
    assert accuracies["cpu"] == accuracies["toy"] > 0.9


def test_auto_without_its_driver_uses_the_cpu_and_reports_why(trained):
    folder, printed = trained("auto")
    assert "trained on cpu" in printed
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["accelerator"]["name"] == "cpu"
    assert plan["passed_over"]["toy-accelerator[toy]"] == f"unavailable: {REASON}"


@needs_a_python_backend
def test_its_options(trained):
    _, printed = trained("toy", "--accelerator.loud", "false", **LOADED)
    assert "operators" not in printed


# --- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "env", "words"),
    [
        (["--accelerator", "toy"], {}, ["toy-accelerator[toy] cannot be used here", REASON]),
        (["--accelerator", "TOY", "--devices", "2"], LOADED, ["asked for 2", "only [0]", "on toy"]),
        (["--accelerator", "gpu"], {**LOADED, **NO_GPU}, ["no usable one"]),
    ],
)
def test_refused_with_one_error_before_anything_starts(geartrain, tmp_path, chosen, env, words):
    done = geartrain("fit", TARGET, "--max-epochs", "1", "--output", "out", *chosen, **env)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("geartrain fit: ") == 1
    for word in words:
        assert word in " ".join(done.stderr.split())
    assert not (tmp_path / "out").exists()
