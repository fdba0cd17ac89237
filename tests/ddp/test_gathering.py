"""A loss over the samples of all ranks."""

import torch
from regression import Contrast
from several_ranks import results
from torch.utils.data import DataLoader

from .cases import ddp, one_trainer, samples, weights


def contrast():
    module = Contrast()
    ddp().fit(module, DataLoader(samples(), batch_size=4))
    return weights(module)


def test_a_contrastive_loss_trains_as_in_one_process(tmp_path):
    one = Contrast()
    one_trainer().fit(one, DataLoader(samples(), batch_size=8))
    for rank in results(tmp_path, contrast):
        torch.testing.assert_close(rank, weights(one))
