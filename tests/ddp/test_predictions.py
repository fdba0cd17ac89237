"""predict returns every output on every rank, in the loader's order."""

import torch
from several_ranks import succeeded
from torch.utils.data import DataLoader

import geartrain as gt
import geartrain_parallel.predictions

from .cases import ddp, one_trainer
from .predictions import Doubles, all_in_order, numbers, of_ranks


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return a == b


class Predicts(Doubles):
    def predict_dataloader(self):
        return numbers(11)


def predict_everything():
    geartrain_parallel.predictions._CHUNK = 1  # one chunk per output
    shuffled = DataLoader(range(50), batch_size=3, shuffle=True, generator=torch.Generator())
    shuffled.generator.seed()  # another seed on each rank
    one = ddp().predict(Doubles(), shuffled)
    gt.cli(
        Predicts,
        argv=[
            "predict",
            "--strategy",
            "ddp",
            "--devices",
            "2",
            "--accelerator",
            "cpu",
            "--quiet",
            "--output",
            "out",
        ],
    )
    return {"in_order": all_in_order(ddp), "of_ranks": of_ranks(ddp), "shuffled": one}


def test_ranks_predict_what_one_process_predicts(tmp_path):
    expected = all_in_order(one_trainer)
    ranks = succeeded(tmp_path, predict_everything)
    for number, kept in enumerate(rank.result for rank in ranks):
        assert kept["in_order"].keys() == expected.keys()
        wrong = [
            name for name, found in kept["in_order"].items() if not equal(found, expected[name])
        ]
        assert not wrong, (
            f"{wrong[0]}: {kept['in_order'][wrong[0]]} on rank {number}, "
            f"expected {expected[wrong[0]]}"
        )
        theirs = {
            name: [batch.tolist() for batch in found] for name, found in kept["of_ranks"].items()
        }
        assert theirs == {
            "iterable": [[0, 2, 4], [6, 8]] * 2,
            "not sharded": [[0, 2, 4], [6]] * 2,
            "DistributedSampler": [[0, 4], [2, 6]],
        }
        assert sorted(torch.cat(kept["shuffled"]).tolist()) == list(range(0, 100, 2))
        assert [len(batch) for batch in kept["shuffled"]] == [3] * 16 + [2]
    assert "predict returns the outputs of rank 0, then those of rank 1" in ranks[0].printed
    of_command_line = torch.load(tmp_path / "out" / "predictions.pt", weights_only=True)
    assert equal(of_command_line, expected["uneven"])
