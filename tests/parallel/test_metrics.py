"""``self.log`` over several ranks: number of collectives, reductions, ranks without metrics."""

import math
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
from small_models import DEADLINE, together

from geartrain import Run, TrainingError, World
from geartrain.metrics.store import MetricStore
from geartrain.parallel import SeveralRanks


class Ranks:
    """Ranks that are threads: ``log_sync`` and ``broadcast`` meet at a barrier.

    Call it with one function per rank, which gets the rank's run.
    """

    def __init__(self, size):
        self.size, self.slots = size, [None] * size
        self.meet = threading.Barrier(size, timeout=DEADLINE)
        self.runs = [self.make_run(rank) for rank in range(size)]

    def make_run(self, rank):
        lines, calls = [], []

        def log_sync(run, values):
            assert (values.dtype, values.ndim) == (torch.float64, 1)
            calls.append(len(values))
            return torch.stack(self.exchange(rank, values))

        hooks = SimpleNamespace(
            log_sync=log_sync,
            broadcast=lambda run, obj, src: self.exchange(rank, obj)[src],
            log_metrics=lambda run, metrics, step: lines.append(dict(metrics)) or [],
        )
        run = Run(
            plan=None,
            hooks=hooks,
            module=None,
            trainer=SimpleNamespace(calls=calls, lines=lines),
            command="fit",
        )
        run.world = World(rank, self.size, rank, self.size)
        run.ranks, run.logs = SeveralRanks(), MetricStore(run)
        return run

    def exchange(self, rank, mine):
        self.slots[rank] = mine
        self.meet.wait()
        values = list(self.slots)
        self.meet.wait()
        return values

    def __call__(self, *each):
        results = together(
            [lambda run=run, act=act: act(run) for run, act in zip(self.runs, each, strict=True)]
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results


def logs(name, values, weights=None, *, stop=False, **options):
    """Return a rank's function, which logs ``values`` and ends the epoch."""

    def act(run):
        for value, weight in zip(values, weights or [1] * len(values), strict=True):
            run.log(
                name,
                value,
                on_step=False,
                on_epoch=True,
                batch_size=weight,
                **{"sync_dist": True, **options},
            )
        run.should_stop = stop
        return run.logs.end_epoch()

    return act


@pytest.mark.parametrize("metrics", [1, 300])
def test_a_flush_is_two_collectives(metrics):
    def act(run):
        for i in range(metrics):
            run.log(
                f"metric {i}",
                torch.tensor(float(i + run.world.rank)),
                on_step=True,
                on_epoch=False,
                sync_dist=True,
            )
        run.logs.flush()
        return run.trainer.calls, run.metrics

    for calls, values in Ranks(2)(act, act):
        assert len(calls) == 2
        assert values == {f"metric {i}": i + 0.5 for i in range(metrics)}


@pytest.mark.parametrize(
    ("reduce_fx", "expected"),
    [("mean", (1 * 1 + 4 * 2 + 9 * 5) / 8), ("sum", 14.0), ("min", 1.0), ("max", 9.0)],
)
def test_reductions_over_ranks(reduce_fx, expected):
    """Batches of 1 and 2 samples on rank 0, and of 5 on rank 1."""
    ranks = Ranks(2)
    both = ranks(
        logs("x", [1.0, 4.0], [1, 2], reduce_fx=reduce_fx),
        logs("x", [9.0], [5], reduce_fx=reduce_fx),
    )
    assert both == [{"x": pytest.approx(expected)}] * 2
    assert [run.trainer.lines for run in ranks.runs] == [both[:1], []]  # only rank 0 has loggers


def test_a_value_of_1_has_the_mean_1_over_ranks():
    assert Ranks(2)(logs("x", [1.0], [1]), logs("x", [1.0], [2])) == [{"x": 1.0}] * 2


@pytest.mark.parametrize("reduce_fx", ["min", "max"])
def test_nan_of_one_rank_is_not_dropped(reduce_fx):
    for values in Ranks(3)(
        *(logs("x", [value], reduce_fx=reduce_fx) for value in (1.0, math.nan, 2.0))
    ):
        assert math.isnan(values["x"])


def test_without_sync_dist_each_rank_keeps_its_own():
    assert Ranks(2)(logs("x", [1.0], sync_dist=False), logs("x", [2.0], sync_dist=False)) == [
        {"x": 1.0},
        {"x": 2.0},
    ]


def test_a_metric_of_rank_0_only_is_a_warning():
    def validate(*each):
        ranks = Ranks(2)
        for run in ranks.runs:
            run.stage = "validate"
        ranks(*each)

    with pytest.warns(
        UserWarning,
        match="validate: x is of rank 0's part of the data alone. Fix: .*sync_dist=True",
    ) as said:
        validate(logs("x", [1.0], sync_dist=False), logs("x", [2.0], sync_dist=False))
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        validate(logs("y", [1.0]), logs("y", [2.0]))
        validate(
            logs("z", [1.0], sync_dist=False, rank_zero_only=True), logs("z", [], sync_dist=False)
        )


def test_rank_zero_only_is_no_difference():
    assert Ranks(2)(
        logs("x", [1.0], sync_dist=False, rank_zero_only=True), logs("x", [], sync_dist=False)
    ) == [{"x": 1.0}, {}]


@pytest.mark.parametrize("empty", [0, 1, 2])
@pytest.mark.parametrize(
    ("reduce_fx", "expected"), [("mean", 3.0), ("sum", 6.0), ("min", 2.0), ("max", 4.0)]
)
def test_a_rank_without_samples_takes_the_others_keys(empty, reduce_fx, expected):
    values = [[2.0], [4.0]]
    values.insert(empty, [])
    ranks = Ranks(3)
    assert (
        ranks(*(logs("x", value, reduce_fx=reduce_fx) for value in values)) == [{"x": expected}] * 3
    )
    assert [run.metrics for run in ranks.runs] == [{"x": expected}] * 3


@pytest.mark.parametrize("empty", [0, 1])
def test_rank_0_passes_metrics_to_loggers_also_without_samples(empty):
    ranks = Ranks(2)
    ranks(*(logs("x", [] if rank == empty else [3.0]) for rank in range(2)))
    assert [run.trainer.lines for run in ranks.runs] == [[{"x": 3.0}], []]


@pytest.mark.parametrize(
    ("names", "options", "words"),
    [
        (("a", "b"), ({}, {}), "ranks 0 and 1.*'a'"),
        (("a", "a", "b"), ({}, {}, {}), "ranks 0 and 2.*'a'"),
        (("a", "a"), ({}, {"reduce_fx": "max"}), "ranks 0 and 1.*'a'"),
    ],
    ids=["names", "three ranks", "reductions"],
)
def test_different_metrics_raise_on_every_rank(names, options, words):
    def failing(act):
        def check(run):
            with pytest.raises(TrainingError, match=words):
                act(run)
            return "raised"

        return check

    acts = [failing(logs(name, [1.0], **one)) for name, one in zip(names, options, strict=True)]
    assert Ranks(len(names))(*acts) == ["raised"] * len(names)


@pytest.mark.parametrize("stops", [(False, False), (True, False), (False, True), (True, True)])
def test_one_rank_stops_all(stops):
    ranks = Ranks(2)
    ranks(*(logs("x", [1.0], stop=stop) for stop in stops))
    assert [run.logs.stop for run in ranks.runs] == [any(stops)] * 2


def test_the_stop_flag_needs_no_metric():
    ranks = Ranks(2)
    ranks(logs("x", [], stop=True), logs("x", []))
    assert [run.logs.stop for run in ranks.runs] == [True, True]
