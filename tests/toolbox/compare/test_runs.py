"""``geartrain compare RUN_A RUN_B``: the first step, and the tensor, in which runs part."""

import json

import pytest
from small_models import Net, loader, trainer

from geartrain import UsageError
from geartrain.callbacks import ModelCheckpoint
from geartrain_tools.compare.command import command
from geartrain_tools.compare.runs import compare_runs, is_run


class Slower(Net):
    """Its rate falls after four steps."""

    def on_train_batch_start(self, batch, batch_idx):
        if self.global_step == 4:
            self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.5


def train(folder, module=Net, **options):
    saves = ModelCheckpoint(every_n_train_steps=1, save_top_k=-1)
    options = {"log_every_n_steps": 1, "max_epochs": 3, "seed": 1, **options}
    trainer(output=folder, callbacks=[saves], **options).fit(module(), loader(batch_size=2))
    return folder


def test_equal_runs_have_no_difference(tmp_path, capsys):
    a, b = train(tmp_path / "a"), train(tmp_path / "b")
    command("compare", [str(a), str(b)])
    assert "no difference:" in capsys.readouterr().out


def test_the_first_step_and_tensor_that_differ_are_named(tmp_path, capsys):
    a, b = train(tmp_path / "a"), train(tmp_path / "b", Slower)
    facts = compare_runs(a, b)
    assert facts["checkpoint"]["step"] == 5  # the first step with the other rate
    names = {row["name"] for row in facts["checkpoint"]["tensors"]}
    assert any(name.startswith("model.") for name in names)
    assert facts["equal_steps"]["checkpoints"] == 4
    command("compare", [str(a), str(b), "--json"])
    assert json.loads(capsys.readouterr().out)["checkpoint"]["step"] == 5
    command("compare", [str(a), str(b)])
    assert "the checkpoints of step 5 differ, most in " in capsys.readouterr().out


def test_other_settings_are_listed(tmp_path):
    a, b = train(tmp_path / "a"), train(tmp_path / "b", accumulate_grad_batches=2)
    names = {row["name"] for row in compare_runs(a, b)["settings"]}
    assert "accumulate_grad_batches" in names


def test_runs_without_a_common_step_are_refused(tmp_path):
    a = train(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "plan.json").write_text("{}")
    assert is_run(tmp_path / "b")
    with pytest.raises(UsageError, match=r"have no step in common.*Fix"):
        compare_runs(a, tmp_path / "b")
