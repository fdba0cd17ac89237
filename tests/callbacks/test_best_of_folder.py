"""``"best"`` in a new process, and the mark of the best epoch after a resume."""

import pytest
import torch
from small_models import Logging, fit, loader, trainer
from threads import on_threads

import geartrain as gt
from geartrain.callbacks import ModelCheckpoint


def module(*values):
    """Return a module whose validation of each epoch logs a ``val_loss`` and its opposite."""

    def logs(module, batch, batch_idx):
        value = values[module.current_epoch]
        module.log("val_loss", value, sync_dist=True)
        module.log("other", -value, sync_dist=True)

    return Logging(validate=logs)


def checkpoints(**options):
    return ModelCheckpoint(**{"monitor": "val_loss", "filename": "{step}", **options})


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_new_process_finds_the_best_of_the_runs_folder(tmp_path, ranks):
    options = {"plugins": [checkpoints(save_top_k=2)], "output": tmp_path, "max_epochs": 3}
    if ranks == 1:
        fit(module(3.0, 1.0, 2.0), val=loader(4), **options)
    else:
        runner, _ = on_threads(2, enable_progress_bar=False, **options)
        runner.fit(module(3.0, 1.0, 2.0), loader(batch_size=2), loader(2, batch_size=1))
    again = trainer(plugins=[checkpoints(save_top_k=2)], output=tmp_path, max_epochs=4)
    best = tmp_path / "checkpoints" / "step=12.ckpt"
    assert again.checkpoint_file("best", resumes=True) == best
    again.fit(module(3.0, 1.0, 0.5, 0.4), loader(), loader(4), ckpt_path="best")
    assert (again.ckpt_path, again.current_epoch) == (str(best), 4)


def test_of_several_the_one_with_the_same_metric(tmp_path):
    first, second = checkpoints(), checkpoints(monitor="other", filename="other-{step}")
    fit(
        module(3.0, 1.0, 2.0),
        val=loader(4),
        plugins=[first, second],
        output=tmp_path,
        max_epochs=3,
    )
    for callback in (first, second):
        again = trainer(
            plugins=[checkpoints(monitor=callback.monitor, filename="x")], output=tmp_path
        )
        assert str(again.checkpoint_file("best")) == callback.best_model_path


def test_without_a_best_file_it_is_still_an_error(tmp_path):
    fit(output=tmp_path)
    with pytest.raises(gt.UsageError, match="no checkpoint that could be the best"):
        trainer(plugins=[checkpoints()], output=tmp_path).checkpoint_file("best")


def test_a_name_that_leads_out_of_the_folder_is_not_followed(tmp_path):
    fit(module(3.0), val=loader(4), plugins=[checkpoints()], output=tmp_path / "run")
    for file in (tmp_path / "run").rglob("*.ckpt"):
        state = torch.load(file, weights_only=True)
        for part in state["fit"]["parts"].values():
            part["best_model_path"] = "../../elsewhere.ckpt"
        torch.save(state, file)
    torch.save({}, tmp_path / "elsewhere.ckpt")
    with pytest.raises(gt.UsageError, match="no checkpoint that could be the best"):
        trainer(plugins=[checkpoints()], output=tmp_path / "run").checkpoint_file("best")


@pytest.mark.parametrize("plugins", [[], [checkpoints(save_top_k=-1)]])
def test_the_mark_of_the_best_epoch_goes_on_after_a_resume(tmp_path, plugins, capsys):
    options = {"plugins": plugins, "output": tmp_path, "enable_progress_bar": True}
    fit(module(3.0, 1.0), val=loader(4), max_epochs=2, **options)
    capsys.readouterr()
    trainer(max_epochs=4, **options).fit(
        module(3.0, 1.0, 2.0, 0.5), loader(), loader(4), ckpt_path="last"
    )
    printed = capsys.readouterr().err
    marked = [line for line in printed.splitlines() if "best so far" in line]
    assert len(marked) == 1
    assert marked[0].startswith("epoch 4/4")
