"""Plugins installed by pip from wheels: listed, selected, run, refused if wrong, else unused."""

import json

import pytest

from .conftest import TARGET

#: (kind, name) -> distribution, for all packages of tests/packages.
PLUGINS = {
    ("strategy", "polite"): "polite-strategy",
    ("plugin", "gradient_norm"): "gradient-norm",
    ("plugin", "forgetful"): "forgetful-observer",
    ("strategy", "broken_import"): "broken-import",
    ("accelerator", "missing_dependency"): "missing-dependency",
    ("plugin", "unknown_hook"): "unknown-hook",
    ("plugin", "unknown_argument"): "unknown-argument",
}
MODULES = {distribution.replace("-", "_") for distribution in PLUGINS.values()} | {
    "twin_a",
    "twin_b",
}


def listed(done):
    """Return the rows of ``geartrain plugins --json`` by distribution and name."""
    assert done.returncode == 0, done.stderr
    return {(row["distribution"], row["name"]): row for row in json.loads(done.stdout)}


# --- listed ---------------------------------------------------------------------------------------


def test_every_installed_plugin_is_listed_with_its_distribution(geartrain):
    rows = listed(geartrain("plugins", "--json"))
    for (kind, name), distribution in PLUGINS.items():
        expected = {
            "name": name,
            "kind": kind,
            "state": "installed",
            "reason": "",
            "distribution": distribution,
            "version": "0.1.0",
        }
        assert rows[distribution, name] == expected
    assert rows["geartrain", "single"]["kind"] == "strategy"
    assert rows["geartrain", "cpu"]["kind"] == "accelerator"


def test_two_that_claim_one_name_are_both_listed_as_failed(geartrain):
    rows = listed(geartrain("plugins", "--json"))
    for distribution in ("twin-a", "twin-b"):
        assert rows[distribution, "twin"]["state"] == "failed"
        assert "twin-a[twin]" in rows[distribution, "twin"]["reason"]
        assert "twin-b[twin]" in rows[distribution, "twin"]["reason"]


def test_probe_reports_failed_imports_and_continues(geartrain):
    rows = listed(geartrain("plugins", "--probe", "--json", "--block", "gradient_norm"))
    assert rows["polite-strategy", "polite"]["state"] == "available"
    assert rows["gradient-norm", "gradient_norm"]["state"] == "blocked"
    broken = rows["missing-dependency", "missing_dependency"]
    assert broken["state"] == "failed"
    assert "geartrain_test_absent_runtime" in broken["reason"]
    broken = rows["broken-import", "broken_import"]
    assert broken["state"] == "failed"
    assert "undefined symbol" in broken["reason"]


def test_listing_imports_neither_torch_nor_any_plugin(site, tmp_path):
    done = site.run(
        site.python, "-X", "importtime", site.bin / "geartrain", "plugins", "--json", cwd=tmp_path
    )
    listed(done)
    imported = {
        line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()
    }
    assert "geartrain" in imported
    assert not imported & {"torch", "numpy", *MODULES}


# --- selected -------------------------------------------------------------------------------------


def test_strategy_does_its_work(fit):
    """lr 0.5, 4 steps, gradient (3, 4); the strategy keeps half of it."""
    run = fit("--strategy", "polite")
    assert run.weights == [3.0, 4.0]
    assert "polite: after you" in run.printed
    strategy = run.plan["strategy"]
    assert strategy.pop("reason")
    assert strategy == {"name": "polite", "distribution": "polite-strategy", "version": "0.1.0"}


def test_strategy_and_observer_with_options_work_together(fit):
    """The observer sees the strategy's gradients: 0.25 · (|3| + |4|)."""
    run = fit(
        "--strategy",
        "polite",
        "--strategy.scale",
        "0.25",
        "--plugin",
        "gradient_norm",
        "--gradient_norm.norm-type",
        "1",
    )
    assert run.weights == [1.5, 2.0]
    assert run.metrics["grad_norm"] == 1.75
    names = [plugin["name"] for plugin in run.plan["plugins"]]
    assert names == ["gradient_norm", "provenance", "progress"]


def test_script_chooses_them_by_name_or_by_class(site, tmp_path):
    (tmp_path / "train.py").write_text(f"""
import sys
sys.path.insert(0, {str(TARGET.parent)!r})
import geartrain as gt
from downhill import Downhill, FourBatches
from geartrain.strategies import PoliteStrategy

for strategy in ("polite", PoliteStrategy(scale=0.25)):
    trainer = gt.Trainer(
        strategy=strategy, plugins=["gradient_norm"], max_epochs=1, enable_progress_bar=False
    )
    module = Downhill()
    trainer.fit(module, FourBatches())
    norm = trainer.callback_metrics["grad_norm"].item()
    print(module.w.tolist(), norm, trainer.plan.strategy.label)
""")
    done = site.run(site.warm_python, "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "[3.0, 4.0] 2.5 polite-strategy[polite]" in done.stdout
    assert "[1.5, 2.0] 1.25 polite-strategy[polite]" in done.stdout


# --- refused --------------------------------------------------------------------------------------


#: Selected options -> words of the error.
WRONG = [
    (
        ["--plugin", "forgetful"],
        ["forgetful-observer[forgetful]", "geartrain[defaults]", "replaces"],
    ),
    (
        ["--plugin", "forgetful", "--strategy", "polite"],
        ["forgetful-observer[forgetful]", "polite-strategy[polite]", "replaces"],
    ),
    (
        ["--strategy", "broken_import"],
        ["broken-import[broken_import]", "RuntimeError", "undefined symbol"],
    ),
    (
        ["--accelerator", "missing_dependency"],
        ["missing-dependency[missing_dependency]", "geartrain_test_absent_runtime", "pip install"],
    ),
    (["--plugin", "unknown_hook"], ["unknown-hook[unknown_hook]", "on_step_ends", "on_step_end'"]),
    (
        ["--plugin", "unknown_argument"],
        ["unknown-argument[unknown_argument]", "'batch'", "on_step_end(run)"],
    ),
    (["--plugin", "twin"], ["twin-a[twin]", "twin-b[twin]", "uninstall"]),
]


@pytest.mark.parametrize(("chosen", "words"), WRONG, ids=[" ".join(chosen) for chosen, _ in WRONG])
def test_a_wrong_selected_plugin_is_one_clear_error(refused, chosen, words):
    error = refused(*chosen)
    for word in words:
        assert word in error


def test_forgotten_wrapper_is_shown_how_to_write_it(refused):
    """The message has lines to copy: those of gradient-norm."""
    lines = [line.strip() for line in refused("--plugin", "forgetful").splitlines()]
    at = lines.index("@hookimpl(wrapper=True)")
    assert lines[at + 1] == "def reduce_gradients(self, run):"
    assert lines[at + 2].startswith("result = yield")
    assert lines[at + 3] == "return result"


def test_names_blocked_by_the_environment_are_refused_too(refused):
    assert "GEARTRAIN_BLOCK" in refused(
        "--plugin", "gradient_norm", GEARTRAIN_BLOCK="polite,gradient_norm"
    )


def test_strategy_of_one_process_does_not_train_alone_on_several_devices(geartrain):
    done = geartrain(
        "fit", TARGET, "--accelerator", "cpu", "--devices", "2", "--strategy", "polite"
    )
    assert done.returncode == 2
    assert "polite-strategy[polite] plans 2 processes but has no setup_process_group" in done.stderr
    assert "Traceback" not in done.stderr


# --- not selected ---------------------------------------------------------------------------------


def test_plugins_that_are_not_selected_change_nothing(fit):
    """With all of them installed, two of them broken, the run is that of core alone.

    ``auto`` must ask the broken accelerator, and reports why it was passed over.
    """
    run = fit()
    assert run.weights == [6.0, 8.0]
    assert (run.plan["strategy"]["name"], [plugin["name"] for plugin in run.plan["plugins"]]) == (
        "single",
        ["provenance", "progress"],
    )
    assert set(run.metrics) == {"step", "epoch", "stage", "train_loss"}
    assert (
        "geartrain_test_absent_runtime"
        in run.plan["passed_over"]["missing-dependency[missing_dependency]"]
    )
    assert "polite" not in run.printed
    assert "twin" not in run.printed


def test_plugins_that_are_not_selected_are_never_imported(fit, tmp_path):
    (tmp_path / "spy.py").write_text("""
import sys
from geartrain import hookimpl

@hookimpl
def on_run_end():
    print("imported:", *sys.modules)
""")
    run = fit("--accelerator", "cpu", "--strategy", "polite", "--plugin", "spy.py")
    imported = next(
        line for line in run.printed.splitlines() if line.startswith("imported:")
    ).split()
    assert MODULES & set(imported) == {"polite_strategy"}
    # A failed import leaves nothing in sys.modules.
    assert "broken_import is imported" not in run.printed


def test_the_environment_is_the_wheels_and_not_the_checkout(site, tmp_path):
    """Otherwise the tests above would not test the files that pip installs."""
    places = (
        "import geartrain, polite_strategy; "
        "print(geartrain.__file__); print(polite_strategy.__file__)"
    )
    found = site.run(site.python, "-c", places, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert [place.startswith(str(site.bin.parent)) for place in found.stdout.splitlines()] == [
        True,
        True,
    ]
