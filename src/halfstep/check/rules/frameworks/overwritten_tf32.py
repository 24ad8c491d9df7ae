"""HS615: a setting for TF32 that the next one overwrites."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from halfstep.check.finding import Finding
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.objects.choices import field_defaults
from halfstep.check.script.objects.command_line import Options
from halfstep.check.script.objects.values import argument, constant, text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import all_nodes
from halfstep.check.script.syntax.names import last_name

__all__ = ["RULES"]

_ALLOWS = "torch.backends.cuda.matmul.allow_tf32"
_CHOOSES = "torch.set_float32_matmul_precision"
_MEANS = {"highest": False, "high": True, "medium": True}  # whether matrix products may use TF32
_OPTION = "import argparse\nimport torch\nparser = argparse.ArgumentParser()\nparser.add_argument('--tf32', action='store_true')\nargs = parser.parse_args()\n"


class _Setting(NamedTuple):
    """A statement that decides on TF32 for matrix products."""

    node: ast.AST
    value: ast.expr
    name: str

    @property
    def means(self) -> bool | None:
        """Whether it allows TF32; None if the text does not decide it."""
        return _meaning(constant(self.value))


def _meaning(value: object) -> bool | None:
    if isinstance(value, str):
        return _MEANS.get(value)
    return value if isinstance(value, bool) else None


class OverwrittenTf32(ScriptRule):
    """A setting for TF32 is overwritten by the next one."""

    code = "HS615"
    name = "tf32-setting-overwritten"
    severity = "warning"
    reason = (
        "`torch.backends.cuda.matmul.allow_tf32` and `torch.set_float32_matmul_precision` set the same switch, and the last one counts: "
        "after `set_float32_matmul_precision('high')` matrix products use TF32 whatever `allow_tf32` was a line before. An option that "
        "sets the first of them has no effect on matrix products, and a run that is meant to be in float32 is not. `allow_tf32 = True` also "
        "replaces 'medium' by 'high'."
    )
    bad = (
        f"{_OPTION}{_ALLOWS} = args.tf32\n{_CHOOSES}('high')\n",
        f"import torch\n{_ALLOWS} = False\ntorch.backends.cudnn.allow_tf32 = False\n{_CHOOSES}('high')\n",
        f"import torch\n{_CHOOSES}('medium')\n{_ALLOWS} = True\n",
    )
    good = (
        f"{_OPTION}{_ALLOWS} = args.tf32\n{_CHOOSES}('high' if args.tf32 else 'highest')\n",
        f"import torch\n{_ALLOWS} = True\n{_CHOOSES}('high')\n",
        f"import torch\n{_ALLOWS} = True\n{_CHOOSES}('medium')\n",
        f"import torch\n{_ALLOWS} = False\nmeasure()\n{_CHOOSES}('high')\n",
    )
    references = (
        "https://docs.pytorch.org/docs/stable/generated/torch.set_float32_matmul_precision.html",
        "measured: torch 2.13, allow_tf32 = False and set_float32_matmul_precision('high') leave allow_tf32 at True",
    )
    words = (_CHOOSES,)

    def check(self, script: Script) -> Iterator[Finding]:
        """Settings of one block with nothing but other settings and messages between them."""
        text = script.source.text
        if "matmul.allow_tf32" not in text or "set_float32_matmul_precision" not in text:
            return
        for node in all_nodes(script.tree):
            for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
                for first, second in _pairs(script, block) if isinstance(block, list) else ():
                    effect = _effect(script, first, second)
                    if effect:
                        yield self.finding(
                            script.where(second.node),
                            f"{second.name} overwrites {first.name} ({script.at(first.node)}): {effect}",
                            instead="keep one of the two, such as torch.set_float32_matmul_precision('high' if tf32 else 'highest')",
                            severity="advice" if _is_weakened(first, second) else None,
                        )


def _pairs(script: Script, block: list[ast.stmt]) -> Iterator[tuple[_Setting, _Setting]]:
    """Settings of one kind that one of the other kind follows."""
    last: _Setting | None = None
    for statement in block:
        setting = _setting(script, statement)
        if setting is not None:
            if last is not None and last.name != setting.name:
                yield last, setting
            last = setting
        elif not _is_quiet(script, statement):
            last = None


def _setting(script: Script, statement: ast.stmt) -> _Setting | None:
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        if script.outline.names.full(statement.targets[0]) == _ALLOWS:
            return _Setting(statement, statement.value, "`allow_tf32`")
    elif isinstance(statement, ast.Expr) and isinstance(call := statement.value, ast.Call):
        value = argument(call, 0, "precision") if script.outline.names.full(call.func) == _CHOOSES else None
        if value is not None:
            return _Setting(statement, value, "`set_float32_matmul_precision`")
    return None


def _is_quiet(script: Script, statement: ast.stmt) -> bool:
    """Whether a statement computes nothing: another setting of torch, a message."""
    if isinstance(statement, ast.Assign):
        return all(script.outline.names.full(t).startswith("torch.backends.") for t in statement.targets)
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call):
        return isinstance(call, ast.Constant)
    return script.outline.names.full(call.func).startswith("torch.") or last_name(text_of(call.func)) in {
        "print",
        "info",
    }


def _effect(script: Script, first: _Setting, second: _Setting) -> str:
    """What the first setting asks for in vain; "" if the two agree or the text does not decide it."""
    if first.means is not None:
        if _is_weakened(first, second):
            return "the precision is 'high' then, not 'medium'"
        if second.means in {None, first.means}:
            return ""
        return f"matrix products {'use' if second.means else 'do not use'} TF32"
    if second.means is not None:
        is_fixed = constant(first.value) is ... and not isinstance(first.value, ast.IfExp)
        return f"`{text_of(first.value)}` has no effect on matrix products" if is_fixed else ""
    options = (first.value, second.value)
    if not all(isinstance(option, ast.Attribute) for option in options) or text_of(options[0]) == text_of(options[1]):
        return ""
    means = _default(script, second.value)
    if means is None:
        return ""
    return f"`{text_of(first.value)}` has no effect on matrix products, which {'use' if means else 'do not use'} TF32 by the default of `{text_of(second.value)}`"


def _is_weakened(first: _Setting, second: _Setting) -> bool:
    """Whether `allow_tf32 = True` follows 'medium': both use TF32, but it chooses 'high'."""
    return constant(first.value) == "medium" and second.name == "`allow_tf32`" and second.means is True


def _default(script: Script, value: ast.expr) -> bool | None:
    """What the default of an option means for TF32."""
    name = last_name(text_of(value))
    defaults = [constant(default) for default in field_defaults(script.outline, name)]
    for call, _, dest in Options(script).declared:
        if dest == name:
            is_flag = constant(argument(call, None, "action")) == "store_true"
            default = argument(call, None, "default")
            defaults.append(False if is_flag and default is None else constant(default))
    means = {_meaning(default) for default in defaults}
    return means.pop() if len(means) == 1 else None


RULES: tuple[type[Rule], ...] = (OverwrittenTf32,)
