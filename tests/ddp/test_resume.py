"""A run of two ranks that resumes is bit-equal to one without a stop; also in another world size.

Each rank has its own state.
"""

import warnings

import pytest
import torch
from several_ranks import failed, results
from torch.utils.data import DataLoader

from geartrain import hookimpl
from geartrain.callbacks import ModelCheckpoint

from .cases import Curve, Net, ddp, one_trainer, samples, weights


class Own(Net):
    """Dropout, BatchNorm, Adam and a schedule by steps."""

    def __init__(self):
        super().__init__("adam", norm=True)
        self.drop = torch.nn.Dropout(0.3)

    def forward(self, x, extra=True):
        return self.drop(super().forward(x, extra))

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Keeps:
    """A callback whose state differs between ranks."""

    def __init__(self):
        self.seen = []

    @hookimpl
    def on_step_end(self, run):
        self.seen.append(100 * run.world.rank + run.step)

    def state_dict(self):
        return {"seen": list(self.seen)}

    def load_state_dict(self, state):
        self.seen = list(state["seen"])


def go(folder, epochs, path=None, **options):
    keeps, lines = Keeps(), Curve()
    every = ModelCheckpoint(
        dirpath=f"{folder}/steps", filename="{step}", every_n_train_steps=2, save_top_k=-1
    )
    plugins = [*options.pop("plugins", []), keeps, lines, every]
    options = {"seed": 5, "accumulate_grad_batches": 2, "plugins": plugins, **options}
    trainer, module = ddp(max_epochs=epochs, output=f"{folder}/run", **options), Own()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(
            module,
            DataLoader(samples(44), batch_size=4, shuffle=True),
            DataLoader(samples(7), batch_size=2),
            ckpt_path=path,
        )
    return {
        "weights": weights(module),
        "optimizer": trainer.run.optimizers[0].state_dict(),
        "scheduler": trainer.run.schedulers[0].scheduler.state_dict(),
        "metrics": dict(trainer.run.metrics),
        "counters": [
            trainer.run.step,
            trainer.run.epoch,
            trainer.run.batch_idx,
            trainer.run.batches_seen,
        ],
        "random": torch.get_rng_state(),
        "seen": keeps.seen,
        "lines": lines.values,
        "files": every.state_dict(),
        "warnings": [
            text
            for one in caught
            if "ckpt" in (text := str(one.message)) and "belongs to another folder" not in text
        ],
    }


def stop_and_resume():
    found = {}
    found["whole"] = go("whole", 3)
    found["first"] = go("first", 1)
    found["rest"] = go("first", 3, "last")
    found["within"] = go("within", 3, "whole/steps/step=4.ckpt")
    found["16-mixed"] = go("mixed", 2, precision="16-mixed")
    found["16-mixed rest"] = go("mixed rest", 2, "mixed/steps/step=4.ckpt", precision="16-mixed")
    found["no seed"] = go("unseeded", 2, seed=None)
    found["no seed rest"] = go("unseeded rest", 2, "unseeded/steps/step=2.ckpt", seed=None)
    found["one became two"] = go("grown", 3, "one/last.ckpt")
    return found


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Return the folder, and each rank's results of all runs."""
    folder = tmp_path_factory.mktemp("resume")
    one_trainer(seed=5, output=folder / "one").fit(
        Own(), DataLoader(samples(44), batch_size=4, shuffle=True)
    )
    return folder, results(folder, stop_and_resume)


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def assert_same_end(a, b):
    assert equal(a["weights"], b["weights"])
    assert a["optimizer"]["param_groups"] == b["optimizer"]["param_groups"]
    assert all(
        equal(state, b["optimizer"]["state"][index])
        for index, state in a["optimizer"]["state"].items()
    )
    assert a["scheduler"] == b["scheduler"]
    assert a["metrics"] == b["metrics"]
    assert a["counters"] == b["counters"]
    assert torch.equal(a["random"], b["random"])
    assert a["seen"] == b["seen"]
    assert not b["warnings"]


PAIRS = [
    ("whole", "rest"),
    ("whole", "within"),
    ("16-mixed", "16-mixed rest"),
    ("no seed", "no seed rest"),
]


@pytest.mark.parametrize(("whole", "rest"), PAIRS)
def test_a_resumed_run_equals_an_uninterrupted_run(kept, whole, rest):
    _, ranks = kept
    for rank in ranks:
        assert_same_end(rank[whole], rank[rest])
        # Rank 0 finds the files; each has an identity.
        assert rank[rest]["files"] == ranks[0][rest]["files"]
        assert rank[rest]["files"]["identity"]
    lines = ranks[0][rest]["lines"]
    assert lines
    assert ranks[0][whole]["lines"][-len(lines) :] == lines


def test_each_rank_has_its_own_state(kept):
    folder, ranks = kept
    for rank, of in enumerate(ranks):
        assert of["rest"]["seen"] == [100 * rank + step for step in range(1, 10)]
    state = torch.load(folder / "whole" / "run" / "last.ckpt", weights_only=True)["fit"]
    assert [one["parts"]["Keeps"]["seen"][0] for one in state["ranks"]] == [1, 101]
    assert not torch.equal(
        state["ranks"][0]["random"]["torch"], state["ranks"][1]["random"]["torch"]
    )
    # State that is equal on all ranks is saved once.
    assert "model_checkpoint" in state["parts"]
    assert "model_checkpoint" not in state["ranks"][1]["parts"]


def resume_what_is_done():
    go("late", 3, "whole/run/last.ckpt")


def test_a_refused_resume_gives_the_same_error_on_every_rank(kept):
    folder, _ = kept
    first, second = failed(folder, resume_what_is_done)
    assert "UsageError: there is nothing left to do" in first.error
    assert first.error == second.error


# --- in a world of another size ------------------------------------------------------------------


def test_one_became_two(kept):
    _, ranks = kept
    (warning,) = ranks[0]["one became two"]["warnings"]
    assert (
        "no saved state for Keeps, which starts from scratch; "
        "no saved state for geartrain-callbacks[model_checkpoint]"
    ) in warning
    assert not ranks[1]["one became two"]["warnings"]
    assert equal(ranks[0]["one became two"]["weights"], ranks[1]["one became two"]["weights"])
    for rank, of in enumerate(ranks):  # 11 steps of one rank, then twice 3 of two ranks
        assert of["one became two"]["counters"][:2] == [17, 3]
        assert of["one became two"]["seen"] == [100 * rank + step for step in range(12, 18)]


def test_two_became_one(kept):
    folder, _ = kept
    file = torch.load(folder / "whole" / "run" / "last.ckpt", weights_only=True)
    seen, keeps = {}, Keeps()

    class Looks(Own):
        def on_train_start(self):
            seen.update({key: value.clone() for key, value in self.state_dict().items()})
            seen["step"] = self.trainer.global_step
            optimizer = self.trainer.run.optimizers[0].state_dict()["state"]
            assert all(
                equal(state, file["fit"]["optimizers"][0]["state"]["state"][index])
                for index, state in optimizer.items()
            )

    one = one_trainer(max_epochs=4, plugins=[keeps])
    with pytest.warns(
        UserWarning,
        match=r"no saved state for Keeps \(it has one for each of 2 ranks, not 1\), "
        "which starts from scratch",
    ):
        one.fit(
            Looks(),
            DataLoader(samples(44), batch_size=4),
            ckpt_path=folder / "whole" / "run" / "last.ckpt",
        )
    assert keeps.seen == list(range(10, 21))  # without the state of either rank
    assert seen.pop("step") == 9
    assert equal(seen, file["model"])
    assert one.global_step == 9 + 11


def test_two_became_one_within_an_epoch(kept):
    folder, _ = kept
    one = one_trainer(max_epochs=2)
    with pytest.warns(
        UserWarning,
        match=r"saved by 2 ranks after 2 batches of an epoch, which 1 ranks resume after 4",
    ) as caught:
        one.fit(
            Own(),
            DataLoader(samples(44), batch_size=4),
            ckpt_path=folder / "whole" / "steps" / "step=4.ckpt",
        )
    assert any(
        "state of Keeps, model_checkpoint, which this run does not have" in str(one.message)
        for one in caught
    )
    assert one.global_step == 4 + 7


def test_two_became_one_at_an_epochs_last_batch(kept):
    """Two ranks have 6 batches each, the last one padded; one rank has 11 batches, not 12."""
    folder, _ = kept
    one = one_trainer(max_epochs=3)
    with pytest.warns(
        UserWarning,
        match=r"saved by 2 ranks after 6 batches of an epoch, which 1 ranks resume after 11",
    ):
        one.fit(
            Own(),
            DataLoader(samples(44), batch_size=4),
            ckpt_path=folder / "whole" / "steps" / "step=6.ckpt",
        )
    assert one.global_step == 6 + 11
