"""``compile``: ``torch.compile`` for the networks of a module."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import nn

from geartrain import Module, Plan, TrainingError, UsageError, hookimpl
from geartrain.plugin_api import libraries, nearest, overridden

_WHO = "geartrain-callbacks[compile]"
_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
#: Options with which torch takes inductor, except on a device that has a compiler of its own.
_INDUCTOR = (None, "inductor")


class Compile:
    """Compile the networks of the module with ``torch.compile``, in place.

    It compiles calls of the module itself and of each direct submodule with parameters, but not
    the step methods. These stay Python, so ``self.log`` and ``self.trainer`` in them cause no graph
    break and no recompilation. A submodule without ``forward``, such as a ModuleList, is replaced
    by its own submodules. Metrics are not compiled. Names in checkpoints do not change.

    ``trainer.fit(torch.compile(module))`` selects it with the options of that call.

    Args:
        regions: compile only submodules of these classes, by name, such as ``Block``. Equal
            blocks share one compilation.
        mode: of the backend ``inductor``: ``"default"``, ``"reduce-overhead"``,
            ``"max-autotune"`` or ``"max-autotune-no-cudagraphs"``.
        dynamic: ``True`` for dynamic shapes at once, ``False`` for a compilation for each shape;
            default: dynamic after the first change of a shape.
        fullgraph: raise an error at a graph break.
        backend: a name of ``torch.compiler.list_backends``, or ``"eager"`` or ``"aot_eager"`` to
            debug. Default: torch's choice, which is ``"inductor"`` except on a tpu.

    Raises:
        UsageError: an unknown mode or backend, or a mode of a backend that has none.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.compile.html
    """

    def __init__(
        self,
        regions: list[str] | None = None,
        mode: str | None = None,
        dynamic: bool | None = None,
        fullgraph: bool = False,
        backend: str | None = None,
    ) -> None:
        self.regions = [regions] if isinstance(regions, str) else regions
        _check_name("mode", mode, _MODES)
        _check_name("backend", backend, torch._dynamo.list_backends(exclude_tags=()))
        if mode is not None and backend not in _INDUCTOR:
            message = f"{_WHO}: mode={mode!r} is of the backend inductor, not of {backend}"
            raise UsageError(f"{message}. Fix: leave one of them out")
        if self.regions == []:
            raise UsageError(f"{_WHO}: regions is empty. Fix: name a class, or leave regions out")
        self.backend = backend
        self._options: dict[str, Any] = {"mode": mode, "dynamic": dynamic, "fullgraph": fullgraph}
        if backend is not None:
            self._options["backend"] = backend
        #: The compiled modules of the run, by name; the module itself is ``""``.
        self.compiled: dict[str, nn.Module] = {}

    @hookimpl
    def check_plan(self, plan: Plan, module: Module | type[Module]) -> None:
        if plan.layout.devices_per_process > 1:
            raise UsageError(
                f"{_WHO}: {plan.strategy.name} copies the module to each device, and compiled "
                "calls would use the weights of the first. Fix: --strategy ddp"
            )
        given = hasattr(module, "_compile_with")  # perhaps with another backend
        if self.backend in _INDUCTOR and plan.accelerator.name == "cpu" and not given:
            _check_cpp_compiler()
        # A module that makes its networks in setup() is checked after it.
        if isinstance(module, nn.Module) and not overridden(module, "setup"):
            self._select(module, UsageError)

    @hookimpl(wrapper=True)
    def wrap_model(self, model: nn.Module) -> Generator[None, nn.Module, nn.Module]:
        user_module = getattr(model, "module", model)
        self.compiled = self._select(user_module, TrainingError)
        # Before the strategy wraps: DDP overlaps the reduction with compiled graphs only if it is
        # outside of them (torch/_dynamo/backends/distributed.py).
        compiled_calls: dict[Any, Callable[..., Any]] = {}
        compiled = partial(torch.compile, **self._options)
        compiler = getattr(user_module, "_compile_with", compiled)
        for module in self.compiled.values():
            alike = type(module), repr(module), tuple(p.shape for p in module.parameters())
            if alike not in compiled_calls:
                compiled_calls[alike] = compiler(_call_for(alike))
            _compile_calls_of(module, compiled_calls[alike])
        return (yield)

    @hookimpl(wrapper=True)
    def teardown_device(self) -> Generator[None, None, None]:
        for module in self.compiled.values():
            module._compiled_call_impl = None
        self.compiled = {}
        yield

    @hookimpl
    def on_exception(self, error: BaseException) -> None:
        if isinstance(error, torch._dynamo.exc.TorchDynamoException):
            error.add_note(
                f"{_WHO}: torch.compile failed. Fix: look at the line above, compile only parts "
                "with regions, or leave out --plugin compile"
            )

    def _select(self, module: nn.Module, error: type[Exception]) -> dict[str, nn.Module]:
        """Return the modules to compile by name.

        Raises:
            Exception: of the type ``error``, if a region or any network is missing.
        """
        name = type(module).__name__
        if self.regions is None:
            found = dict(_networks(module))
            if not found:
                message = f"{_WHO}: {name} has no submodule with parameters, and no forward"
                raise error(f"{message}. Fix: compute in one of them, or leave compile out")
            return found
        found = {n: m for n, m in module.named_modules() if type(m).__name__ in self.regions}
        classes = {type(m).__name__ for m in module.modules()}
        for region in self.regions:
            if region not in classes:
                message = f"{_WHO}: {name} has no submodule of a class {region!r}"
                raise error(f"{message}. Fix: use a class in it. {nearest(region, classes)}")
        return found


def _networks(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the module if it has a ``forward``, and its nearest submodules with one."""
    if _computes(module):
        yield "", module
    waiting = list(module.named_children())
    while waiting:
        name, child = waiting.pop(0)
        if any(library.owns(child) for library in libraries().values()):
            continue
        if not any(True for _ in child.parameters()):
            continue
        if _computes(child):
            yield name, child
        else:
            waiting += [(f"{name}.{inner}", one) for inner, one in child.named_children()]


def _computes(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module; copies of this function are compiled.

    ``nn.Module.compile`` is no alternative: called from outside a graph, torch skips the frames of
    its own classes, such as Sequential and Linear, and compiles nothing.
    """
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


@cache
def _call_for(alike: Any) -> FunctionType:
    """Return a copy of :func:`_call` for modules that are ``alike``, the same in each run.

    torch keeps compilations in the code object, at most eight, so different modules must not share
    one. Equal modules, and the next run, find the compilation there.
    """
    return FunctionType(_call.__code__.replace(), globals())


def _compile_calls_of(module: nn.Module, compiled: Callable[..., Any]) -> None:
    """Make ``module(...)`` call ``compiled``. A copy or a pickle of the module is not compiled."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled(module, args, kwargs)

    module._compiled_call_impl = call  # as nn.Module.compile does


def _check_name(option: str, value: str | None, known: Collection[str]) -> None:
    if value is not None and value not in known:
        message = f"{_WHO}: {option}={value!r} does not exist"
        raise UsageError(f"{message}. Fix: use a known one. {nearest(value, known)}")


def _check_cpp_compiler() -> None:
    """Refuse a machine on which inductor cannot compile for the CPU.

    Raises:
        UsageError: torch finds no C++ compiler.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, OSError):
        message = f"{_WHO}: torch finds no C++ compiler, which inductor needs on the CPU"
        raise UsageError(f"{message}. Fix: install g++, or set CXX to a compiler") from None
