"""Whether something scales the losses of a script: a library that it imports, or a scaler that it uses."""

from __future__ import annotations

import ast
import re
from functools import lru_cache

from halfstep.check.regex import regex
from halfstep.check.script.flow.event import Event, compatible
from halfstep.check.script.flow.order import STEPS, function_around, later
from halfstep.check.script.flow.passing import stores
from halfstep.check.script.flow.trace import Trace
from halfstep.check.script.objects.expressions import arguments_of
from halfstep.check.script.objects.saving import restores, saves
from halfstep.check.script.objects.values import constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.outline import Function
from halfstep.check.script.syntax.scaler_class import data_scalers, is_data_scaler

__all__ = ["has_scaler", "is_elsewhere", "is_forgotten", "is_out_of_reach", "is_owned"]

# Scripts that import these have their loss scaled by the library.
_OWNERS = ("accelerate", "lightning", "pytorch_lightning", "lightning_fabric", "deepspeed", "apex", "fairscale", "composer", "mmcv", "mmengine", "ignite", "catalyst", "fairseq", "colossalai", "torch_xla", "megatron", "habana_frameworks")  # fmt: skip
# What these provide does not touch the loss: seeds, loaders, kernels, offloading.
_HELPERS = regex(
    r"^accelerate\.(utils\.)?(set_seed|init_empty_weights|infer_auto_device_map|dispatch_model|load_checkpoint\w*|"
    r"find_executable_batch_size|logging|get_logger|init_on_device|cpu_offload)(\.|$)|^accelerate\.logging\.|"
    r"lightning(\.pytorch)?(\.utilities(\.seed)?)?\.(seed_everything|LightningDataModule)$|lightning\.(pytorch\.)?loggers|"
    r"^deepspeed\.ops\.|^apex\.(parallel|normalization|optimizers|contrib)(\.|$)"
)
# Names of what may scale a loss; `guidance_scale` and `ax.set_xscale` are none.
_SCALES = regex(r"scaler|scaled|^_?(un)?scale_?$|(loss|grad|gradient|amp)_?scale", re.IGNORECASE)
# Functions that may scale: `loss_scaler(loss, optimizer)`, `scale_loss(loss)`; not a class, `ShiftScaleRotate` or `ScaledAdam`.
_SCALING_CALL = regex(
    r"^(?!raise|log|warn|print)[a-z_]*(scaler|(un)?scale_(loss|grad)|(loss|grad|amp)_scale|scaled?_backward)|^(un)?scale_?$"
)
_STATE = {"state_dict", "load_state_dict", "get_scale", "is_enabled"}
_ACTIONS = ("scale", "scaler_step", "unscale", "owned_step", "handed")
_PLAIN_CALLS = {"print", "isinstance", "hasattr", "getattr", "setattr", "str", "type", "len"}


def is_owned(script: Script, trace: Trace, event: Event) -> bool:
    """Whether a library scales the loss of a backward."""
    # `if use_engine: engine.backward(loss)`, `else: loss.backward()`: the second path has no owner.
    if any(e.kind == "owned_backward" and not compatible(e, event) for e in trace):
        return False
    return _imports_owner(script) or script.has("owned_backward", "owned_step")


def _imports_owner(script: Script) -> bool:
    """Whether a library that scales losses is imported, for more than its helpers."""
    outline = script.outline
    for local, full in outline.names.table.items():
        if full.split(".")[0] not in _OWNERS or _HELPERS.search(full):
            continue
        # `import pytorch_lightning as pl`: what is used of it decides.
        uses = [full_use for full_use in outline.library_calls if full_use.startswith(f"{full}.")]
        bases = [names for bases in outline.bases.values() for names in map(outline.names.full, bases)]
        uses += [base for base in bases if base.startswith(f"{full}.")]
        if not uses or outline.loads[local] > len(uses) or not all(map(_HELPERS.search, uses)):
            return True
    return False


def is_elsewhere(script: Script, trace: Trace) -> bool:
    """Whether the scalers of a script belong to other functions: none is in reach of this loop."""
    functions = {e.function for e in trace}
    if not all(s.key for s in script.scalers) or not script.scalers:
        return False
    scopes = {s.function for s in script.scalers}
    classes = {f.cls for f in functions} - {""}
    if scopes & functions or any(s.function.parent is None or s.function.cls in classes for s in script.scalers):
        return False
    names = (n for f in functions for n in ast.walk(f.node) if f.parent is not None)
    inside = any("scale" in _identifier(n).lower() for n in names)
    return not inside and all(f.parent is not None for f in functions)


def is_forgotten(script: Script, trace: Trace, index: int) -> bool:
    """Whether a scaler serves the other optimizers of the same iteration, but not the one that steps next."""
    event = trace[index]
    following = next(later(trace, index, *STEPS), None)
    if following is None or trace[following].kind != "opt_step" or not trace[following].optimizer:
        return False
    mine = trace[following].optimizer.rsplit(".", 1)[-1]
    if any(e.kind in {"handed", "get_scale", "autograd_grad"} for e in trace):
        return False
    scaled = [e for e in trace if e.kind == "backward" and e.scaled != "no"]
    served, unscaled = (
        {e.optimizer.rsplit(".", 1)[-1] for e in script.events(kind)} for kind in ("scaler_step", "unscale")
    )
    # Both always run: another branch of a condition may be the one without mixed precision.
    together = bool(scaled) and all(_runs_with(e, event) for e in scaled)
    return together and bool(served) and "" not in served | unscaled and mine not in served | unscaled


def _runs_with(scaled: Event, event: Event) -> bool:
    """Whether one backward runs in each iteration in which another one does, also on several micro-batches."""
    depth = min(len(scaled.loops), len(event.loops))
    is_near = depth > 0 or scaled.function is event.function or scaled.loops == event.loops
    return is_near and scaled.loops[:depth] == event.loops[:depth] and set(scaled.guards) <= set(event.guards)


def is_out_of_reach(script: Script, *events: Event) -> bool:
    """Whether the functions of some events name nothing that scales: the scaler of their class is for its other methods."""
    places = {e.function.node for e in events} | {function_around(script, root) for e in events for root in e.roots}
    if any(isinstance(place, ast.Module) for place in places):
        return False
    return not any(_SCALES.search(_identifier(node)) for place in places for node in ast.walk(place))


def _identifier(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "") or getattr(node, "arg", "") or ""


@lru_cache(maxsize=4)  # rules ask for every event of one script
def has_scaler(script: Script) -> bool:
    """Whether the script uses a scaler, or anything called one."""
    names = {s.key.rsplit(".", 1)[-1] for s in script.scalers}
    is_read = any(not name or (script.outline.loads[name] and not _is_only_saved(script, name)) for name in names)
    others = data_scalers(script.outline) - names
    named = [name for name in script.outline.loads if "scaler" in name.lower() and name not in others]
    return (is_read or any(not _is_other_scaler(script, name) for name in named)) and _acts(script)


def _acts(script: Script) -> bool:
    """Whether any line may scale a loss with something called a scaler, which otherwise is only created, passed on or saved."""
    if script.has(*_ACTIONS) or any(event.scaled != "no" for event in script.events("backward")):
        return True
    for name, sites in script.outline.calls.items():
        acts = _SCALING_CALL.search(name)
        for call, function in sites:
            if acts and not _is_creation(script, call):
                return True
            func = call.func
            owner = _identifier(func.value) if isinstance(func, ast.Attribute) else ""
            if _is_scaler_name(owner) and name not in {*_STATE, "update", "get"}:
                return True
            passed = [_identifier(value) for value in arguments_of(call)]
            if any(map(_is_scaler_name, passed)) and not _is_known(script, call, function, name):
                return True
    return False


def _is_creation(script: Script, call: ast.Call) -> bool:
    """Whether the result of a call is a scaler: `scaler = make_scaler(args)`."""
    statement = script.statement(call)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    names = [_identifier(n) for target in targets for n in ast.walk(target)]
    return any(map(_is_scaler_name, names))


def _is_scaler_name(name: str) -> bool:
    return "scaler" in name.lower() and not is_data_scaler(name)


def _is_known(script: Script, call: ast.Call, function: Function, name: str) -> bool:
    """Whether a function that receives a scaler is one of this file, or does not train with it: it saves, restores or prints."""
    if stores(call) or saves(name) or restores(name) or name in _PLAIN_CALLS:
        return True
    return script.outline.call_target(call, function) is not None


def _is_other_scaler(script: Script, name: str) -> bool:
    """Whether a name is the class itself, or a scaler of data: `StandardScaler`, or a variable that only is one."""
    if name == "GradScaler" or is_data_scaler(name) or _is_only_saved(script, name):
        return True
    keys = [key for key in script.outline.bindings if key.rsplit(".", 1)[-1] == name]
    bound = [b.value for key in keys for b in script.outline.bindings[key]]
    is_param = any(name in function.params for function in script.outline.functions)
    if bound and not is_param and all(v is not None and constant(v) is None for v in bound):
        return True  # it is always None
    values = [b.value for b in script.outline.bindings.get(name, ())]
    calls = [text_of(v.func) for v in values if isinstance(v, ast.Call)]
    return bool(calls) and len(calls) == len(values) and all(map(is_data_scaler, calls))


def _is_only_saved(script: Script, name: str) -> bool:
    """Whether a scaler's state is saved, restored or printed, and nothing else is done with it."""
    uses = saved = 0
    for node in ast.walk(script.tree):
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load) and _identifier(node) == name:
            uses += 1
        elif (isinstance(node, ast.Attribute) and node.attr in _STATE and _identifier(node.value) == name) or (
            isinstance(node, ast.Compare) and _identifier(node.left) == name and constant(node.comparators[0]) is None
        ):
            saved += 1
    created = name in {s.key.rsplit(".", 1)[-1] for s in script.scalers}
    return created and uses == saved
