"""Throughput: the speed of training between flushes."""

from types import SimpleNamespace

import pytest
import torch
from small_models import EvalNet, Loggers, Net, Pretend, assert_equal, fit, loader

from geartrain import hookimpl
from geartrain.callbacks import Throughput, ThroughputMonitor
from geartrain_callbacks.throughput import _known_peak

#: Floating-point operations of one sample in Net: 2 per weight in forward, 4 in backward, less for
#: the first layer, whose input needs no gradient.
PER_SAMPLE = 2 * (3 * 4 + 4) * 3 - 2 * 3 * 4


@pytest.fixture
def clock(monkeypatch):
    """Set the clock: a training step takes 0.5 s, a validation batch 100 s."""
    clock = SimpleNamespace(now=5.0)
    clock.perf_counter = lambda: clock.now
    monkeypatch.setattr("geartrain_callbacks.throughput.time", clock)

    class Ticks:
        @hookimpl(wrapper=True)
        def step(self):
            yield
            clock.now += 0.5

        @hookimpl(wrapper=True)
        def forward(self, method):
            clock.now += 100 * (method == "validation_step")
            return (yield)

    clock.ticks = Ticks()
    return clock


def lines(clock, *arguments, module=None, of_plugin=None, **options):
    loggers = Loggers()
    plugin = Throughput(*arguments, **(of_plugin or {}))
    fit(module, plugins=[clock.ticks, loggers, plugin], **{"log_every_n_steps": 2, **options})
    return [(step, metrics) for step, metrics in loggers.lines if "val_loss" not in metrics]


def test_figures_from_flush_to_flush(clock):
    figures = {"batches_per_sec": 2, "samples_per_sec": 8, "flops_per_sec": 8 * PER_SAMPLE}
    expected = {f"{of}/{name}": n for name, n in figures.items() for of in ("device", "global")}
    assert lines(clock) == [(4, expected), (6, expected)]


def test_tokens_in_a_sample_or_in_a_batch(clock):
    assert lines(clock, 10)[0][1]["device/tokens_per_sec"] == 80
    assert lines(clock, lambda batch: batch[0].numel())[0][1]["global/tokens_per_sec"] == 24


def test_validation_is_not_counted(clock):
    options = {"max_epochs": 2, "val_check_interval": 3, "num_sanity_val_steps": 2}
    found = lines(clock, module=EvalNet(), val=loader(), **options)
    assert [step for step, _ in found] == [4, 6, 8, 10, 12]
    assert {metrics["device/samples_per_sec"] for _, metrics in found} == {8}


def test_accumulated_batches_and_short_ones(clock):
    options = {"accumulate_grad_batches": 2, "log_every_n_steps": 1}
    found = lines(clock, train=loader(22), **options)
    assert [metrics["device/samples_per_sec"] for _, metrics in found] == [16, 12]
    assert [metrics["device/batches_per_sec"] for _, metrics in found] == [4, 4]
    assert found[0][1]["device/flops_per_sec"] == 16 * PER_SAMPLE


def test_all_devices(clock):
    metrics = lines(clock, strategy=Pretend(), devices=2)[0][1]
    assert (metrics["device/samples_per_sec"], metrics["global/samples_per_sec"]) == (8, 16)


def test_several_devices_in_one_process(clock):
    class Two(Pretend):
        import geartrain as gt

        planned, world = gt.Layout(1, 2), gt.World()

    metrics = lines(clock, strategy=Two(), devices=2)[0][1]
    assert (metrics["device/samples_per_sec"], metrics["global/samples_per_sec"]) == (4, 8)
    assert "device/flops_per_sec" not in metrics


def test_utilisation_of_a_peak(clock):
    metrics = lines(clock, of_plugin={"peak_flops": 16 * PER_SAMPLE})[0][1]
    assert metrics["device/mfu"] == 0.5


def test_without_flops(clock):
    metrics = lines(clock, of_plugin={"flops": False, "peak_flops": 1.0})[0][1]
    assert {name.partition("/")[2] for name in metrics} == {"batches_per_sec", "samples_per_sec"}


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H200", "bf16-mixed", 989e12),
        ("NVIDIA H100 PCIe", "bf16-true", 756e12),
        ("NVIDIA H100 80GB HBM3", "16-mixed", 989e12),
        ("NVIDIA A100-SXM4-80GB", "bf16-mixed", 312e12),
        ("NVIDIA A100-SXM4-80GB", "32-true", None),
        ("Tesla T4", "bf16-mixed", None),
    ],
)
def test_known_peaks(name, precision, peak, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: name)
    plan = SimpleNamespace(precision=SimpleNamespace(name=precision))
    assert _known_peak(SimpleNamespace(device=torch.device("cuda:0"), plan=plan)) == peak


def test_the_device_is_waited_for_at_flushes_only(clock, monkeypatch):
    waits = []
    wait = "geartrain_callbacks.throughput._wait"
    monkeypatch.setattr(wait, lambda device: waits.append(clock.now))
    lines(clock, log_every_n_steps=3)
    assert waits == [6.5, 8.0]


def test_training_is_not_changed(clock):
    torch.manual_seed(3)
    plain, module = Net(), Net()
    module.load_state_dict(plain.state_dict())
    fit(plain)
    lines(clock, module=module)
    assert_equal(plain, module)


# --- Lightning's ThroughputMonitor ----------------------------------------------------------------


def monitored(clock, module=None, options=None, **of_trainer):
    loggers = Loggers()
    plugin = ThroughputMonitor(lambda batch: len(batch[0]), **(options or {}))
    of_trainer = {"log_every_n_steps": 2, **of_trainer}
    fit(module, plugins=[clock.ticks, loggers], callbacks=[plugin], **of_trainer)
    return [(step, metrics) for step, metrics in loggers.lines if "val_loss" not in metrics]


def test_monitor_logs_lightnings_names(clock):
    module = Net()
    module.flops_per_batch = 100
    options = {"length_fn": lambda batch: batch[0].numel(), "available_flops": 400}
    assert monitored(clock, module, options)[0] == (
        4,
        {
            "train/time": 2.0,
            "train/batches": 4,
            "train/samples": 16,
            "train/lengths": 48,
            "train/device/batches_per_sec": 2,
            "train/device/samples_per_sec": 8,
            "train/device/items_per_sec": 24,
            "train/device/flops_per_sec": 200,
            "train/device/mfu": 0.5,
        },
    )


def test_monitor_without_options_and_with_a_separator(clock):
    options = {"separator": "|"}
    names = {"time", "batches", "samples", "device|batches_per_sec", "device|samples_per_sec"}
    assert set(monitored(clock, options=options)[0][1]) == {f"train|{name}" for name in names}


def test_monitor_of_several_processes(clock):
    metrics = monitored(clock, strategy=Pretend(), devices=2)[0][1]
    assert metrics["train/device/samples_per_sec"] == 8
    assert metrics["train/samples_per_sec"] == 16


@pytest.mark.parametrize(("window", "expected"), [(1, [8, 4]), (2, [8, 4]), (4, [8, 5.333333])])
def test_monitors_window(clock, window, expected):
    class Slows(Net):
        def training_step(self, batch, batch_idx):
            clock.now += 0.5 * (batch_idx > 3)
            return super().training_step(batch, batch_idx)

    found = monitored(clock, Slows(), {"window_size": window})
    speeds = [metrics["train/device/samples_per_sec"] for _, metrics in found]
    assert speeds == pytest.approx(expected)


def test_monitor_leaves_validation_out(clock):
    options = {"max_epochs": 2, "val_check_interval": 3, "num_sanity_val_steps": 2}
    found = monitored(clock, EvalNet(), val=loader(), **options)
    assert {metrics["train/device/samples_per_sec"] for _, metrics in found} == {8}
    assert found[-1][1]["train/time"] == 6.0
