"""The function ``shard``: each rank's part of a loader."""

import itertools
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
)

import geartrain as gt
from geartrain.data.stage import Stage
from geartrain.parallel import shard


def run_of(rank, size=4, seed=7, launcher="geartrain", **options):
    options = SimpleNamespace(**{"use_distributed_sampler": True, "seed": seed, **options})
    hooks = SimpleNamespace(broadcast=lambda run, obj, src: obj)
    return SimpleNamespace(
        world=gt.World(rank, size, data_rank=rank, data_size=size),
        plan=SimpleNamespace(options=options),
        hooks=hooks,
        cluster=SimpleNamespace(launcher=launcher),
    )


def shards(loader, stage, size=4, epoch=None, **options):
    """Return each rank's batches, as lists of numbers."""
    made = [shard(run_of(rank, size, **options), loader, stage) for rank in range(size)]
    for one in made:
        if epoch is not None:
            Stage([one]).set_epoch(epoch)
    found = [[batch.tolist() for batch in one] for one in made]
    for one, batches in zip(made, found, strict=True):
        assert len(one) == len(batches)
    return found


def numbers(batches):
    return [n for batch in batches for n in (batch if isinstance(batch, list) else [batch])]


# --- sizes of the parts ---------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, True])
def test_evaluation_has_every_sample_exactly_once(shuffle):
    found = [
        numbers(b)
        for b in shards(DataLoader(range(103), batch_size=4, shuffle=shuffle), "validate")
    ]
    assert [len(n) for n in found] == [26, 26, 26, 25]
    assert sorted(itertools.chain(*found)) == list(range(103))


@pytest.mark.parametrize("shuffle", [False, True])
def test_training_pads_to_equal_length_and_keeps_the_shuffling(shuffle):
    found = [
        numbers(b) for b in shards(DataLoader(range(103), batch_size=4, shuffle=shuffle), "train")
    ]
    assert [len(n) for n in found] == [26] * 4
    assert set(itertools.chain(*found)) == set(range(103))
    order = [n for turn in zip(*found, strict=True) for n in turn]
    assert (order == [*range(103), 0]) is not shuffle


def test_a_rank_without_samples_repeats_another_ranks():
    loader = DataLoader(range(3))
    made = [shard(run_of(rank), loader, "test") for rank in range(4)]
    assert [Stage.of([one], "test").batches for one in made] == [[1], [1], [1], [0]]
    assert [numbers([b.tolist() for b in one]) for one in made] == [[0], [1], [2], [0]]
    assert [numbers(b) for b in shards(loader, "train")] == [[0], [1], [2], [0]]


@pytest.mark.parametrize("rank", range(4))
def test_ranks_of_an_empty_loader_refuse_it_as_one_process_does(rank):
    with pytest.raises(gt.TrainingError, match="the test loader is empty"):
        Stage.of([shard(run_of(rank), DataLoader([]), "test")], "test")


def test_ranks_predict_whole_batches_in_turn():
    loader = DataLoader(range(11), batch_size=3)
    assert shards(loader, "predict", size=2) == [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9, 10]]]
    assert shards(DataLoader(range(11), batch_size=3, drop_last=True), "predict", size=2) == [
        [[0, 1, 2], [6, 7, 8]],
        [[3, 4, 5]],
    ]
    shuffled = shards(DataLoader(range(11), batch_size=3, shuffle=True), "predict", size=2)
    assert sorted(numbers(shuffled[0]) + numbers(shuffled[1])) == list(range(11))


# --- order ----------------------------------------------------------------------------------------


class AnyOrder(Sampler):
    """A sampler that draws from torch's global generator, as many do."""

    def __iter__(self):
        return iter(torch.randperm(24).tolist())

    def __len__(self):
        return 24


class Odd(Sampler):
    def __iter__(self):
        return iter(range(1, 24, 2))

    def __len__(self):
        return 12


LOADERS = {
    "shuffle": lambda: DataLoader(range(24), batch_size=3, shuffle=True),
    "a sampler that draws": lambda: DataLoader(range(24), batch_size=3, sampler=AnyOrder()),
    "a batch sampler of a random one": lambda: DataLoader(
        range(24), batch_sampler=BatchSampler(RandomSampler(range(24)), 3, False)
    ),
    "a custom batch sampler": lambda: DataLoader(range(24), batch_sampler=Pairs(AnyOrder())),
}


class Pairs(BatchSampler):
    def __init__(self, sampler):
        super().__init__(sampler, 2, False)


@pytest.mark.parametrize("name", LOADERS)
def test_set_epoch_gives_another_order_the_same_on_every_rank(name):
    orders = []
    for epoch in range(3):
        found = shards(LOADERS[name](), "train", size=2, epoch=epoch)
        # Ranks with different orders would overlap.
        assert sorted(numbers(found[0]) + numbers(found[1])) == list(range(24))
        orders.append(numbers(found[0]))
        assert shards(LOADERS[name](), "train", size=2, epoch=epoch) == found
    assert len({tuple(order) for order in orders}) == 3


def test_a_sampler_that_draws_does_not_change_the_global_generator():
    made = shard(run_of(0, 2), DataLoader(range(24), sampler=AnyOrder()), "train")
    before = torch.random.get_rng_state()
    assert len(list(made.sampler)) == 12
    assert torch.equal(before, torch.random.get_rng_state())


def test_without_a_seed_rank_0_draws_one_for_all():
    drawn = []
    run = run_of(0, 2, seed=None)
    run.hooks.broadcast = lambda run, obj, src: drawn.append(obj) or 5
    other = run_of(1, 2, seed=5)
    loader = DataLoader(range(24), shuffle=True)
    found = [numbers([b.tolist() for b in shard(one, loader, "train")]) for one in (run, other)]
    assert sorted(found[0] + found[1]) == list(range(24))
    assert len(drawn) == 1


def with_generator(place, seed):
    """Return a shuffled loader whose user gave a seeded generator to the loader or its sampler."""
    generator = torch.Generator().manual_seed(seed)
    if place == "loader":
        return DataLoader(range(24), shuffle=True, generator=generator)
    sampler = RandomSampler(range(24), generator=generator)
    if place == "sampler":
        return DataLoader(range(24), sampler=sampler)
    return DataLoader(range(24), batch_sampler=BatchSampler(sampler, 1, False))


@pytest.mark.parametrize("place", ["loader", "sampler", "batch sampler"])
@pytest.mark.parametrize("plan_seed", [None, 3])
def test_the_users_generator_seeds_the_order_as_in_one_process(place, plan_seed):
    def order(seed):
        run = run_of(0, 2, seed=plan_seed)
        return numbers([b.tolist() for b in shard(run, with_generator(place, seed), "train")])

    assert order(7) == order(7)
    assert order(7) != order(8)


def test_without_the_plans_seed_seed_everything_seeds_the_order_and_the_next_fit_has_another():
    loader, orders = DataLoader(range(24), shuffle=True), []
    for _ in range(2):
        gt.seed_everything(1)
        runs = [run_of(0, 2, seed=None) for _ in range(2)]
        orders.append([numbers([b.tolist() for b in shard(r, loader, "train")]) for r in runs])
    assert orders[0] == orders[1]
    assert orders[0][0] != orders[0][1]


# --- custom samplers ------------------------------------------------------------------------------


def test_custom_sampler_is_wrapped():
    assert shards(DataLoader(range(24), batch_size=2, sampler=Odd()), "train", size=2)[1] == [
        [3, 7],
        [11, 15],
        [19, 23],
    ]


def test_batch_sampler_keeps_its_batch_size():
    loader = DataLoader(range(24), batch_sampler=BatchSampler(Odd(), 2, drop_last=True))
    assert [len(b) for b in shards(loader, "train", size=4)[0]] == [2]


def test_ranks_get_batches_of_a_custom_batch_sampler_in_turn():
    batches = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10]]
    loader = DataLoader(range(11), batch_sampler=batches)
    assert shards(loader, "test", size=2) == [[[0, 1, 2], [4, 5], [10]], [[3], [6, 7, 8, 9]]]
    assert shards(loader, "train", size=2) == [
        [[0, 1, 2], [4, 5], [10]],
        [[3], [6, 7, 8, 9], [0, 1, 2]],
    ]


class Endless(Sampler):
    def __iter__(self):
        return itertools.cycle(range(5))


class FiveWithoutLength(Sampler):
    def __iter__(self):
        return iter([[n] for n in range(5)])


def test_ranks_get_items_of_a_sampler_without_length_in_turn():
    ones = [
        shard(run_of(rank, 2), DataLoader(range(5), sampler=Endless(), batch_size=2), "train")
        for rank in range(2)
    ]
    assert [numbers(b.tolist() for b in itertools.islice(one, 3)) for one in ones] == [
        [0, 2, 4, 1, 3, 0],
        [1, 3, 0, 2, 4, 1],
    ]
    loader = DataLoader(range(5), batch_sampler=FiveWithoutLength())
    for stage, expected in (("train", [[0, 2], [1, 3]]), ("validate", [[0, 2, 4], [1, 3]])):
        made = [shard(run_of(rank, 2), loader, stage) for rank in range(2)]
        assert [numbers(b.tolist() for b in one) for one in made] == expected
        assert [Stage.of([one], stage).batches for one in made] == [[None], [None]]


@pytest.mark.parametrize("batched", [False, True])
def test_a_users_distributed_sampler_is_kept_and_gets_the_epoch(batched):
    own = DistributedSampler(range(24), num_replicas=4, rank=1)
    loader = DataLoader(range(24), sampler=own)
    if batched:
        loader = DataLoader(range(24), batch_sampler=BatchSampler(own, 3, False))
    assert shard(run_of(1), loader, "train") is loader
    Stage([loader]).set_epoch(3)
    assert own.epoch == 3


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(8))


def test_an_iterable_dataset_is_not_sharded_with_one_warning():
    loader = DataLoader(Numbers(), batch_size=2)
    with pytest.warns(UserWarning, match=r"Numbers cannot be sharded.*global_rank") as said:
        assert shard(run_of(1), loader, "train") is loader
    assert len(said) == 1


def test_nothing_is_sharded_in_one_process_or_if_it_is_turned_off():
    loader = DataLoader(range(8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert shard(run_of(1, use_distributed_sampler=False), loader, "train") is loader
        alone = DataLoader(Numbers())
        assert shard(run_of(0, 1), alone, "train") is alone


def test_one_rank_of_a_launcher_has_the_order_of_several():
    """The launcher may start more ranks the next time, which go on within the epoch."""
    loader = DataLoader(range(8), shuffle=True)
    alone = numbers(shards(loader, "train", 1, launcher="torchrun")[0])
    pair = [numbers(batches) for batches in shards(loader, "train", 2)]
    assert alone == [number for both in zip(*pair, strict=True) for number in both]


# --- options of a loader --------------------------------------------------------------------------


class Tagged(DataLoader):
    """A subclass with other arguments than DataLoader's."""

    def __init__(self, tag, n):
        super().__init__(
            range(n),
            batch_size=4,
            drop_last=True,
            num_workers=2,
            prefetch_factor=3,
            collate_fn=sum,
            timeout=9,
        )
        self.tag = tag


def test_options_and_subclass_of_a_loader_are_kept():
    loader = Tagged("mine", 18)
    generator = loader.generator = torch.Generator()
    made = shard(run_of(0, 2), loader, "train")
    assert type(made) is Tagged
    assert (made.tag, made.num_workers, made.prefetch_factor, made.collate_fn, made.timeout) == (
        "mine",
        2,
        3,
        sum,
        9,
    )
    assert (made.batch_size, made.drop_last, made.generator) == (4, True, generator)
    assert len(made) == 2
    assert list(made) == [0 + 2 + 4 + 6, 8 + 10 + 12 + 14]
    assert len(loader) == 4
    assert type(loader.sampler) is not type(made.sampler)


def test_loader_without_batches_is_sharded_by_sample():
    assert shards(DataLoader(torch.arange(5), batch_size=None), "test", size=2) == [
        [0, 2, 4],
        [1, 3],
    ]
