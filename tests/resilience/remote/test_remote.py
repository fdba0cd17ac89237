"""``remote``: the folder of a run in a store, against a server of S3."""

import json
import os
import resource
import shutil
import signal
import socket
import threading
from contextlib import suppress
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from several_ranks import run
from small_models import EvalNet, Net, assert_equal, loader, trainer, weights
from waiting import press_ctrl_c

from geartrain import TrainingError, UsageError, hookimpl
from geartrain.callbacks import AsyncCheckpoint, ModelCheckpoint
from geartrain.testing import run_plugin
from geartrain_cli.command_line import main
from geartrain_resilience.remote.plugin import Remote
from geartrain_resilience.remote.store import Store
from geartrain_resilience.remote.uploads import Uploads


def fit(url, epochs=2, output="run", ckpt_path=None, plugins=()):
    plugins = [*plugins, *([Remote(url)] if url else [])]
    done = trainer(output=output, max_epochs=epochs, seed=1, plugins=plugins)
    net = EvalNet(optimizer=torch.optim.Adam)  # after the seed
    done.fit(net, loader(shuffle=True), loader(8), ckpt_path=ckpt_path)
    return net, done


def whole_run(epochs=4):
    return weights(fit(None, epochs, output="whole")[0])


def local_files(folder="run"):
    found = {str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file()}
    assert not any(name.startswith(".remote") for name in found)
    return found


def test_the_store_has_the_files_of_the_run(bucket):
    best = ModelCheckpoint("val_loss", filename="{epoch}")
    fit(bucket.url, 3, plugins=[best])
    assert bucket.names() == local_files() >= {"last.ckpt", "plan.json", "summary.json"}
    for name in local_files():
        assert bucket.read(name) == Path("run", name).read_bytes(), name


def test_a_fresh_machine_resumes_from_the_store(bucket):
    expected = whole_run()
    best = {"monitor": "val_loss", "filename": "{epoch}", "save_top_k": 2}
    fit(bucket.url, 2, plugins=[ModelCheckpoint(**best)])
    before = Path("run/metrics.jsonl").read_text()
    shutil.rmtree("run")
    callback = ModelCheckpoint(**best)
    net, done = fit(bucket.url, 4, ckpt_path="auto", plugins=[callback])
    assert done.global_step == 24
    assert_equal(weights(net), expected)
    assert Path("run/metrics.jsonl").read_text().startswith(before)
    assert len(callback.best_k_models) == 2
    assert Path(callback.best_model_path).is_file()
    # ModelCheckpoint deleted the replaced file, in the folder and in the bucket.
    assert bucket.names() == local_files()


class Kill:
    @hookimpl
    def on_step_end(self, run):
        if run.step == 14:
            os.kill(os.getpid(), signal.SIGKILL)


def fit_and_be_killed(url):
    fit(url, 4, plugins=[Kill()])


def test_a_killed_run_resumes_from_the_store(bucket):
    expected = whole_run()
    (done,) = run(Path.cwd(), fit_and_be_killed, bucket.url, ranks=1, place="alone")
    assert done.end == str(-signal.SIGKILL), done.printed
    shutil.rmtree("run")
    net, done = fit(bucket.url, 4, ckpt_path="auto")
    assert_equal(weights(net), expected)
    # The second save waited for the first upload, and nothing older was taken.
    assert done.run.loop.start.path == Path("run/last.ckpt")


def test_the_further_of_folder_and_store_is_used(bucket):
    expected = whole_run()
    fit(bucket.url, 1)
    shutil.copytree("run", "older")
    fit(bucket.url, 3, ckpt_path="last")
    net, done = fit(bucket.url, 4, output="older", ckpt_path="last")  # this machine fell behind
    assert_equal(weights(net), expected)
    shutil.copytree("older", "newer")
    bucket.put("last.ckpt", Path("run/last.ckpt").read_bytes())  # the last upload was lost
    _, done = fit(bucket.url, 5, output="newer", ckpt_path="last")
    assert done.run.step == 30
    assert not Path("newer/checkpoints").exists()
    assert bucket.read("last.ckpt") == Path("newer/last.ckpt").read_bytes()


def test_a_damaged_object_is_not_used(bucket):
    fit(bucket.url, 2, plugins=[ModelCheckpoint(save_top_k=-1, filename="{epoch}")])
    damaged = bytearray(bucket.read("last.ckpt"))
    damaged[len(damaged) // 2] ^= 255
    bucket.put("last.ckpt", bytes(damaged))
    shutil.rmtree("run")
    with pytest.warns(UserWarning, match=r"damaged.*Used instead: .*epoch=1.ckpt"):
        _, done = fit(bucket.url, 3, ckpt_path="auto")
    assert done.global_step == 18


def test_auto_starts_from_scratch_if_the_store_is_empty(bucket):
    _, done = fit(bucket.url, 1, ckpt_path="auto")
    assert done.global_step == 6
    assert "last.ckpt" in bucket.names()


def test_a_run_in_the_store_is_not_overwritten(bucket):
    fit(bucket.url, 1)
    before = bucket.read("plan.json")
    with pytest.raises(UsageError, match=r"already contains a run.*--resume auto"):
        fit(bucket.url, 1, output="other")
    assert bucket.read("plan.json") == before
    assert not Path("other").exists()


def test_a_second_fit_of_the_trainer_continues_there(bucket):
    _, done = fit(bucket.url, 1)
    done.test(EvalNet(), loader(4))
    assert json.loads(bucket.read("summary.json"))["command"] == "test"


class Fails:
    """Raises an error after a step."""

    def __init__(self, step):
        self.step = step

    @hookimpl
    def on_step_end(self, run):
        if run.step == self.step:
            raise KeyboardInterrupt


def test_after_an_error_everything_is_in_the_store(bucket):
    with pytest.raises(KeyboardInterrupt):
        fit(bucket.url, 3, plugins=[Fails(8)])
    assert json.loads(bucket.read("summary.json"))["status"] == "interrupted"
    assert bucket.read("last.ckpt") == Path("run/last.ckpt").read_bytes()


class HeldStore(MemoryFileSystem):
    """A store that takes the first ``last.ckpt`` only after ``released`` is set."""

    protocol = "held"
    released = threading.Event()

    def put_file(self, lpath, rpath, **options):
        if "last.ckpt" in rpath:
            assert self.released.wait(60)
        super().put_file(lpath, rpath, **options)


class CtrlC:
    """Presses Ctrl-C once the training thread waits for the thread that uploads.

    The store takes its file once the training thread waits for that thread again.
    """

    @hookimpl
    def on_checkpoint_saved(self):
        if not self._presses.is_alive():
            self._presses.start()

    def __init__(self):
        self._presses = threading.Thread(target=self._press, daemon=True)

    def _press(self):
        press_ctrl_c([Uploads.wait], then=(Remote.on_exception, Uploads.start, Uploads.wait))
        HeldStore.released.set()


@pytest.mark.parametrize("epochs", [1, 3])
def test_ctrl_c_while_the_run_waits_for_the_store(tmp_path, monkeypatch, epochs):
    monkeypatch.chdir(tmp_path)
    fsspec.register_implementation("held", HeldStore, clobber=True)
    HeldStore.released.clear()
    url = f"held://runs/{epochs}"
    with pytest.raises(KeyboardInterrupt):
        fit(url, epochs, plugins=[CtrlC()])
    assert Store(url).files().keys() == local_files()
    Store(url).get("last.ckpt", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == Path("run/last.ckpt").read_bytes()


def test_a_run_that_fails_before_its_first_checkpoint_may_be_started_again(bucket):
    with pytest.raises(KeyboardInterrupt):
        fit(bucket.url, 1, plugins=[Fails(2)])
    assert bucket.names() == set()
    fit(bucket.url, 1)
    assert "last.ckpt" in bucket.names()


def test_checkpoints_that_are_written_in_the_background(bucket):
    fit(bucket.url, 3, plugins=[AsyncCheckpoint(), ModelCheckpoint("val_loss")])
    assert bucket.names() == local_files()
    assert bucket.read("last.ckpt") == Path("run/last.ckpt").read_bytes()


def test_two_ranks_upload_once(bucket):
    run_plugin(Remote(bucket.url), ranks=2, output="run", max_epochs=2)
    assert bucket.names() == local_files()
    assert bucket.uploads("last.ckpt") == 2
    shutil.rmtree("run")
    ranks = run_plugin(
        Remote(bucket.url), ranks=2, output="run", max_epochs=3, ckpt_path="auto", seed=None
    )
    assert bucket.uploads("last.ckpt") == 3
    assert len(ranks) == 2


# --- failures -------------------------------------------------------------------------------------


class Cut:
    """A server that forwards connections until it is cut; then it closes each after some bytes."""

    def __init__(self, address, size=20_000):
        self._target = address.rpartition("/")[2].split(":")
        self._size, self.cut = size, threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = "http://{}:{}".format(*self._listener.getsockname())
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection((self._target[0], int(self._target[1])))
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=self._copy, args=pair, daemon=True).start()

    def _copy(self, source, target):
        sent = 0
        with suppress(OSError):
            while data := source.recv(4096):
                sent += len(data)
                if self.cut.is_set() and sent > self._size:
                    break
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self):
        self._listener.close()


def test_an_interrupted_upload_replaces_nothing(bucket, server, monkeypatch):
    proxy = Cut(server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    store = Store(bucket.url)
    whole, other = os.urandom(200_000), os.urandom(300_000)
    Path("file").write_bytes(whole)
    store.put(Path("file"), "last.ckpt")
    proxy.cut.set()
    Path("file").write_bytes(other)
    with pytest.raises(TrainingError, match=rf"{bucket.url}/last.ckpt could not be uploaded: "):
        store.put(Path("file"), "last.ckpt")
    proxy.close()
    assert bucket.read("last.ckpt") == whole
    assert bucket.names() == {"last.ckpt"}


def test_a_full_disk_replaces_nothing(tmp_path):
    store, file = Store(f"file://{tmp_path}/store"), tmp_path / "file"
    file.write_bytes(b"whole")
    store.put(file, "checkpoints/a.ckpt")
    file.write_bytes(bytes(200_000))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(TrainingError, match=r"a.ckpt could not be uploaded: .*too large"):
            store.put(file, "checkpoints/a.ckpt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.files() == {"checkpoints/a.ckpt": 5}
    store.get("checkpoints/a.ckpt", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"whole"


def test_a_server_that_is_gone_is_one_clear_error(bucket, server, monkeypatch):
    proxy = Cut(server, size=0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)

    class Goes:
        @hookimpl
        def on_step_end(self, run):
            if run.step == 8:
                proxy.cut.set()

    with pytest.raises(TrainingError) as caught:
        fit(bucket.url, 4, plugins=[Goes()])
    proxy.close()
    message = str(caught.value)
    assert message.startswith(f"{bucket.url}/")
    assert "could not be uploaded" in message
    assert "Fix: " in message
    assert not any("and then" in note for note in caught.value.__notes__)
    assert json.loads(Path("run/summary.json").read_text())["status"] == "failed"
    assert Path("run/last.ckpt").exists()
    assert not Path("run/.remote").exists()


def test_a_failed_upload_does_not_hide_the_error_of_the_run(bucket, server, monkeypatch):
    proxy = Cut(server, size=0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)

    class Goes(Fails):
        @hookimpl
        def on_exception(self):
            proxy.cut.set()

    with pytest.raises(KeyboardInterrupt) as caught:
        fit(bucket.url, 3, plugins=[Goes(8)])
    proxy.close()
    assert any("could not be uploaded" in note for note in caught.value.__notes__)
    assert not Path("run/.remote").exists()


def test_a_store_that_cannot_be_reached_ends_before_the_start(bucket, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    with pytest.raises(TrainingError, match=f"{bucket.url} could not be listed.*Fix: "):
        fit(bucket.url, 1)
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("runs/7", "is not a URL"),
        (Path("s3://bucket/run"), "is not a URL"),
        ("nosuch://bucket/run", "Protocol not known: nosuch.*Fix: "),
        ("s3://", "names no folder"),
        ("s3://user:geheim@bucket/run", "'s3://bucket/run' was given with a password"),
        ("https://host/run?sig=geheim", "'https://host/run' was given with a password or a query"),
    ],
)
def test_urls_that_cannot_work(url, words):
    with pytest.raises(UsageError, match=words) as caught:
        Remote(url)
    assert "geheim" not in str(caught.value)


def test_a_run_without_a_folder_is_refused():
    with pytest.raises(UsageError, match=r"has none. Fix: --output DIR"):
        fit("memory://runs/none", 1, output=None)


def test_two_stores_of_one_run_are_refused(tmp_path):
    stores = [Remote("memory://runs/a"), Remote("memory://runs/b")]
    with pytest.raises(UsageError, match=r"\[remote\] is given twice\. Fix: give one"):
        fit(None, 1, output=tmp_path / "run", plugins=stores)
    assert not (tmp_path / "run").exists()


def test_names_in_a_store_do_not_lead_out_of_the_folder(bucket, tmp_path):
    fit(bucket.url, 1)
    target = tmp_path / "evil"
    for name in ("../../evil", f"/{target}", ".git/hooks"):
        bucket.put(name, b"evil")
    shutil.rmtree("run")
    fit(bucket.url, 2, ckpt_path="auto")
    assert not target.exists()
    assert not Path("run/.git").exists()


def test_no_secret_reaches_a_file(bucket):
    fit(bucket.url, 1)
    for name in bucket.names():
        assert b"-of-test" not in bucket.read(name), name


def test_a_checkpoint_elsewhere_stays_here_with_a_warning(bucket):
    best = ModelCheckpoint("val_loss", dirpath="elsewhere")
    with pytest.warns(UserWarning, match="uploads the run's folder run, and not .*elsewhere"):
        fit(bucket.url, 1, plugins=[best])
    assert not any("elsewhere" in name for name in bucket.names())


# --- nodes ----------------------------------------------------------------------------------------


def test_ranks_that_read_other_checkpoints_end_with_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    class Other:
        """Gives rank 1 the state of an earlier step, as a node with an old folder would."""

        @hookimpl(wrapper=True)
        def load_checkpoint(self, run):
            state = yield
            if run.world.rank == 1:
                state["fit"]["step"] -= 1
            return state

    remote = Remote("memory://runs/ranks")
    run_plugin(remote, ranks=2, output="run", max_epochs=1)
    with pytest.raises(TrainingError, match="the ranks read checkpoints of other steps: 4, 3"):
        run_plugin(
            [Other(), remote], ranks=2, output="run", max_epochs=2, ckpt_path="last", seed=None
        )


def test_on_several_nodes_the_store_decides(bucket):
    fit(bucket.url, 1)
    shutil.copytree("run", "further")
    fit(None, 3, output="further", ckpt_path="last")  # its uploads were lost
    for node in ("further", "fresh"):
        remote = Remote(bucket.url)
        remote._nodes = 2
        (*_, found) = list(
            trainer(output=node, plugins=[remote]).hooks.find_checkpoint(
                which="last", output=Path(node)
            )
        )
        assert found == [Path(node, "last.ckpt")]
        assert found[0].read_bytes() == bucket.read("last.ckpt")


# --- checkpoints by URL ---------------------------------------------------------------------------


def test_a_checkpoint_is_read_by_its_url(bucket, capsys):
    expected = whole_run()
    net, _ = fit(bucket.url, 2)
    url = f"{bucket.url}/last.ckpt"
    assert_equal(weights(EvalNet.load_from_checkpoint(url, optimizer=None)), weights(net))
    other, _ = fit(None, 4, output="other", ckpt_path=url)
    assert_equal(weights(other), expected)
    trainer().test(EvalNet(), loader(4), ckpt_path=url)
    assert main(["ckpt", "show", url]) == 0
    assert main(["ckpt", "verify", url]) == 0
    assert main(["ckpt", "list", bucket.url]) == 2
    assert "is a URL" in capsys.readouterr().err
    copies = list(Path(os.environ["XDG_CACHE_HOME"]).rglob("*.ckpt"))
    assert len(copies) == 1
    before = copies[0].stat().st_mtime_ns
    EvalNet.load_from_checkpoint(url, optimizer=None)
    assert copies[0].stat().st_mtime_ns == before  # not downloaded again
    bucket.put("last.ckpt", Path("other/last.ckpt").read_bytes())
    again = EvalNet.load_from_checkpoint(url, optimizer=None)
    assert_equal(weights(again), expected)


def test_urls_of_checkpoints_that_cannot_be_read(bucket):
    for url, words in (
        (f"{bucket.url}/none.ckpt", "there is no such file. Fix: pass an existing file"),
        (Path(bucket.url), "is not a URL. Fix: a string"),
        ("nosuch://x/y.ckpt", "Protocol not known"),
    ):
        with pytest.raises(UsageError, match=words):
            trainer().fit(Net(), loader(), ckpt_path=url)
