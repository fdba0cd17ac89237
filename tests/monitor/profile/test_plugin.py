"""The plugin in runs: its table, its files, and runs that end early."""

import gzip
import json
import re

import pytest
import torch
from small_models import EvalNet, Logging, Net, assert_equal, fit, loader, trainer

import geartrain as gt
from geartrain import UsageError, hookimpl
from geartrain_monitor.profile import Profile
from geartrain_testing import run_plugin

SHORT = {"wait": 1, "warmup": 1, "active": 2}


def facts(folder, name="profile.json"):
    return json.loads((folder / name).read_text())


def rows(printed):
    found = re.finditer(r"(?m)^  (.{18})\s*([\d.]+) ms", printed)
    return {match[1].strip(): float(match[2]) for match in found}


def parts(folder):
    """Return the milliseconds per step of each part."""
    return {part["name"]: part["ms_per_step"] for part in facts(folder)["parts"]}


class Slow:
    """Count its calls."""

    calls = 0

    @hookimpl
    def on_step_end(self):
        self.calls += 1


def test_table_and_file_have_the_parts_and_the_plugins(tmp_path, capsys):
    slow = Slow()
    fit(Logging(), plugins=[Profile(trace=False), slow], output=tmp_path, log_every_n_steps=1)
    found, each = facts(tmp_path), parts(tmp_path)
    assert (found["unit"], found["steps"]) == ("step", 5)  # the first is not counted
    assert all(each[name] > 0 for name in ("data", "forward", "backward"))
    assert sum(part["share"] for part in found["parts"]) == pytest.approx(1)
    assert sum(each.values()) == pytest.approx(found["ms_per_step"])
    assert [rank["rank"] for rank in found["ranks"]] == [0]
    [own] = [hook for hook in found["hooks"] if hook["plugin"].endswith("Slow")]
    assert (own["hook"], own["calls"], slow.calls) == ("on_step_end", 5, 6)
    printed = capsys.readouterr().out
    assert rows(printed)["forward"] == pytest.approx(each["forward"], abs=1e-3)
    assert re.search(r"Slow on_step_end, 5 calls", printed)


def test_validation_is_not_in_the_steps(tmp_path):
    profile = Profile(trace=False)
    fit(EvalNet(), val=loader(), plugins=[profile], output=tmp_path, val_check_interval=2)
    found = facts(tmp_path)
    assert found["validation"]["runs"] == 3
    assert found["validation"]["ms_per_run"] > 0
    calls = {hook["hook"]: hook["calls"] for hook in found["hooks"]}
    assert calls["forward"] == found["steps"] == 5


def test_weights_are_those_of_a_run_without_it(tmp_path):
    plain, profiled = Net(), Net()
    profiled.load_state_dict(plain.state_dict())
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "strategy": "dp"}
    fit(plain, **options)
    fit(profiled, plugins=[Profile(trace=False)], output=tmp_path, **options)
    assert_equal(plain, profiled)
    assert facts(tmp_path)["ms_per_step"] > 0


def test_without_a_folder_it_says_so_and_prints(capsys):
    train = loader(num_workers=1, persistent_workers=True)
    with pytest.warns(UserWarning, match="has no folder, so it only prints its table. Fix"):
        fit(train=train, plugins=[Profile()], max_epochs=2)
    found = rows(capsys.readouterr().out)
    assert min(found["backward"], found["data"]) > 0


def test_trace_has_every_field_and_its_steps_are_not_in_the_table(tmp_path):
    fit(plugins=[Profile(**SHORT)], output=tmp_path, max_epochs=2)
    assert facts(tmp_path)["steps"] == 12 - 1 - 3
    with gzip.open(tmp_path / "trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    assert all({"ph", "ts", "pid", "tid"} <= event.keys() for event in events)
    assert all(isinstance(event[name], int) for event in events for name in ("pid", "tid"))
    spans = [event["name"] for event in events if event["ph"] == "X"]
    assert spans.count("geartrain forward") >= 2
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert any(name.startswith("rank 0: ") for name in names)
    assert not list(tmp_path.glob("*rank-*"))


def test_resumed_run_keeps_the_first_files(tmp_path):
    fit(Net(), plugins=[Profile(**SHORT)], output=tmp_path)
    before = (tmp_path / "profile.json").read_bytes(), (tmp_path / "trace.json.gz").read_bytes()
    again = trainer(plugins=[Profile(**SHORT)], output=tmp_path, max_epochs=2)
    again.fit(Net(), loader(), ckpt_path="last")
    after = (tmp_path / "profile.json").read_bytes(), (tmp_path / "trace.json.gz").read_bytes()
    assert before == after
    assert facts(tmp_path, "profile-2.json")["steps"] == 6 - 1 - 3
    assert (tmp_path / "trace-2.json.gz").exists()


@pytest.mark.parametrize(("error", "step"), [(KeyboardInterrupt, 3), (ValueError, 5)])
def test_interrupted_run_has_a_table_and_files(tmp_path, capsys, error, step):
    class Fails:
        @hookimpl(wrapper=True)
        def forward(self, run):
            if run.step == step:
                raise error
            return (yield)

    with pytest.raises(error):
        fit(plugins=[Profile(**SHORT), Fails()], output=tmp_path)
    assert rows(capsys.readouterr().out)["forward"] > 0
    assert facts(tmp_path)["steps"] >= 1
    assert (tmp_path / "trace.json.gz").exists()


def test_short_runs_and_fast_dev_run(tmp_path, capsys):
    fit(plugins=[Profile()], output=tmp_path / "a", max_steps=1)
    assert "no trace: it needs more than 12 steps" in capsys.readouterr().out
    assert facts(tmp_path / "a")["steps"] == 1
    fit(plugins=[Profile()], output=tmp_path / "b", fast_dev_run=True)
    assert rows(capsys.readouterr().out)["forward"] > 0
    assert not (tmp_path / "b" / "profile.json").exists()


def test_evaluation_counts_batches(tmp_path):
    trainer(plugins=[Profile()], output=tmp_path).validate(EvalNet(), loader())
    found = facts(tmp_path)
    assert (found["unit"], found["steps"]) == ("batch", 6)


def test_manual_optimisation(tmp_path):
    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    fit(Manual(), plugins=[Profile(trace=False)], output=tmp_path)
    assert all(parts(tmp_path)[name] > 0 for name in ("forward", "backward", "optimizer"))


def test_session_refuses_it():
    message = r"geartrain-monitor\[profile\]: a Session never calls on_validation"
    with pytest.raises(UsageError, match=message):
        gt.Session(accelerator="cpu", devices=1, plugins=[Profile()])


@pytest.mark.parametrize("options", [{"wait": 0}, {"active": 0}, {"warmup": -1}, {"active": True}])
def test_wrong_options_are_refused(options):
    with pytest.raises(UsageError, match=f"{next(iter(options))}=.*Fix: use a whole number"):
        Profile(**options)


def test_file_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch, capsys):
    def full(path):
        raise OSError("disk full")

    monkeypatch.setattr("geartrain_monitor.profile.plugin.replacing", full)
    with pytest.warns(UserWarning, match="profile.json is not written: disk full"):
        fit(plugins=[Profile(trace=False)], output=tmp_path)
    assert rows(capsys.readouterr().out)["forward"] > 0


def test_table_of_ranks_names_the_slowest(capsys):
    run_plugin(Profile, ranks=2)
    printed = capsys.readouterr().out
    assert printed.count("profile: ") == 1
    assert "rank 0 of 2" in printed
    assert re.search(r"forward.*slowest: rank [01], [\d.]+ ms", printed)


def test_trace_that_cannot_be_recorded_or_written_is_a_warning(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", full)
    with pytest.warns(UserWarning, match="the trace is lost: disk full"):
        fit(plugins=[Profile(**SHORT)], output=tmp_path / "a")
    assert facts(tmp_path / "a")["steps"] == 6 - 1 - 3
    assert not (tmp_path / "a" / "trace.json.gz").exists()
    monkeypatch.setattr(torch.profiler.profile, "start", full)
    with pytest.warns(UserWarning, match="there is no trace: disk full"):
        fit(plugins=[Profile(**SHORT)], output=tmp_path / "b")
    assert facts(tmp_path / "b")["steps"] == 6 - 1
