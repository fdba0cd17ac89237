"""``geartrain ckpt list``, ``verify``, ``show`` and ``diff``."""

import json
import pickle
import re
import zipfile

import pytest
import torch
from command_line import cells

import geartrain.checkpoint.training_state as core
from geartrain_tools.checkpoints.contents import FORMAT

from .conftest import EVIL

LAST = "run/last.ckpt"


def changed(path, change, to=None):
    """Save a changed copy of a checkpoint with torch.save; return its path."""
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, to or path)
    return to or path


def test_the_commands_know_the_format_of_core():
    assert FORMAT == core.FORMAT


# --- list -----------------------------------------------------------------------------------------


def test_list_shows_step_epoch_score_and_marks(run, command):
    out = command("ckpt list run").out
    assert "step  epoch  score" in out
    name, step, epoch, score, marks, size, date = cells(out, "checkpoints/epoch=2.ckpt")
    assert (name, step, epoch, marks) == ("checkpoints/epoch=2.ckpt", "18", "3", "best")
    assert 0 < float(score) < 1
    assert re.fullmatch(r"\d+\.\d KiB", size)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", date)
    assert cells(out, "last.ckpt")[:5] == ["last.ckpt", "18", "3", "-", "newest"]
    assert "epoch=0" not in out


def test_list_as_json(run, command):
    rows = command("ckpt list run --json").facts["checkpoints"]
    assert [(row["file"], row["epoch"], row["marks"]) for row in rows] == [
        ("checkpoints/epoch=1.ckpt", 2, []),
        ("checkpoints/epoch=2.ckpt", 3, ["best"]),
        ("last.ckpt", 3, ["newest"]),
    ]
    assert rows[0]["bytes"] == (run / "checkpoints" / "epoch=1.ckpt").stat().st_size


def test_list_shows_a_file_that_it_cannot_read_and_no_half_written_one(run, command):
    (run / "broken.ckpt").write_bytes(b"PK\3\4 and no more")
    (run / ".last.ckpt.123").write_bytes(b"")
    out = command("ckpt list run").out
    assert cells(out, "broken.ckpt")[1:5] == ["-", "-", "-", "cannot be read"]
    assert ".123" not in out


def test_list_of_a_folder_without_a_checkpoint_is_refused(run, refused):
    (run / "empty").mkdir()
    assert "run/empty has no checkpoint: no file ends in .ckpt" in refused("ckpt list run/empty")


# --- verify ---------------------------------------------------------------------------------------


def test_verify_of_whole_files(run, command):
    done = command("ckpt verify run")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("3 checkpoints read, none damaged")
    assert command("ckpt verify run --json").facts["damaged"] == 0


@pytest.mark.parametrize(
    "key", ["trained layers.0.weight", "fit optimizers 0 state state 1 exp_avg"]
)
def test_verify_names_the_damaged_tensor(run, command, key):
    path = run / "last.ckpt"
    state = torch.load(path, weights_only=True)
    for name in key.split():
        state = state[int(name) if name.isdigit() else name]
    raw = bytearray(path.read_bytes())
    place = raw.index(state.numpy().tobytes())
    raw[place] ^= 1
    path.write_bytes(raw)
    done = command("ckpt verify run")
    assert done.code == 1
    assert done.err.startswith("geartrain ckpt: 1 of 3 checkpoints is damaged: run/last.ckpt")
    row = cells(done.out, "last.ckpt")
    assert row[1] == "damaged"
    assert row[2].startswith(key.replace(" ", "."))
    assert row[2].endswith("its contents do not match its checksum")
    assert cells(done.out, "checkpoints/epoch=1.ckpt")[1] == "complete"


def test_verify_names_the_damaged_names_and_settings(run, command):
    path = run / "last.ckpt"
    with zipfile.ZipFile(path) as archive:
        begin = next(r for r in archive.infolist() if r.filename.endswith("data.pkl")).header_offset
    raw = bytearray(path.read_bytes())
    raw[begin + 300] ^= 1
    path.write_bytes(raw)
    done = command(f"ckpt verify {LAST} --json")
    assert done.code == 1
    (found,) = json.loads(done.out)["checkpoints"]
    assert found["damages"] == [
        {
            "part": "names and settings (data.pkl)",
            "problem": "its contents do not match its checksum",
        }
    ]


def as_folder(raw):
    """Give the last tensor the attribute of a folder: torch would not read it."""
    attributes = raw.rindex(b"PK\1\2", 0, raw.rindex(b"/data/")) + 38
    return raw[:attributes] + b"\x10" + raw[attributes + 1 :]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (as_folder, "it is marked as a folder"),
        (lambda raw: b"", "it is empty"),
        (lambda raw: raw[: len(raw) // 2], "its end is missing or damaged: it was cut"),
        (lambda raw: raw[:-1], "the last bytes of the archive are missing or changed"),
        (lambda raw: bytes(len(raw)), "it begins with zeros"),
        (lambda raw: b"hello", "it is no archive of torch.save"),
        (lambda raw: raw[:-5] + b"9" + raw[-4:], "the archive's comment has (3, 98, 0)"),
    ],
)
def test_verify_of_damaged_archives(run, command, damage, problem):
    path = run / "last.ckpt"
    path.write_bytes(damage(path.read_bytes()))
    done = command(f"ckpt verify {LAST}")
    assert done.code == 1
    assert problem in done.out, done.out


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda state: state.pop("model"), "it has no 'model'"),
        (lambda state: state["fit"].pop("optimizers"), "fit.optimizers: it is missing"),
        (lambda state: state["fit"].update(ranks=[]), "fit.ranks: it has the state of no rank"),
        (lambda state: state["fit"].pop("format"), "fit: it has no format"),
        (lambda state: state.update(step=-1), "step: it is -1"),
        (
            lambda state: state["fit"]["optimizers"][0]["parameters"].pop(),
            "fit.optimizers.0: it names 3 parameters, and its groups have 4",
        ),
    ],
)
def test_verify_of_wrong_contents(run, command, change, part):
    changed(run / "last.ckpt", change)
    done = command(f"ckpt verify {LAST}")
    assert done.code == 1
    assert part in done.out, done.out


def test_verify_says_what_else_a_user_should_know(run, command):
    def change(state):
        state["fit"]["format"] = 9
        state["model"]["layers.0.bias"][1] = float("nan")

    changed(run / "last.ckpt", change)
    done = command(f"ckpt verify {LAST}")
    assert done.code == 0, done.err
    assert "geartrain did not write it: --resume FILE reads it" in done.out
    assert "it has format 9, and this version resumes from format 1" in done.out
    assert "NaN or infinity in model: layers.0.bias" in done.out


class Ran:
    def __reduce__(self):
        return open, ("ran", "w")


def test_no_code_of_a_file_runs(run, command, folder):
    torch.save({"model": {}, "fit": Ran()}, run / "evil.ckpt")
    (run / "worse.ckpt").write_bytes(pickle.dumps(Ran()))
    for line in ("list run", "verify run", "show run/evil.ckpt", f"diff {LAST} run/evil.ckpt"):
        command(f"ckpt {line}")
    assert command("ckpt export run/evil.ckpt out.pt").code == 1
    assert not (folder / "ran").exists()


def test_a_value_that_contains_itself_is_an_error(run, command):
    def change(state):
        state["loop"] = [state]

    changed(run / "last.ckpt", change)
    done = command(f"ckpt verify {LAST}")
    assert done.code == 1
    assert "the values are nested deeper than 100 levels" in done.out
    assert command(f"ckpt show {LAST}").code == 1


# --- show -----------------------------------------------------------------------------------------


def test_show_a_checkpoint(run, command):
    out = command(f"ckpt show {LAST}").out
    for first, second in (
        ("format", "1"),
        ("step", "18"),
        ("epoch", "3"),
        ("position", "between two epochs"),
        ("world size", "1"),
        ("width", "4"),
        ("max_epochs", "3"),
        ("trained", "4"),
    ):
        assert cells(out, first)[1] == second
    assert cells(out, "geartrain[single]")[1:3] == ["strategy", "0.1.0"]
    assert cells(out, "geartrain-callbacks[ema]")[1:3] == ["plugin", "0.1.0"]
    assert cells(out, "model")[1:4] == ["4", "21", "84 B"]
    assert cells(out, "module")[1] == "Validated"
    assert "state_dict() had a value" in cells(out, "state of Unreadable")[1]


def test_show_as_json(run, command):
    facts = command(f"ckpt show {LAST} --json").facts
    assert facts["plan"]["hyperparameters"] == {"width": 4, "name": EVIL}
    assert facts["plan"]["options"]["seed"] == 1
    assert facts["sizes"]["model"] == {"tensors": 4, "numbers": 21, "bytes": 84}
    assert (facts["world_size"], facts["batch"], facts["format"]) == (1, 0, 1)


def test_show_what_cannot_be_restored(run, command):
    def change(state):
        fit = state["fit"]
        fit["ranks"] = [{**rank, "parts": {"sampler": {}}} for rank in fit["ranks"] * 2]
        fit["batch_idx"] = 4
        plan = json.loads(state["plan"])
        plan["strategy"] = {"name": "far", "distribution": "geartrain-far", "version": "3"}
        state["plan"] = json.dumps(plan)

    changed(run / "last.ckpt", change)
    out = command(f"ckpt show {LAST}").out
    assert "4 batches of epoch 3 (from 0) are done" in out
    assert cells(out, "geartrain-far[far]")[1:4] == ["strategy", "3", "not installed"]
    assert cells(out, "strategy geartrain-far[far]")[1] == "geartrain-far is not installed here"
    (row,) = [line for line in out.splitlines() if "state of sampler, random states" in line]
    assert "another number of ranks starts without" in row
    assert (
        "the loaders must give the same batches again" in cells(out, "the position in the epoch")[1]
    )


def test_show_of_weights_alone(run, command):
    changed(
        run / "last.ckpt", lambda state: [state.pop(key) for key in ("fit", "plan", "geartrain")]
    )
    out = command(f"ckpt show {LAST}").out
    assert "no fit saved it" in cells(out, "everything but the weights")[1]


def test_no_control_character_of_a_file_reaches_the_terminal(run, command):
    def change(state):
        state["model"][EVIL] = torch.zeros(1)
        state[EVIL] = EVIL
        state["fit"]["parts"][EVIL] = {EVIL: EVIL}
        state["fit"]["left_out"] = [EVIL]
        state["geartrain"] = state["fit"]["optimizers"][0]["class"] = EVIL
        state["saved_by"] = {"name": EVIL, "distribution": EVIL}
        state["module"] = {"class": EVIL, "missing": [EVIL]}

    path = changed(run / "last.ckpt", change, run / f"{EVIL}.ckpt")
    for line in ("list run", "verify run", f"show '{path}'", f"diff {LAST} '{path}'"):
        for options in ("", " --json"):
            done = command(f"ckpt {line}{options}")
            assert done.code == 0, done.err
            text = done.out.replace("\n", "")
            assert text.isprintable(), [c for c in text if not c.isprintable()]
            assert "\\x1b[31m" in text or "\\u001b[31m" in text


# --- diff -----------------------------------------------------------------------------------------


def test_diff_of_equal_files(run, command):
    done = command(f"ckpt diff {LAST} {LAST}")
    assert done.out.startswith("the same contents: 24 tensors are equal")
    assert command(f"ckpt diff {LAST} {LAST} --json").facts["equal"] is True


def test_diff_names_tensors_and_settings(run, command):
    def change(state):
        state["model"]["layers.0.bias"][2] += 0.5
        state["model"]["layers.2.bias"] = state["model"]["layers.2.bias"].double()
        state["model"]["layers.0.weight"] = torch.zeros(2, 2)
        state["trained"]["layers.0.bias"][0] = float("inf")
        state["model"]["new"] = torch.zeros(1)
        optimizer = state["fit"]["optimizers"][0]["state"]
        optimizer["param_groups"][0]["lr"] = 0.25
        optimizer["state"][1]["exp_avg"][0] += 2
        plan = json.loads(state["plan"])
        plan["options"]["max_epochs"] = 7
        state["plan"] = json.dumps(plan)
        state["fit"]["ranks"][0]["random"]["torch"][0] += 1

    changed(run / "last.ckpt", change, run / "other.ckpt")
    facts = command(f"ckpt diff {LAST} run/other.ckpt --json").facts
    assert facts["equal"] is False
    rows = {row["name"]: (row["change"], row["max_abs_diff"]) for row in facts["tensors"]}
    near = rows.pop("model.layers.0.bias")
    assert near == ("values", pytest.approx(0.5))
    moved = rows.pop("optimizers.0.state.layers.0.bias.exp_avg")
    assert moved == ("values", pytest.approx(2))
    assert rows == {
        "model.layers.2.bias": ("float32 -> float64", 0.0),
        "model.layers.0.weight": ("shape [4, 3] -> [2, 2]", None),
        "trained.layers.0.bias": ("values", "inf"),
        "model.new": ("only in B", None),
    }
    settings = {row["name"]: (row["a"], row["b"]) for row in facts["settings"]}
    assert settings == {
        "optimizers.0.groups.0.lr": (0.001, 0.25),
        "plan.options.max_epochs": (3, 7),
        "ranks.0.random": ("its own", "another"),
    }


def test_diff_of_a_damaged_file_is_refused(run, command):
    raw = (run / "last.ckpt").read_bytes()
    (run / "cut.ckpt").write_bytes(raw[:1000])
    done = command(f"ckpt diff {LAST} run/cut.ckpt")
    assert done.code == 1
    assert "run/cut.ckpt is damaged" in done.err


# --- wrong usage ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "no action is given.\nFix: geartrain ckpt list|verify|show|diff|export PATH"),
        ("verfy run", "there is no action 'verfy'. Did you mean 'verify'?"),
        ("show run", "run is a folder, not a checkpoint.\nFix: use one of its files: checkpoints/"),
        ("show run/lst.ckpt", "there is no checkpoint run/lst.ckpt. Did you mean 'last.ckpt'?"),
        ("show run/last.ckpt --jsn", "there is no option --jsn. Did you mean '--json'?"),
        ("show run/last.ckpt more", "there is no argument more."),
        ("diff run/last.ckpt", "B is missing.\nFix: geartrain ckpt diff --help"),
        ("list", "PATH is missing."),
        ("export run/last.ckpt", "OUT is missing."),
    ],
)
def test_wrong_usage(run, refused, line, message):
    assert message.replace("\n", " ") in refused(f"ckpt {line}").replace("\n", " ")


def test_help(command):
    assert "export PATH OUT" in command("ckpt --help").out
    assert "--submodule NAME" in command("ckpt export --help").out
    assert "geartrain ckpt verify runs/1" in command("ckpt verify --help").out
