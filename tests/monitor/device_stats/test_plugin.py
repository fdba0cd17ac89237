"""The plugin ``device_stats`` as users run it."""

import json
import pickle
import threading
import warnings
from pathlib import Path

import pytest
import small_models
import torch
from several_ranks import command
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain import callbacks, hookimpl
from geartrain_monitor.device_stats import DeviceStats, monitor

from .cases import CPU, Chip, FakeGpu, Logger, Net, Until, sampling, trainer

DOWNHILL = str(Path(__file__).parents[2] / "integration" / "downhill.py")
pytestmark = pytest.mark.filterwarnings(
    "ignore:device_stats. cpu .* reports no figures:UserWarning"
)


def written(folder):
    """Return the lines of metrics.jsonl that have device values."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "process_rss_mib" in line]


# --- the command line -----------------------------------------------------------------------------


def test_chosen_by_name_its_figures_are_in_the_runs_folder(tmp_path):
    options = ("--max-epochs", "2", "--plugin", "device_stats", "--output", "out")
    done = command(tmp_path, "fit", DOWNHILL, *options)
    assert done.end == "0", done.err
    # Four steps are shorter than the interval: one sample, at the end of the first epoch.
    (line,) = written(tmp_path / "out")
    assert (line["step"], line["epoch"], line["stage"]) == (4, 0, "train")
    assert line["memory_available_mib"] > 0
    message = "neither the epoch's line nor the closing table shows them"
    assert "process_rss_mib" not in done.printed, message
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert "process_rss_mib" not in summary["metrics"]
    assert done.err.count("cpu (geartrain[cpu]) reports no figures (it has no device_stats)") == 1


@pytest.mark.parametrize(
    "interval", ["5", None, True, [1], 0, 0.05, -1, float("nan"), float("inf")]
)
def test_an_interval_that_is_not_a_time_is_refused(interval):
    with pytest.raises(gt.UsageError, match=r"device_stats\].*interval.*Fix"):
        DeviceStats(interval)


@pytest.mark.parametrize("cpu_stats", ["yes", 2, []])
def test_cpu_stats_that_are_no_choice_are_refused(cpu_stats):
    with pytest.raises(gt.UsageError, match=r"cpu_stats=.*Fix: True, False or None"):
        DeviceStats(cpu_stats=cpu_stats)


class Figures:
    """A logger that keeps the names of all figures."""

    def __init__(self):
        self.names = set()

    @hookimpl
    def log_metrics(self, metrics):
        self.names |= set(metrics)


@pytest.mark.parametrize(
    ("accelerator", "cpu_stats", "logs"),
    [
        ("cpu", True, True),
        ("cpu", False, False),
        ("cpu", None, True),
        (Chip(), None, False),
        (Chip(), True, True),
    ],
)
def test_cpu_stats(accelerator, cpu_stats, logs):
    figures, plugin = Figures(), callbacks.DeviceStatsMonitor(cpu_stats=cpu_stats)
    more = [FakeGpu()] if accelerator == "cpu" else []
    one = small_models.trainer(
        accelerator=accelerator, plugins=[plugin, figures, *more], log_every_n_steps=1
    )
    one.fit(Net(), [torch.ones(2)] * 3)
    assert "gpu0_utilization_percent" in figures.names
    assert ("process_rss_mib" in figures.names) == logs


# --- logged samples -------------------------------------------------------------------------------


def test_a_long_run_gets_a_sample_after_each_interval():
    logger, gpu = Logger(), FakeGpu()
    one = trainer(logger, gpu)

    def has_seen_work():  # on a busy machine not in every interval
        figures = [item for _, _, sample in logger.samples for item in sample.items()]
        busy = {name for name, figure in figures if figure > 10}
        works = {"process_cpu_percent", "cpu_utilization_percent"} <= busy
        return len(logger.samples) >= 3 and works

    one.fit(Net(), Until(has_seen_work))
    for stage, step, figures in logger.samples:
        assert stage == "train"
        assert 1 <= step <= one.global_step
        assert figures["gpu0_utilization_percent"] == 87.0
        assert figures["gpu0_memory_used_mib"] == 1024.0
        assert figures["process_rss_mib"] > 10
        assert 0 <= figures["memory_used_percent"] <= 100
        assert 0 <= figures["cpu_utilization_percent"] <= 100
        assert figures["process_cpu_percent"] >= 0
    assert {"load_1m", *logger.samples[0][2]} >= CPU
    steps = [step for _, step, _ in logger.samples]
    assert steps == sorted(set(steps))
    assert steps[1] - steps[0] > 1, "an interval lies between two samples"
    assert logger.threads == {threading.current_thread()}, "the training thread calls the loggers"
    assert gpu.threads == {"device_stats"}, "the plugin's thread calls the accelerators"
    assert set(one.callback_metrics) == {"loss"}
    assert set(one.logged_metrics) == {"loss"}


def test_a_run_shorter_than_the_interval_gets_one_sample():
    logger, gpu = Logger(), FakeGpu()
    trainer(logger, gpu, interval=1000, max_epochs=3).fit(Net(), [torch.ones(2)] * 4)
    ((stage, step, figures),) = logger.samples
    assert (stage, step, figures["gpu0_memory_used_mib"]) == ("train", 4, 1024.0)
    assert gpu.asked == 1


def test_the_first_validation_brings_the_first_sample():
    logger = Logger()
    one = trainer(logger, FakeGpu(), interval=1000, max_epochs=2, num_sanity_val_steps=2)
    one.fit(Net(), [torch.ones(2)] * 4, [torch.ones(2)] * 4)
    ((stage, step, _),) = logger.samples
    assert (stage, step) == ("validate", 4)


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_an_evaluation_gets_samples_between_its_batches_and_one_at_its_end(command):
    logger = Logger()
    one = trainer(logger, FakeGpu())
    getattr(one, command)(Net(), Until(logger.count(2)))
    assert [stage for stage, _, _ in logger.samples[:2]] == [command] * 2

    short = Logger()
    getattr(trainer(short, FakeGpu(), interval=1000), command)(Net(), [torch.ones(2)])
    ((stage, step, figures),) = short.samples
    assert (stage, step) == (command, 0)
    assert figures["gpu0_memory_used_mib"] == 1024.0


def test_the_sanity_check_logs_nothing():
    logger, gpu = Logger(), FakeGpu()
    one = trainer(logger, gpu, num_sanity_val_steps=-1)
    one.fit(Net(), Until(logger.count(1)), Until(lambda: gpu.asked >= 3))
    assert logger.samples
    assert "sanity_check" not in {stage for stage, _, _ in logger.samples}


def test_an_accelerators_values_are_logged_without_a_warning(recwarn):
    logger = Logger()
    trainer(logger, accelerator=Chip()).fit(Net(), [torch.ones(2)])
    assert logger.samples[0][2]["gpu0_utilization_percent"] == 87.0
    assert not [str(w.message) for w in recwarn if "device_stats" in str(w.message)]


def test_an_accelerator_without_values_is_named_once():
    class Silent(Chip):
        @hookimpl
        def device_stats(self):
            return None

    logger = Logger()
    message = "Silent.*its device_stats gave none.*only the CPU's are logged"
    with pytest.warns(UserWarning, match=message) as said:
        trainer(logger, accelerator=Silent()).fit(Net(), Until(logger.count(2)))
    assert len([w for w in said if "reports no figures" in str(w.message)]) == 1
    assert logger.samples[0][2].keys() <= CPU


def test_without_a_logger_it_warns_except_with_fast_dev_run():
    with pytest.warns(UserWarning, match=r"no logger is selected.*Fix: --output DIR"):
        trainer(FakeGpu()).fit(Net(), [torch.ones(2)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer(FakeGpu(), fast_dev_run=True).fit(Net(), [torch.ones(2)])


# --- no other effects -----------------------------------------------------------------------------


def test_training_sees_the_same_batches(tmp_path):
    def endless():
        yield from (torch.full((2,), float(n)) for n in range(1000))

    with_it, without = Net(), Net()
    options = {"max_epochs": 3, "limit_train_batches": 2, "accumulate_grad_batches": 2}
    trainer(Logger(), FakeGpu(), **options).fit(with_it, endless())
    small_models.trainer(**options).fit(without, endless())
    assert with_it.seen == without.seen
    assert len(set(with_it.seen)) == 6, "the user's generator continues in the next epoch"
    assert torch.equal(with_it.w, without.w)


def test_a_prefetching_iterator_is_closed_at_the_end_of_the_epoch():
    class Prefetching:
        replaces = frozenset({"device_batches"})
        open = 0

        @hookimpl
        def device_batches(self, loader):
            self.kept = self.batches(loader)  # the strategy keeps the iterator, so it must close it
            return self.kept

        def batches(self, loader):
            self.open += 1
            try:
                yield from loader
            finally:
                self.open -= 1

        @hookimpl
        def on_epoch_end(self):
            assert self.open == 0

    prefetching = Prefetching()
    trainer(Logger(), prefetching, max_steps=2).fit(Net(), [torch.ones(2)] * 9)


def test_forked_loader_workers_have_no_sampling_thread():
    logger = Logger()
    options = {"num_workers": 2, "multiprocessing_context": "fork"}
    module, data = Net(), DataLoader(torch.arange(8.0), batch_size=2, **options)
    trainer(logger, FakeGpu(), max_epochs=3).fit(module, data)
    assert module.seen == [0.5, 2.5, 4.5, 6.5] * 3


# --- the thread ends ------------------------------------------------------------------------------


class Interrupted(Net):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def training_step(self, batch, batch_idx):
        assert sampling()
        raise self.error


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_thread_has_ended_after_an_error(error):
    with pytest.raises(error):
        trainer(Logger(), FakeGpu(), interval=1000).fit(Interrupted(error()), [torch.ones(2)])
    assert not sampling()


@pytest.mark.parametrize("event", ["on_run_start", "on_exception"])
def test_the_thread_has_ended_after_another_plugins_error(event):
    class Failing:
        @hookimpl(specname=event)
        def fails(self):
            raise RuntimeError(event)

    one = small_models.trainer(plugins=[Failing(), DeviceStats(1000.0), Logger()])
    for each in (one, trainer(Logger(), Failing(), interval=1000)):
        with pytest.raises((RuntimeError, ValueError)):
            each.fit(Interrupted(ValueError("mine")), [torch.ones(2)])
        assert not sampling()


def test_one_object_works_in_a_second_fit_and_can_be_pickled():
    plugin, logger = pickle.loads(pickle.dumps(DeviceStats(1000))), Logger()
    one = small_models.trainer(plugins=[plugin, logger])
    for count in (1, 2):
        one.fit(Net(), [torch.ones(2)])
        assert len(logger.samples) == count
        assert not sampling()
        assert pickle.loads(pickle.dumps(plugin)).interval == 1000.0


@pytest.mark.timeout(30)  # waiting in each of the sixty epochs would take a minute
def test_a_hanging_driver_delays_the_run_once_and_is_named(monkeypatch):
    monkeypatch.setattr(monitor, "PATIENCE", 1.0)
    goes_on = threading.Event()

    class Hanging:
        @hookimpl
        def device_stats(self):
            assert goes_on.wait(30)

    one = trainer(Logger(), Hanging(), max_epochs=60)
    with pytest.warns(UserWarning, match="its thread did not end within"):
        one.fit(Net(), [torch.ones(2)])
    assert (one.global_step, len(sampling())) == (60, 1)
    goes_on.set()
    sampling()[0].join(30)


# --- a sampler that fails -------------------------------------------------------------------------


def test_the_first_error_ends_the_sampling_with_one_warning():
    class Broken(FakeGpu):
        @hookimpl
        def device_stats(self, run):
            super().device_stats(run)
            raise OSError("the driver is gone")

    broken, ends = Broken(), []
    one = trainer(Logger(), broken, max_epochs=3)
    with pytest.warns(UserWarning, match="no more samples") as said:
        one.fit(Net(), Until(lambda: ends.append(sampling()) or (broken.asked and not ends[-1])))
    (text,) = [str(w.message) for w in said if "no more samples" in str(w.message)]
    assert text == (
        "device_stats takes no more samples; training continues: OSError: the driver is gone; "
        "raised in hook 'device_stats' of Broken"
    )
    assert (broken.asked, one.current_epoch) == (1, 3)


@pytest.mark.timeout(30)
def test_an_error_at_the_first_sample_of_a_short_run_is_reported(monkeypatch):
    monkeypatch.setattr(monitor, "PATIENCE", 1000.0)

    class Broken:
        @hookimpl
        def device_stats(self):
            raise OSError("the driver is gone")

    with pytest.warns(UserWarning, match="no more samples.*the driver is gone"):
        trainer(Logger(), Broken(), interval=1000).fit(Net(), [torch.ones(2)])


class OtherGpu(FakeGpu):
    pass


@pytest.mark.parametrize(
    ("second", "problem"),
    [
        (OtherGpu(gpu0_utilization_percent=1.0), "gives 'gpu0_utilization_percent' twice"),
        (OtherGpu(gpu1_power_watt=None), "gives gpu1_power_watt=None, which is not a number"),
        (OtherGpu(gpu1_power_watt="12 W"), "gives gpu1_power_watt='12 W', which is not a number"),
    ],
)
def test_wrong_values_name_the_plugins_that_may_have_given_them(second, problem):
    logger = Logger()
    with pytest.warns(UserWarning, match="no more samples") as said:
        trainer(logger, FakeGpu(), second).fit(Net(), [torch.ones(2)])
    (text,) = [str(w.message) for w in said if "no more samples" in str(w.message)]
    assert problem in text
    for name in ("OtherGpu", "FakeGpu", "geartrain-monitor[device_stats]"):
        assert name in text
    assert not logger.samples
