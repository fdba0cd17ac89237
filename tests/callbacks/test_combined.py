"""CombinedLoader: the batches of each mode, its length, what is refused, ranks and resuming."""

import pickle

import pytest
import torch
from small_models import EvalNet, Stream, fit, loader, trainer
from torch.utils.data import DataLoader, IterableDataset

import geartrain as gt
from geartrain import CombinedLoader, TrainingError, UsageError, hookimpl
from geartrain.callbacks import ModelCheckpoint
from geartrain.testing import ThreadRanks, run_plugin


def of(*numbers, **options):
    """Return a loader of these numbers, one a batch."""
    return DataLoader([torch.tensor(float(n)) for n in numbers], batch_size=1, **options)


def plain(batch):
    """Return a batch with numbers in place of tensors."""
    if isinstance(batch, dict):
        return {key: plain(one) for key, one in batch.items()}
    if isinstance(batch, list | tuple):
        return [plain(one) for one in batch]
    return batch if batch is None else batch.tolist()[0]


class Sees(gt.Module):
    """Notes its batches; its dropout draws random numbers in each step."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(plain(batch))
        parts = batch.values() if isinstance(batch, dict) else batch
        total = sum(part.sum() for part in parts if part is not None)
        return (torch.nn.functional.dropout(self.weight) * total).sum() / 100

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


def seen(data, module=None, **options):
    module = Sees() if module is None else module
    return fit(module, data, **options), module.seen


# --- modes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("min_size", [(1, 5), (2, 6)]),
        ("max_size", [(1, 5), (2, 6), (None, 7), (None, 8), (None, 9)]),
        ("max_size_cycle", [(1, 5), (2, 6), (1, 7), (2, 8), (1, 9)]),
    ],
)
@pytest.mark.parametrize("known", [True, False])
def test_each_mode_trains_on_its_batches(mode, expected, known):
    short, long = of(1, 2), of(5, 6, 7, 8, 9)
    if not known:
        long = Stream(long)
    data = CombinedLoader({"a": short, "b": long}, mode)
    one, batches = seen(data, max_epochs=2)
    assert batches == [{"a": a, "b": b} for a, b in expected] * 2
    assert one.global_step == 2 * len(expected)
    assert one.num_training_batches == (len(expected) if known else float("inf"))


def test_several_loaders_make_a_list():
    _, batches = seen((of(1, 2), of(3)))
    assert batches == [[1, 3], [2, 3]]


def test_a_limit_counts_combined_batches():
    one, batches = seen({"a": of(1), "b": of(2, 3, 4, 5)}, limit_train_batches=0.5)
    assert batches == [{"a": 1, "b": 2}, {"a": 1, "b": 3}]
    assert one.num_training_batches == 2


def test_accumulation_takes_combined_batches():
    one, batches = seen([of(1), of(2, 3, 4)], accumulate_grad_batches=2)
    assert one.global_step == 2
    assert len(batches) == 3


def test_the_module_and_a_datamodule_return_a_combined_loader():
    class Data(gt.DataModule):
        def train_dataloader(self):
            return CombinedLoader([of(1), of(2, 3)], "min_size")

    _, batches = seen(Data())
    assert batches == [[1, 2]]


def test_the_trainer_has_the_loaders_by_name():
    data = {"a": of(1), "b": of(2)}
    one, _ = seen(data)
    assert one.train_dataloader == data


def test_manual_optimisation_gets_combined_batches():
    class Manual(Sees):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            self.optimizers().step()

    module = Manual()
    fit(module, {"a": of(1), "b": of(2, 3)})
    assert module.seen == [{"a": 1, "b": 2}, {"a": 1, "b": 3}]


def test_a_session_trains_on_a_combined_loader():
    with gt.Session(accelerator="cpu") as session:
        data = session.setup_dataloaders(CombinedLoader({"a": of(1), "b": of(2, 3)}, "max_size"))
        assert len(data) == 2
        assert [plain(batch) for batch in data] == [{"a": 1, "b": 2}, {"a": None, "b": 3}]


# --- evaluation -----------------------------------------------------------------------------------


def test_a_sequential_one_is_evaluated_as_its_list():
    loaders, net = [loader(8), loader(12, 3)], EvalNet()
    expected = trainer().test(net, loaders)
    assert trainer().test(net, CombinedLoader(loaders, "sequential")) == expected


class Pairs(EvalNet):
    """A net that notes the batches that it validates and tests, and logs their sum."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def validation_step(self, batch, batch_idx):
        self.seen.append(plain(batch))
        self.log("sum", float(sum(filter(None, self.seen[-1].values()))), batch_size=1)

    test_step = validation_step


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("min_size", [(1, 5), (2, 6)]),
        ("max_size", [(1, 5), (2, 6), (None, 7)]),
        ("max_size_cycle", [(1, 5), (2, 6), (1, 7)]),
    ],
)
@pytest.mark.parametrize("command", ["validate", "test", "fit"])
def test_other_modes_evaluate_combined_batches(mode, expected, command):
    data, net = CombinedLoader({"a": of(1, 2), "b": of(5, 6, 7)}, mode), Pairs()
    one = trainer(num_sanity_val_steps=1)
    if command == "fit":
        one.fit(net, loader(), data)
        assert net.seen.pop(0) == {"a": 1, "b": 5}  # the sanity check
    else:
        getattr(one, command)(net, data)
    assert net.seen == [{"a": a, "b": b} for a, b in expected]
    sums = [(a or 0) + b for a, b in expected]
    assert one.callback_metrics["sum"] == pytest.approx(sum(sums) / len(sums))


def test_a_limit_and_a_list_in_evaluation():
    class Notes(EvalNet):
        seen = ()

        def test_step(self, batch, batch_idx, dataloader_idx):
            self.seen = (*self.seen, (dataloader_idx, plain(batch)))

    net, of_two = Notes(), CombinedLoader([of(1, 2, 3), of(4, 5, 6)])
    trainer(limit_test_batches=2).test(net, [of_two, of(7)])
    assert net.seen == ((0, [1, 4]), (0, [2, 5]), (1, 7))
    net = Notes()
    trainer().test(net, [CombinedLoader([of(1), of(2)], "sequential"), of(7)])
    assert net.seen == ((0, 1), (1, 2), (2, 7))


def test_prediction_refuses_other_modes_than_sequential():
    data = CombinedLoader([loader(), loader()])
    with pytest.raises(UsageError, match=r"to predict has mode='min_size'.*Fix: use 'sequential'"):
        trainer().predict(EvalNet(), data)
    with pytest.raises(UsageError, match=r"to predict has mode='min_size'"):
        trainer().predict(EvalNet(), [data, loader()])


# --- nested ---------------------------------------------------------------------------------------


def nested():
    inner = CombinedLoader([of(1, 2), of(3, 4, 5)], "max_size")
    return {"a": [of(6), {"c": of(7, 8)}], "b": inner}


@pytest.mark.parametrize("make", [dict, lambda data: CombinedLoader(data, "max_size_cycle")])
def test_a_batch_has_the_shape_of_nested_loaders(make):
    _, batches = seen(make(nested()), module=Nested())
    assert batches == [
        {"a": [6, {"c": 7}], "b": [1, 3]},
        {"a": [6, {"c": 8}], "b": [2, 4]},
        {"a": [6, {"c": 7}], "b": [None, 5]},
    ]


class Nested(Sees):
    def training_step(self, batch, batch_idx):
        self.seen.append(plain(batch))
        return (self.weight * batch["b"][1]).sum() / 100


def test_nested_loaders_are_evaluated_one_after_the_other():
    class Notes(EvalNet):
        seen = ()

        def test_step(self, batch, batch_idx, dataloader_idx):
            self.seen = (*self.seen, (dataloader_idx, plain(batch)))

    inner = CombinedLoader([of(1), of(2)], "sequential")
    for data in ({"a": [of(6)], "b": inner}, CombinedLoader({"a": [of(6)], "b": inner}, MODE)):
        net = Notes()
        trainer().test(net, data)
        assert net.seen == ((0, 6), (1, 1), (2, 2))


MODE = "sequential"


def test_a_list_of_batches_is_a_loader():
    batches = [(torch.ones(1), torch.ones(1))] * 3
    combined = CombinedLoader({"a": batches, "b": [torch.ones(1)] * 2})
    assert list(combined.named) == ["['a']", "['b']"]
    assert [len(batch["a"]) for batch in combined] == [2, 2]


def test_each_nested_loader_is_sharded_and_its_workers_end():
    data = nested()
    data["b"] = CombinedLoader(
        [of(1, 2, num_workers=1, persistent_workers=True), of(3, 4)], "min_size"
    )
    results = run_plugin(module=Nested(), data=data, seed=1)
    found = [[batch["b"] for batch in result.module.seen] for result in results]
    assert found == [[[1, 3]], [[2, 4]]]
    assert data["b"].loaders[0]._iterator is None


def test_nested_loaders_resume_bit_for_bit(tmp_path):
    def go(folder, path=None):
        module = Nested()
        inner = CombinedLoader([shuffled(2), shuffled(5)], "max_size_cycle")
        data = {"a": [shuffled(3), {"c": shuffled(8)}], "b": inner}
        every = ModelCheckpoint(
            dirpath=tmp_path / folder, filename="{step}", every_n_train_steps=1, save_top_k=-1
        )
        trainer(seed=1, max_epochs=2, callbacks=[every]).fit(module, data, ckpt_path=path)
        return module

    whole = go("whole")
    rest = go("rest", tmp_path / "whole" / "step=11.ckpt")
    assert rest.seen == whole.seen[11:]
    assert torch.equal(rest.weight, whole.weight)


# --- mistakes -------------------------------------------------------------------------------------

SAME = of(1)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, "dict to train holds nothing in place of loaders"),
        ({"a": of(1), "b": 3}, "holds int in place of loaders"),
        ({"a": SAME, "b": {"c": SAME}}, r"\['b'\]\['c'\] is the loader of \['a'\] again"),
        ([SAME, CombinedLoader([of(1), SAME])], r"\[1\] is the loader of \[0\] again"),
        ([of(1)], "a list of one loader .* Fix: give the loader itself"),
        ({"a": SAME, "b": SAME}, r"\['b'\] is the loader of \['a'\] again.*Fix: make another"),
        ({"a": of(1), "b": (x for x in of(1))}, r"\['b'\] is a generator, .* only once"),
        ([of(1), CombinedLoader([of(1), of(2)], "sequential")], "has mode='sequential' in a Comb"),
    ],
)
def test_wrong_loaders_are_refused_before_anything_starts(data, words):
    class Launches:
        @hookimpl(wrapper=True)
        def launch(self):
            raise AssertionError
            yield

    with pytest.raises(UsageError, match=words):
        fit(Sees(), data, plugins=[Launches()])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (({"a": of(1)}, "max_sise"), "mode='max_sise' is unknown. Did you mean 'max_size'.*Fix:"),
        (({},), "got an empty dict. Fix: give a dict or list of DataLoaders"),
        ((of(1),), "got DataLoader"),
        (({"a": "text"},), r"\['a'\] is a str, which is not a loader"),
        (({"a": [of(1), 3]},), r"\['a'\]\[1\] is a int, which is not a loader"),
        (({"a": {"b": 3}},), r"\['a'\] is a dict, which is not a loader"),
    ],
)
def test_a_wrong_combined_loader_is_refused(arguments, words):
    with pytest.raises(UsageError, match=words):
        CombinedLoader(*arguments)


def test_training_refuses_the_mode_sequential():
    data = CombinedLoader([of(1), of(2)], "sequential")
    with pytest.raises(UsageError, match=r"to train has mode='sequential'. Fix: .*ConcatDataset"):
        fit(Sees(), data)


@pytest.mark.parametrize(("mode", "nothing"), [("min_size", of()), ("max_size_cycle", Stream([]))])
def test_an_empty_loader_is_named(mode, nothing):
    data = CombinedLoader({"a": of(1), "b": nothing}, mode)
    with pytest.raises(TrainingError, match=r"CombinedLoader: \['b'\] (is empty|gave no batch)"):
        fit(Sees(), data)


def test_a_loader_that_gives_nothing_the_second_time_is_named():
    class Once:
        left = 1

        def __iter__(self):
            self.left, n = 0, self.left
            return iter([torch.ones(1)] * n)

    with pytest.raises(TrainingError, match=r"\[0\] gave no batch when it began again: Once"):
        fit(Sees(), [Once(), Stream(of(1, 2))])


# --- resume ---------------------------------------------------------------------------------------


def shuffled(n, workers=0, own_generator=False):
    options = {"num_workers": workers, "persistent_workers": workers > 0}
    if own_generator:
        options["generator"] = torch.Generator().manual_seed(3)
    return of(*range(n), shuffle=True, **options)


@pytest.mark.parametrize(
    ("mode", "own_generator"),
    [("min_size", False), ("max_size_cycle", False), ("max_size_cycle", True)],
)
def test_a_run_resumes_bit_for_bit_within_an_epoch(tmp_path, mode, own_generator):
    def go(folder, path=None):
        module = Sees()
        data = {"a": shuffled(3, own_generator=own_generator), "b": shuffled(8)}
        every = ModelCheckpoint(
            dirpath=tmp_path / folder, filename="{step}", every_n_train_steps=1, save_top_k=-1
        )
        one = trainer(seed=1, max_epochs=2, callbacks=[every])
        one.fit(module, CombinedLoader(data, mode), ckpt_path=path)
        return module

    whole = go("whole")
    for step in (2, 5):  # within an epoch; the shorter loader has begun again before 5
        rest = go(f"rest {step}", tmp_path / "whole" / f"step={step}.ckpt")
        assert rest.seen == whole.seen[step:]
        assert torch.equal(rest.weight, whole.weight)


def test_persistent_workers_resume_bit_for_bit_in_the_second_epoch(tmp_path):
    def go(folder, path=None):
        module = Sees()
        every = ModelCheckpoint(
            dirpath=tmp_path / folder, filename="{step}", every_n_train_steps=2, save_top_k=-1
        )
        one = trainer(seed=1, max_epochs=2, callbacks=[every])
        one.fit(module, {"a": shuffled(3, workers=1), "b": shuffled(8, workers=1)}, ckpt_path=path)
        return module.seen

    whole = go("whole")
    assert go("rest", tmp_path / "whole" / "step=10.ckpt") == whole[10:]


def test_a_loader_begins_again_in_another_order():
    _, batches = seen({"a": shuffled(6), "b": of(*range(24))}, seed=1)
    passes = [[batch["a"] for batch in batches[i : i + 6]] for i in range(0, 24, 6)]
    assert all(sorted(one) == list(range(6)) for one in passes)
    assert len(set(map(tuple, passes))) == 4


def test_workers_of_a_loader_that_begins_again_are_seeded_alike_after_a_resume(tmp_path):
    class Noise(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return torch.rand(1)[0]

    def go(path=None):
        module = Sees()
        data = {"a": DataLoader(Noise(), num_workers=1), "b": of(*range(5))}
        every = ModelCheckpoint(
            dirpath=tmp_path / str(path is None),
            filename="{step}",
            every_n_train_steps=1,
            save_top_k=-1,
        )
        one = trainer(seed=1, callbacks=[every])
        one.fit(module, data, ckpt_path=path)
        return module.seen

    whole = go()
    assert go(tmp_path / "True" / "step=3.ckpt") == whole[3:]


# --- ranks ----------------------------------------------------------------------------------------


def test_each_loader_is_sharded():
    results = run_plugin(module=Sees(), data={"a": of(1, 2, 3, 4), "b": of(5, 6)}, seed=1)
    batches = [result.module.seen for result in results]
    assert [[batch["a"] for batch in one] for one in batches] == [[1, 3], [2, 4]]
    assert [[batch["b"] for batch in one] for one in batches] == [[5, 5], [6, 6]]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("min_size", [[(1, 4)], [(2, 5)]]),
        ("max_size", [[(1, 4), (3, 6), (None, 8)], [(2, 5), (None, 7)]]),
    ],
)
def test_ranks_evaluate_the_batches_of_one_process(mode, expected):
    short = of(1, 2) if mode == "min_size" else of(1, 2, 3)
    data, net = CombinedLoader({"a": short, "b": of(4, 5, 6, 7, 8)}, mode), Pairs()
    alone = trainer()
    alone.validate(net, data)
    assert len(net.seen) == sum(map(len, expected))
    strategy = ThreadRanks(2)
    one = trainer(strategy=strategy)
    one.validate(Pairs(), data)
    for run, batches in zip(strategy.runs, expected, strict=True):
        assert run.module.seen[: len(batches)] == [{"a": a, "b": b} for a, b in batches]


def test_a_rank_without_a_part_to_evaluate_is_an_error_and_never_counts_a_batch_twice():
    data = {"a": of(1), "b": of(2, 3, 4)}
    one = trainer(strategy=ThreadRanks(2))
    one.validate(Pairs(), CombinedLoader(data, "min_size"))
    assert one.callback_metrics["sum"] == 3
    with pytest.raises(TrainingError, match=r"\['a'\] has fewer batches .* Fix: fewer devices"):
        trainer(strategy=ThreadRanks(2)).validate(Pairs(), CombinedLoader(data, "max_size"))


def test_ranks_with_other_lengths_end_together():
    class Uneven(Sees):
        def train_dataloader(self):
            count = 3 - self.trainer.global_rank
            return {"a": Numbers(1), "b": Numbers(count)}

    with pytest.warns(UserWarning, match="have run out before the others"):
        results = run_plugin(module=Uneven())
    assert [len(result.module.seen) for result in results] == [2, 2]


class Numbers(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter([torch.ones(1)] * self.count)


def test_it_can_be_sent_to_another_process():
    again = pickle.loads(pickle.dumps(CombinedLoader({"a": of(1), "b": of(2, 3)}, "max_size")))
    assert [plain(batch) for batch in again] == [{"a": 1, "b": 2}, {"a": None, "b": 3}]


def test_workers_end_with_the_run():
    data = {"a": of(1, num_workers=1, persistent_workers=True), "b": of(2, 3, 4)}
    _, batches = seen(data, max_epochs=2)
    assert [batch["a"] for batch in batches] == [1] * 6
    assert data["a"]._iterator is None
