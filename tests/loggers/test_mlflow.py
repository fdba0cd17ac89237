"""The plugin ``mlflow``: records read back by MLflow's client, and servers that do not answer."""

import contextlib
import json
import math
import shutil
import socket
import threading
import warnings
from pathlib import Path

import pytest
from mlflow import MlflowClient
from threads import on_threads

from geartrain import TrainingError, UsageError, hookimpl
from geartrain.callbacks import ModelCheckpoint
from geartrain_mlflow import MLflow
from geartrain_mlflow.names import LONGEST, Names

from .cases import Net, Shows, fit, loader, open_files, show_all, trainer


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    """Create a database with MLflow's tables, once, because this takes seconds."""
    path = tmp_path_factory.mktemp("empty") / "test.db"
    # The default experiment keeps its artifacts in the working folder.
    with contextlib.chdir(path.parent):
        close(MlflowClient(f"sqlite:///{path}"))
    return path


@pytest.fixture(autouse=True)
def uri(tmp_path, monkeypatch, empty):
    """A copy of the database for one test; at the end no file is open."""
    for name in ("TRACKING_URI", "EXPERIMENT_NAME", "EXPERIMENT_ID", "ALLOW_FILE_STORE"):
        monkeypatch.delenv(f"MLFLOW_{name}", raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.chdir(tmp_path)
    shutil.copy(empty, tmp_path)
    yield f"sqlite:///{tmp_path}/test.db"
    assert not [thread for thread in threading.enumerate() if thread.name == "mlflow"]
    assert not any(path.startswith(str(tmp_path)) and path.endswith(".db") for path in open_files())


def close(client):
    client._tracking_client.store.engine.dispose()


@contextlib.contextmanager
def reading(uri):
    client = MlflowClient(uri)
    try:
        yield client
    finally:
        close(client)


def runs(uri, experiment="Default"):
    """Return the experiment's runs, oldest first."""
    with reading(uri) as client:
        found = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
        return sorted(found, key=lambda run: (run.info.start_time, run.info.end_time))


def history(uri, run, name):
    with reading(uri) as client:
        found = client.get_metric_history(run.info.run_id, name)
        return sorted((metric.step, metric.value) for metric in found)


def artifacts(uri, run):
    """Return the paths of the run's checkpoints."""
    with reading(uri) as client:
        return [file.path for file in client.list_artifacts(run.info.run_id, "checkpoints")]


# --- content --------------------------------------------------------------------------------------


def test_a_run_has_params_metrics_with_their_steps_tags_and_its_status(uri, tmp_path):
    plugin = MLflow(experiment="digits", tracking_uri=uri, tags={"team": "red"})
    net = Net(lr=0.5, note="ä" * 7000)  # MLflow takes 6000
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(plugin, output=tmp_path / "first", net=net)
    assert not ours(caught)
    (run,) = runs(uri, "digits")
    assert (run.info.status, run.info.run_name) == ("FINISHED", "first")
    assert run.info.end_time >= run.info.start_time
    assert history(uri, run, "loss") == [(step, float(step)) for step in (2, 4, 6, 8, 10, 12)]
    assert history(uri, run, "val_loss") == [(6, 106.0), (12, 112.0)]
    params = run.data.params
    expected = {"lr": "0.5", "widths": "[3, 1]", "bias": "true", "note": "ä" * 6000}
    expected |= {"plan.accelerator": "cpu", "plan.strategy": "single", "plan.processes": "1"}
    expected |= {"plan.precision": "32-true", "plan.max_epochs": "2", "plan.batch_size.global": "4"}
    assert {name: params[name] for name in expected} == expected
    assert json.loads(params["plan.plugins"]) == ["mlflow", "provenance"]
    assert run.data.tags["team"] == "red"
    assert run.data.tags["geartrain.command"] == "fit"
    assert {"mlflow.user", "mlflow.source.name", "geartrain.version"} <= set(run.data.tags)


def test_by_name_with_mlflows_own_environment(uri, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "from outside")
    fit("mlflow", plugin_options={"mlflow": {"run_name": "mine"}})
    assert [run.info.run_name for run in runs(uri, "from outside")] == ["mine"]
    fit(MLflow(experiment="of its own"))
    assert len(runs(uri, "of its own")) == len(runs(uri, "from outside")) == 1


def test_without_a_uri_it_is_mlflows_database_in_the_working_folder(tmp_path):
    fit("mlflow", max_epochs=1)
    assert len(runs(f"sqlite:///{tmp_path}/mlflow.db")) == 1


def test_a_folder_is_written_if_mlflow_allows_it(tmp_path, monkeypatch):
    uri = (tmp_path / "store").as_uri()
    message = r"\[mlflow\]: tracking_uri='file:.*is a folder.*sqlite:///mlflow\.db"
    with pytest.raises(UsageError, match=message):
        fit(MLflow(tracking_uri=uri))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    fit(MLflow(tracking_uri=uri), max_epochs=1)
    (run,) = MlflowClient(uri).search_runs(["0"])
    assert (run.info.status, run.data.metrics["loss"]) == ("FINISHED", 6.0)


def test_more_metrics_than_one_call_takes_and_nan_and_infinity(uri, monkeypatch):
    log_batch, sizes = MlflowClient.log_batch, []

    # A database accepts any number of metrics and duplicates; a server does not.
    def count(*args, metrics=(), **options):
        sizes.append(len(metrics))
        log_batch(*args, metrics=metrics, **options)

    monkeypatch.setattr(MlflowClient, "log_batch", count)
    values = {f"metric {i}": float(i) for i in range(2100)}
    all_values = {**values, "nan": math.nan, "inf": math.inf}
    fit(MLflow(tracking_uri=uri), values=all_values, max_epochs=1, log_every_n_steps=6)
    (run,) = runs(uri)
    found = run.data.metrics
    assert {name: found[name] for name in values} == values
    assert math.isnan(found["nan"])
    assert (max(sizes), sum(sizes)) == (1000, 2100 + len(("nan", "inf", "loss", "val_loss")))
    assert found["inf"] > 1e308  # MLflow's databases store the largest number instead


def test_names_that_mlflow_refuses_are_mapped_anew_in_each_run(uri):
    names = {
        "acc@1": "acc_1",
        "acc%1": "acc_1_2",
        "acc_1": "acc_1_3",
        "a//b/../c/": "a/b/c",
        "x" * 300: "x" * LONGEST,
        "x" * 299: "x" * (LONGEST - 6) + "_2",
        "grün (µ): ok": "grün _µ__ ok",
        "..": "_",
    }
    plugin, numbered = MLflow(tracking_uri=uri), {name: -float(i) for i, name in enumerate(names)}
    fit(plugin, values=numbered, max_epochs=1)
    fit(plugin, values={"acc%1": -9.0}, max_epochs=1)
    first, second = runs(uri)
    found = {value: name for name, value in first.data.metrics.items()}
    assert {name: found[value] for name, value in numbered.items()} == names
    assert second.data.metrics["acc_1"] == -9.0


def test_a_name_always_has_the_same_spelling():
    names = Names()
    found = [names[name] for name in ("a:b", "a b", "a?b", "a:b", "a?b")]
    assert found == ["a_b", "a b", "a_b_2", "a_b", "a_b_2"]


def test_checkpoints_are_artifacts_on_request(uri, tmp_path):
    for name, wanted in (("with", True), ("without", False)):
        fit(MLflow(tracking_uri=uri, experiment=name, checkpoints=wanted), output=tmp_path / name)
    (sent,), (other,) = runs(uri, "with"), runs(uri, "without")
    assert (artifacts(uri, sent), artifacts(uri, other)) == (["checkpoints/last.ckpt"], [])
    with reading(uri) as client:
        file = Path(client.download_artifacts(sent.info.run_id, "checkpoints/last.ckpt"))
    assert file.read_bytes() == (tmp_path / "with" / "last.ckpt").read_bytes()


def test_a_checkpoint_that_was_deleted_before_it_was_sent_is_left_out(
    uri, tmp_path, monkeypatch, recwarn
):
    sent = MlflowClient.log_artifact

    def late(self, run_id, file, *arguments):
        if "step=6" in file:  # a slow server: a better checkpoint has replaced this one
            assert replaced.wait(30)
        sent(self, run_id, file, *arguments)

    class Says:
        @hookimpl
        def on_run_end(self):
            replaced.set()

    replaced = threading.Event()
    monkeypatch.setattr(MlflowClient, "log_artifact", late)
    best = ModelCheckpoint("val_loss", mode="max", dirpath=tmp_path / "best", filename="{step}")
    fit(MLflow(tracking_uri=uri, checkpoints=True), best, Says())
    (run,) = runs(uri)
    assert artifacts(uri, run) == ["checkpoints/step=12.ckpt"]
    assert run.info.status == "FINISHED"
    assert not ours(recwarn)


def test_images_histograms_texts_and_tables_are_artifacts(uri):
    def show(net):
        show_all(net)
        net.logger.experiment.set_tag(net.logger.run_id, "own", "yes")

    fit(MLflow(tracking_uri=uri), net=Shows(show))
    (run,) = runs(uri)
    assert run.data.tags["own"] == "yes"
    folder = Path(run.info.artifact_uri) / "media"
    assert (folder / "said" / "00000006.txt").read_text() == "<hello>"
    assert json.loads((folder / "table" / "00000006.json").read_text())["rows"] == [["a|b", 1]]
    assert (folder / "images" / "cat" / "00000006.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(folder.rglob("*.*"))) == 4


@pytest.mark.parametrize(
    ("error", "status"),
    [(ValueError("oh"), "FAILED"), (KeyboardInterrupt(), "KILLED"), (SystemExit(143), "KILLED")],
)
def test_a_run_that_ends_early_keeps_its_metrics_and_its_status(uri, error, status):
    with pytest.raises(type(error)):
        fit(MLflow(tracking_uri=uri), error=error)
    (run,) = runs(uri)
    assert run.info.status == status
    assert history(uri, run, "loss") == [(2, 2.0)]


def test_each_command_of_one_object_is_a_run(uri):
    one, net = trainer(MLflow(tracking_uri=uri), max_epochs=1), Net()
    for _ in range(2):
        one.fit(net, loader())
    one.test(net, loader())
    found = runs(uri)
    assert [run.data.tags["geartrain.command"] for run in found] == ["fit", "fit", "test"]
    assert [history(uri, run, "loss") for run in found[:2]] == [[(2, 2.0), (4, 4.0), (6, 6.0)]] * 2
    assert history(uri, found[2], "tested") == [(6, 7.0)]


@pytest.mark.parametrize("first", [0, 1])
def test_two_ranks_write_once(uri, first):
    one, _ = on_threads(first=first, plugins=[MLflow(tracking_uri=uri)])
    one.fit(Net(), loader(), loader())
    (run,) = runs(uri)
    assert history(uri, run, "val_loss") == [(3, 103.0)]
    assert run.data.params["plan.processes"] == "2"


def test_a_trial_writes_nothing(tmp_path):
    fit("mlflow", fast_dev_run=True)
    assert [path.name for path in tmp_path.iterdir()] == ["test.db"]


# --- refused options, and servers that do not answer ----------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("experiment", ""), ("run_name", " "), ("tracking_uri", "")),
        *(("patience", 0), ("patience", math.nan), ("patience", True)),
    ],
)
def test_wrong_options_are_refused_by_mlflow(name, value):
    with pytest.raises(UsageError, match=rf"geartrain-mlflow\[mlflow\]: {name}="):
        MLflow(**{name: value})


def ours(caught):
    messages = [str(warning.message) for warning in caught]
    return [message for message in messages if "geartrain-mlflow[mlflow]" in message]


@contextlib.contextmanager
def bound(monkeypatch, silent=False):
    """Give the address of a server that refuses connections, or accepts and never answers."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if silent:
            server.listen()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        left = [thread for thread in threading.enumerate() if thread.name == "mlflow"]
        assert len(left) == silent
    for thread in left:  # the closed socket resets the connection, which ends the thread
        thread.join(60)


@pytest.mark.parametrize(
    ("address", "words"),
    [(None, "127.0.0.1"), ("sqlite:///file/x.db", "")],
    ids=["a closed port", "a file in place of a folder"],
)
def test_a_server_that_refuses_is_one_warning(tmp_path, monkeypatch, address, words):
    (tmp_path / "file").write_text("mine")
    with (
        bound(monkeypatch) as refuses,
        pytest.warns(UserWarning, match=r"geartrain-mlflow\[mlflow\]") as caught,
    ):
        one = fit(MLflow(tracking_uri=address or refuses))
    assert one.global_step == 12
    (warning,) = ours(caught)
    assert words in warning


def test_a_silent_server_delays_the_end_at_most_by_patience(monkeypatch):
    """MLflow would wait two minutes, and then retry."""
    with (
        bound(monkeypatch, silent=True) as address,
        pytest.warns(UserWarning, match=r"geartrain-mlflow\[mlflow\]") as caught,
    ):
        one = fit(MLflow(tracking_uri=address, patience=0.5))
    assert one.global_step == 12
    (warning,) = ours(caught)
    assert "has not taken everything within 0.5 s" in warning


def test_its_own_object_of_a_silent_server_is_an_error_after_patience(monkeypatch):
    net, message = Shows(lambda net: net.logger.experiment), "MLflow has not created the run within"
    with bound(monkeypatch, silent=True) as address, pytest.raises(TrainingError, match=message):
        fit(MLflow(tracking_uri=address, patience=0.1), net=net)
