"""The file predictions.pt."""

import threading

import pytest
import torch

from geartrain import TrainingError
from geartrain_cli.predictions import save_predictions


def test_output_that_cannot_be_saved_is_named_and_the_older_file_stays(tmp_path):
    path = tmp_path / "out" / "predictions.pt"
    save_predictions([torch.ones(2)], path)
    with pytest.raises(
        TrainingError,
        match=r"predictions.pt was not written: output 1, of type lock, cannot be pickled",
    ):
        save_predictions([1, threading.Lock()], path)
    assert [file.name for file in path.parent.iterdir()] == ["predictions.pt"]
    assert torch.load(path, weights_only=True)[0].tolist() == [1, 1]
