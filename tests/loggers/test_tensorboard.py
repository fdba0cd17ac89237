"""The plugin ``tensorboard``: its files, read by TensorBoard."""

import json
import math
import threading
import warnings

import pytest
import torch
from several_ranks import results
from small_models import assert_equal
from tensorboard import context
from tensorboard.backend.event_processing import (
    data_provider,
    event_accumulator,
    plugin_event_multiplexer,
)
from tensorboard.plugins import base_plugin
from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups
from threads import on_threads
from torch.distributed import HashStore

from geartrain import TrainingError, UsageError, hookimpl
from geartrain_tensorboard import TensorBoard

from .cases import Net, Shows, fit, loader, open_files, show_all, threads, trainer

try:
    import resource
except ImportError:
    resource = None


@pytest.fixture(autouse=True)
def _nothing_is_left_open(tmp_path):
    yield
    assert "_AsyncWriterThread" not in {type(one).__name__ for one in threading.enumerate()}
    assert not any("tfevents" in path for path in open_files())


def read(folder):
    all_of = {"scalars": 0, "tensors": 0}
    return event_accumulator.EventAccumulator(str(folder), size_guidance=all_of).Reload()


def scalars(folder):
    events = read(folder)
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def sessions(folder):
    """Return ``{name: (hyperparameters, metrics, status)}`` of TensorBoard's HPARAMS table."""
    runs = plugin_event_multiplexer.EventMultiplexer().AddRunsFromDirectory(str(folder))
    runs.Reload()
    provider = data_provider.MultiplexerDataProvider(runs, str(folder))
    own = base_plugin.TBContext(logdir=str(folder), data_provider=provider, multiplexer=runs)
    backend, request = backend_context.Context(own), context.RequestContext()
    wanted = api_pb2.ListSessionGroupsRequest(start_index=0, slice_size=99)
    wanted.allowed_statuses.extend(api_pb2.Status.values())
    records = backend.hparams_metadata(request, "")
    given = backend.hparams_from_data_provider(request, "", 99)
    infos = backend.experiment_from_metadata(request, "", True, records, given).metric_infos
    wanted.col_params.extend(api_pb2.ColParams(metric=info.name) for info in infos)
    found = {}
    for group in list_session_groups.Handler(request, backend, "", wanted).run().session_groups:
        values = {name: getattr(v, v.WhichOneof("kind")) for name, v in group.hparams.items()}
        for session in group.sessions:
            metrics = {value.name.tag: value.value for value in session.metric_values}
            found[session.name] = (values, metrics, api_pb2.Status.Name(session.status))
    return found


# --- content --------------------------------------------------------------------------------------


def test_scalars_and_evaluations_have_the_step_of_their_logging(tmp_path):
    one = fit("tensorboard", output=tmp_path, values={"nan": math.nan, "inf": math.inf})
    plan = json.loads(json.dumps(one.plan.as_dict()))
    one.test(Net(), loader())
    found, steps = scalars(tmp_path / "tensorboard"), (2, 4, 6, 8, 10, 12)
    assert [math.isnan(value) for _, value in found.pop("nan")] == [True] * 6
    assert found == {
        "loss": [(step, float(step)) for step in steps],
        "inf": [(step, math.inf) for step in steps],
        "val_loss": [(6, 106.0), (12, 112.0)],
        "tested": [(12, 7.0)],
    }
    (event,) = read(tmp_path / "tensorboard").Tensors("plan/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert text.startswith("```json\n")
    assert json.loads(text.removeprefix("```json").removesuffix("```")) == plan


def test_hyperparameters_are_in_tensorboards_table_with_the_newest_metrics(tmp_path):
    fit(TensorBoard(), output=tmp_path / "a")
    fit(TensorBoard(), output=tmp_path / "b", net=Net(lr=0.01, bias=False))
    found = sessions(tmp_path)
    hyperparameters, metrics, status = found["a/tensorboard"]
    assert hyperparameters == {"lr": 0.1, "widths": "[3, 1]", "bias": "true", "note": "a"}
    assert metrics == {"loss": 12.0, "val_loss": 112.0}
    assert status == "STATUS_SUCCESS"
    other = {"lr": 0.01, "widths": "[3, 1]", "bias": "false", "note": "a"}
    assert found["b/tensorboard"][0] == other
    assert set(found) == {"a/tensorboard", "b/tensorboard"}  # no other folder for them


def test_images_histograms_texts_and_tables(tmp_path):
    def show(net):
        show_all(net)
        net.logger.experiment.add_scalar("own", 1.5, 3)

    fit("tensorboard", output=tmp_path, net=Shows(show))
    found = read(tmp_path / "tensorboard")
    (image,) = found.Images("images/cat")
    assert (image.step, image.width, image.height) == (6, 2, 1)
    (event,) = found.Histograms("weights")
    value = event.histogram_value
    assert (value.num, value.min, value.max, value.sum) == (3, 0, 1, 2)
    assert [count for count in value.bucket if count] == [1, 2]
    (said,) = found.Tensors("said/text_summary")
    assert said.tensor_proto.string_val == [b"<hello>"]
    (table,) = found.Tensors("table/text_summary")
    assert table.tensor_proto.string_val == [b"| name | n |\n| --- | --- |\n| a\\|b | 1 |"]
    assert [(one.step, one.value) for one in found.Scalars("own")] == [(3, 1.5)]


def test_its_own_object_exists_in_a_run_only_and_does_nothing_in_a_trial(tmp_path):
    one = trainer("tensorboard", output=tmp_path, fast_dev_run=True)
    own = r"geartrain-tensorboard\[tensorboard\]: its experiment exists only in a run. Fix: use it"
    with pytest.raises(TrainingError, match=own):
        one.logger.experiment.add_scalar("own", 1.5, 3)
    net = Shows(lambda net: net.logger.experiment.add_text("x", "y").anything())
    one.fit(net, loader(), loader())
    with pytest.raises(TrainingError, match=own):
        one.logger.experiment.add_scalar("own", 1.5, 3)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failed_run_is_shown_as_failed_with_its_metrics(tmp_path, error):
    with pytest.raises(error):
        fit("tensorboard", output=tmp_path / "a", error=error())
    ((_, metrics, status),) = sessions(tmp_path).values()
    assert (metrics, status) == ({"loss": 2.0}, "STATUS_FAILURE")


# --- graph ----------------------------------------------------------------------------------------


class Noisy(Net):
    def forward(self, x):
        return super().forward(x + torch.rand(()))


def test_graph_is_written_on_request_and_changes_nothing(tmp_path):
    torch.manual_seed(0)
    plain, with_graph = Noisy(), Noisy()
    with_graph.load_state_dict(plain.state_dict())
    with_graph.example_input_array = torch.zeros(2, 3)
    for name, net in (("plain", plain), ("graph", with_graph)):
        net.layers[0].eval()  # a frozen layer must stay in eval mode
        with pytest.warns(UserWarning, match="eval mode"):
            fit(TensorBoard(graph=name == "graph"), output=tmp_path / name, net=net, seed=1)
        assert [part.training for part in net.modules()] == [True, True, False, True]
    assert not read(tmp_path / "plain" / "tensorboard").Tags()["graph"]
    graph = read(tmp_path / "graph" / "tensorboard").Graph()
    assert any("Linear" in node.name for node in graph.node)
    assert_equal(plain, with_graph)  # the random numbers are equal too


class Untraceable(Net):
    def forward(self, x):
        if x.sum() == 0:
            raise RuntimeError("not on zeros")
        return super().forward(x)


@pytest.mark.parametrize(
    ("net", "why"), [(Net(), "no example_input_array"), (Untraceable(), "not on zeros")]
)
def test_without_a_graph_the_rest_is_written_with_a_warning(tmp_path, net, why, capsys):
    if isinstance(net, Untraceable):
        net.example_input_array = torch.zeros(1, 3)
    message = rf"\[tensorboard\]: no graph was written of {type(net).__name__}: .*{why}"
    with pytest.warns(UserWarning, match=message):
        fit(TensorBoard(graph=True), output=tmp_path, net=net)
    assert scalars(tmp_path / "tensorboard")["val_loss"] == [(6, 106.0), (12, 112.0)]
    assert capsys.readouterr().out == ""


# --- several runs ---------------------------------------------------------------------------------


def test_a_second_fit_of_the_same_object_has_another_folder(tmp_path):
    folder, net = tmp_path / "tb", Net()
    one = trainer(TensorBoard(str(folder)), max_epochs=1)
    for _ in range(3):
        one.fit(net, loader())
    one.test(net, loader())
    losses = [(2, 2.0), (4, 4.0), (6, 6.0)]
    assert scalars(folder / "fit-2") == {"loss": losses}
    assert scalars(folder / "fit-3") == {"loss": losses, "tested": [(6, 7.0)]}
    assert set(sessions(tmp_path)) == {"tb", "tb/fit-2", "tb/fit-3"}
    assert len(list(folder.glob("events*"))) == 1


class Stored:
    """Gives the run a store, as strategies of several processes do. Later plugins come first."""

    def __init__(self, store):
        self.store = store

    @hookimpl
    def on_run_start(self, run):
        run.store = self.store


@pytest.mark.parametrize("store", [lambda: None, HashStore], ids=["one process", "ranks"])
def test_two_in_one_run_have_a_folder_each(tmp_path, store):
    fit(*(TensorBoard(str(tmp_path)) for _ in range(2)), Stored(store()), val=False)
    for folder in (tmp_path, tmp_path / "fit-2"):
        assert len(list(folder.glob("events*"))) == 1
        assert len(scalars(folder)["loss"]) == 6


def test_a_rank_that_starts_again_goes_on_in_the_folder_of_each(tmp_path):
    store = HashStore()
    for _ in range(2):
        fit(*(TensorBoard(str(tmp_path)) for _ in range(2)), Stored(store), val=False)
    for folder in (tmp_path, tmp_path / "fit-2"):
        assert len(list(folder.glob("events*"))) == 2
    assert not (tmp_path / "fit-3").exists()


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), True, "1"])
def test_wrong_flush_seconds_are_refused(seconds):
    with pytest.raises(UsageError, match=r"geartrain-tensorboard\[tensorboard\]: flush_seconds"):
        TensorBoard(flush_seconds=seconds)


@pytest.mark.parametrize(
    ("folder", "message"), [(None, "has no place.*--output DIR"), (__file__, ".*is not a folder")]
)
def test_no_place_to_write_is_refused(folder, message):
    with pytest.raises(UsageError, match=rf"geartrain-tensorboard\[tensorboard\].*{message}"):
        fit(TensorBoard(folder))


@pytest.mark.parametrize("first", [0, 1])
def test_two_ranks_write_once(tmp_path, first):
    one, _ = on_threads(first=first, plugins="tensorboard", output=tmp_path)
    one.fit(Net(), loader(), loader())
    folder = tmp_path / "tensorboard"
    assert len(list(folder.iterdir())) == 1
    assert scalars(folder)["val_loss"] == [(3, 103.0)]


def test_a_trial_writes_nothing(tmp_path):
    for plugin in ("tensorboard", TensorBoard(str(tmp_path / "tb"))):
        fit(plugin, output=tmp_path / "run", fast_dev_run=True)
    assert list(tmp_path.iterdir()) == []


# --- when it cannot be written --------------------------------------------------------------------


def train_on_a_full_disk():
    """Set a limit on the size of files."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options = {"tensorboard": {"folder": "tb", "flush_seconds": 0.001}}
        one = fit("tensorboard", plugin_options=options, max_epochs=30, log_every_n_steps=1)
    assert one.global_step == 180
    left = threads()
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return left, *(
        str(warning.message) for warning in caught if "tensorboard[" in str(warning.message)
    )


@pytest.mark.skipif(resource is None, reason="Windows has no limit of a file's size")
def test_a_full_disk_is_one_warning(tmp_path):
    ((left, warning),) = results(tmp_path, train_on_a_full_disk, ranks=1, place="alone")
    assert left == {"MainThread"}
    assert "geartrain-tensorboard[tensorboard]: log_metrics raised OSError" in warning
    assert scalars(tmp_path / "tb")["loss"][0] == (1, 1.0)


def test_a_folder_that_cannot_be_made_is_one_warning(tmp_path):
    (tmp_path / "file").write_text("mine")
    message = r"geartrain-tensorboard\[tensorboard\]: on_run_start raised"
    with pytest.warns(UserWarning, match=message) as caught:
        one = fit(TensorBoard(str(tmp_path / "file" / "tb")))
    assert one.global_step == 12
    assert sum("tensorboard" in str(warning.message) for warning in caught) == 1
