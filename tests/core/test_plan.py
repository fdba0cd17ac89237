"""Arguments -> Plan: the choices, their reasons, and the errors before anything starts."""

import dataclasses
import json
import sys
import warnings

import pytest
import torch
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain import Layout, UsageError, hookimpl
from geartrain.builtin.cpu import CPUAccelerator

from .contract_fixtures import accelerator_source, dists as dists, strategy_source

pytestmark = pytest.mark.usefixtures("dists")


def planned(**options):
    return gt.Trainer(**{"enable_progress_bar": False, **options})


def plan(**options):
    return planned(**options).plan


def refused(*words, **options):
    with pytest.raises(UsageError) as caught:
        plan(**options)
    for word in words:
        assert word in str(caught.value)
    return str(caught.value)


class Plans:
    """A strategy that plans the given layout."""

    def __init__(self, layout=None):
        self.layout, self.request = layout, None

    @hookimpl
    def plan_processes(self, request):
        self.request = request
        return self.layout


# --- accelerator ----------------------------------------------------------------------------------


def test_auto_takes_the_cpu_if_nothing_else_is_installed():
    made = plan()
    assert (made.accelerator.label, made.devices, made.strategy.label) == (
        "geartrain[cpu]",
        (0,),
        "geartrain[single]",
    )
    assert made.processes == made.num_nodes == 1


def test_auto_takes_the_highest_priority_and_gives_reasons_against_the_others(dists):
    dists.accelerator("npu", priority=5, count=1)
    dists.accelerator("cuda", priority=30, unavailable="NVML: driver not loaded")
    dists.accelerator("mps", priority=20, count=1)
    dists.add("acme-broken", "1 / 0", accelerators={"broken": "X"})
    made = plan(block=["mps"])
    assert made.accelerator.name == "npu"
    assert "priority" in made.accelerator.reason
    why = made.passed_over
    assert "NVML: driver not loaded" in why["geartrain-cuda[cuda]"]
    assert "blocked" in why["geartrain-mps[mps]"]
    assert "ZeroDivisionError" in why["acme-broken[broken]"]
    assert "priority 0" in why["geartrain[cpu]"]
    assert "fake_geartrain_mps" not in sys.modules


def test_gpu_takes_cuda_or_mps_and_nothing_else(dists):
    dists.accelerator("npu", priority=99)
    refused("gpu", "pip install geartrain-cuda", accelerator="gpu")
    dists.accelerator("mps", priority=20, count=1)
    assert plan(accelerator="GPU").accelerator.name == "mps"
    dists.accelerator("cuda", priority=30, count=1)
    assert plan(accelerator="gpu").accelerator.name == "cuda"
    assert "fake_geartrain_npu" not in sys.modules


@pytest.mark.parametrize("accelerator", ["gpu", "CUDA"])
def test_an_accelerator_that_is_unusable_is_an_error_with_the_reason(dists, accelerator):
    dists.accelerator("cuda", unavailable="NVML: driver not loaded")
    refused("geartrain-cuda[cuda]", "NVML: driver not loaded", accelerator=accelerator)
    assert plan(accelerator="auto").accelerator.name == "cpu"


def test_named_accelerator_imports_no_other(dists):
    dists.add("acme-broken", "1 / 0", accelerators={"broken": "X"})
    assert plan(accelerator="Cpu").accelerator.name == "cpu"
    assert "fake_acme_broken" not in sys.modules


@pytest.mark.parametrize("name", ["DDP", "single"])
def test_strategy_given_as_accelerator(name):
    refused(name, "is a strategy", f"--strategy {name}", accelerator=name)


def test_accelerator_that_shares_its_name_with_a_strategy_can_be_chosen(dists):
    chip = (
        "class Chip:\n    priority = 1\n    unavailable = staticmethod(lambda: None)\n"
        "    device_count = staticmethod(lambda: 1)\n"
    )
    dists.add(
        "acme-xla",
        chip + strategy_source(),
        accelerators={"xla": "Chip"},
        strategies={"xla": "Strategy"},
    )
    made = plan(accelerator="xla", strategy="xla")
    assert (made.accelerator.label, made.strategy.label) == ("acme-xla[xla]", "acme-xla[xla]")


def test_accelerator_options_reach_its_init(dists):
    dists.accelerator("npu")
    for name in ("npu", "auto"):
        trainer = planned(accelerator=name, devices=1, accelerator_options={"pinned": True})
        assert trainer.hooks.manager.get_plugin("geartrain-npu[npu]").pinned is True
        refused(
            "geartrain-npu[npu]",
            "'pined'",
            "'pinned'",
            accelerator=name,
            accelerator_options={"pined": True},
        )


def test_accelerator_and_strategy_given_as_objects():
    made = plan(accelerator=CPUAccelerator(), strategy=Plans(Layout(1, 1)))
    assert (made.accelerator.label, made.strategy.label) == ("geartrain[cpu]", "Plans")


class Chip(CPUAccelerator):
    @staticmethod
    def unavailable():
        return "no such chip here"


def test_accelerator_object_is_asked_as_a_named_one_is():
    refused("Chip", "no such chip here", accelerator=Chip())


@pytest.mark.parametrize("given", [object(), Plans(), Plans])
def test_object_that_is_no_accelerator(given):
    refused("priority", "unavailable()", "device_count()", accelerator=given)


# --- accelerators that answer wrongly -------------------------------------------------------------

CHIP = """
class Chip:
    priority = {priority}
    @staticmethod
    def unavailable(): {unavailable}
    @staticmethod
    def device_count(): {count}
"""


def chip(priority="50", unavailable="return None", count="return 1"):
    return CHIP.format(priority=priority, unavailable=unavailable, count=count)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"unavailable": "raise OSError('no bus')"}, "unavailable() raised OSError: no bus"),
        ({"unavailable": "return False"}, "returned False, which is neither None nor a reason"),
        ({"unavailable": "return ''"}, "unavailable() returned ''"),
        ({"count": "1 / 0"}, "device_count() raised ZeroDivisionError"),
        ({"count": "return 0"}, "above 0, though unavailable() returned None"),
        ({"count": "return True"}, "device_count() returned True"),
        ({"count": "return '2'"}, "device_count() returned '2'"),
        ({"priority": "'high'"}, "priority is 'high'"),
        ({"priority": "True"}, "priority is True"),
        ({"priority": "float('nan')"}, "priority is nan"),
        (None, "has no priority, unavailable, device_count"),
    ],
)
def test_accelerator_that_answers_nonsense(dists, fault, words):
    """By name it is an error with its label; ``auto`` passes it over with the same reason."""
    source = "class Chip: ...\n" if fault is None else chip(**fault)
    dists.add("acme-chip", source, accelerators={"npu": "Chip"})
    refused("acme-chip[npu]: ", words, accelerator="npu")
    made = plan()
    assert made.accelerator.name == "cpu"
    for word in ("failed: ", words):
        assert word in made.passed_over["acme-chip[npu]"]


def test_question_that_is_no_static_method(dists):
    dists.add(
        "acme-chip",
        chip().replace("@staticmethod", "").replace("()", "(self)"),
        accelerators={"npu": "Chip"},
    )
    reason = plan().passed_over["acme-chip[npu]"]
    assert "unavailable() raised TypeError" in reason


def test_cause_of_a_question_that_raised_is_kept(dists):
    dists.add(
        "acme-chip", chip(unavailable="raise OSError('no bus')"), accelerators={"npu": "Chip"}
    )
    with pytest.raises(UsageError) as caught:
        plan(accelerator="npu")
    assert isinstance(caught.value.__cause__, OSError)


def test_probe_prints_to_stderr(dists, capsys):
    dists.add(
        "acme-chip",
        "print('imported')\n" + chip(unavailable="print('asked'); raise OSError(3)"),
        accelerators={"npu": "Chip"},
    )
    assert "unavailable() raised OSError: 3" in plan().passed_over["acme-chip[npu]"]
    assert capsys.readouterr() == ("", "imported\nasked\n")


def test_ctrl_c_while_asking_is_no_answer(dists):
    dists.add(
        "acme-chip", chip(unavailable="raise KeyboardInterrupt"), accelerators={"npu": "Chip"}
    )
    for name in ("auto", "npu"):
        with pytest.raises(KeyboardInterrupt):
            plan(accelerator=name)


def test_assumed_accelerator_is_not_asked_but_must_be_comparable(dists):
    dists.add("acme-chip", chip(unavailable="1 / 0", count="1 / 0"), accelerators={"npu": "Chip"})
    assert plan(devices=-1, assume={"npu": 3}, strategy=Plans(Layout(1, 3))).devices == (0, 1, 2)
    dists.add("acme-odd", chip(priority="'high'"), accelerators={"odd": "Chip"})
    refused("acme-odd[odd]", "priority is 'high'", assume={"npu": 3, "odd": 1})


# --- several usable accelerators, missing ones -------------------------


@pytest.mark.parametrize(
    ("priorities", "best", "says"),
    [
        ({"b": 5, "a": 5}, "a", {"b": "priority 5 is not above a's 5"}),
        ({"b": 5.5, "a": 5}, "b", {"a": "priority 5 is not above b's 5.5"}),
        (
            {"a": -1, "b": -2},
            "cpu",
            {"a": "-1 is not above cpu's 0", "b": "-2 is not above cpu's 0"},
        ),
        ({"a": 0}, "a", {"cpu": "0 is not above a's 0"}),
        ({"z": 0}, "cpu", {"z": "0 is not above cpu's 0"}),
    ],
)
def test_highest_priority_wins_and_names_break_ties(dists, priorities, best, says):
    for name, priority in priorities.items():
        dists.accelerator(name, priority=priority)
    made = plan(devices=1)
    assert made.accelerator.name == best
    by_name = {label.partition("[")[2][:-1]: reason for label, reason in made.passed_over.items()}
    assert by_name.keys() == {"cpu", *priorities} - {best}
    for name, words in says.items():
        assert words in by_name[name]
    assert "highest priority" in made.accelerator.reason


def test_broken_accelerator_that_auto_skips_is_warned_of(dists):
    dists.add("geartrain-npu", "import absent_driver", accelerators={"npu": "Chip"})
    with pytest.warns(UserWarning, match="is not used") as caught:
        made = plan()
    assert made.accelerator.label == "geartrain[cpu]"
    (message,) = [
        str(one.message) for one in caught if "geartrain-npu[npu] is not used: " in str(one.message)
    ]
    for words in (
        "ModuleNotFoundError: No module named 'absent_driver'. "
        "Fix: use another version of geartrain-npu",
        "--block geartrain-npu[npu]",
    ):
        assert words in message
    assert made.passed_over["geartrain-npu[npu]"].startswith("failed: ")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plan(block=["geartrain-npu[npu]"]).accelerator.label == "geartrain[cpu]"


def test_broken_accelerator_that_was_chosen_ends_the_run_with_its_label(dists):
    source = accelerator_source(priority=99).replace(
        "self.pinned = pinned", "raise OSError('no such device')"
    )
    dists.add("geartrain-npu", source, accelerators={"npu": "Chip"})
    for options in (
        {"accelerator": "npu"},
        {"accelerator": "auto"},
        {"accelerator": "auto", "accelerator_options": {"pinned": True}},
    ):
        with pytest.raises(OSError, match="no such device") as caught:
            plan(**options)
        assert caught.value.__notes__ == ["raised while geartrain-npu[npu] was created"]


def test_second_claim_of_a_name_of_ours_changes_nothing_and_is_warned_of(dists):
    for distribution in ("geartrain-ddp", "acme"):
        dists.add(
            distribution,
            strategy_source(),
            accelerators={"cpu": "Chip"} if distribution == "acme" else {},
            strategies={"ddp": "Strategy"},
        )
    with pytest.warns(UserWarning, match="is not used") as caught:
        made = plan(devices=2)
    assert (made.accelerator.label, made.strategy.label) == ("geartrain[cpu]", "geartrain-ddp[ddp]")
    said = " ".join(str(one.message) for one in caught)
    for word in (
        "acme[cpu] is not used: the name is geartrain[cpu]'s; uninstall acme",
        "acme[ddp] is not used: the name is geartrain-ddp[ddp]'s",
    ):
        assert word in said
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan(devices=2, block=["acme[cpu]", "acme[ddp]"])


SEEN = {"cuda": "2 NVIDIA GPUs", "mps": "an Apple GPU"}


def test_auto_names_the_plugin_that_this_machine_lacks(dists, monkeypatch):
    monkeypatch.setattr(
        "geartrain.planning.registry.visible_devices", lambda: {"cuda": SEEN["cuda"]}
    )
    label, fix = "geartrain-cuda[cuda]", "Fix: pip install geartrain-cuda"
    expected = f"not installed, though this machine has {SEEN['cuda']}. {fix}"
    made = plan(devices=1)
    assert made.accelerator.name == "cpu"
    assert made.passed_over == {label: expected}
    refused(label, SEEN["cuda"], fix, accelerator="gpu")
    assert plan(accelerator="cpu").passed_over == {}
    dists.accelerator("npu", priority=99)
    assert plan(devices=1).passed_over[label] == expected  # also if another is usable
    dists.accelerator("cuda", unavailable="no driver", count="1 / 0")  # its devices are not counted
    assert plan(devices=1).passed_over[label] == "unavailable: no driver"


def test_gpu_with_one_of_two_installed(dists, monkeypatch):
    monkeypatch.setattr("geartrain.planning.registry.visible_devices", lambda: SEEN)
    dists.accelerator("mps", priority=20, unavailable="macOS 13.1 is too old")
    error = refused(
        "geartrain-mps[mps] is unavailable: macOS 13.1 is too old",
        "Fix: pip install geartrain-cuda",
        accelerator="gpu",
    )
    assert "pip install geartrain-mps" not in error


# --- assumed hardware -----------------------------------------------------------------------------


@pytest.mark.parametrize("accelerator", ["gpu", "auto"])
def test_assumed_hardware_is_planned_for_without_being_asked(dists, accelerator):
    dists.accelerator("cuda", priority=30, unavailable="NVML: driver not loaded", count=0)
    dists.strategy("ddp")
    made = plan(accelerator=accelerator, devices=-1, assume={"cuda": 8})
    assert (made.accelerator.name, made.devices, made.processes) == ("cuda", tuple(range(8)), 8)
    refused("[0, 1, 2, 3, 4, 5, 6, 7]", accelerator=accelerator, devices=[8], assume={"cuda": 8})


def test_trainer_of_assumed_hardware_runs_nothing(dists):
    dists.accelerator("cuda", unavailable="NVML: driver not loaded")
    with pytest.raises(UsageError, match="assumes hardware"):
        planned(accelerator="cuda", devices=1, assume={"cuda": 8}).fit(Net(), [1])


@pytest.mark.parametrize(
    "precision", ["64-true", "bf16-true", "16-mixed", "bf16-mixed", "bf16", 16]
)
def test_a_precision_that_is_not_installed(dists, precision):
    refused("pip install geartrain-callbacks", precision=precision)


def test_assumed_accelerator_must_be_installed():
    refused("pip install geartrain-cuda", accelerator="auto", assume={"cuda": 8})


# --- strategy -------------------------------------------------------------------------------------


def test_one_device_takes_single_and_gives_the_reason(dists):
    module = dists.strategy("ddp")
    made = plan(accelerator="cpu", devices=1)
    assert made.strategy.name == "single"
    assert "one device" in made.strategy.reason
    assert "one device" in made.passed_over["geartrain-ddp[ddp]"]
    assert module not in sys.modules


@pytest.mark.parametrize("options", [{"devices": 2}, {"devices": 1, "num_nodes": 2}])
def test_several_devices_or_nodes_with_nothing_installed_answer_with_the_install_line(options):
    refused("pip install geartrain-ddp", accelerator="cpu", **options)


@pytest.mark.parametrize("options", [{"devices": 2}, {"devices": 1, "num_nodes": 2}])
def test_several_devices_or_nodes_take_ddp_and_import_no_other(dists, options):
    for name in ("ddp_spawn", "horovod", "dp", "ddp", "bagua", "gossip"):
        dists.strategy(name)
    made = plan(accelerator="cpu", **options)
    assert made.strategy.label == "geartrain-ddp[ddp]"
    assert "'auto'" in made.strategy.reason
    assert "ddp" in made.passed_over["geartrain-horovod[horovod]"]
    assert {"fake_geartrain_ddp"} == {n for n in sys.modules if n.startswith("fake_")}


def test_auto_takes_ddp_spawn_if_the_command_cannot_be_run_again(dists, monkeypatch):
    monkeypatch.setattr(
        "geartrain_parallel.rerun_command.reason_not_rerunnable", lambda: "a notebook has none"
    )
    dists.strategy("ddp")
    with pytest.raises(UsageError, match=r"a notebook has none.*pip install geartrain-spawn"):
        gt.Trainer(accelerator="cpu", devices=2)
    dists.strategy("ddp_spawn")
    made = gt.Trainer(accelerator="cpu", devices=2).plan
    assert made.strategy.name == "ddp_spawn"
    assert "a notebook has none" in made.strategy.reason


def test_auto_takes_the_next_best_if_ddp_is_blocked(dists):
    dists.strategy("ddp")
    dists.strategy("ddp_spawn")
    made = plan(accelerator="cpu", devices=2, block=["ddp"])
    assert made.strategy.name == "ddp_spawn"
    assert "blocked" in made.passed_over["geartrain-ddp[ddp]"]


def test_strategy_options_reach_its_init(dists):
    dists.strategy("gossip", layout="Layout(self.bucket_mb, 1)")
    assert (
        plan(accelerator="cpu", strategy="Gossip", strategy_options={"bucket_mb": 3}).processes == 3
    )
    refused(
        "geartrain-gossip[gossip]",
        "'bucket_mv'",
        "'bucket_mb'",
        strategy="gossip",
        strategy_options={"bucket_mv": 1},
    )


def test_strategy_is_asked_with_accelerator_devices_and_nodes():
    asked = Plans(Layout(1, 2))
    plan(accelerator="cpu", devices=2, strategy=asked, num_nodes=3)
    assert (asked.request.accelerator, asked.request.devices, asked.request.num_nodes) == (
        "cpu",
        (0, 1),
        3,
    )


@pytest.mark.parametrize("options", [{"devices": 2}, {"devices": 1, "num_nodes": 2}])
def test_single_refuses_several(options):
    refused("geartrain[single]", "devices=1", accelerator="cpu", strategy="single", **options)


@pytest.mark.parametrize("rubbish", [None, (2, 1), Layout])
def test_plan_processes_must_return_a_layout(rubbish):
    refused("Plans", "plan_processes", "Layout", accelerator="cpu", strategy=Plans(rubbish))


@pytest.mark.parametrize("numbers", [(0, 1), ("2", 1), (True, 1), (1, 0), (1, None)])
def test_layout_is_of_whole_numbers_above_zero(numbers):
    class Strategy:
        @hookimpl
        def plan_processes(self):
            return Layout(*numbers)

    refused("Layout", accelerator="cpu", strategy=Strategy())


@pytest.mark.parametrize("num_nodes", [0, True, "2"])
def test_num_nodes_is_a_whole_number_above_zero(num_nodes):
    refused("num_nodes", repr(num_nodes), accelerator="cpu", num_nodes=num_nodes)


# --- the plan -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "nodes", "accumulate", "processes", "per_device", "whole"),
    [
        (Layout(1, 1), 1, 1, 1, 32, 32),
        (Layout(2, 1), 1, 1, 2, 32, 64),
        (Layout(2, 1), 3, 4, 6, 32, 32 * 6 * 4),
        (Layout(1, 4), 1, 1, 1, 8, 32),  # dp: one loader's batch is cut over four devices
        (Layout(1, 4), 2, 2, 2, 8, 32 * 2 * 2),  # ddp2
        (Layout(1, 3), 1, 1, 1, 11, 32),  # the first device gets the remainder
        (Layout(None, 1), 1, 2, None, 32, None),  # horovodrun decides
    ],
)
def test_batch_sizes(layout, nodes, accumulate, processes, per_device, whole):
    made = plan(
        accelerator="cpu",
        devices=4,
        strategy=Plans(layout),
        num_nodes=nodes,
        accumulate_grad_batches=accumulate,
    )
    assert made.processes == processes
    assert (made.per_device_batch, made.global_batch) == (None, None)
    sized = dataclasses.replace(made, loader_batch_size=32, hyperparameters={})
    assert (sized.per_device_batch, sized.global_batch) == (per_device, whole)
    assert sized.as_dict()["batch_size"] == {"per_device": per_device, "global": whole}


def test_as_dict_has_the_contents_of_plan_json():
    shown = plan(
        accelerator="cpu", devices=2, strategy=Plans(Layout(2, 1)), num_nodes=2, plugins=[Watches()]
    ).as_dict()
    fixed = [
        "accelerator",
        "devices",
        "strategy",
        "processes",
        "nodes",
        "precision",
        "batch_size",
        "plugins",
    ]
    assert [key for key in shown if key in fixed] == fixed
    assert shown["devices"] == [0, 1]
    assert (shown["processes"], shown["nodes"]) == (4, 2)
    assert (shown["accelerator"]["distribution"], shown["accelerator"]["version"]) == (
        "geartrain",
        gt.__version__,
    )
    for choice in (shown["accelerator"], shown["strategy"], shown["precision"], *shown["plugins"]):
        assert {"name", "distribution", "version", "reason"} <= set(choice)
        assert choice["reason"]
    assert [choice["name"] for choice in shown["plugins"]] == ["Watches"]
    assert json.loads(json.dumps(shown)) == shown


def test_plan_is_frozen():
    made = plan()
    for holder, name in (
        (made, "devices"),
        (made.accelerator, "name"),
        (made.layout, "processes_per_node"),
        (made.options, "max_epochs"),
    ):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(holder, name, 1)
    dataclasses.replace(made, loader_batch_size=32, hyperparameters={})
    assert made.loader_batch_size is None


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("16-mixed", "16-mixed"),
        (16, "16-mixed"),
        ("BF16", "bf16-mixed"),
        ("32-true", "32-true"),
        (32, "32-true"),
        ("64", "64-true"),
        ("bf16-true", "bf16-true"),
    ],
)
def test_precision_by_its_name_and_in_short(dists, given, name):
    dists.names.add("geartrain-callbacks")
    made = planned(accelerator="cpu", precision=given)
    assert made.plan.precision.name == made.precision == name
    assert made.plan.precision.reason == (
        "the default" if given == "32-true" else f"--precision {given}"
    )


@pytest.mark.parametrize("given", ["16-true", 8, None, True, 16.0, ["16"], torch.float16])
def test_an_unknown_precision_is_refused(given):
    refused(f"precision={given!r}", "is not known", "32-true", precision=given)


# --- check_plan -----------------------------------------------------------------------------------


class Watches:
    """Records everything that could happen before the first batch."""

    def __init__(self, refuse=None):
        self.seen, self.refuse = [], refuse

    @hookimpl
    def check_plan(self, plan):
        self.seen.append(plan)
        if self.refuse:
            raise UsageError(self.refuse)

    @hookimpl(wrapper=True)
    def launch(self, worker):
        self.seen.append("launch")
        return (yield)


class Net(gt.Module):
    def prepare_data(self):
        raise AssertionError("something has started")

    def setup(self, stage):
        raise AssertionError("something has started")

    def training_step(self, batch, batch_idx): ...

    def configure_optimizers(self): ...


def test_check_plan_refuses_before_anything_starts(tmp_path):
    watches = Watches("dp with 16 bits is refused")
    trainer = planned(accelerator="cpu", plugins=[watches], output=tmp_path / "run")
    with pytest.raises(UsageError, match="dp with 16 bits"):
        trainer.fit(Net(), [1])
    (seen,) = watches.seen
    assert isinstance(seen, gt.Plan)
    assert not (tmp_path / "run").exists()


def test_check_plan_sees_the_whole_plan():
    watches = Watches("enough")
    trainer = planned(accelerator="cpu", plugins=[watches], accumulate_grad_batches=2)
    with pytest.raises(UsageError, match="enough"):
        trainer.fit(Net(), DataLoader(list(range(24)), batch_size=6))
    assert watches.seen[0].global_batch == 12


def test_select_devices_without_indices_is_refused():
    processes = type("Processes", (CPUAccelerator,), {"select_devices": lambda *_: [0]})
    with pytest.raises(
        UsageError, match="Processes: indexed = False and select_devices contradict each other"
    ):
        planned(accelerator=processes(), devices=8)
