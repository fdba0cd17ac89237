"""Two ranks of ddp train as one process does, and what is wrong is refused."""

from functools import cache

import pytest
import torch

from .cases import CASES, train
from .ranks import failure, results, script


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """case -> (loss curve, weights), for each rank; all cases in one run of two processes."""
    body = """
found = {}
for name in CASES:
    trainer, curve, weights = train(name, ranks=2)
    found[name] = (curve, weights)
keep(trainer, found=found)
"""
    return [kept["found"] for kept in results(tmp_path_factory.mktemp("cases"), body, timeout=100)]


@cache
def one_process(name):
    _, curve, weights = train(name)
    return curve, weights


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_as_one_process_does(two_ranks, name):
    curve, weights = one_process(name)
    theirs, trained = two_ranks[0][name]
    assert len(curve) > 1
    assert theirs == pytest.approx(curve, rel=1e-5)
    # LBFGS divides by small differences of gradients, which makes rounding larger.
    rtol, atol = (1e-4, 1e-5) if name == "lbfgs" else (1e-5, 1e-6)
    for key, expected in weights.items():
        torch.testing.assert_close(trained[key], expected, rtol=rtol, atol=atol)
        assert torch.equal(trained[key], two_ranks[1][name][1][key]), f"{key} differs between ranks"


@pytest.fixture(scope="module")
def one_script(tmp_path_factory):
    """Several runs in one script: fit with BatchNorm, fit again, validate, test; a strategy of the user's own."""
    body = """
import torch.distributed as dist
from geartrain.strategies import DDPStrategy


class Mine(DDPStrategy):
    calls = []

    def init_dist_connection(self, run):
        self.calls.append("init_dist_connection")
        super().init_dist_connection(run)

    def configure_ddp(self, run, model):
        self.calls.append("configure_ddp")
        return super().configure_ddp(run, model)


class Watched(Net):
    def on_validation_epoch_start(self):
        seen.append({key: value.clone() for key, value in self.named_buffers()})


seen, found = [], {}
module = Watched(norm=True)
if int(os.environ.get("RANK", 0)):
    module.first.reset_parameters()  # ranks that start apart
val = DataLoader(samples(24), batch_size=3)
trainer = ddp(max_epochs=2, num_sanity_val_steps=1)
trainer.fit(module, DataLoader(samples(), batch_size=4), val)
found["buffers"] = {key: value.clone() for key, value in module.named_buffers()}
found["buffers in validation"] = list(seen)
found["after one"] = {key: value.clone() for key, value in module.state_dict().items()}
found["fit's own validation"] = trainer.callback_metrics["val_loss"]
found["validated"] = trainer.validate(module, val)
found["tested"] = trainer.test(module, val)
trainer.fit(module, DataLoader(samples(), batch_size=4), val)
found["after two"] = {key: value.clone() for key, value in module.state_dict().items()}
found["counters"] = (trainer.global_step, trainer.current_epoch, trainer.world_size)

mine = one_trainer(strategy=Mine(), devices=2)
mine.fit(Net(), DataLoader(samples(), batch_size=4))
found["calls"] = list(Mine.calls)
mine.fit(Net(), DataLoader(samples(), batch_size=4))
found["calls of two"] = list(Mine.calls)

other = Net()
other.last.reset_parameters()  # other weights on each rank, and no training that would make them the same
with torch.random.fork_rng():
    torch.manual_seed(trainer.global_rank)
    other.last.reset_parameters()
found["of other weights"] = ddp().validate(other, val)
found["other weights"] = other.last.weight.detach().clone()
found["group is left"] = dist.is_initialized()
keep(trainer, **found)
"""
    return results(tmp_path_factory.mktemp("script"), body, timeout=90)


def test_batch_norm_buffers_end_equal_on_every_rank(one_script):
    first, second = one_script
    assert first["buffers"]["norm.num_batches_tracked"] == 12
    for key, value in first["buffers"].items():
        assert torch.equal(value, second["buffers"][key]), key


def test_batch_norm_buffers_are_equal_in_every_validation(one_script):
    first, second = (kept["buffers in validation"] for kept in one_script)
    assert len(first) == len(second) == 3  # the sanity check and two epochs
    for mine, theirs in zip(first, second, strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_ranks_that_start_apart_end_with_the_same_weights(one_script):
    first, second = one_script
    for after in ("after one", "after two"):
        assert all(torch.equal(first[after][key], second[after][key]) for key in first[after])
    assert not torch.equal(first["after one"]["last.weight"], first["after two"]["last.weight"])


def test_fit_validate_test_and_fit_again_in_one_script(one_script):
    for kept in one_script:
        assert kept["validated"][0]["samples"] == 24
        assert kept["validated"][0]["val_loss"] == pytest.approx(kept["fit's own validation"], rel=1e-6)
        assert kept["tested"][0]["test_loss"] == pytest.approx(kept["fit's own validation"], rel=1e-6)
        assert kept["counters"] == (12, 2, 2)
        assert not kept["group is left"]


def test_what_a_subclass_overrides_is_called_once_a_process_and_run(one_script):
    for kept in one_script:
        assert kept["calls"] == ["init_dist_connection", "configure_ddp"]
        assert kept["calls of two"] == kept["calls"] * 2


def test_evaluation_without_training_has_rank_0s_weights_everywhere(one_script):
    first, second = one_script
    assert torch.equal(first["other weights"], second["other weights"])
    assert first["of other weights"] == second["of other weights"]


# --- refused -------------------------------------------------------------------------------------------------------------


def test_none_as_a_loss_on_one_rank_is_an_error(tmp_path):
    printed = failure(
        tmp_path,
        """
class Skips(Net):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 and self.global_rank == 1 else super().training_step(batch, batch_idx)

ddp().fit(Skips(), DataLoader(samples(), batch_size=4))
""",
    )
    assert "training_step returned None on rank 1" in printed


def test_strategy_that_would_train_alone_is_refused(tmp_path):
    printed = failure(
        tmp_path,
        """
class Alone:
    @hookimpl
    def setup_process_group(self):
        return gt.World()

one_trainer(strategy=Alone(), devices=2).fit(Net(), DataLoader(samples(), batch_size=4))
""",
    )
    assert "the plan has 2 processes" in printed
    assert "made a world of 1" in printed


def test_ranks_with_different_models_are_refused_and_told_what_differs(tmp_path):
    printed = failure(
        tmp_path,
        """
module = Net()
if int(os.environ.get("RANK", 0)):
    module.last = nn.Linear(8, 1, bias=False)
ddp().fit(module, DataLoader(samples(), batch_size=4))
""",
    )
    said = [printed, *(log.read_text() for log in (tmp_path / "run.tmp").rglob("rank-1.log"))]  # rank 0's error may come first
    assert any("rank 1 differs from rank 0 in parameters: last.bias is [1, True] there and None here" in text for text in said)


@pytest.mark.parametrize("backend", ["nccl", "glooo"])
def test_backend_that_cannot_be_is_refused_before_anything_starts(tmp_path, backend):
    options = ("--strategy", "ddp", "--devices", "2", "--accelerator", "cpu", "--strategy.process_group_backend", backend)
    done = script(tmp_path, "gt.cli(Net)", "fit", *options)
    assert done.returncode == 2, done.printed
    assert f"process_group_backend='{backend}' cannot be used on cpu. Fix: gloo" in done.printed
    assert "Traceback" not in done.printed


def test_one_rank_leaves_the_environment_as_it_was(tmp_path):
    body = """
before = dict(os.environ)
for _ in range(2):
    trainer = ddp(devices=1)
    trainer.fit(Net(), DataLoader(samples(), batch_size=4))
    assert dict(os.environ) == before, {name for name in os.environ if os.environ[name] != before.get(name)}
keep(trainer, size=trainer.world_size)
"""
    assert [kept["size"] for kept in results(tmp_path, body, ranks=1)] == [1]
