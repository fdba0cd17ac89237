"""``geartrain explain --memory``: a rank's memory, and the bytes that it sends, predicted."""

import gc

import pytest
from command_line import cells

WIDTH, LAYERS = 64, 4
PARAMETERS = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
#: A step's count for each parameter, which Adam keeps as a tensor.
COUNTS = 4 * 2 * LAYERS

NET = f"""
import torch
from torch import nn
from torch.utils.data import DataLoader
import geartrain as gt

class Net(gt.Module):
    def __init__(self, bias_of_loss: float = 0.0):
        super().__init__()
        print("the module is made")
        self.net = nn.Sequential(*[nn.Linear({WIDTH}, {WIDTH}) for _ in range({LAYERS})])

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def train_dataloader(self):
        return DataLoader(torch.randn(64, {WIDTH}), batch_size=2, shuffle=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)
"""

READS = """
from net_of_adam import Net, torch

class Reads(Net):
    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        if loss.item() > 1e9:
            return None
        return loss

class Chooses(Net):
    def training_step(self, batch, batch_idx):
        return self.net(batch[batch[:, 0] > 0]).square().mean()

class Made(Net):
    def __init__(self):
        super().__init__()
        self.rates = torch.linspace(0, 1, 4).tolist()
"""


@pytest.fixture
def memory(command, write, installed):
    """``memory("ddp", 2)``: return the prediction of ``explain --memory --json``."""
    gc.freeze()  # a prediction collects garbage in each step, and torch has a million objects
    installed |= {f"geartrain-{name}" for name in ("ddp", "parallel", "sharded", "spawn")}
    write("net_of_adam.py", NET)

    def run(strategy, devices, options="", target="net_of_adam.py:Net"):
        line = f"explain {target} --memory --json --accelerator cpu --strategy {strategy}"
        return command(f"{line} --devices {devices} --assume cpu=64 {options}").facts["memory"]

    return run


# --- the figures ----------------------------------------------------------------------------------


def test_single_has_each_tensor_once(memory):
    found = memory("single", 1)
    assert found["parameters"] == found["gradients"] == PARAMETERS
    assert found["optimizer_states"] == 2 * PARAMETERS + COUNTS
    assert found["sent_per_step"] == 0
    parts = ("parameters", "gradients", "optimizer_states", "activations")
    assert found["peak"] == sum(found[part] for part in parts) > found["set_up"]


@pytest.mark.parametrize("ranks", [2, 64])
def test_ddp_has_buckets_and_sends_gradients_in_a_ring(memory, ranks):
    found = memory("ddp", ranks)
    assert found["parameters"] == PARAMETERS
    assert found["gradients"] == 2 * PARAMETERS
    assert found["optimizer_states"] == 2 * PARAMETERS + COUNTS
    assert found["sent_per_step"] == round(2 * PARAMETERS * (ranks - 1) / ranks)


@pytest.mark.parametrize("ranks", [2, 64])
def test_fsdp_has_a_part_of_each_tensor(memory, ranks):
    found = memory("fsdp", ranks, "--strategy.units Linear")
    assert found["parameters"] == PARAMETERS / ranks
    assert found["optimizer_states"] == 2 * PARAMETERS / ranks + COUNTS
    assert 0 < found["gradients"] <= PARAMETERS / ranks
    # Two gathers, and gloo reduces by an all-reduce.
    assert found["sent_per_step"] == round(4 * PARAMETERS * (ranks - 1) / ranks)
    assert found["set_up"] > PARAMETERS  # each rank makes the whole module


def test_ddp_sharded_gathers_once(memory):
    found = memory("ddp_sharded", 2)
    assert found["parameters"] == PARAMETERS / 2
    assert found["optimizer_states"] == PARAMETERS + COUNTS
    assert found["sent_per_step"] == round(3 * PARAMETERS / 2)


def test_a_larger_batch_and_accumulation_take_memory(memory, write):
    small = memory("single", 1)["activations"]
    write("wide.py", NET.replace("batch_size=2", "batch_size=60"))
    assert memory("single", 1, target="wide.py:Net")["activations"] > small
    assert memory("single", 1, "--accumulate-grad-batches 4")["activations"] > small


def test_clipping_precision_and_data_modules_are_counted(memory, command):
    full = memory("ddp", 2, "--gradient-clip-val 1.0 --precision bf16-mixed")
    half = memory("single", 1, "--precision bf16-true")
    assert full["parameters"] == PARAMETERS
    assert half["parameters"] == PARAMETERS / 2
    assert command("explain net.py --memory --json").facts["memory"]["parameters"] == 84


def test_layers_that_are_copies_or_made_in_setup_are_counted_once(memory, write):
    write(
        "copied.py",
        "import copy\nfrom net_of_adam import Net, nn\n"
        "class Copied(Net):\n    def __init__(self):\n        super().__init__()\n"
        "        self.net = nn.Sequential(*[copy.deepcopy(each) for each in self.net])\n"
        "class Late(Net):\n    def setup(self, stage):\n"
        f"        layers = [nn.Linear({WIDTH}, {WIDTH}) for _ in range({LAYERS})]\n"
        "        self.net = nn.Sequential(*layers)\n",
    )
    for name, strategy, ranks in (("Copied", "single", 1), ("Late", "ddp", 2)):
        plain, found = memory(strategy, ranks), memory(strategy, ranks, target=f"copied.py:{name}")
        parts = ("parameters", "gradients", "optimizer_states", "activations")
        assert [found[part] for part in parts] == [plain[part] for part in parts]


def test_schedulers_see_the_length_of_the_training(command, write):
    scheduler = "torch.optim.lr_scheduler.OneCycleLR"
    write(
        "cycle.py",
        NET.replace(
            "return torch.optim.Adam(self.parameters(), lr=1e-3)",
            "optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)\n"
            "        steps = self.trainer.estimated_stepping_batches\n"
            "        assert steps == 64, steps\n"
            f"        return [optimizer], [{scheduler}(optimizer, 0.1, total_steps=steps)]",
        ),
    )
    done = command("explain cycle.py --memory --json --accelerator cpu --max-epochs 2")
    assert done.facts["memory"]["parameters"] == PARAMETERS


def test_the_same_process_can_predict_twice_and_then_train(memory, fit):
    assert memory("ddp", 2) == memory("ddp", 2)
    fit("--no-output")


# --- the output -----------------------------------------------------------------------------------


def test_the_text_says_that_it_is_a_prediction(command, write):
    write("net_of_adam.py", NET)
    done = command("explain net_of_adam.py --memory --accelerator cpu --strategy single")
    assert "counted from fake tensors, not measured" in done.out
    assert cells(done.out, "parameters")[1] == "0.1 MiB"
    assert cells(done.out, "sent")[1] == "0.0 MiB"
    assert "the module is made" not in done.out


def test_plugins_that_watch_are_left_out_and_named(memory, command, write):
    write("watch.py", "import geartrain as gt\n@gt.hookimpl\ndef on_step_end(run): 1 / 0\n")
    assert memory("single", 1, "--plugin watch.py")["left_out"] == ["watch"]
    done = command("explain net_of_adam.py --memory --plugin watch.py")
    assert "watch" in cells(done.out, "not counted")


def test_without_the_flag_nothing_is_predicted(plan):
    assert "memory" not in plan()


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("Reads", "reads.py:7: if loss.item() > 1e9"),
        ("Chooses", "reads.py:13: return self.net(batch[batch[:, 0] > 0]).square().mean()"),
        ("Made", "reads.py:18: self.rates = torch.linspace(0, 1, 4).tolist()"),
    ],
)
def test_a_module_that_needs_values_is_refused_with_its_line(command, write, name, line):
    write("net_of_adam.py", NET)
    write("reads.py", READS)
    done = command(f"explain reads.py:{name} --memory --accelerator cpu --strategy single")
    assert done.code == 2
    assert line in done.err
    assert "Fix: " in done.err


def test_other_strategies_are_refused(command, memory):
    done = command(
        "explain net_of_adam.py --memory --accelerator cpu --devices 2 --strategy ddp_spawn"
    )
    assert done.code == 2
    assert "geartrain-spawn[ddp_spawn]" in done.err
    assert "Fix: --strategy with one of single, ddp, fsdp, ddp_sharded" in done.err
