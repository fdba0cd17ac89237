"""``geartrain fit``, ``validate``, ``test``, ``predict``: results, files and exit codes."""

import json

import pytest
import torch

FAST = "--fast-dev-run --enable-progress-bar false"


@pytest.fixture
def weights(folder):
    """Return a function: ``weights("out")`` reads the weights that a run saved."""
    return lambda run: torch.load(folder / run / "last.ckpt", weights_only=True)["model"]


@pytest.fixture
def fit_bad(command, folder, capsys):
    """Return a function that fits a module whose step raises, with ``--json``."""
    (folder / "bad.py").write_text(
        "from net import *\n"
        "class Bad(Net):\n"
        "    def training_step(self, batch, batch_idx):\n"
        '        raise ValueError("oops")\n'
        "    def train_dataloader(self):\n"
        "        return [0]\n"
    )

    def run(arguments):
        return command(f"fit bad.py:Bad {arguments} --json")

    return run


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# --- results --------------------------------------------------------------------------------------


def test_fit_trains_and_leaves_its_folder(command, folder, left):
    done = command("fit net.py --max-epochs 3 --seed 1 --output out --log-every-n-steps 4")
    assert done.code == 0
    # geartrain-callbacks adds provenance.jsonl: tests/callbacks/test_provenance.py
    assert {path.name for path in (folder / "out").iterdir()} - {"provenance.jsonl"} == {
        "plan.json",
        "metrics.jsonl",
        "summary.json",
        "last.ckpt",
    }
    summary = left("out", "summary.json")
    assert (summary["status"], summary["command"], summary["steps"], summary["epochs"]) == (
        "done",
        "fit",
        12,
        3,
    )
    lines = [
        json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()
    ]
    losses = [line["val_loss"] for line in lines if "val_loss" in line]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert losses[-1] == summary["metrics"]["val_loss"]
    assert [line["step"] for line in lines if "train_loss" in line] == [4, 8, 12]
    assert left("out", "plan.json")["batch_size"] == {"per_device": 4, "global": 4}
    assert "val_loss" in done.out


def test_options_of_the_target_reach_it(fit, weights):
    fit("--model.hidden 7 --output out")
    assert weights("out")["layers.0.weight"].shape == (7, 3)


def test_the_file_s_data_module_is_used(fit, left):
    fit("--data.samples 12 --data.batch-size 6 --output out")
    assert left("out", "summary.json")["steps"] == 2


def test_json_prints_the_result_alone(command, left):
    found = command("fit net.py --max-epochs 2 --output out --json").facts
    summary = left("out", "summary.json")
    assert found.pop("output") == "out"
    assert found == {name: summary[name] for name in found}
    assert found["metrics"]


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        ("--max-epochs 0.5", 2, {"error": "UsageError", "message": "--max_epochs: expected"}),
        ("--resume", 2, {"error": "UsageError", "fix": "--output DIR of the run"}),
        ("--max-epochs 1", 1, {"error": "ValueError", "lines": "bad.py:4: raise ValueError"}),
    ],
)
def test_json_prints_an_error(fit_bad, arguments, code, error):
    done = fit_bad(arguments)
    assert done.code == code
    facts = json.loads(done.out)
    assert (facts["status"], facts["command"]) == ("failed", "fit")
    for name, part in error.items():
        assert part in str(facts[name])


@pytest.mark.parametrize("verb", ["test", "validate"])
def test_a_checkpoint_gives_the_metrics_that_it_was_saved_with(command, fit, left, verb):
    fit("--seed 1 --output out --max-epochs 2")
    trained = left("out", "summary.json")["metrics"]["val_loss"]
    assert command(f"{verb} net.py --checkpoint out/last.ckpt --output again").code == 0
    assert left("again", "summary.json")["metrics"]["val_loss"] == trained
    assert command(f"{verb} net.py --seed 1 --output untrained").code == 0
    assert left("untrained", "summary.json")["metrics"]["val_loss"] != trained


def test_the_closing_table_shows_the_metrics(command, fit, left):
    fit("--seed 1 --output out")
    shown = command("test net.py --checkpoint out/last.ckpt").out
    assert f"{left('out', 'summary.json')['metrics']['val_loss']:.6g}" in shown


def test_predict_passes_over_every_batch(command, fit, left):
    fit("--output out")
    done = command("predict net.py --checkpoint out/last.ckpt --data.samples 10 --output predicted")
    assert done.code == 0
    assert [line for line in done.out.splitlines() if "predicted" in line] == [
        "predicted [4, 1]",
        "predicted [4, 1]",
        "predicted [2, 1]",
    ]
    assert left("predicted", "summary.json")["command"] == "predict"


def test_predictions_are_saved_in_the_output_folder(command):
    done = command("predict net.py --data.samples 10 --output kept")
    assert done.code == 0, done.err
    kept = torch.load("kept/predictions.pt", weights_only=True)
    assert [tuple(batch.shape) for batch in kept] == [(4, 1), (4, 1), (2, 1)]


def test_predict_requires_output_before_anything_is_made(command):
    done = command("predict net.py")
    assert done.code == 2
    assert "--output" in done.err
    assert "the module is made" not in done.out


def test_fit_starts_from_a_checkpoint(fit, weights):
    fit("--seed 1 --output out")
    fit("--checkpoint out/last.ckpt --model.lr 0 --output same")
    assert same(weights("same"), weights("out"))


def test_fast_dev_run_tries_everything_and_writes_nothing(command, folder):
    done = command("fit net.py --fast-dev-run --output out --max-epochs 9")
    assert "fit: 1 steps, 1 epochs" in done.out
    assert "val_loss" in done.out
    assert "fit: 3 steps, 1 epochs" in command("fit net.py --fast-dev-run 3").out
    assert not (folder / "out").exists()


# --- repeatable -----------------------------------------------------------------------------------


def test_one_seed_gives_bitwise_equal_weights(fit, refused, weights):
    """Initial weights, dropout and the order of the samples all depend on the seed."""
    for run, seed in (("a", 5), ("b", 5), ("c", 6)):
        torch.seed()  # the previous random state must not matter
        fit(f"--seed {seed} --output {run}")
    assert same(weights("a"), weights("b"))
    assert not same(weights("a"), weights("c"))
    assert "already contains a run" in refused("fit net.py --output a")


def test_resume_continues_with_the_folder(command, fit, weights, folder):
    fit("--seed 1 --max-epochs 2 --output whole")
    fit("--seed 1 --max-epochs 1 --output out")
    first = (folder / "out" / "metrics.jsonl").read_text()
    fit("--seed 1 --max-epochs 2 --output out --resume")
    assert same(weights("out"), weights("whole"))
    assert (folder / "out" / "metrics.jsonl").read_text() == (
        folder / "whole" / "metrics.jsonl"
    ).read_text()
    assert (folder / "out" / "metrics.jsonl").read_text().startswith(first)
    with pytest.warns(UserWarning, match="there is nothing left to do: .* Nothing is trained"):
        done = command("fit net.py --seed 1 --max-epochs 2 --output out --resume auto")
    assert done.code == 0
    assert same(weights("out"), weights("whole"))
    done = command("fit net.py --seed 1 --max-epochs 2 --output out --resume")
    assert done.code == 2
    assert "there is nothing left to do" in done.err


def test_resume_from_a_file_and_without_a_file(fit, refused, weights):
    assert "has saved no last checkpoint" in refused(
        "fit net.py --max-epochs 1 --output out --resume"
    )
    fit("--seed 1 --max-epochs 1 --resume auto --output out")  # the next option is not its value
    fit("--seed 1 --max-epochs 2 --output whole")
    fit("--seed 1 --max-epochs 2 --output other --resume out/last.ckpt")
    assert same(weights("other"), weights("whole"))
    assert "Fix: give one of them" in refused(
        "fit net.py --max-epochs 2 --resume out/last.ckpt --checkpoint out/last.ckpt"
    )
    assert "there is no option --resume" in refused("test net.py --resume out/last.ckpt")


# --- how they fail --------------------------------------------------------------------------------

MINE = (
    "from net import Data as Base, Net\nclass Mine(Net):\n{0}    pass\n"
    "class Data(Base):\n    pass\n{1}"
)


#: The code of the console script ``geartrain``.
COMMAND = "import sys; from geartrain.commands import main; sys.exit(main())"


def test_an_error_of_user_code_is_raised_unchanged_with_traceback(command, write):
    write("mine.py", MINE.format("    def __init__(self, lr: float = 0.1): 1 / 0\n", ""))
    with pytest.raises(ZeroDivisionError) as raised:
        command(f"fit mine.py {FAST} --traceback")
    assert raised.traceback[-1].name == "__init__"
    assert not getattr(raised.value, "__notes__", [])


@pytest.mark.end_to_end
def test_it_exits_with_1_and_the_user_s_line(python, write, left):
    body = "    def training_step(self, batch, batch_idx): return 1 / 0\n"
    write("mine.py", MINE.format(body, ""))
    done = python("-c", COMMAND, "fit", "mine.py", "--output", "out")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "geartrain fit: ZeroDivisionError: division by zero\n  mine.py:3: " in done.stderr
    summary = left("out", "summary.json")
    assert (summary["status"], summary["error"]) == (
        "failed",
        "ZeroDivisionError: division by zero",
    )


@pytest.mark.parametrize(
    ("module", "data", "words"),
    [
        ("", "    def train_dataloader(self): return []\n", ["train loader is empty"]),
        (
            "    def training_step(self, batch, batch_idx): return 'low'\n",
            "",
            ["training_step returned str"],
        ),
        (
            "    def training_step(self, batch, batch_idx): self.log('x', batch[0])\n",
            "",
            ["self.log('x')", "one number"],
        ),
    ],
    ids=["empty loader", "no loss", "log of a batch"],
)
def test_an_error_of_geartrain_is_one_message_and_exits_with_1(command, write, module, data, words):
    write("mine.py", MINE.format(module, data))
    done = command("fit mine.py --max-epochs 1 --num-sanity-val-steps 0")
    assert done.code == 1
    assert done.err.count("geartrain fit: ") == 1  # below the line with which a fit begins
    assert "Traceback" not in done.err
    assert all(word in done.err for word in words), done.err


def test_no_data_at_all(command, write):
    write("mine.py", "from net import Net\nclass Mine(Net): ...\n")
    for verb, method in (
        ("fit", "train_dataloader"),
        ("test", "test_dataloader"),
        ("predict", "predict_dataloader"),
    ):
        done = command(f"{verb} mine.py --output {verb}")
        assert done.code == 2
        assert method in done.err


@pytest.mark.parametrize(("name", "code"), [("nope.ckpt", 2), ("net.py", 1)])
def test_a_file_that_is_not_a_checkpoint(command, name, code):
    done = command(f"test net.py --checkpoint {name}")
    assert done.code == code
    assert name in done.err
    assert "checkpoint" in done.err


@pytest.mark.parametrize(
    ("verb", "which"),
    [("fit", "best"), ("test", "last"), ("tune lr", "best"), ("tune batch-size", "last")],
)
def test_best_and_last_are_refused_as_checkpoint(command, verb, which):
    done = command(f"{verb} net.py --checkpoint {which} --output out")
    assert done.code == 2
    assert f"--checkpoint {which}: here it is a file.\nFix: --checkpoint RUN/last.ckpt" in done.err


def test_the_best_checkpoint_by_the_command_line(command, folder):
    options = {"monitor": "val_loss", "save_top_k": 2, "filename": "{epoch}"}
    chosen = " ".join(f"--model_checkpoint.{name} {value}" for name, value in options.items())
    assert (
        command(f"fit net.py --max-epochs 3 --output out --plugin model_checkpoint {chosen}").code
        == 0
    )
    files = sorted(path.name for path in (folder / "out" / "checkpoints").iterdir())
    assert files == ["epoch=1.ckpt", "epoch=2.ckpt"]
    assert command(f"test net.py --checkpoint out/checkpoints/{files[1]}").code == 0
    refused = command("fit net.py --plugin model_checkpoint --no-output")
    assert refused.code == 2
    assert "geartrain-callbacks[model_checkpoint] has no place to write" in refused.err


INTERRUPTED = """    def on_train_epoch_start(self):
        if self.current_epoch == 1 and not self.trainer.plan.resumes:
            raise KeyboardInterrupt
"""


def test_an_interrupt_prints_the_line_that_resumes(command, write, folder):
    write("mine.py", MINE.format(INTERRUPTED, ""))
    done = command("fit mine.py --max-epochs 2 --output 'my out'")
    assert done.code == 1
    (line,) = [line for line in done.err.splitlines() if line.startswith("Resume: ")]
    resume = "fit mine.py --max-epochs 2 --output 'my out' --resume 'my out/last.ckpt'"
    assert line == f"Resume: geartrain {resume}"
    assert command(resume).code == 0
    done = command("fit mine.py --max-epochs 2 --no-output")
    assert "Resume: " not in done.err  # there is no checkpoint


def test_an_interrupt_prints_no_traceback(command, write, left):
    write(
        "mine.py",
        MINE.format("    def training_step(self, batch, batch_idx): raise KeyboardInterrupt\n", ""),
    )
    done = command("fit mine.py --max-epochs 1 --output out")
    assert done.code == 1
    assert done.err.rstrip().endswith("interrupted")
    assert left("out", "summary.json")["status"] == "interrupted"
