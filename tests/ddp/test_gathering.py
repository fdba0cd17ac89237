"""A loss over the samples of all ranks."""

import pytest
import torch
from regression import Contrast
from several_ranks import results
from torch.utils.data import DataLoader

from .cases import ddp, one_trainer, samples, weights


def contrast(local=False):
    module = Contrast(local)
    ddp().fit(module, DataLoader(samples(), batch_size=4))
    return weights(module)


@pytest.mark.parametrize("local", [False, True])
def test_a_contrastive_loss_trains_as_in_one_process(tmp_path, local):
    one = Contrast()
    one_trainer().fit(one, DataLoader(samples(), batch_size=8))
    for rank in results(tmp_path, contrast, local):
        torch.testing.assert_close(rank, weights(one))
