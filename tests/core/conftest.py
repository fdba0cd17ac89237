"""What every test of core starts from."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_weights_in_every_test():
    torch.manual_seed(0)
