"""The parts of a batch, and the combination of their outputs."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import numpy
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from geartrain import TrainingError
from geartrain_callbacks.parts.combine import combine
from geartrain_callbacks.parts.split import split

Pair = namedtuple("Pair", "x y")


@dataclass
class Record:
    x: torch.Tensor
    name: str


@pytest.mark.parametrize("n", range(1, 14))
@pytest.mark.parametrize("k", [1, 2, 3, 4, 8])
def test_parts_are_those_of_torch_chunk(n, k):
    parts, sizes = split(torch.arange(n), k)
    assert [part.tolist() for part in parts] == [part.tolist() for part in torch.arange(n).chunk(k)]
    assert sizes == [len(part) for part in parts]


def test_every_form_of_nesting_is_kept():
    x = torch.arange(6).reshape(3, 2)
    batch = {
        "pair": Pair(x, x[:, 0]),
        "record": Record(x, "abc"),
        "ordered": OrderedDict(a=[x, (x, None)]),
        "array": numpy.arange(3),
        "names": ("a", "b", "c"),
        "numbers": [1, 2.0, True],
        "other": ["a", "b"],
        "zero": torch.tensor(7),
    }
    (first, second), sizes = split(batch, 2)
    assert sizes == [2, 1]
    assert isinstance(first["pair"], Pair)
    assert torch.equal(second["pair"].y, x[2:, 0])
    assert isinstance(first["record"], Record)
    assert torch.equal(first["record"].x, x[:2])
    assert second["record"].name == "abc"
    assert type(first["ordered"]) is OrderedDict
    assert torch.equal(second["ordered"]["a"][1][0], x[2:])
    assert second["array"].tolist() == [2]
    assert (first["names"], second["names"]) == (("a", "b"), ("c",))
    assert (first["numbers"], second["numbers"]) == ([1, 2.0], [True])
    assert first["other"] == second["other"] == ["a", "b"]
    assert first["zero"] is second["zero"] is batch["zero"]


class Graph:
    """Hides its tensors from geartrain, as the batches of graph libraries do."""

    def to(self, device):
        return self


def test_an_object_with_hidden_tensors_is_one_part_but_an_error_beside_tensors():
    graph = Graph()
    assert split(graph, 2) == ([graph], [1])
    with pytest.raises(
        TrainingError,
        match=r"batch\[0\] is a Graph, whose tensors cannot be split.*Fix: pass its tensors in",
    ):
        split((graph, torch.ones(4)), 2)


@pytest.mark.parametrize(
    "batch",
    [{"text": ["a", "b"]}, torch.tensor(1.0), torch.empty(0, 3), None],
    ids=["text", "0-d", "empty", "None"],
)
def test_a_batch_without_rows_is_one_part(batch):
    parts, sizes = split(batch, 2)
    assert sizes == [1]
    assert parts[0] is batch


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"x": torch.ones(4, 2), "w": torch.ones(5)},
            r"batch\['w'\] has 5 rows, but the batch has 4.*Fix",
        ),
        (Pair(torch.ones(4), [torch.ones(4), torch.ones(1)]), r"batch\.y\[1\] has 1 rows"),
        ([torch.ones(4), Record(torch.ones(3), "")], r"batch\[1\]\.x has 3 rows"),
        (
            [torch.ones(3), pack_sequence([torch.ones(2), torch.ones(1)])],
            r"batch\[1\] is a PackedSequence.*pack the sequences in the step",
        ),
    ],
)
def test_an_item_that_cannot_be_split_is_named(batch, message):
    with pytest.raises(TrainingError, match=message):
        split(batch, 2)


def test_one_part_stays_as_it_is():
    output = {"n": 3, "what": object()}
    assert combine("training_step", [output], [3]) is output


def test_numbers_become_means_weighted_by_samples():
    outputs = [
        {"loss": torch.tensor(1.0), "f": (2.0, None)},
        {"loss": torch.tensor(4.0), "f": (5.0, None)},
    ]
    combined = combine("training_step", outputs, [2, 1])
    assert combined["loss"].ndim == 0
    assert combined["loss"].item() == 2.0
    assert combined["f"] == (3.0, None)


def test_rows_are_concatenated_and_equal_values_stay():
    parts = [
        Pair({"logits": torch.ones(2, 3), "names": ["a", "b"], "ids": [1, 2]}, "val"),
        Pair({"logits": torch.zeros(1, 3), "names": ["c"], "ids": [3]}, "val"),
    ]
    combined = combine("validation_step", parts, [2, 1])
    assert isinstance(combined, Pair)
    assert combined.x["logits"].tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 0]]
    assert combined.x["names"] == ["a", "b", "c"]
    assert combined.x["ids"] == [1, 2, 3]
    assert combined.y == "val"
    assert combine("validation_step", [True, True], [2, 1]) is True


def test_rows_that_are_a_multiple_of_the_samples_are_concatenated():
    assert combine("test_step", [torch.ones(6, 2), torch.ones(3, 2)], [2, 1]).shape == (9, 2)
    boxes = [torch.ones(5, 4), torch.ones(0, 4)]
    assert combine("predict_step", boxes, [2, 1]).shape == (5, 4)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([None, torch.tensor(1.0)], "is NoneType and Tensor in different parts"),
        ([1.0, torch.tensor(1.0)], "is float and Tensor"),
        ([16, 16], r"is an integer in each part \(16, 16\)"),
        ([torch.tensor(3), torch.tensor(3)], "is a number in each part, but not a floating-point"),
        ([{"n": 3}, {"n": 3}], r"under \['n'\] is an integer"),
        ([{"a": 1.0}, {"b": 1.0}], r"under \['[ab]'\] is not in all parts"),
        ([[1.0], [1.0, 2.0, 3.0]], r"under \[\d\] is not in all parts"),
        (
            [torch.ones(10, 10), torch.ones(10, 10)],
            r"has \[10, 10\] rows in parts of \[3, 2\] samples",
        ),
        ([torch.ones(3, 4), torch.ones(2, 5)], "has the shapes"),
        (["a", "b"], r"\(str\) is not the same in all parts"),
        ([object(), object()], r"\(object\) is not the same"),
        ([numpy.ones(3), numpy.ones(2)], r"\(ndarray\) is not the same"),
    ],
)
def test_outputs_that_cannot_be_combined_are_errors(outputs, message):
    with pytest.raises(
        TrainingError,
        match=f"the output of validation_step.* ?{message}.*Fix: define validation_step_end",
    ):
        combine("validation_step", outputs, [3, 2])


def test_predictions_have_no_step_end_to_define():
    with pytest.raises(TrainingError, match="return tensors"):
        combine("predict_step", [object(), object()], [3, 2])


def test_losses_with_weights_are_added():
    outputs = [
        {"loss": torch.tensor(1.0), "weight": 3, "accuracy": 0.5},
        {"loss": torch.tensor(4.0), "weight": torch.tensor(0), "accuracy": 1.0},
    ]
    combined = combine("training_step", outputs, [3, 2])
    assert {name: float(value) for name, value in combined.items()} == pytest.approx(
        {"loss": 5.0, "weight": 3.0, "accuracy": 0.7}
    )
