"""Ranks must agree to train. tests/testing/test_thread_ranks.py compares them with one process."""

import pytest
import torch
from regression import Net, one_trainer, samples
from threads import equal, on_threads
from torch import nn
from torch.utils.data import DataLoader

import geartrain as gt


class Apart(Net):
    """Starts with other weights on each rank."""

    def setup(self, stage):
        with torch.random.fork_rng():
            torch.manual_seed(self.global_rank)
            self.last.reset_parameters()


def test_evaluation_without_training_has_rank_0s_weights_everywhere():
    trainer, strategy = on_threads()
    trainer.validate(Apart(norm=True), DataLoader(samples(24), batch_size=3))
    first, second = strategy.runs
    assert equal(first.module.state_dict(), second.module.state_dict())
    assert first.metrics == second.metrics


def test_none_as_a_loss_on_one_rank_is_an_error():
    class Skips(Net):
        def training_step(self, batch, batch_idx):
            return (
                None
                if batch_idx == 1 and self.global_rank == 1
                else super().training_step(batch, batch_idx)
            )

    trainer, _ = on_threads()
    with pytest.raises(gt.TrainingError, match="training_step returned None on rank 1"):
        trainer.fit(Skips(), DataLoader(samples(), batch_size=4))


def test_ranks_with_different_models_are_refused_with_the_difference():
    class Differs(Net):
        def setup(self, stage):
            if self.global_rank:
                self.last = nn.Linear(8, 1, bias=False)

    trainer, strategy = on_threads()
    with pytest.raises(gt.TrainingError, match="rank 1 differs from rank 0; see its log"):
        trainer.fit(Differs(), DataLoader(samples(), batch_size=4))
    assert (
        "rank 1 differs from rank 0 in parameters: last.bias is [1, True] there and None here"
        in str(strategy.errors[1])
    )


def test_ranks_start_with_the_buffers_of_rank_0_also_those_that_no_checkpoint_has():
    class Masked(Net):
        def setup(self, stage):
            self.register_buffer("mask", torch.full((2,), self.global_rank), persistent=False)

        def on_train_start(self):
            self.trained_with = self.mask.clone()

    trainer, strategy = on_threads()
    trainer.fit(Masked(), DataLoader(samples(), batch_size=4))
    assert strategy.runs[1].module.trained_with.tolist() == [0, 0]


def test_ranks_whose_buffers_have_different_shapes_are_refused():
    class Masked(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.zeros(3), persistent=False)

        def setup(self, stage):
            self.mask = torch.zeros(3 + self.global_rank)

    trainer, strategy = on_threads()
    with pytest.raises(gt.TrainingError, match="rank 1 differs from rank 0; see its log"):
        trainer.validate(Masked(), DataLoader(samples(), batch_size=4))
    assert "in buffers: mask is [3] there and [4] here" in str(strategy.errors[1])


def test_an_output_on_some_ranks_is_refused(tmp_path):
    """For example if it was typed on one node. Only ranks with a folder would save."""

    class Forgets(Net):
        def setup(self, stage):
            if self.global_rank:
                self.trainer.run.output = None

    trainer, strategy = on_threads(output=tmp_path / "run")
    with pytest.raises(gt.TrainingError, match="rank 1 differs from rank 0"):
        trainer.fit(Forgets(), DataLoader(samples(), batch_size=4))
    assert "rank 1 differs from rank 0 in --output: 'a folder' there and 'no folder' here" in str(
        strategy.errors[1]
    )


def test_predictions_kept_on_some_ranks_are_refused():
    class Drops(Net):
        def setup(self, stage):
            if self.global_rank:
                self.trainer.return_predictions = False

    trainer, strategy = on_threads()
    with pytest.raises(gt.TrainingError, match="rank 1 differs from rank 0"):
        trainer.predict(Drops(), DataLoader(samples(), batch_size=4))
    assert "in return_predictions: None there and False here" in str(strategy.errors[1])


def test_a_buffer_may_be_registered_on_one_rank_alone():
    class Lazy(Net):
        def on_train_start(self):
            if self.trainer.is_global_zero:
                self.register_buffer("mask", torch.ones(2))

    trainer, strategy = on_threads()
    trainer.fit(Lazy(), DataLoader(samples(), batch_size=4))
    assert [run.step for run in strategy.runs] == [6, 6]


def test_lbfgs_takes_the_mean_of_the_ranks_losses():
    """Its line search uses the loss: with each rank's own, ranks would diverge."""

    class Searches(Net):
        def configure_optimizers(self):
            return torch.optim.LBFGS(
                self.parameters(), lr=1.0, max_iter=4, line_search_fn="strong_wolfe"
            )

    alone, (trainer, strategy) = Searches(), on_threads()
    one_trainer().fit(alone, DataLoader(samples(), batch_size=8))
    trainer.fit(Searches(), DataLoader(samples(), batch_size=4))
    first, second = (run.module.state_dict() for run in strategy.runs)
    assert equal(first, second)
    for key, expected in alone.state_dict().items():
        torch.testing.assert_close(first[key], expected, rtol=1e-3, atol=1e-4)


# --- precision ------------------------------------------------------------------------------------

#: precision -> the allowed difference between two ranks and one process, which add in other order.
TOLERANCES = {"64-true": 1e-12, "16-mixed": 2e-3}


@pytest.mark.parametrize("precision", TOLERANCES)
def test_two_ranks_train_in_a_precision_as_one_process_does(precision):
    options = {"precision": precision, "gradient_clip_val": 0.002, "accumulate_grad_batches": 2}
    alone, (trainer, strategy) = Net(), on_threads(**options)
    one_trainer(**options).fit(alone, DataLoader(samples(), batch_size=8))
    trainer.fit(Net(), DataLoader(samples(), batch_size=4))
    first, second = (run.module.state_dict() for run in strategy.runs)
    assert equal(first, second)
    for name, expected in alone.state_dict().items():
        assert first[name].dtype == expected.dtype
        torch.testing.assert_close(
            first[name], expected, rtol=TOLERANCES[precision], atol=TOLERANCES[precision]
        )


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    class Overflows(Net):
        def __init__(self):
            super().__init__()
            self.moved = []

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * float("inf") if batch_idx == 2 and self.global_rank == 1 else loss

        def configure_optimizers(self):
            self.schedule = torch.optim.lr_scheduler.ExponentialLR(
                optimizer := super().configure_optimizers(), 0.9
            )
            return [optimizer], [{"scheduler": self.schedule, "interval": "step"}]

        def on_train_batch_start(self, batch, batch_idx):
            self.before = self.first.weight.detach().clone()

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.moved.append(not torch.equal(self.before, self.first.weight))

    trainer, strategy = on_threads(precision="16-mixed")
    trainer.fit(Overflows(), DataLoader(samples(), batch_size=4))
    for run in strategy.runs:
        assert run.module.moved == [True, True, False, True, True, True]
        assert run.metrics["skipped_steps"] == 1
        assert run.module.schedule.last_epoch == 5
