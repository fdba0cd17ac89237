"""The units of fsdp: by class or size, without those that share weights or are not called."""

from torch import nn

from geartrain_sharded.units import units


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(4, 2, 8) for _ in range(2)])
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight


def names(model, *arguments):
    known = {id(part): name for name, part in model.named_modules()}
    return sorted(known[id(part)] for part in units(model, *arguments))


def test_units_by_class():
    assert names(Model(), ["TransformerEncoderLayer"], 1) == ["layers.0", "layers.1"]


def test_units_by_size():
    layer = sum(each.numel() for each in Model().layers[0].parameters())
    assert names(Model(), [], layer) == ["layers.0", "layers.1"]
    assert names(Model(), [], layer + 1) == []  # a ModuleList has no forward


def test_a_part_whose_weights_are_shared_or_read_by_another_is_no_unit():
    model = Model()
    assert "head" not in names(model, [], 1)
    assert "embedding" not in names(model, [], 1)
    assert "layers.0.self_attn.out_proj" not in names(model, [], 1)
    assert "layers.0.self_attn" in names(model, [], 1)


def test_inner_units_come_first():
    model = Model()
    found = units(model, ["Linear", "TransformerEncoderLayer"], 1)
    assert found.index(model.layers[0].linear1) < found.index(model.layers[0])
