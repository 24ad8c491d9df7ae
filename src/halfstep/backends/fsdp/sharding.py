"""Sharding a model with `fully_shard`: which modules become units, and the optimizers' groups afterwards.

Units are the repeated blocks of the model, or the modules that the user names, then the model itself with the rest. All
trained weights of a unit must have one dtype, so under lean presets a module that stays in fp32 is a unit too; batch norms,
of which a model may have hundreds with few weights each, are not sharded and stay replicated, and so do scalars. A module
that shares a parameter with one outside of it cannot be a unit, and belongs to the one around it.

`fully_shard` replaces parameters. The groups of optimizers are rebound by name, as the same dictionaries, so that
schedulers keep working.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import SettingError
from halfstep.hardware.units import few

__all__ = ["check_rebindable", "named_units", "rebind", "scalars", "shard_model"]


def named_units(model: nn.Module, shard: Sequence[nn.Module | type | str]) -> list[nn.Module]:
    """The modules that `shard` names: themselves, by class, or by a pattern of their names; raises for one that names none."""
    units: dict[nn.Module, None] = {}
    modules: dict[str, nn.Module] = dict(model.named_modules())
    for item in shard:
        if isinstance(item, nn.Module):
            matches: list[nn.Module] = [m for m in modules.values() if m is item]
        elif isinstance(item, type):
            matches = [m for m in modules.values() if isinstance(m, item)]
        else:
            names = [name for name in modules if fnmatchcase(name, item)]
            # "blocks.*" also matches the parts of each block, which are not meant.
            matches = [modules[n] for n in names if not any(n.startswith(f"{other}.") for other in names)]
        if not matches:
            shown = type(item).__name__ if isinstance(item, nn.Module) else repr(item)
            raise SettingError(
                f"FSDP(shard=...) has {shown}, which is no module of {type(model).__name__}; known names start with "
                f"{few([name for name in modules if name])}."
            )
        units |= dict.fromkeys(matches)
    return list(units)


def scalars(model: nn.Module) -> set[Tensor]:
    """Parameters without dimensions, such as CLIP's temperature, which `fully_shard` does not take."""
    return {p for p in model.parameters() if p.dim() == 0}


def check_rebindable(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise for optimizers whose groups cannot be rebound to sharded parameters."""
    known = {id(p) for p in model.parameters()}
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if any(optimizer.state.values()):
            raise SettingError(
                f"{name} already has a state, for parameters that are not sharded. Shard the model before the optimizer is built and "
                "stepped (fully_shard), or load the state with Engine.load after Engine(...)."
            )
        strangers = sum(id(p) not in known for group in optimizer.param_groups for p in group["params"])
        if strangers:
            raise SettingError(
                f"{name} has {strangers} parameters that are not in the model; build it from model.parameters()."
            )


def rebind(optimizers: Sequence[torch.optim.Optimizer], names: Mapping[int, str], params: Mapping[str, Tensor]) -> None:
    """Put the parameters that now have these names into the optimizers' groups; `names` are by the identity of the old ones."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [params[names[id(p)]] for p in group["params"]]
        optimizer.state.clear()


def shard_model(
    roots: Sequence[nn.Module], units: Sequence[nn.Module], replicated: set[Tensor], **settings: Any
) -> None:
    """Shard `units`, the inner ones first, then `roots`; `replicated` parameters stay as they are."""
    from torch.distributed.fsdp import fully_shard

    everything = [module for root in roots for module in root.modules()]
    position = {id(module): number for number, module in enumerate(everything)}
    inner_first = sorted(units, key=lambda module: position[id(module)], reverse=True)
    ignored = {p for p in replicated if isinstance(p, nn.Parameter)}
    for module in inner_first:
        if module not in roots and _is_closed(module, everything):
            fully_shard(module, ignored_params=ignored, **settings)
    for root in roots:
        fully_shard(root, ignored_params=ignored, **settings)


def _is_closed(unit: nn.Module, everything: Sequence[nn.Module]) -> bool:
    """Whether no module outside of a unit has a parameter of it."""
    inside = set(unit.modules())
    own = {id(p) for p in unit.parameters()}
    return not any(
        id(p) in own for module in everything if module not in inside for p in module.parameters(recurse=False)
    )
