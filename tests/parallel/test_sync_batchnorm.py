"""``sync_batchnorm``: BatchNorm layers are SyncBatchNorm during fit on several ranks."""

import pytest
import torch
from small_models import Net, fit, loader, trainer
from threads import on_threads
from torch import nn

import geartrain as gt
from geartrain import TrainingError, UsageError
from geartrain_parallel.sync_batchnorm import SyncBatchNorm


class Normed(Net):
    def __init__(self, norm=nn.BatchNorm1d):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), norm(4), nn.Linear(4, 1))


class Own(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x).relu()


@pytest.fixture
def joined(tmp_path):
    """Join a process group of one process."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def run_of(module):
    """Return a run whose fit on one rank has ended; its plan is on the CPU."""
    return fit(module).run


def test_only_the_class_of_layers_changes_and_it_is_restored(joined):
    net = Normed()
    run, norm = run_of(net), net.layers[1]
    calls = []
    norm.register_forward_hook(lambda *_: calls.append(1))
    keys, facts, hooks = list(net.state_dict()), set(vars(norm)), list(net.parameters())
    plugin = SyncBatchNorm()
    plugin._synchronize(run)
    assert type(norm) is nn.SyncBatchNorm
    assert net.layers[1] is norm
    assert list(net.state_dict()) == keys
    assert all(a is b for a, b in zip(net.parameters(), hooks, strict=True))
    norm.eval()(torch.ones(2, 4))
    assert calls == [1]
    list(plugin.teardown_process_group())
    assert type(norm) is nn.BatchNorm1d
    assert set(vars(norm)) == facts


def test_each_rank_synchronizes_after_it_joined_and_restores_after_an_error(joined, monkeypatch):
    """torch raises in the forward of a SyncBatchNorm on the CPU, which is why it is refused."""
    monkeypatch.delattr(SyncBatchNorm, "check_plan")
    one, strategy = on_threads(sync_batchnorm=True)
    with pytest.raises(ValueError, match="SyncBatchNorm expected input tensor to be on GPU"):
        one.fit(Normed(), loader())
    assert [type(run.module.layers[1]) for run in strategy.runs] == [nn.BatchNorm1d] * 2


def test_one_rank_keeps_its_layers():
    net = Normed()
    fit(net, sync_batchnorm=True)
    assert type(net.layers[1]) is nn.BatchNorm1d


def test_evaluation_keeps_its_layers():
    class Evaluated(Normed):
        def validation_step(self, batch, batch_idx):
            assert type(self.layers[1]) is nn.BatchNorm1d

    one, _ = on_threads(sync_batchnorm=True)
    one.validate(Evaluated(), loader())


def test_the_cpu_is_refused_before_anything_starts():
    one, strategy = on_threads(sync_batchnorm=True)
    with pytest.raises(UsageError, match=r"cannot train on the CPU.*Fix: leave it out"):
        one.fit(Normed(), loader())
    assert strategy.runs == []


def test_several_devices_in_one_process_are_refused():
    one = trainer(strategy="dp", devices=2, sync_batchnorm=True)
    with pytest.raises(UsageError, match=r"geartrain-dp\[dp\] has one process.*Fix: --strategy"):
        one.fit(Normed(), loader())


def test_a_layer_whose_own_methods_would_be_lost_is_refused_before_anything_starts():
    with pytest.raises(UsageError, match="Own would lose its own methods"):
        fit(Normed(Own), sync_batchnorm=True)


def test_a_strategy_without_torch_distributed_is_refused():
    with pytest.raises(TrainingError, match=r"single\] has no process group|single has no process"):
        SyncBatchNorm()._synchronize(run_of(Normed()))


def test_a_module_without_batchnorm_is_a_warning(joined):
    with pytest.warns(UserWarning, match="changes nothing: Net has no BatchNorm"):
        SyncBatchNorm()._synchronize(run_of(Net()))


def test_it_is_an_option_of_the_plan():
    assert gt.Trainer(sync_batchnorm=True, devices=1).plan.as_dict()["options"]["sync_batchnorm"]
