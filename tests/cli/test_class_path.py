"""Classes chosen by options: --model CLASS, --optimizer CLASS, and class_path in a config file."""

import pickle

import pytest
import torch
import yaml

from geartrain_cli.optimizers import choose, with_optimizer

pytestmark = pytest.mark.usefixtures("chip")

TWO = """
import torch
import geartrain as gt


class Encoder(torch.nn.Module):
    def __init__(self, width: int = 4):
        super().__init__()
        self.width = width


class Deep(Encoder):
    def __init__(self, width: int = 4, depth: int = 2):
        super().__init__(width)
        self.depth = depth


class Small(gt.Module):
    def __init__(self, width: int = 4, encoder: Encoder | None = None):
        super().__init__()
        self.layer, self.made = torch.nn.Linear(3, 1), f"Small {width}"
        if encoder is not None:
            print("encoder", vars(encoder)["width"], getattr(encoder, "depth", None))

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(4, 3), batch_size=2)

    def on_train_end(self):
        optimizer = self.optimizers()
        rate = optimizer.param_groups[0]["lr"]
        print(f"{self.made}, {type(self).__name__}, {type(optimizer).__name__} {rate:g}")


class Large(Small):
    def __init__(self, depth: int = 3):
        super().__init__()
        self.made = f"Large {depth}"

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Other(gt.Module):
    pass
"""


@pytest.fixture(autouse=True)
def two(write):
    write("two.py", TWO)


ADAM = "--optimizer Adam --optimizer.lr 0.25"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--model Large --model.depth 7", "Large 7, Large, SGD 0.5"),
        ("--model two.Large", "Large 3, Large, SGD 0.5"),
        (f"--model Small {ADAM}", "Small 4, Small, Adam 0.25"),
        ("--model=Small --model.width 9 --optimizer torch.optim.SGD", "Small 9, Small, SGD 0.001"),
        (
            f"--model Small {ADAM} --lr-scheduler ExponentialLR --lr_scheduler.gamma 0.1",
            "Small 4, Small, Adam 0.025",
        ),
        ("--config conf.yaml", "Small 9, Small, Adam 0.125"),
        ("--config conf.yaml --model.width 8 --optimizer.lr 0.5", "Small 8, Small, Adam 0.25"),
        ("--config conf.yaml --model Large --model.depth 1", "Large 1, Large, Adam 0.125"),
    ],
)
@pytest.mark.filterwarnings("ignore:--optimizer is used")
def test_a_class_is_chosen(fit, write, words, expected):
    write(
        "conf.yaml",
        "model: {class_path: two.Small, init_args: {width: 9}}\n"
        "optimizer: {class_path: torch.optim.Adam, init_args: {lr: 0.25}}\n"
        "lr_scheduler:\n"
        "  class_path: torch.optim.lr_scheduler.ExponentialLR\n"
        "  init_args: {gamma: 0.5}\n",
    )
    assert expected in fit(words, target="two.py").splitlines()


def test_an_argument_may_be_a_class_with_arguments(fit, write):
    words = f"--model Small {ADAM} --model.encoder Deep --model.encoder.width 5"
    assert "encoder 5 2" in fit(words, target="two.py")
    write(
        "conf.yaml",
        "model:\n  class_path: Small\n  init_args:\n    encoder: "
        "{class_path: two.Deep, init_args: {depth: 6}}\n",
    )
    assert "encoder 8 6" in fit(
        f"--config conf.yaml --model.encoder.width 8 {ADAM}", target="two.py"
    )


def test_print_config_means_the_same_when_read(command, write):
    words = f"--model Small --model.width 6 {ADAM}"
    printed = command(f"fit two.py {words} --print-config").out
    assert yaml.safe_load(printed)["model"]["class_path"] == "Small"
    write("conf.yaml", printed)
    assert command("fit two.py --config conf.yaml --print-config").out == printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model Smal", "has no Module 'Smal'. Did you mean 'Small'?"),
        ("--model two.Deep", "has no Module 'two.Deep'"),
        ("--model 3x", "this is not a class. Fix: a class"),
        ("--model Large --lr-scheduler StepLR", "has no optimizer. Fix: give --optimizer"),
        (
            "--model Small --optimizer Adam --optimizer.lrr 1",
            "no argument 'lrr'. Did you mean 'lr'",
        ),
        ("--model Small --optimizer Adma", "there is no class 'Adma'. Fix: a class"),
        (
            "--model Small --model.encoder Deep --model.encoder.widht 1",
            "--model.encoder.widht: two.Deep has no argument 'widht'. Did you mean 'width'?",
        ),
        (
            "--model Small --model.encoder Deep --model.encoder.width x",
            "--model.encoder.width: expected int, got 'x'",
        ),
    ],
)
def test_mistakes(refused, words, message):
    assert message in " ".join(refused(f"fit two.py {words}").split())


def test_a_module_with_a_chosen_optimizer_can_be_sent_to_another_process():
    from small_models import Net

    with pytest.warns(UserWarning, match="--optimizer is used in place of Net.configure_opt"):
        made = with_optimizer(Net)()
    adam = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.5}}
    from jsonargparse import dict_to_namespace

    choose(made, {"optimizer": dict_to_namespace(adam)})
    again = pickle.loads(pickle.dumps(made))
    assert torch.equal(again.layers[0].weight, made.layers[0].weight)
    assert again.configure_optimizers().param_groups[0]["lr"] == 0.5
    assert type(again).__name__ == "Net"
