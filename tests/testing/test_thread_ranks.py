"""The strategy ``ThreadRanks``: the conformance kit's cases in the test's process, and more."""

import sys
import threading
from functools import cache, cached_property, partial

import pytest
import torch
from regression import Net, one_trainer, samples
from threads import on_threads
from torch.utils.data import DataLoader, TensorDataset

import geartrain as gt
import geartrain_testing.recorder
from geartrain.testing import Capabilities, ThreadRanks
from geartrain_testing.cases import Cases
from geartrain_testing.cases_training import TrainingCases
from geartrain_testing.kit import BATCH, Report, Reports
from geartrain_testing.program import Job, Request
from geartrain_testing.scenarios import SCENARIOS

# --- the kit's cases ------------------------------------------------------------------------------


class ThreadJob(Job):
    """A scenario whose trainers have this strategy."""

    def trainer(self, *plugins, **options):
        more = (
            {"strategy": ThreadRanks(self.ranks, first=self.ranks // 3)}
            if self.request.devices > 1
            else {}
        )
        recorder = geartrain_testing.recorder.Recorder(str(self.folder))
        return one_trainer(plugins=[*plugins, recorder], **more, **options)


class KitInProcess:
    """A Kit for the kit's cases that runs scenarios on demand, without a program."""

    def __init__(self, folder, ranks):
        self.folder, self.ranks = folder, ranks
        self.can = Capabilities.of(ThreadRanks.capabilities, "ThreadRanks")
        self.request = Request(
            "", {}, "cpu", ranks, str(folder / "threads"), [], ranks, BATCH, BATCH * ranks
        )
        self.one = Request(
            "", {}, "cpu", 1, str(folder / "one"), [], ranks, BATCH * ranks, BATCH * ranks
        )

        # Each scenario runs once.
        self.report = cache(partial(self._run, self.request))
        self.reference = cache(partial(self._run, self.one))

    def _run(self, request, scenario):
        job = ThreadJob(request, scenario)
        SCENARIOS[scenario](job)
        job.finish(True)
        return Report(scenario, job.folder)

    @cached_property
    def reports(self):
        names = ("sgd", "adam", "many_buckets", "accumulation", "unfreezing")
        return Reports({name: self.report(name) for name in names})


@pytest.mark.filterwarnings("ignore:.*cannot be sharded", "ignore:the training loaders of ranks")
class TestConformance(TrainingCases, Cases):
    """The kit's cases without those about faults and launchers, which need processes."""

    test_key_on_one_rank = test_unused_parameters_unsupported = None  # these start a program

    @pytest.fixture(scope="class", params=[pytest.param(2, marks=pytest.mark.matrix), 3])
    @classmethod
    def kit(cls, request, tmp_path_factory):
        with pytest.MonkeyPatch.context() as patch:
            # While a rank is late, no other rank runs.
            patch.setattr(geartrain_testing.recorder, "LATE", 0)
            yield KitInProcess(tmp_path_factory.mktemp("kit"), request.param)
            for name in [name for name in sys.modules if name.startswith("conformance_plugin")]:
                del sys.modules[name]


# --- tests on thread ranks ------------------------------------------------------------------------


def test_a_run_is_deterministic():
    class Drops(Net):
        def forward(self, x, extra=True):
            return torch.nn.functional.dropout(super().forward(x, extra), 0.5, self.training)

    def trained():
        trainer, strategy = on_threads(3, seed=7)
        trainer.fit(Drops(), DataLoader(samples(), batch_size=4, shuffle=True))
        return [run.module.state_dict() for run in strategy.runs]

    once, again = trained(), trained()
    assert all(
        torch.equal(value, again[rank][name])
        for rank in range(3)
        for name, value in once[rank].items()
    )


def test_rank_0_has_the_callers_own_objects_and_the_others_copies():
    class Notes:
        @gt.hookimpl
        def on_run_start(self, run):
            self.rank, self.thread = run.world.rank, threading.current_thread()

    module, notes = Net(), Notes()
    trainer, strategy = on_threads(plugins=[notes])
    trainer.fit(module, DataLoader(samples(8), batch_size=2))
    first, second = strategy.runs
    assert first is trainer.run
    assert (first.module, first.trainer, notes.rank, notes.thread) == (
        module,
        trainer,
        0,
        threading.current_thread(),
    )
    assert second.module is not module
    assert (second.trainer.global_rank, second.trainer.world_size, second.module.trainer) == (
        1,
        2,
        second.trainer,
    )
    assert [
        part.plugin.rank for part in second.trainer.setup.parts if isinstance(part.plugin, Notes)
    ] == [1]
    assert not notes.thread.name.startswith("rank")
    assert {thread.name for thread in threading.enumerate()}.isdisjoint({"rank-0", "rank-1"})


def test_devices_set_the_number_of_ranks():
    trainer = one_trainer(strategy=ThreadRanks(), devices=3)
    trainer.validate(Net(), DataLoader(samples(6), batch_size=2))
    assert trainer.world_size == trainer.plan.processes == 3


def test_one_rank_is_one_process():
    trainer, strategy = on_threads(1)
    trainer.fit(Net(), DataLoader(samples(8), batch_size=2))
    assert (trainer.world_size, len(strategy.runs)) == (1, 1)


@pytest.mark.parametrize("frozen", [("first", "second"), ("", "first")])
def test_ranks_that_freeze_other_parameters_are_named(frozen):
    class Freezes(Net):
        def on_train_batch_start(self, batch, batch_idx):
            if name := frozen[self.global_rank]:
                getattr(self, name).weight.requires_grad_(False)

    trainer, _ = on_threads()
    message = r"rank 1 differs from rank 0: requires_grad of (first|second)\.weight is "
    with pytest.raises(gt.TrainingError, match=message):
        trainer.fit(Freezes(), DataLoader(samples(8), batch_size=2))


@pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"
)
def test_loader_workers_may_be_forked_by_each_rank():
    trainer, strategy = on_threads()
    trainer.fit(
        Net(), DataLoader(samples(16), batch_size=2, num_workers=1, persistent_workers=True)
    )
    same, _ = on_threads()
    same.fit(Net(), DataLoader(samples(16), batch_size=2))
    assert trainer.callback_metrics == same.callback_metrics
    assert all(
        loader._iterator is None or not loader._iterator._workers[0].is_alive()
        for run in strategy.runs
        for loader in run.stages["train"].loaders
    )


def test_a_session_runs_its_function_on_each_rank():
    def train(session, data):
        model, optimizer = session.setup(net := Net(), torch.optim.SGD(net.parameters(), lr=0.1))
        for x, y in session.setup_dataloaders(DataLoader(data, 4)):
            session.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        ranks.append(session.global_rank)
        return session.all_gather(net.last.weight.detach())

    ranks = []
    session = gt.Session(accelerator="cpu", strategy=ThreadRanks(2))
    first, second = session.launch(train, samples())
    assert ranks == [0, 1]
    assert torch.equal(first, second)


# --- wrong usage ----------------------------------------------------------------------------------


def test_an_object_that_cannot_be_copied_is_named_before_a_rank_starts():
    class Locked(Net):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()

    trainer, strategy = on_threads()
    with pytest.raises(
        gt.UsageError,
        match=r"ThreadRanks: model\.lock: _thread\.lock cannot be copied, .*Fix: make it in setup",
    ):
        trainer.fit(Locked(), DataLoader(samples(8)))
    with pytest.raises(
        gt.UsageError, match=r"ThreadRanks: train_dataloaders: generator cannot be copied"
    ):
        trainer.fit(Net(), (batch for batch in DataLoader(samples(8))))
    assert strategy.runs == []


def test_without_geartrain_spawn_the_error_of_the_copy_is_raised(monkeypatch):
    monkeypatch.setitem(sys.modules, "geartrain_spawn.refusals", None)
    trainer, _ = on_threads()
    with pytest.raises(
        gt.UsageError,
        match=r"ThreadRanks: the run cannot be copied.*cannot pickle.*Fix: make it in setup\(\)",
    ):
        trainer.fit(Net(), (batch for batch in DataLoader(samples(8))))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ThreadRanks(0), "ranks=0 must be 1 or more"),
        (lambda: on_threads(2, first=2)[0].check(Net()), "first=2 must be one of the 2 ranks"),
        (lambda: on_threads(num_nodes=2)[0].check(Net()), "not on 2 node.s. with cpu"),
        (
            lambda: one_trainer(
                strategy=ThreadRanks(2), accelerator="cuda", devices=2, assume={"cuda": 2}
            ).check(Net()),
            "with cuda",
        ),
        (
            lambda: gt.Session(accelerator="cpu", strategy=ThreadRanks(2)).launch(),
            "starts its processes on a function",
        ),
    ],
)
def test_wrong_options_of_thread_ranks_are_refused(make, message):
    with pytest.raises(gt.UsageError, match=message):
        make()


# --- errors ---------------------------------------------------------------------------------------


class Notes:
    """A plugin that notes each rank's errors and teardown: ``(rank, event)``."""

    def __init__(self, events):
        self.events = events

    def __deepcopy__(self, memo):
        return Notes(self.events)

    @gt.hookimpl
    def on_exception(self, run, error):
        self.events.append((run.world.rank, type(error).__name__))

    @gt.hookimpl(wrapper=True)
    def teardown_device(self, run):
        self.events.append((run.world.rank, "teardown"))
        return (yield)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "phase", ["setup", "configure_optimizers", "training_step", "validation_step", "teardown"]
)
def test_an_error_on_one_rank_ends_all_and_is_raised_itself(rank, phase):
    class Fails(Net):
        def setup(self, stage):
            self.fail("setup")

        def configure_optimizers(self):
            self.fail("configure_optimizers")
            return super().configure_optimizers()

        def training_step(self, batch, batch_idx):
            if batch_idx == 1:
                self.fail("training_step")
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            self.fail("validation_step")
            return super().validation_step(batch, batch_idx)

        def teardown(self, stage):
            self.fail("teardown")

        def fail(self, where):
            if (where, self.global_rank) == (phase, rank):
                raise KeyError("my own error")

    events = []
    trainer, strategy = on_threads(plugins=[Notes(events)])
    with pytest.raises(KeyError, match="my own error") as caught:
        trainer.fit(
            Fails(), DataLoader(samples(8), batch_size=2), DataLoader(samples(4), batch_size=2)
        )
    assert f"rank {rank} of 2 raised this" in caught.value.__notes__
    assert strategy.errors[rank] is caught.value
    assert {(0, "teardown"), (1, "teardown")} <= set(events)
    if phase != "teardown":
        assert f"rank {rank} has failed" in str(strategy.errors[1 - rank])
        assert {(rank, "KeyError"), (1 - rank, "TrainingError")} <= set(events)
    assert {thread.name for thread in threading.enumerate()}.isdisjoint({"rank-0", "rank-1"})
    trainer.validate(Net(), DataLoader(samples(4)))  # the error does not affect the next run


class Table(Net):
    """A table with sparse gradients, whose rows not every rank uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(4, 1, sparse=True)

    def training_step(self, batch, batch_idx):
        return (self.table(batch[0]) - 1).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.table.parameters(), 0.1)


def test_sparse_gradients_are_averaged_over_ranks():
    rows = TensorDataset(torch.tensor([0, 1, 1, 3, 2, 2, 0, 1]))
    one, two = Table(), Table()
    one_trainer().fit(one, DataLoader(rows, 4))
    on_threads(2)[0].fit(two, DataLoader(rows, 2))
    assert torch.allclose(one.table.weight, two.table.weight)
