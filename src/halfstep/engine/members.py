"""Several modules and loose parameters in one Engine, as the members of one module.

    Engine([actor, critic], ...)                                     names start with "0." and "1."
    Engine({"actor": actor, "log_alpha": log_alpha}, ...)            names start with "actor."; log_alpha is a name

Set-up, checkpoints, EMA and patterns work on one module with names, so the members become children of a holder that is
never called. A loose parameter is an nn.Parameter or a leaf tensor that requires a gradient, such as a temperature. Loose
parameters stay in fp32 in every preset: they are small, few, and often used in sums and exponentials that 16 bits would
round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from halfstep.backends.base import unwrap
from halfstep.backends.wrapped import find_ddp
from halfstep.errors import SettingError

__all__ = ["Members", "as_module"]


class Members(nn.Module):
    """Holds modules and loose parameters under names."""

    def __init__(self, members: Mapping[str, nn.Module | Tensor]) -> None:
        super().__init__()
        for name, member in members.items():
            # Not add_module and register_parameter: they reject names such as "forward", and tensors that are no nn.Parameter.
            if isinstance(member, nn.Module):
                self._modules[name] = unwrap(member)
            else:
                self._parameters[name] = member  # type: ignore[assignment]

    @property
    def loose_parameters(self) -> list[Tensor]:
        """The parameters that belong to no module."""
        return list(self.parameters(recurse=False))


def as_module(model: Any) -> nn.Module:
    """The module to train: the model itself, or a holder of several."""
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, Mapping):
        members = dict(model)
    elif isinstance(model, Sequence) and not isinstance(model, str | bytes):
        members = {str(index): member for index, member in enumerate(model)}
    else:
        hint = " A single parameter goes into a list: Engine([parameter], ...)." if isinstance(model, Tensor) else ""
        raise SettingError(
            f"Engine(model=...) takes a torch.nn.Module, or a list or dict of modules and parameters, not {type(model).__name__}.{hint}"
        )
    if not members:
        raise SettingError("Engine(model=...) is empty; pass a module, or a list or dict of modules and parameters.")
    names: dict[int, str] = {}
    for name, member in members.items():
        _check_member(name, member)
        first = names.setdefault(id(member), name)
        if first != name:
            raise SettingError(f"Engine(model=...) has the same object as {first!r} and as {name!r}. Pass it once.")
    return Members(members)


def _check_member(name: Any, member: Any) -> None:
    if (
        not isinstance(name, str) or not name or "." in name or name == "_orig_mod"
    ):  # which marks torch.compile's wrapper
        raise SettingError(
            f"Engine(model=...) has a member named {name!r}; a name is a text without dots (and not _orig_mod), which starts its parameters' names."
        )
    if isinstance(member, nn.Module):
        if find_ddp(member) is not None:
            raise SettingError(
                f"Member {name!r} is in DistributedDataParallel, which an Engine supports for a single model only. Put the members into one "
                "nn.Module and wrap that, or use one Engine for each wrapped model."
            )
        return
    if not isinstance(member, Tensor):
        raise SettingError(
            f"Member {name!r} of Engine(model=...) is a {type(member).__name__}; pass modules and parameters."
        )
    if not member.is_leaf or not (member.requires_grad or isinstance(member, nn.Parameter)):
        state = "the result of a computation" if not member.is_leaf else "a tensor that requires no gradient"
        raise SettingError(
            f"Member {name!r} of Engine(model=...) is {state} (shape {tuple(member.shape)}); pass an nn.Parameter or a leaf tensor with "
            "requires_grad=True."
        )
