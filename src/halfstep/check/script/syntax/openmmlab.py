"""The settings of a configuration file of OpenMMLab: a Python module of dictionaries, read by MMEngine."""

from __future__ import annotations

import ast

from halfstep.check.script.syntax.names import chain

__all__ = ["class_of", "entries_of", "float32_validation", "inherits_settings", "settings_of"]

_HALF = {"float16", "fp16", "half"}


def settings_of(module: ast.Module) -> dict[str, ast.Assign]:
    """The last assignment of each setting."""
    return {
        node.targets[0].id: node
        for node in module.body
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
    }


def inherits_settings(module: ast.Module) -> bool:
    """Whether a configuration extends another: `_base_ = [...]`, or the block of `read_base()`."""
    return "_base_" in settings_of(module) or any(isinstance(node, ast.With) for node in module.body)


def entries_of(node: ast.expr | None) -> dict[str, ast.expr]:
    """The entries of `dict(a=...)` or `{"a": ...}`; none if some of them are not written out."""
    if isinstance(node, ast.Call) and chain(node.func) == ("dict",) and not node.args:
        return {k.arg: k.value for k in node.keywords if k.arg} if all(k.arg for k in node.keywords) else {}
    if isinstance(node, ast.Dict):
        keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
        return {str(k): v for k, v in zip(keys, node.values, strict=True)} if len(keys) == len(node.values) else {}
    return {}


def class_of(node: ast.expr | None) -> str:
    """The class that an entry `type` names, by a string or by itself."""
    if isinstance(node, ast.Constant):
        return str(node.value).rpartition(".")[2]
    return (chain(node) or ("",))[-1] if node is not None else ""


def float32_validation(module: ast.Module) -> ast.Assign | None:
    """The setting of MMEngine's own validation loop without `fp16`, in a file that sets training under float16 autocast.

    `ValLoop` opens its autocast in float16 only, so training in bfloat16 has no such option.
    """
    settings = settings_of(module)
    trained = entries_of(settings["optim_wrapper"].value) if "optim_wrapper" in settings else {}
    loop = settings.get("val_cfg")
    validated = entries_of(loop.value) if loop is not None else {}
    if class_of(trained.get("type")) != "AmpOptimWrapper" or class_of(validated.get("type")) != "ValLoop":
        return None
    dtype = trained.get("dtype")
    return loop if "fp16" not in validated and (dtype is None or class_of(dtype) in _HALF) else None
