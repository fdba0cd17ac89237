"""The communication thread: order, errors, and the end of the process."""

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from several_ranks import results

from geartrain_bagua.channel import Channel


@pytest.fixture
def channel():
    made = Channel()
    yield made
    assert made.close(5)


def test_work_is_done_in_order_by_one_thread_other_than_this(channel):
    done = []
    jobs = [
        channel.submit(lambda i=i: (done.append(i), threading.get_ident())[1]) for i in range(500)
    ]
    idents = {job.result() for job in jobs}
    assert done == list(range(500))
    assert len(idents) == 1
    assert threading.get_ident() not in idents


def test_result_raises_the_error_and_no_later_work_is_done(channel):
    done = []

    def fails():
        raise KeyError("my own error")

    first, second = channel.submit(fails), channel.submit(lambda: done.append(1))
    for job in (first, second):
        with pytest.raises(KeyError, match="my own error"):
            job.result()
    assert done == []


def submit_a_wait_without_end():
    channel = Channel()
    channel.submit(threading.Event().wait)
    return channel.close(0.0)


def test_a_thread_that_never_ends_does_not_keep_the_process(tmp_path):
    assert results(tmp_path, submit_a_wait_without_end, ranks=1, place="alone") == [False]


def test_work_is_not_kept_alive_by_an_idle_thread(channel):
    import weakref

    class Held:
        def __call__(self):
            return None

    held = Held()
    reference = weakref.ref(held)
    channel.submit(held).result()
    channel.submit(lambda: None).result()  # the thread has dropped the first job
    del held
    assert reference() is None


@pytest.mark.parametrize("call", ["set_device", "Stream", "stream"])
def test_result_raises_if_the_thread_gets_no_stream(monkeypatch, call):
    def fails(*_):
        raise RuntimeError("CUDA error: out of memory")

    # No GPU is needed: the thread makes only these CUDA calls before the work, and does no work.
    for name in ("set_device", "Stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, fails if name == call else lambda *_: nullcontext())
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda *_: SimpleNamespace(record_event=lambda: None)
    )
    channel, done = Channel(torch.device("cuda", 0)), []
    job = channel.submit(lambda: done.append(1))
    assert job._done.wait(30)
    with pytest.raises(RuntimeError, match="out of memory"):
        job.result()
    assert done == []
    assert channel.close(5)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_streams_wait_for_each_other_on_cuda():
    device = torch.device("cuda", 0)
    channel, x = Channel(device), torch.zeros(1 << 20, device=device)
    for i in range(50):
        torch.cuda._sleep(1_000_000)
        x.fill_(i)  # on this stream, after the sleep
        y = channel.submit(lambda: x * 2).result()
        assert torch.equal(y, torch.full_like(y, 2 * i))
    assert channel.close(5)
