"""Add ``toy`` as a torch device, in Python alone.

torch reserves one device type, PrivateUse1, for external backends. Here a tensor on it wraps a CPU
tensor; ``__torch_dispatch__`` runs every operator on the wrapped tensor.
Source: https://github.com/albanD/subclass_zoo/blob/main/new_device.py.
"""

import torch
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

aten = torch.ops.aten
_setup_privateuseone_for_python_backend("toy")


class ToyTensor(torch.Tensor):
    """A tensor on toy:0."""

    #: The number of operators run on the device.
    operators = 0
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, on_cpu):
        same = {
            "strides": on_cpu.stride(),
            "storage_offset": on_cpu.storage_offset(),
            "dtype": on_cpu.dtype,
        }
        return torch.Tensor._make_wrapper_subclass(cls, on_cpu.size(), **same, device="toy:0")

    def __init__(self, on_cpu):
        self.on_cpu = on_cpu

    def __repr__(self):
        return f"{self.on_cpu!r} on toy:0"

    def __reduce_ex__(self, protocol):
        # A CPU tensor, so that a checkpoint loads on machines without toy.
        return self.on_cpu.detach().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if operator is aten._to_copy.default:
            return copied_to(
                torch.device(kwargs.pop("device", None) or args[0].device), args[0], kwargs
            )
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if operator is not aten.copy_.default and any(
            t.ndim and not isinstance(t, cls) for t in tensors
        ):
            raise RuntimeError(
                f"{operator}: expected all tensors to be on the same device, but found toy:0 and "
                "cpu"
            )
        cls.operators += 1
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        result = operator(*unwrapped(args), **unwrapped(kwargs))
        # An operator that works in place returns the tensor that it was given.
        given = {id(t.on_cpu): t for t in tensors if isinstance(t, cls)}
        return tree_map_only(
            torch.Tensor, lambda t: given.get(id(t)) if id(t) in given else cls(t), result
        )


def unwrapped(tree):
    return tree_map_only(ToyTensor, lambda tensor: tensor.on_cpu, tree)


def copied_to(device, tensor, kwargs):
    """Implement ``tensor.to(device)`` from the CPU, to the CPU, or within toy."""
    copy = aten._to_copy.default(unwrapped(tensor), **kwargs)
    return ToyTensor(copy) if device.type == "toy" else copy


# --- operators without a toy tensor, for which __torch_dispatch__ is not called -------------------

library = torch.library.Library("aten", "IMPL")  # registrations live as long as this object


@torch.library.impl(library, "empty.memory_format", "PrivateUse1")
def empty(size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return ToyTensor(torch.empty(size, dtype=dtype))


@torch.library.impl(library, "empty_strided", "PrivateUse1")
def empty_strided(size, stride, dtype=None, layout=None, device=None, pin_memory=None):
    return ToyTensor(torch.empty_strided(size, stride, dtype=dtype))


@torch.library.impl(library, "_copy_from", "PrivateUse1")
def copy_from(tensor, to, non_blocking=False):
    unwrapped(to).copy_(unwrapped(tensor))
    return to
