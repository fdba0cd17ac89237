"""prediction_writer: files for each batch and rank, and no output in memory."""

import gc
import weakref

import pytest
import torch
from small_models import EvalNet, Stream, loader, samples, trainer
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from geartrain import TrainingError
from geartrain.callbacks import BasePredictionWriter, PredictionWriter
from geartrain.testing import ThreadRanks


class Predicts(EvalNet):
    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return {"x": batch[0], "mean": batch[0].mean(1)}


def predict(writer, loaders, strategy="single", **options):
    one = trainer(strategy=strategy, callbacks=[writer])
    return one.predict(Predicts(), loaders, **options)


def read(folder):
    """Return every file of a writer by its relative path."""
    return {
        str(path.relative_to(folder)): torch.load(path, weights_only=True)
        for path in sorted(folder.rglob("*.pt"))
    }


def assert_whole(files, n):
    """Assert that the files have each sample once, under its index."""
    found = {}
    for content in files.values():
        for index, row in zip(content["indices"], content["prediction"]["x"], strict=True):
            assert index not in found
            found[index] = row
    expected = samples(n).tensors[0]
    assert sorted(found) == list(range(n))
    assert all(torch.equal(found[i], expected[i]) for i in found)


WORKERS = {"num_workers": 2, "persistent_workers": True}


@pytest.mark.parametrize(
    ("ranks", "shuffle", "workers"),
    [(1, True, {}), (2, True, {}), (3, False, {}), (2, False, WORKERS)],
)
def test_each_sample_is_written_once_with_its_index(tmp_path, ranks, shuffle, workers):
    strategy = "single" if ranks == 1 else ThreadRanks(ranks)
    loaders = loader(22, shuffle=shuffle, **workers)
    assert predict(PredictionWriter(tmp_path), loaders, strategy) is None

    files = read(tmp_path)
    assert len(files) == 6
    assert {path.split("/")[0] for path in files} == {f"rank-{i}" for i in range(ranks)}
    assert_whole(files, 22)


def test_an_epoch_is_one_file_for_each_rank(tmp_path):
    writer = PredictionWriter(tmp_path, "batch_and_epoch")
    predict(writer, [loader(8), loader(5)], ThreadRanks(2))
    files = read(tmp_path)
    for rank in (0, 1):
        whole = files[f"rank-{rank}.pt"]
        for n, outputs, indices in zip((8, 5), whole["predictions"], whole["indices"], strict=True):
            for output, some in zip(outputs, indices, strict=True):
                assert torch.equal(output["x"], samples(n).tensors[0][some])
    first = [i for rank in (0, 1) for some in files[f"rank-{rank}.pt"]["indices"][0] for i in some]
    assert sorted(first) == list(range(8))


def test_other_loaders(tmp_path):
    """A tensor is written without the rest of the tensor of which it is a view."""
    batches, large = [[3, 1], [0]], samples(2000).tensors[0]
    loaders = [
        Stream([[large[:3]], [large[3:6]]]),
        DataLoader(samples(8), batch_sampler=batches),
        DataLoader(samples(8), batch_sampler=BatchSampler(RandomSampler(samples(8)), 3, False)),
    ]
    outputs = predict(PredictionWriter(tmp_path), loaders, return_predictions=True)
    assert [len(of_loader) for of_loader in outputs] == [2, 2, 3]
    assert all(path.stat().st_size < 4000 for path in tmp_path.rglob("*.pt"))
    files = [read(tmp_path / "rank-0" / f"loader-{i}") for i in range(3)]
    indices = [[content["indices"] for content in of_loader.values()] for of_loader in files]
    assert indices[:2] == [[None, None], batches]
    assert sorted(i for some in indices[2] for i in some) == list(range(8))


def test_memory_does_not_grow(tmp_path):
    """No output is alive when the next batch but one is written."""
    alive = []

    class Watches(BasePredictionWriter):
        def write_on_batch_end(self, trainer, module, prediction, *more):
            gc.collect()
            assert sum(one() is not None for one in alive) <= 1
            alive.append(weakref.ref(prediction["mean"]))

    predict(Watches(), loader(24))
    assert len(alive) == 6


def test_a_second_prediction_replaces_nothing(tmp_path):
    writer = PredictionWriter(tmp_path)
    one = trainer(callbacks=[writer])
    one.predict(Predicts(), loader(8))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.pt")}
    with pytest.raises(TrainingError, match=r"rank-0 exists.*Fix: use another output_dir"):
        one.predict(Predicts(), loader(12))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.pt")} == before


def test_fit_and_test_write_nothing(tmp_path):
    writer = PredictionWriter(tmp_path / "out")
    one = trainer(callbacks=[writer])
    one.fit(EvalNet(), loader(), loader())
    one.test(EvalNet(), loader())
    assert not (tmp_path / "out").exists()


def test_without_a_writer_predictions_are_returned_except_on_request():
    one = trainer()
    assert one.predict(Predicts(), loader(8), return_predictions=False) is None
    assert len(one.predict(Predicts(), loader(8))) == 2
