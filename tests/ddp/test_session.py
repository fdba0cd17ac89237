"""Session on two real ranks of ddp: trains as one process does on the whole batch, and nothing of it hangs or stays."""

import sys
from pathlib import Path

import pytest
import torch

from .ranks import failure, results, script

HERE = str(Path(__file__).parent)
sys.path.insert(0, HERE)
try:
    import session_cases  # imports its neighbour as the scripts of the ranks do
finally:
    sys.path.remove(HERE)

IMPORTS = "import session_cases as own\nfrom torch.nn import functional\n"
TWO = IMPORTS + 'session = gt.Session(accelerator="cpu", devices=2, strategy="ddp")\n'


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """case -> weights, for each rank; all cases in one run of two processes."""
    body = (
        IMPORTS
        + "found = {name: own.with_session(name) for name in own.CASES}\nkeep(gt.Session(accelerator='cpu', devices=2), found=found)\n"
    )
    return [kept["found"] for kept in results(tmp_path_factory.mktemp("cases"), body, timeout=100)]


@pytest.mark.parametrize("name", session_cases.CASES)
def test_two_ranks_train_as_one_process_does(two_ranks, name):
    expected = session_cases.by_hand(name)
    # float16 rounds, and LBFGS divides by small differences of gradients, which makes rounding larger.
    rtol, atol = {"with a scaler": (1e-2, 1e-4), "lbfgs": (1e-4, 1e-5)}.get(name, (1e-5, 1e-6))
    for key, value in expected.items():
        torch.testing.assert_close(two_ranks[0][name][key], value, rtol=rtol, atol=atol)
        assert torch.equal(two_ranks[0][name][key], two_ranks[1][name][key]), f"{key} differs between ranks"


@pytest.fixture(scope="module")
def one_session(tmp_path_factory):
    """Everything else in one session of two ranks."""
    body = (
        TWO
        + """
import torch.distributed as dist
from pathlib import Path

session = gt.Session(accelerator="cpu", devices=2, strategy="ddp", output="out", seed=5)
found = {}
with session:
    session.launch()
    rank = session.global_rank
    found["place"] = (rank, session.local_rank, session.world_size, session.is_global_zero, str(session.device))
    found["gathered"] = session.all_gather({"x": torch.full((2,), float(rank))})["x"]
    found["uneven"] = session.all_gather(torch.ones(rank + 1))
    found["reduced"] = {op: session.all_reduce(torch.tensor([rank, 10.0]), op) for op in ("mean", "sum", "min", "max")}
    found["whole mean"] = session.all_reduce(torch.tensor(rank))
    found["broadcast"] = session.broadcast({"from": rank}, src=1)
    with session.rank_zero_first():
        if rank == 0:
            Path("first").touch()
        found["first was there"] = Path("first").exists()
    session.print("printed by", rank)
    net = Net(norm=True)
    model, optimizer = session.setup(net, torch.optim.Adam(net.parameters(), lr=0.01))
    found["drawn before"] = torch.rand(1)
    with torch.no_grad():
        model(samples()[:4][0])  # the first batch
    found["drawn"] = torch.rand(1)
    loader = session.setup_dataloaders(DataLoader(samples(25), 4, shuffle=True))
    found["passes"] = [torch.cat([x[:, 0] for x, _ in loader]) for _ in range(2)]
    even = session.setup_dataloaders(DataLoader(samples(25), 4), even=False)
    none = session.setup_dataloaders(DataLoader(samples(1), 4), even=False)
    found["samples"] = (sum(len(x) for x, _ in even), len(even), sum(len(x) for x, _ in none), len(none))
    for x, y in session.setup_dataloaders(DataLoader(samples(), 4)):
        session.backward(functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:  # alone, with buffers that DDP would broadcast: nothing may wait for the other
        model.eval()
        with torch.no_grad():
            found["alone"] = model(samples()[:4][0]).shape
    session.log("rank", rank)
    session.log("mean", rank, sync_dist=True)
    found["metrics"] = dict(session.run.metrics)
    session.save("state.ckpt", {"model": model, "optimizer": optimizer, "step": session.global_step})
    other = Net(norm=True)
    other = session.setup(other)
    found["rest"] = session.load("state.ckpt", {"model": other})["step"]
    found["loaded"] = all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), session.broadcast(model.state_dict()).values()))
found["group is left"] = dist.is_initialized()
found["usable"] = model(samples()[:4][0]).shape
keep(gt.Session(accelerator="cpu", devices=2, strategy="ddp"), **found)
"""
    )
    folder = tmp_path_factory.mktemp("one")
    return results(folder, body, timeout=60), folder


def test_each_rank_knows_its_place(one_session):
    (first, second), _ = one_session
    assert first["place"] == (0, 0, 2, True, "cpu")
    assert second["place"] == (1, 1, 2, False, "cpu")


def test_collectives(one_session):
    for kept in one_session[0]:
        assert kept["gathered"].tolist() == [[0, 0], [1, 1]]
        assert [t.tolist() for t in kept["uneven"]] == [[1], [1, 1]]
        assert {op: t.tolist() for op, t in kept["reduced"].items()} == {"mean": [0.5, 10], "sum": [1, 20], "min": [0, 10], "max": [1, 10]}
        assert kept["whole mean"].item() == 0.5
        assert kept["broadcast"] == {"from": 1}
        assert kept["first was there"]
        assert kept["usable"] == (4, 1)
        assert not kept["group is left"]


def test_loaders_are_sharded_and_shuffled_anew(one_session):
    (first, second), _ = one_session
    every = sorted(x[0].item() for x, _ in session_cases.samples(25))
    for mine, theirs in zip(first["passes"], second["passes"], strict=True):
        assert len(mine) == len(theirs) == 13
        assert sorted({*mine.tolist(), *theirs.tolist()}) == pytest.approx(every)
    assert not torch.equal(*first["passes"])


def test_without_padding_each_sample_comes_once(one_session):
    (first, second), _ = one_session
    assert (first["samples"], second["samples"]) == ((13, 4, 1, 1), (12, 3, 0, 0))


def test_what_is_logged_and_saved(one_session):
    (first, second), folder = one_session
    assert first["metrics"] == {"rank": 0, "mean": 0.5}
    assert second["metrics"] == {"rank": 1, "mean": 0.5}
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert '"step": 6' in lines[0]
    assert '"rank": 0.0' in lines[0]
    for kept in (first, second):
        assert kept["rest"] == 6
        assert kept["loaded"]
    assert first["alone"] == (4, 1)
    assert torch.equal(first["drawn before"], second["drawn before"])
    assert not torch.equal(first["drawn"], second["drawn"])  # not the same dropout
    assert "printed by 1" not in (folder / "out" / "logs" / "rank-1.log").read_text()


# --- faults --------------------------------------------------------------------------------------------------------------

LOOP = """
with session:
    session.launch()
    net = Net()
    model, optimizer = session.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for i, (x, y) in enumerate(session.setup_dataloaders(DataLoader(samples(), 4))):
        fault(i)
        session.backward(functional.mse_loss(model(x), y))
        optimizer.step()
"""


def test_an_error_on_another_rank_ends_all_and_is_named(tmp_path):
    fault = "def fault(i):\n    if i == 2 and session.global_rank == 1:\n        raise ValueError('the other one')\n"
    printed = failure(tmp_path, TWO + fault + LOOP)
    assert "rank 1 failed: ValueError: the other one" in printed


def test_an_error_on_this_rank_ends_all(tmp_path):
    fault = "def fault(i):\n    if i == 2 and session.global_rank == 0:\n        raise ValueError('this one')\n"
    printed = failure(tmp_path, TWO + fault + LOOP)
    assert "ValueError: this one" in printed


def test_a_rank_that_is_killed_ends_all(tmp_path):
    fault = "import signal\ndef fault(i):\n    if i == 2 and session.global_rank == 1:\n        os.kill(os.getpid(), signal.SIGKILL)\n"
    printed = failure(tmp_path, TWO + fault + LOOP)
    assert "rank 1 was ended by SIGKILL" in printed


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_without_with_ends_all(tmp_path, rank):
    fault = f"def fault(i):\n    if i == 2 and session.global_rank == {rank}:\n        raise ValueError('that one')\n"
    body = TWO + fault + LOOP.replace("with session:", "if True:")
    printed = failure(tmp_path, body)
    assert "ValueError: that one" in printed


def test_a_session_that_is_never_closed_closes_at_the_programs_end(tmp_path):
    body = TWO + "def fault(i): ...\n" + LOOP.replace("with session:", "if True:") + "keep(session, step=session.global_step)\n"
    assert [kept["step"] for kept in results(tmp_path, body)] == [6, 6]


def test_any_module_is_trained_by_all_ranks(tmp_path):
    body = (
        TWO
        + """
class Manual(Net):
    automatic_optimization = False

found = {}
session.launch()
for kind in (Manual, nn.Sequential):
    torch.manual_seed(0)
    module = kind(nn.Linear(3, 1)) if kind is nn.Sequential else kind()
    model, optimizer = session.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    for x, y in session.setup_dataloaders(DataLoader(samples(), 4)):
        session.backward(functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    found[kind.__name__] = {name: value.clone() for name, value in module.state_dict().items()}
keep(session, found=found)
"""
    )
    one, two = (kept["found"] for kept in results(tmp_path, body))
    for name in ("Manual", "Sequential"):
        assert all(torch.equal(one[name][key], two[name][key]) for key in one[name]), f"{name}: the ranks' weights differ"


@pytest.mark.parametrize("theirs", ["{'b': 1.0}", "{'a': 1.0, 'b': 1.0}"])
def test_different_names_are_no_mean(tmp_path, theirs):
    body = TWO + f"session.launch()\nsession.log_dict({{'a': 0.0}} if session.global_rank == 0 else {theirs}, sync_dist=True)\n"
    printed = failure(tmp_path, body)
    assert "ranks 0 and 1 logged different metrics with sync_dist" in printed
    assert "Fix: log the same names on every rank" in printed


def test_models_that_differ_are_refused(tmp_path):
    body = (
        TWO
        + """
with session:
    session.launch()
    session.setup(nn.Linear(3, 1 + session.global_rank))
"""
    )
    assert "rank differs from rank 0" in failure(tmp_path, body).replace("rank 1 differs", "rank differs")


def test_a_model_that_is_called_past_the_strategy_is_refused(tmp_path):
    body = TWO + LOOP.replace("model(x)", "net(x)").replace("        fault(i)\n", "")
    assert "Net was not called through what session.setup returned" in failure(tmp_path, body)


def test_a_function_runs_in_both(tmp_path):
    body = (
        TWO
        + """
def work(session, name, scale=1):
    return session.all_gather(torch.tensor(float(session.global_rank + 1) * scale)), own.loop(session, name)

gathered, trained = session.launch(work, "sgd", scale=2)
again, _ = session.launch(work, "sgd")
keep(session, gathered=gathered, again=again, trained=trained)
"""
    )
    kept = results(tmp_path, body, ranks=1)[0]
    assert kept["gathered"].tolist() == [2, 4]
    assert kept["again"].tolist() == [1, 2]
    for key, value in session_cases.by_hand("sgd").items():
        torch.testing.assert_close(kept["trained"][key], value, rtol=1e-5, atol=1e-6)


def test_under_pytest_it_says_what_to_do_before_anything_starts():
    import geartrain as gt

    session = gt.Session(accelerator="cpu", devices=2, strategy="ddp")
    with pytest.raises(gt.UsageError, match=r"under pytest it would run the tests again. Fix: .*ddp_spawn"):
        session.launch()
    with pytest.raises(gt.UsageError, match=r"before session.launch\(\)"):
        session.setup(torch.nn.Linear(1, 1))


def test_a_notebook_is_told_before_anything_starts(tmp_path):
    body = TWO + "sys.modules['ipykernel'] = sys\nsession.launch()\n"
    done = script(tmp_path, body)
    assert done.returncode == 1
    assert "a notebook has none. Fix:" in done.printed
    assert not list(tmp_path.glob("kept-*"))


def test_gradients_that_are_held_back_are_not_reduced(tmp_path):
    body = (
        IMPORTS
        + """
import torch.distributed as dist


class Counting:
    calls = 0

    @hookimpl
    def reduce_bucket(self, bucket):
        self.calls += 1
        work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])


counting = Counting()
with gt.Session(accelerator="cpu", devices=2, strategy="ddp", plugins=[counting]) as session:
    session.launch()
    trained = own.loop(session, "accumulating")
    keep(session, calls=counting.calls, steps=session.global_step, trained=trained)
"""
    )
    for kept in results(tmp_path, body):
        assert kept["calls"] == kept["steps"] == 3
        for key, value in session_cases.by_hand("accumulating").items():
            torch.testing.assert_close(kept["trained"][key], value, rtol=1e-5, atol=1e-6)
