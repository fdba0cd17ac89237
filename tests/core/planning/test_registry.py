"""Installed plugins: their states, names, and the effect of broken and blocked ones."""

import json
import shutil
import sys
from importlib import import_module
from pathlib import Path

import pytest

import geartrain
from geartrain import UsageError
from geartrain.errors.known import KNOWN
from geartrain.hooks.plugin_info import PluginInfo
from geartrain.planning.registry import Registry, make

from ..contract_fixtures import dists as dists


def found(registry, name):
    (candidate,) = (c for c in registry.candidates if c.name == name)
    return candidate


# --- installed plugins ----------------------------------------------------------------------------


def test_core_declares_its_own_as_any_plugin_would(dists):
    registry = Registry()
    assert {c.distribution for c in registry.candidates} == {"geartrain"}
    assert [c.name for c in registry.of("accelerator")] == ["cpu"]
    assert [c.name for c in registry.of("strategy")] == ["single"]
    assert [c.name for c in registry.of("precision")] == ["32-true"]
    assert registry.of("command") == []
    assert registry.of("plugin") == []


def test_metadata_has_name_kind_distribution_and_version(dists):
    dists.add(
        "acme-loggers",
        version="3.1",
        accelerators={"npu": "Npu"},
        strategies={"gossip": "Gossip"},
        plugins={"xml": "Xml"},
    )
    told = [c.as_dict() for c in Registry().candidates if c.distribution == "acme-loggers"]
    common = {"state": "installed", "reason": "", "distribution": "acme-loggers", "version": "3.1"}
    assert told == [
        {"name": "npu", "kind": "accelerator", **common},
        {"name": "gossip", "kind": "strategy", **common},
        {"name": "xml", "kind": "plugin", **common},
    ]
    assert json.loads(json.dumps(told)) == told


def test_listing_and_choosing_import_nothing_else(dists):
    modules = [
        dists.add(f"acme-{kind}", "1 / 0", **{kind: {"broken": "X"}})
        for kind in ("accelerators", "strategies", "plugins")
    ]
    mine = dists.strategy("mine")
    registry = Registry()
    assert not {*modules, mine} & set(sys.modules)
    registry.select("strategy", "mine")
    assert mine in sys.modules
    assert not set(modules) & set(sys.modules)
    assert {c.state for c in registry.candidates if c.name == "broken"} == {"available"}


def test_metadata_is_read_again_only_after_something_was_installed(dists, monkeypatch):
    scans = []
    monkeypatch.setattr(
        geartrain.errors.distributions,
        "_scan",
        lambda real=geartrain.errors.distributions._scan: scans.append(1) or real(),
    )
    dists.strategy("gossip")
    first, second = Registry(), Registry(block=["gossip"])
    assert len(scans) == 1
    assert found(first, "gossip").state == "available", "a block in one registry changes no other"
    assert found(second, "gossip").state == "blocked"
    dists.strategy("rumour")
    assert found(Registry(), "rumour").state == "available"
    assert len(scans) == 2
    # pip installs into a folder that is on the path already.
    info = next(
        folder
        for path in sys.path
        if (folder := Path(path, "geartrain_gossip-1.0.dist-info")).exists()
    )
    shutil.copytree(info, info.with_name("geartrain_whisper-1.0.dist-info"))
    info.with_name("geartrain_whisper-1.0.dist-info").joinpath("METADATA").write_text(
        "Name: geartrain-whisper\nVersion: 1.0\n"
    )
    dists.names.add("geartrain-whisper")
    assert {candidate.distribution for candidate in Registry().candidates} >= {
        "geartrain-gossip",
        "geartrain-whisper",
    }
    assert len(scans) == 3


# --- find -----------------------------------------------------------------------------------------


def refused(kind, name, *words, **registry):
    with pytest.raises(UsageError) as caught:
        Registry(**registry).select(kind, name)
    for word in words:
        assert word in str(caught.value)
    return str(caught.value)


def test_misspelling_gets_the_nearest_name(dists):
    dists.strategy("gossip")
    refused("strategy", "Gosip", "'Gosip'", "Did you mean 'gossip'?")
    refused("strategy", "hororvod", "Did you mean 'horovod'?")
    assert "pip install" not in refused("strategy", "xyz", "gossip", "single")


def test_install_lines_name_geartrains_own_distributions():
    lines = {
        ("strategy", "ddp"): "ddp",
        ("strategy", "ddp_spawn"): "spawn",
        ("strategy", "ddp2"): "dp",
        ("strategy", "dp"): "dp",
    }
    lines |= {("strategy", n): n for n in ("horovod", "bagua")} | {
        ("accelerator", n): n for n in ("cuda", "mps")
    }
    assert {key: KNOWN[key] for key in lines} == {
        key: f"geartrain-{name}" for key, name in lines.items()
    }


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("accelerator", "hpu"),
        ("strategy", "colossalai"),
    ],
)
def test_a_name_that_no_distribution_provides_gets_no_install_line(dists, kind, name):
    for typed in (name, name.upper()):
        message = refused(
            kind, typed, f"no {kind} {typed!r}", "no geartrain distribution", "Fix: use "
        )
        assert "pip install" not in message


def test_distribution_may_provide_a_name_that_geartrain_does_not(dists):
    dists.add("acme-xla", "class D: ...", strategies={"xla": "D"})
    assert Registry().select("strategy", "xla").info.distribution == "acme-xla"


def test_name_of_another_kind_is_an_error_that_names_the_kind(dists):
    refused("accelerator", "Single", "--strategy single")


def test_name_of_another_kind_that_is_not_installed_is_an_error_that_names_the_kind(dists):
    refused("strategy", "cuda", "'cuda'", "accelerator")


# --- blocked, claimed twice -----------------------------------------------------------------------


@pytest.mark.parametrize("by", ["--block", "GEARTRAIN_BLOCK"])
def test_blocked_name_is_listed_and_refused_and_never_imported(dists, monkeypatch, by):
    module = dists.strategy("gossip")
    monkeypatch.setenv("GEARTRAIN_BLOCK", " other, GOSSIP," if by == "GEARTRAIN_BLOCK" else "")
    block = ["Gossip"] if by == "--block" else []
    candidate = found(Registry(block), "gossip")
    assert (candidate.state, candidate.reason) == ("blocked", f"by {by}")
    refused("strategy", "gossip", "geartrain-gossip[gossip]", "blocked", by, block=block)
    registry = Registry(block)
    assert registry.check_usable(found(registry, "gossip")) is None
    assert found(registry, "gossip").state == "blocked"
    assert module not in sys.modules


def test_blocking_a_name_that_nothing_has_is_an_error_except_from_the_environment(
    dists, monkeypatch
):
    with pytest.raises(UsageError, match=r"sinlge.*'single'"):
        Registry(["sinlge"])
    monkeypatch.setenv("GEARTRAIN_BLOCK", "sinlge")
    assert {c.state for c in Registry().candidates} == {"available"}


def test_two_distributions_that_claim_one_name_are_both_named(dists):
    modules = [
        dists.add(name, "class G: ...", strategies={typed: "G"})
        for name, typed in (("acme", "gossip"), ("zeta", "Gossip"))
    ]
    refused("strategy", "gossip", "acme[gossip]", "zeta[Gossip]", "uninstall one")
    registry = Registry()
    assert [c.state for c in registry.candidates if c.name.lower() == "gossip"] == [
        "failed",
        "failed",
    ]
    assert registry.find("strategy", "single").state == "available"
    assert not set(modules) & set(sys.modules)


@pytest.mark.parametrize(("kind", "name"), [("accelerator", "cpu"), ("strategy", "ddp")])
def test_names_of_core_and_of_our_distributions_win(dists, kind, name):
    group = {"accelerator": "accelerators", "strategy": "strategies"}[kind]
    if name == "ddp":
        dists.strategy("ddp")
    module = dists.add("acme", "1 / 0", **{group: {name.upper(): "X"}})
    registry = Registry()
    owner = KNOWN.get((kind, name), "geartrain")
    assert registry.select(kind, name).info.label == f"{owner}[{name}]"
    theirs = found(registry, name.upper())
    assert (theirs.state, theirs.reason) == (
        "failed",
        f"the name is {owner}[{name}]'s; uninstall acme, or --block acme[{name.upper()}]",
    )
    assert module not in sys.modules


@pytest.mark.parametrize("by", ["--block", "GEARTRAIN_BLOCK"])
def test_one_of_two_distributions_with_a_name_is_blocked(dists, monkeypatch, by):
    for name in ("acme", "zeta"):
        dists.add(name, "class G: ...", strategies={"gossip": "G"})
    monkeypatch.setenv("GEARTRAIN_BLOCK", "Acme[gossip]" if by == "GEARTRAIN_BLOCK" else "")
    registry = Registry(["Acme[gossip]"] if by == "--block" else [])
    assert registry.select("strategy", "gossip").info.label == "zeta[gossip]"
    assert [c.state for c in registry.candidates if c.name == "gossip"] == ["blocked", "selected"]


def test_another_distributions_name_counts_if_ours_is_blocked(dists):
    dists.add("acme", "class C: ...", accelerators={"cpu": "C"})
    assert Registry(["geartrain[cpu]"]).select("accelerator", "cpu").info.label == "acme[cpu]"


def test_blocking_the_wrong_distribution_is_an_error(dists):
    with pytest.raises(UsageError, match=r"--block acme\[cpu\]: nothing installed has that name"):
        Registry(["acme[cpu]"])


def test_one_name_in_two_kinds_is_no_conflict(dists):
    dists.add(
        "acme-xla", "class A: ...\nclass S: ...", accelerators={"xla": "A"}, strategies={"xla": "S"}
    )
    registry = Registry()
    assert type(registry.select("accelerator", "xla").plugin).__name__ == "A"
    assert type(registry.select("strategy", "xla").plugin).__name__ == "S"


# --- load -----------------------------------------------------------------------------------------

BROKEN = {
    "raises": ("raise RuntimeError('no driver')", "X", ("RuntimeError", "no driver")),
    "exits": ("import sys\nsys.exit('go away')", "X", ("SystemExit", "go away")),
    "lacks a module": (
        "import acme_absent",
        "X",
        ("ModuleNotFoundError", "pip install --force-reinstall acme-broken"),
    ),
    "names a missing module": (
        "",
        "=absent_part:X",
        ("ModuleNotFoundError", "pip install --force-reinstall acme-broken"),
    ),
    "lacks the class": ("", "X", ("AttributeError", "X")),
    "has a function": ("def X(): ...", "X", ("not a class",)),
    "names a module": ("", "={module}", ("not a class",)),
    "is no reference": ("", "=what is this?", ("acme-broken[broken]",)),
}


@pytest.mark.parametrize("how", BROKEN)
def test_broken_plugin_that_was_selected_is_an_error_with_its_label(dists, how):
    source, entry, words = BROKEN[how]
    dists.add("acme-broken", source, strategies={"broken": entry.format(module="fake_acme_broken")})
    registry = Registry()
    with pytest.raises(UsageError) as caught:
        registry.select("strategy", "broken")
    for word in ("acme-broken[broken]", "Fix:", *words):
        assert word in str(caught.value)
    assert found(registry, "broken").state == "failed"
    assert found(registry, "broken").reason
    assert registry.select("strategy", "single").info.label == "geartrain[single]"


def test_failed_import_keeps_its_cause(dists):
    dists.add("acme-broken", "raise RuntimeError('no driver')", strategies={"broken": "X"})
    with pytest.raises(UsageError) as caught:
        Registry().select("strategy", "broken")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_distribution_for_another_geartrain_is_refused_before_its_import(dists):
    lines = ["not a requirement!", "Geartrain[testing] >=9,<10", 'geartrain>=99; extra == "dev"']
    module = dists.add("acme", "class G: ...", strategies={"gossip": "G"}, requires=lines)
    message = refused(
        "strategy",
        "gossip",
        "acme[gossip]: it requires geartrain",
        f"geartrain {geartrain.__version__} is installed",
        "Fix: ",
    )
    assert "99" not in message
    assert module not in sys.modules


def test_distribution_for_another_version_of_ours_is_refused(dists):
    module = dists.add("acme", "", strategies={"gossip": "G"}, requires=["geartrain_cli>=9"])
    message = refused("strategy", "gossip", "acme[gossip]: it requires geartrain-cli>=9, and")
    assert "Fix: pip install 'geartrain-cli>=9', or use another version of acme" in message
    assert module not in sys.modules


def test_distribution_for_another_contract_is_refused(dists, monkeypatch):
    points = {"plugins": {"gauge": "G"}, "contract": {"1": "G"}}
    dists.add("acme", "class G: ...", **points)
    assert Registry().select("plugin", "gauge").info.label == "acme[gauge]"
    monkeypatch.setattr(geartrain.planning.registry, "CONTRACT", 3)
    refused(
        "plugin",
        "gauge",
        "acme[gauge]: it is built for version 1 of the hooks, and geartrain 0.",
        "has 3. Fix: update its hookimpls",
    )
    dists.add("acme-new", "class H: ...", plugins={"new": "H"}, contract={"3": "H", "2": "H"})
    assert Registry().select("plugin", "new").info.label == "acme-new[new]"


def test_keyboard_interrupt_while_importing_is_no_broken_plugin(dists):
    dists.add("acme-slow", "raise KeyboardInterrupt", strategies={"slow": "X"})
    with pytest.raises(KeyboardInterrupt):
        Registry().select("strategy", "slow")


# --- probe ----------------------------------------------------------------------------------------


def probed(registry, name):
    candidate = found(registry, name)
    return registry.check_usable(candidate), candidate.state, candidate.reason


def test_probe_asks_an_accelerator_if_it_can_be_used_here(dists):
    dists.accelerator("npu", unavailable="NPU: driver not loaded")
    dists.accelerator("gpu2", cls="Gpu")
    registry = Registry()
    assert probed(registry, "npu") == (None, "unavailable", "NPU: driver not loaded")
    cls, state, reason = probed(registry, "gpu2")
    assert (cls.__name__, state, reason) == ("Gpu", "available", "")


def test_probe_of_a_strategy_imports_it_and_no_more(dists):
    dists.add(
        "acme", "class S:\n    def unavailable(): raise RuntimeError", strategies={"gossip": "S"}
    )
    cls, state, _ = probed(Registry(), "gossip")
    assert (cls.__name__, state) == ("S", "available")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("class X:\n    def unavailable(): raise OSError('no such device')", "no such device"),
        ("class X: ...", "unavailable"),
        ("raise RuntimeError('no driver')", "RuntimeError"),
    ],
)
def test_probe_of_a_broken_accelerator_fails_without_raising(dists, source, words):
    dists.add("acme-broken", source, accelerators={"broken": "X"})
    cls, state, reason = probed(Registry(), "broken")
    assert (cls, state) == (None, "failed")
    assert words in reason


# --- select, adopt, make --------------------------------------------------------------------------


def test_select_makes_the_plugin_with_its_options(dists):
    dists.strategy("gossip")
    registry = Registry()
    part = registry.select("strategy", "GOSSIP", {"bucket_mb": 3}, "because")
    assert part.plugin.bucket_mb == 3
    assert part.options == {"bucket_mb": 3}
    assert part.info == PluginInfo("gossip", "strategy", "geartrain-gossip", "1.0", "because")
    assert (found(registry, "gossip").state, found(registry, "gossip").reason) == (
        "selected",
        "because",
    )


def test_adopted_object_of_an_installed_class_has_its_entry_points_name(dists):
    module = dists.strategy("gossip")
    cls = import_module(module).Strategy
    for given in (cls(7), cls):
        registry = Registry()
        part = registry.adopt("strategy", given, "given")
        assert isinstance(part.plugin, cls)
        assert part.info.label == "geartrain-gossip[gossip]"
        assert found(registry, "gossip").state == "selected"


def test_adopted_object_of_the_users_own_has_its_class_name_and_no_distribution(dists):
    class Mine: ...

    for given in (Mine, Mine()):
        part = Registry().adopt("plugin", given, "given")
        assert isinstance(part.plugin, Mine)
        assert part.info == PluginInfo("Mine", "plugin", None, None, "given")
        assert part.info.label == "Mine"


class Takes:
    def __init__(self, path, every=1):
        self.path, self.every = path, every


def test_make_passes_options_by_name():
    made = make(Takes, "acme[takes]", {"path": "x", "every": 2})
    assert (made.path, made.every) == ("x", 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"path": 1, "evry": 2}, "'every'"), ({}, "'path'"), ({"path": 1, "qqq": 2}, "every, path")],
)
def test_option_that_is_unknown_or_missing(options, words):
    with pytest.raises(UsageError, match=r"acme\[takes\]") as caught:
        make(Takes, "acme[takes]", options)
    assert words in str(caught.value)


def test_error_of_the_plugins_own_init_is_not_changed():
    class Fails:
        def __init__(self):
            raise TypeError("mine")

    with pytest.raises(TypeError, match="mine") as caught:
        make(Fails, "acme[fails]", {})
    assert caught.value.__notes__ == ["raised while acme[fails] was created"]


def test_an_error_that_names_the_plugin_itself_is_not_its_own_cause():
    class Refuses:
        def __init__(self):
            raise UsageError("acme[refuses]: no")

    with pytest.raises(UsageError, match=r"^acme\[refuses\]: no$") as raised:
        make(Refuses, "acme[refuses]", {})
    assert raised.value.__cause__ is None
