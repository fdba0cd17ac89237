"""What one rank imports decides no collective."""

import sys

from several_ranks import results
from torch.utils.data import DataLoader

from .cases import Net, ddp, samples


class Imports(Net):
    def on_train_start(self):
        if self.trainer.is_global_zero:
            import torchmetrics  # noqa: F401


def train():
    for name in [name for name in sys.modules if name.startswith("torchmetrics")]:
        del sys.modules[name]  # another test's: the ranks' server had imported it
    trainer = ddp(max_epochs=2)
    trainer.fit(Imports(), *[DataLoader(samples(), batch_size=4)] * 2)
    return dict(trainer.run.metrics), "torchmetrics" in sys.modules


def test_one_rank_may_import_a_library_of_metrics(tmp_path):
    (first, imported), (second, also) = results(tmp_path, train)
    assert (imported, also) == (True, False)
    assert first == second
    assert first["samples"] == 48
