"""``geartrain ckpt export``: files that torch, safetensors and Hugging Face's libraries open."""

import json
import sys

import pytest
import torch
from huggingface_hub import PyTorchModelHubMixin
from safetensors.torch import load_file
from small_models import Net, loader, trainer

from .conftest import Validated

LAST = "run/last.ckpt"


def weights(name="model"):
    return torch.load(LAST, weights_only=True)[name]


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_state_dict(run, command):
    done = command(f"ckpt export {LAST} --format state_dict out.pt")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("export: out.pt (state_dict, 4 entries")
    Net().load_state_dict(torch.load("out.pt", weights_only=True))
    assert_equal(torch.load("out.pt", weights_only=True), weights())


@pytest.mark.parametrize(("which", "key"), [("average", "model"), ("trained", "trained")])
def test_averaged_or_trained_weights(run, command, which, key):
    assert command(f"ckpt export {LAST} out.safetensors --weights {which}").code == 0
    assert_equal(load_file("out.safetensors"), weights(key))
    assert not torch.equal(
        weights("model")["layers.0.weight"], weights("trained")["layers.0.weight"]
    )


def test_averaged_weights_beside_the_trained_ones(run, command):
    """With ``EMA(validate=False)`` the file's model is the trained one."""
    state = torch.load(LAST, weights_only=True)
    state["average"], state["model"] = state["model"], state.pop("trained")
    torch.save(state, "other.ckpt")
    for which in ("average", "trained"):
        assert command(f"ckpt export other.ckpt {which}.pt --weights {which}").code == 0
    assert_equal(torch.load("average.pt", weights_only=True), weights("model"))
    assert_equal(torch.load("trained.pt", weights_only=True), weights("trained"))


class HubNet(Validated, PyTorchModelHubMixin):
    pass


def test_a_folder_for_the_hub_mixin(run, command):
    facts = command(f"ckpt export {LAST} hub --format hf --json").facts
    assert facts["entries"] == 4
    model = HubNet.from_pretrained("hub")
    assert_equal(dict(model.state_dict()), weights())
    assert model.hparams["width"] == 4


def test_a_folder_for_transformers(folder, command):
    """The weights of the attribute ``model``, with tied embeddings, and its config."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2)

    class Language(Net):
        def __init__(self):
            super().__init__()
            self.model = GPT2LMHeadModel(config)

    module = Language()
    trainer(output="run", plugins=[]).fit(module, loader())
    config.save_pretrained("config")
    line = f"ckpt export {LAST} gpt2 --format hf --submodule model --config config"
    done = command(line)
    assert done.code == 0, done.err
    found, report = GPT2LMHeadModel.from_pretrained("gpt2", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert_equal(dict(found.state_dict()), dict(module.model.state_dict()))
    assert found.lm_head.weight is found.transformer.wte.weight


def test_safetensors_holds_views_and_tied_weights(run, command):
    state = torch.load(LAST, weights_only=True)
    table = torch.arange(12.0).reshape(3, 4)
    state["model"] = {"a": table, "tied": table, "turned": table.T, "row": table[1]}
    torch.save(state, LAST)
    assert command(f"ckpt export {LAST} out.safetensors").code == 0
    assert_equal(load_file("out.safetensors"), state["model"])
    assert command(f"ckpt export {LAST} out.pt").code == 0
    assert_equal(torch.load("out.pt", weights_only=True), state["model"])


def test_without_safetensors_the_error_has_the_pip_command(run, refused, monkeypatch, folder):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    message = refused(f"ckpt export {LAST} out --format hf")
    assert "pip install 'geartrain-tools[safetensors]'" in message
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("out", "no format is given for out."),
        ("out --format hff", "--format hff is unknown. Did you mean 'hf'?"),
        ("out.pt --weights best", "--weights best is unknown."),
        ("out.pt --submodule layer", "Did you mean 'layers'?"),
        ("out.pt --config net.py", "--config is for --format hf, not state_dict."),
        ("out --format hf --config net.py", "it is no JSON"),
        ("net.py --format state_dict", "net.py exists and is not replaced."),
        ("run --format hf", "run exists and is not replaced."),
        ("run/x/y.ckpt", "no format is given for"),
    ],
)
def test_wrong_options_write_nothing(run, refused, folder, options, message):
    before = sorted(folder.rglob("*"))
    assert message in refused(f"ckpt export {LAST} {options}")
    assert sorted(folder.rglob("*")) == before


def test_weights_that_are_no_average_are_refused(run, refused):
    state = torch.load(LAST, weights_only=True)
    del state["trained"]
    torch.save(state, LAST)
    assert "no averaged weights" in refused(f"ckpt export {LAST} out.pt --weights average")


def test_a_value_that_is_no_tensor_is_refused(run, refused, folder, command):
    state = torch.load(LAST, weights_only=True)
    state["model"]["_extra_state"] = {"a": 1}
    torch.save(state, LAST)
    message = refused(f"ckpt export {LAST} out.safetensors")
    assert "'_extra_state' is none. Fix: --format state_dict" in " ".join(message.split())
    assert not (folder / "out.safetensors").exists()
    assert command(f"ckpt export {LAST} out.pt").code == 0


def test_a_damaged_file_is_not_exported(run, command, folder):
    raw = bytearray((folder / LAST).read_bytes())
    raw[len(raw) // 2] ^= 1
    (folder / LAST).write_bytes(raw)
    done = command(f"ckpt export {LAST} out.pt")
    assert done.code == 1
    assert "run/last.ckpt is damaged" in done.err
    assert not (folder / "out.pt").exists()


def test_config_json_has_the_modules_hyperparameters(run, command, folder):
    assert command(f"ckpt export {LAST} hub --format hf").code == 0
    config = json.loads((folder / "hub" / "config.json").read_text())
    assert config["width"] == 4
