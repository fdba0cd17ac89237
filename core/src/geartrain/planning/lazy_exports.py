"""Find the names of public modules, as ``geartrain.strategies``, in installed distributions."""

from __future__ import annotations

from typing import Any

from importlib_metadata import EntryPoint

from geartrain.errors.distributions import canonical, entry_points, import_from
from geartrain.errors.hints import write_instead
from geartrain.errors.known import KNOWN
from geartrain.hooks.plugin_info import GROUPS


def resolve(kind: str, module: str, attribute: str, homes: dict[str, str]) -> Any:
    """Return the value of ``from <module> import <attribute>``.

    It is a class that an installed entry point names, or a helper in the same module.

    Args:
        kind: ``"strategy"``, ``"accelerator"`` or ``"plugin"``.
        module: the public module, for errors.
        attribute: the name to import.
        homes: names that geartrain's own distributions provide -> the plugin's name.

    Raises:
        ImportError: the distribution of a known name is not installed (the message ends in the
            ``pip install`` line), several distributions have the class, or a vocabulary knows the
            name (the message ends with the replacement).
        AttributeError: an unknown name.
    """
    installed = entry_points(group=GROUPS[kind])
    home = KNOWN[kind, homes[attribute]] if attribute in homes else "geartrain"
    found = {(_distribution(ep), ep.value): ep for ep in installed if _attribute(ep) == attribute}
    provided = {key: ep for key, ep in found.items() if key[0] == home}
    if not provided and attribute in homes:
        # A helper in the plugin's module that is no entry point, as find_usable_cuda_devices.
        for ep in installed:
            if (_distribution(ep), ep.name) == (home, homes[attribute]):
                return getattr(__import__(ep.module, fromlist=[attribute]), attribute)
        message = f"{module}.{attribute} is not installed"
        raise ImportError(f"{message}. Fix: pip install {home}", name=home)
    if len(provided or found) > 1:
        labels = ", ".join(f"{distribution} ({value})" for distribution, value in found)
        message = f"{module}.{attribute}: several distributions have one: {labels}"
        raise ImportError(f"{message}. Fix: import it from its own module", name=module)
    for ep in (provided or found).values():
        return ep.load()
    if answer := write_instead(module, attribute):
        raise ImportError(f"{module} has no {attribute!r}{answer}", name=module)
    have = ", ".join(names(kind))
    raise AttributeError(f"{module} has no {attribute!r}. Installed: {have}")


def forward(module: str, package: str, attribute: str) -> Any:
    """Return the value of ``from <module> import <attribute>``, for a module of one package."""
    # With a __path__, the package's modules could be imported twice.
    if attribute.startswith("__") and attribute != "__all__":
        raise AttributeError(f"module {module!r} has no attribute {attribute!r}")
    return getattr(import_from(package, module), attribute)


def names(kind: str) -> list[str]:
    """Return the class names that are installed."""
    return sorted({name for name in map(_attribute, entry_points(group=GROUPS[kind])) if name})


def _distribution(entry_point: EntryPoint) -> str:
    return canonical(entry_point.dist.name) if entry_point.dist else "?"


def _attribute(entry_point: EntryPoint) -> str:
    return entry_point.value.partition(":")[2].strip()
