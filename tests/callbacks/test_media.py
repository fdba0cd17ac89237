"""``self.log_image`` and the like: what loggers and the run's folder get."""

import io
import json
import math
import re
import warnings

import numpy
import pytest
import torch
from PIL import Image
from small_models import EvalNet, Net, fit, loader, trainer
from torch import nn

from geartrain import TrainingError, hookimpl
from geartrain.callbacks import Media
from geartrain.testing import ThreadRanks


class Keeps:
    """A logger that keeps what it gets."""

    def __init__(self):
        self.media = []

    @hookimpl
    def log_media(self, media):
        self.media.append(media)


class Shows(Net):
    """Calls ``show(module)`` in the first training step of an epoch."""

    def __init__(self, show):
        super().__init__()
        self.show = show

    def training_step(self, batch, batch_idx):
        if batch_idx == 0:
            self.show(self)
        return super().training_step(batch, batch_idx)


def shown(show, **options):
    """Train with ``show``; return what the logger got."""
    keeps = Keeps()
    fit(Shows(show), plugins=[keeps], **options)
    return keeps.media


def pixels(image):
    (media,) = shown(lambda net: net.log_image("x", image))
    assert media.kind == "image"
    assert media.value.dtype is torch.uint8
    return media.value


# --- images ---------------------------------------------------------------------------------------

GREY = [[0, 64], [128, 255]]


@pytest.mark.parametrize(
    "image",
    [
        torch.tensor(GREY),
        torch.tensor([[GREY]], dtype=torch.float64) / 255,
        (torch.tensor(GREY) / 255).requires_grad_(),
        numpy.array(GREY)[..., None] / 255,
        Image.fromarray(numpy.array(GREY, dtype=numpy.uint8)),
    ],
    ids=["integers", "one of a batch", "graph", "channels last", "PIL"],
)
def test_an_image_is_uint8_with_channels_last(image):
    assert pixels(image).tolist() == torch.tensor(GREY)[..., None].tolist()


def test_a_tensors_channels_come_first_and_an_arrays_last():
    tensor = torch.arange(27, dtype=torch.uint8).reshape(3, 3, 3)
    assert pixels(tensor).equal(tensor.permute(1, 2, 0))
    assert pixels(tensor.numpy()).equal(tensor)


def test_a_batch_becomes_a_grid():
    batch = torch.arange(1, 6, dtype=torch.uint8).reshape(5, 1, 1, 1).expand(5, 3, 2, 4)
    grid = pixels(batch)
    assert grid.shape == (2 * 2 + 1, 3 * 4 + 2, 3)
    assert grid[0, ::5, 0].tolist() == [1, 2, 3]
    assert grid[3, ::5, 0].tolist() == [4, 5, 255]


def test_values_out_of_range_are_a_warning_and_are_cut():
    image = torch.tensor([[-1.0, 0.5, 2.0, math.nan]])
    with pytest.warns(UserWarning, match=r"'x'.*3 of 4 values are not from 0 to 1.*Fix: scale"):
        assert pixels(image).flatten().tolist() == [0, 128, 255, 0]


@pytest.mark.parametrize(
    ("image", "what"),
    [
        (torch.zeros(2), r"the shape \[2\]"),
        (torch.zeros(2, 5, 5), r"the shape \[2, 5, 5\]"),
        (torch.zeros(0, 3, 5, 5), r"the shape \[0, 3, 5, 5\]"),
        ("cat.png", "got str"),
    ],
)
def test_another_object_is_refused(image, what):
    with pytest.raises(TrainingError, match=rf"log_image\('x'\) .*{what}.*Fix: use"):
        pixels(image)


@pytest.mark.parametrize("channels", [1, 4])
def test_the_file_is_a_png(channels):
    image = torch.randint(0, 256, (5, 7, channels), dtype=torch.uint8)
    suffix, data = Media("image", "x", 0, image).encoded()
    read = numpy.asarray(Image.open(io.BytesIO(data))).reshape(5, 7, channels)
    assert suffix == ".png"
    assert torch.tensor(read).equal(image)


def test_a_figure_is_drawn_and_closed():
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(2, 1), dpi=50)
    figure.add_subplot().plot([1, 2])
    (media,) = shown(lambda net: net.log_figure("curve", figure))
    assert (media.kind, media.name, list(media.value.shape)) == ("image", "curve", [50, 100, 4])
    assert media.value.float().std() > 1
    assert not pyplot.get_fignums()
    with pytest.raises(TrainingError, match=r"got Linear.*Fix: use a matplotlib Figure"):
        shown(lambda net: net.log_figure("curve", nn.Linear(1, 1)))


# --- histograms, texts, tables --------------------------------------------------------------------


def histogram(values):
    (media,) = shown(lambda net: net.log_histogram("x", values))
    return media.value


def test_a_histogram_counts_every_value():
    found = histogram(torch.tensor([[0.0, 1.0], [1.0, 4.0]], dtype=torch.float16))
    assert sum(found.counts) == 4
    assert (found.edges[0], found.edges[-1]) == (0, 4)
    assert found.counts[16] == 2  # 1.0 begins the bucket
    assert (found.sum, found.sum_squares) == (6, 18)
    assert len(found.edges) == len(found.counts) + 1


def test_a_histogram_of_equal_values_and_of_a_list():
    assert sum(histogram([3, 3]).counts) == 2
    assert histogram(torch.tensor([True, False])).sum == 1


def test_values_that_are_not_finite_are_left_out_with_a_warning():
    with pytest.warns(UserWarning, match="2 of 3 values are NaN or infinite"):
        assert sum(histogram([math.nan, 1.0, math.inf]).counts) == 1
    with pytest.warns(UserWarning, match="1 of 1 values are NaN"):
        assert shown(lambda net: net.log_histogram("x", math.nan)) == []
    with pytest.warns(UserWarning, match="no values"):
        assert shown(lambda net: net.log_histogram("x", [])) == []


def test_a_table_of_columns_of_rows_and_of_a_frame():
    import pandas

    columns = {"name": ["a", "b"], "n": [torch.tensor(1), numpy.float32(0.5)]}
    rows = [["a", 1], ["b", 0.5]]
    for arguments in [
        (columns,),
        (rows, ["name", "n"]),
        (pandas.DataFrame({"name": ["a", "b"], "n": [1, 0.5]}),),
    ]:
        (media,) = shown(lambda net, arguments=arguments: net.log_table("x", *arguments))
        assert (media.value.columns, media.value.rows) == (["name", "n"], rows)


@pytest.mark.parametrize(
    "arguments",
    [({"a": [1], "b": [1, 2]},), ([[1, 2]],), ([[1, 2]], ["a"]), (3, ["a"])],
    ids=["uneven", "no names", "more cells than names", "no rows"],
)
def test_what_is_no_table_is_refused(arguments):
    with pytest.raises(TrainingError, match=r"log_table\('x'\) needs columns.*Fix: log_table"):
        shown(lambda net: net.log_table("x", *arguments))


def test_a_text_is_a_string():
    (media,) = shown(lambda net: net.log_text("x", "héllo"))
    assert media.encoded() == (".txt", "héllo".encode())
    with pytest.raises(TrainingError, match=r"log_text\('x'\) got int. Fix: use a string"):
        shown(lambda net: net.log_text("x", 3))


# --- when and where -------------------------------------------------------------------------------


def test_the_step_is_that_of_metrics():
    media = shown(lambda net: net.log_text("x", "a"), max_epochs=2)
    assert [one.step for one in media] == [1, 7]


def test_the_sanity_check_logs_nothing():
    class Validates(EvalNet):
        def validation_step(self, batch, batch_idx):
            self.log_text("x", self.trainer.run.stage)

    keeps = Keeps()
    fit(Validates(), val=loader(4), plugins=[keeps], num_sanity_val_steps=1)
    assert [(one.value, one.step) for one in keeps.media] == [("validate", 6)]


def test_without_a_logger_and_a_folder_one_warning_says_so():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        fit(Shows(lambda net: net.log_text("x", "a")), max_epochs=3)
    (warning,) = caught
    assert re.match(
        r"log_text\('x'\) goes nowhere. Fix: give the run a folder", str(warning.message)
    )
    assert warning.filename == __file__


def test_outside_a_run_and_without_a_name():
    with pytest.raises(RuntimeError, match=r"self.log_text\('x'\) works only while a Trainer runs"):
        Net().log_text("x", "a")
    for name in ("", "..", None):
        with pytest.raises(TrainingError, match="needs a name"):
            shown(lambda net, name=name: net.log_text(name, "a"))


def test_only_rank_0_logs():
    keeps = Keeps()
    ranks = ThreadRanks(2)
    trainer(strategy=ranks, plugins=[keeps]).fit(
        Shows(lambda net: net.log_text("x", f"rank {net.global_rank}")), loader()
    )
    assert [one.value for one in keeps.media] == ["rank 0"]


# --- the run's folder -----------------------------------------------------------------------------


def index(folder):
    return [json.loads(line) for line in (folder / "media" / "index.jsonl").open()]


def show_all(net):
    net.log_image("a/b", torch.zeros(2, 2))
    net.log_text("../../up", "text")
    net.log_table("t", {"x": [1]})
    net.log_histogram("h", [1.0, 2.0])


def test_the_folder_has_each_file_and_an_index(tmp_path):
    fit(Shows(show_all), output=tmp_path / "run")
    listed = index(tmp_path / "run")
    assert listed == [
        {"kind": "image", "name": "a/b", "step": 1, "file": "media/a_b-00000001.png"},
        {"kind": "text", "name": "../../up", "step": 1, "file": "media/__.._up-00000001.txt"},
        {"kind": "table", "name": "t", "step": 1, "file": "media/t-00000001.json"},
        {"kind": "histogram", "name": "h", "step": 1, "file": "media/h-00000001.json"},
    ]
    assert json.loads((tmp_path / "run" / listed[2]["file"]).read_text()) == {
        "columns": ["x"],
        "rows": [[1]],
    }
    assert sorted(
        path.name for path in tmp_path.rglob("*") if path.is_file() and "media" in str(path)
    ) == sorted(["index.jsonl", *(one["file"].partition("/")[2] for one in listed)])


def test_a_second_object_of_a_step_and_a_resumed_run_overwrite_nothing(tmp_path):
    def twice(net):
        net.log_text("x", "first")
        net.log_text("x", "second")

    fit(Shows(twice), output=tmp_path)
    trainer(output=tmp_path, max_epochs=2).fit(Shows(twice), loader(), ckpt_path="last")
    files = [one["file"] for one in index(tmp_path)]
    assert files[:2] == ["media/x-00000001.txt", "media/x-00000001-2.txt"]
    assert len({*files}) == 4
    assert (tmp_path / files[1]).read_text() == "second"


def test_a_trial_writes_nothing(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(Shows(show_all), output=tmp_path / "run", fast_dev_run=True)
    assert not (tmp_path / "run").exists()


def test_modules_and_callbacks_reach_the_loggers_own_object():
    class Own(Keeps):
        @property
        def experiment(self):
            return "own"

    own, net = Own(), Net()
    assert (net.logger, net.loggers) == (None, [])
    done = fit(net, plugins=[Keeps(), own])
    assert done.loggers == net.loggers == [own]
    assert net.logger.experiment == "own"
    assert fit().logger is None
