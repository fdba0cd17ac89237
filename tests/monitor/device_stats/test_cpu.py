"""The CPU's values, and values that cannot be read."""

import os
import threading

import psutil
import pytest

from geartrain_monitor.device_stats import cpu
from geartrain_monitor.device_stats.cpu import NAMES, Cpu

from .cases import CPU


@pytest.fixture
def figures(monkeypatch):
    """Return all values, however short the time since the first call."""
    monkeypatch.setattr(cpu, "SHORTEST", 0.0)
    return lambda: Cpu().figures()


def denied(*_, **__):
    raise psutil.AccessDenied(os.getpid())


def gone(*_, **__):
    raise psutil.NoSuchProcess(os.getpid())


def unobtainable():
    raise OSError("unobtainable")


def test_the_names_and_units(figures):
    found = figures()
    assert set(found) <= NAMES == CPU
    assert set(found) | {"load_1m"} == CPU
    memory = psutil.virtual_memory()
    assert 0 < found["memory_available_mib"] <= memory.total / 2**20
    own = psutil.Process().memory_info().rss / 2**20
    assert found["process_rss_mib"] == pytest.approx(own, rel=0.2)


def test_a_utilisation_over_no_time_is_left_out():
    assert not {"cpu_utilization_percent", "process_cpu_percent"} & set(Cpu().figures())


def test_another_thread_gets_no_utilisation(figures, monkeypatch):
    monkeypatch.setattr(cpu, "SHORTEST", 0.0)
    mine, theirs = Cpu(), []
    thread = threading.Thread(target=lambda: theirs.append(mine.figures()))
    thread.start()
    thread.join()
    own = {"cpu_utilization_percent", "process_cpu_percent"}
    assert set(theirs[0]) == set(mine.figures()) - own


@pytest.mark.parametrize(
    ("whose", "name", "error", "lost"),
    [
        (psutil, "cpu_percent", denied, {"cpu_utilization_percent"}),
        (psutil.Process, "cpu_percent", gone, {"process_cpu_percent"}),
        (psutil.Process, "memory_info", denied, {"process_rss_mib"}),
        (psutil, "virtual_memory", denied, {"memory_used_percent", "memory_available_mib"}),
        (os, "getloadavg", unobtainable, {"load_1m"}),
    ],
)
def test_unreadable_values_are_left_out(figures, monkeypatch, whose, name, error, lost):
    before = set(figures())
    monkeypatch.setattr(whose, name, error, raising=False)
    assert set(figures()) == before - lost


def test_a_system_without_load_average_has_none(figures, monkeypatch):
    monkeypatch.delattr(os, "getloadavg", raising=False)
    assert set(figures()) == CPU - {"load_1m"}
