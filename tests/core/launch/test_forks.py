"""Forked children, as loader workers, keep no signal handlers of their parent."""

import multiprocessing
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from geartrain.launch import forks
from geartrain.launch.signals import Interrupted, raise_on_signals

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def test_a_signal_to_a_forked_child_neither_wakes_the_watcher_of_its_rank_nor_raises_in_the_child():
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    started = multiprocessing.get_context("fork").Event()
    child = multiprocessing.get_context("fork").Process(
        target=lambda: started.set() or signal.pause()
    )
    before = signal.set_wakeup_fd(writing)
    try:
        with raise_on_signals(SIGNALS):
            child.start()
            assert started.wait(10)
            child.terminate()
            child.join(10)
            os.set_blocking(reading, False)
            woken = os.read(reading, 64) if select.select([reading], [], [], 0)[0] else b""
    finally:
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)
    assert child.exitcode == -signal.SIGTERM
    assert signal.SIGTERM not in woken


def test_a_signal_to_a_child_that_was_just_forked_is_not_lost():
    with raise_on_signals(SIGNALS):
        for _ in range(20):
            child = multiprocessing.get_context("fork").Process(target=signal.pause)
            child.start()
            child.terminate()
            child.join(10)
            assert child.exitcode == -signal.SIGTERM


def test_a_signal_that_comes_in_the_middle_of_a_fork_still_ends_the_run(monkeypatch):
    monkeypatch.setattr(forks, "_preparations", [lambda: os.kill(os.getpid(), signal.SIGTERM)])
    reading, writing = os.pipe()
    # The signal may end start() before it has kept the child, so the child answers by a pipe.
    child = multiprocessing.get_context("fork").Process(target=os.write, args=(writing, b"ran"))

    def start_and_wait():
        child.start()
        time.sleep(10)

    try:
        with raise_on_signals(SIGNALS), pytest.raises(Interrupted, match="ended by SIGTERM"):
            start_and_wait()
        assert select.select([reading], [], [], 10)[0]
    finally:
        os.close(reading)
        os.close(writing)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.end_to_end
@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for a file in /proc")
def test_loader_workers_leave_no_folder_after_an_error(tmp_path):
    program = """
        import torch, geartrain as gt
        from torch.utils.data import DataLoader

        class Fails(gt.Module):
            def __init__(self):
                super().__init__()
                self.net = torch.nn.Linear(1, 1)

            def training_step(self, batch, batch_idx):
                raise ValueError("my own error")

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), 0.1)

        trainer = gt.Trainer(max_epochs=1, enable_progress_bar=False)
        data = DataLoader(torch.rand(8, 1), batch_size=2, num_workers=1, persistent_workers=True)
        trainer.fit(Fails(), data)
    """
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert "ValueError: my own error" in done.stderr
    assert not list(tmp_path.glob("pymp-*"))
