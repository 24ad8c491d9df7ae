"""HS190: the deprecated torch.cuda.amp and torch.cpu.amp names, with a fix that preserves the arguments; HS117: no import."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from halfstep.check.finding import Edit, Finding, Fix
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.flow.unbound import is_bound, unbound_names
from halfstep.check.script.objects.expressions import options_of
from halfstep.check.script.scaling.version_tests import is_by_device, runs_unset
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import Imported, chain
from halfstep.check.script.syntax.outline import MAX_BINDINGS
from halfstep.check.script.syntax.scaler_class import SCALER_ARGUMENTS

__all__ = ["RULES"]

_OLD = {
    f"torch.{device}.amp.{name}"
    for device, names in (
        ("cuda", ("autocast", "GradScaler", "custom_fwd", "custom_bwd")),
        ("cpu", ("autocast", "GradScaler")),
    )
    for name in names
}
# torch.cuda.amp.autocast(enabled, dtype, cache_enabled) by position; torch.amp.autocast by keyword.
_REGION = "    with torch.autocast('cuda', dtype=torch.float16):\n        loss = model(x)\n"
_AUTOCAST_ORDER = ("enabled", "dtype", "cache_enabled")


@dataclass(frozen=True)
class _Use:
    """One use of a deprecated name: the name itself, and its call, if it is called."""

    name: ast.expr
    full: str
    call: ast.Call | None


class DeprecatedAmp(ScriptRule):
    """The script uses torch.cuda.amp, which PyTorch 2.4 deprecated."""

    code = "HS190"
    name = "deprecated-amp"
    severity = "advice"
    reason = (
        "Since PyTorch 2.4 `torch.cuda.amp.autocast`, `GradScaler`, `custom_fwd` and `custom_bwd` (and their torch.cpu.amp versions) "
        "emit a FutureWarning on every use; `torch.amp` provides them for every device. The arguments moved: "
        '`torch.cuda.amp.autocast(enabled, dtype)` is `torch.amp.autocast("cuda", dtype, enabled)`, and `GradScaler(init_scale)` is '
        '`GradScaler("cuda", init_scale)`, so a plain rename changes the meaning.'
    )
    bad = (
        "import torch\nwith torch.cuda.amp.autocast(use_amp, torch.bfloat16):\n    y = model(x)\n",
        "import torch\nfrom torch.cuda.amp import autocast, GradScaler\nscaler = GradScaler(2.0**12, enabled=amp)\n"
        "for x in loader:\n    with autocast(amp):\n        loss = model(x)\n    scaler.scale(loss).backward()\n"
        "    scaler.step(optimizer)\n    scaler.update()\n",
        "import torch\nfrom torch.cuda import amp\nwith amp.autocast(enabled=True):\n    y = model(x)\n",
        "import torch\nimport torch.cuda.amp as amp\nscaler = amp.GradScaler()\nprint(scaler)\n",
        "import torch\nfrom torch.cuda.amp import custom_fwd, custom_bwd\nclass F(torch.autograd.Function):\n    @staticmethod\n"
        "    @custom_fwd(cast_inputs=torch.float32)\n    def forward(ctx, x):\n        return x\n    @staticmethod\n    @custom_bwd\n"
        "    def backward(ctx, g):\n        return g\n",
        "import torch\n@torch.cuda.amp.autocast()\ndef forward(x):\n    return x\n",
    )
    good = (
        'import torch\nwith torch.amp.autocast("cuda", enabled=use_amp, dtype=torch.bfloat16):\n    y = model(x)\n',
        "import torch\nwith torch.amp.autocast('cuda', dtype=torch.bfloat16, enabled=use_amp):\n    y = model(x)\n",
        "import torch\ntry:\n    scaler = getattr(torch, 'amp').GradScaler('cuda')\nexcept Exception:\n    scaler = torch.cuda.amp.GradScaler()\nprint(scaler)\n",
        "try:\n    from torch.amp import GradScaler\nexcept ImportError:\n    from torch.cuda.amp import GradScaler\nscaler = GradScaler()\nprint(scaler)\n",
    )
    references = (
        "https://docs.pytorch.org/docs/stable/amp.html",
        "https://github.com/pytorch/pytorch/pull/126531",
        "https://github.com/Dao-AILab/flash-attention/issues/1530",
    )

    def check(self, script: Script) -> Iterator[Finding]:
        """Deprecated names in use: one finding per import, or per use where the full name is spelled out."""
        modern = _modern_branches(script)
        uses = [use for use in _uses(script) if not _is_fallback(script, use, modern)]
        uses.sort(key=lambda use: (use.name.lineno, use.name.col_offset))
        names = script.outline.names
        statements: dict[ast.AST, list[Imported]] = {}
        for imported in names.imported:
            statements.setdefault(imported.statement, []).append(imported)
        for statement, group in statements.items():
            imported_uses = [use for imported in group for use in _uses_of(imported, uses)]
            if imported_uses and not any(names.ambiguous(use.name) for use in imported_uses):
                deprecated = ", ".join(dict.fromkeys(use.full for use in imported_uses))
                yield self._finding(script, statement, deprecated, _import_fix(script, group[0], uses))
        whole = {i.alias.asname or "torch" for i in names.imported if i.full == "torch"} | {"torch"}
        for use in uses:
            root = chain(use.name)[0]
            if root in whole or not names.full(use.name):
                new = f"{root}.amp." + use.full.rsplit(".", 1)[-1] if root in whole else ""
                edits = _use_edits(script, use, new) if new else []
                fix = Fix("use torch.amp", tuple(edits)) if edits else None
                yield self._finding(script, use.name, use.full, fix)

    def _finding(self, script: Script, node: ast.AST, names: str, fix: Fix | None) -> Finding:
        device = names.split(".")[1]
        calls = []
        for name in (full.rsplit(".", 1)[-1] for full in names.split(", ")):
            keyword = "device_type=" if name.startswith("custom_") else ""
            calls.append(f'torch.amp.{name}({keyword}"{device}", ...)')
        return self.finding(
            script.where(node),
            f"{names}: deprecated since PyTorch 2.4, emits FutureWarning",
            instead=", ".join(calls),
            fix=fix,
        )


def _uses(script: Script) -> Iterator[_Use]:
    """Every call, decorator or assignment that uses a deprecated name."""
    names, outline = script.outline.names, script.outline
    if "amp" not in outline.loads and not any(".amp" in full for full in names.table.values()):
        return  # most files
    for full in _OLD & outline.library_calls.keys():
        for call, _ in outline.library_calls[full]:
            yield _Use(call.func, full, call)
    for full in _OLD:
        # A module that comes from elsewhere has no full name: `from lib import *`, `th.cuda.amp.GradScaler()`.
        for call, _ in outline.calls.get(full.rsplit(".", 1)[-1], ()):
            if not names.full(call.func) and ".".join(chain(call.func)).endswith(full.removeprefix("torch")):
                yield _Use(call.func, full, call)
    for call, _ in outline.library_calls.get("functools.partial", ()):
        if call.args and names.full(call.args[0]) in _OLD:
            yield _Use(call.args[0], names.full(call.args[0]), None)
    for bases in outline.bases.values():  # `class Scaler(torch.cuda.amp.GradScaler):` warns in its constructor
        yield from (_Use(base, names.full(base), None) for base in bases if names.full(base) in _OLD)
    for function in outline.functions:
        for decorator in getattr(function.node, "decorator_list", ()):
            if not isinstance(decorator, ast.Call) and names.full(decorator) in _OLD:
                yield _Use(decorator, names.full(decorator), None)
    for bindings in outline.bindings.values():
        values = [part for b in bindings[:MAX_BINDINGS] if b.value is not None for part in options_of(b.value)]
        old = [part for part in values if isinstance(part, (ast.Attribute, ast.Name)) and names.full(part) in _OLD]
        # A name that may also be the new API, perhaps by `partial(torch.amp.autocast, ...)`, is chosen by version.
        inside = [n for part in values for n in ast.walk(part) if isinstance(n, ast.Attribute)] if old else []
        if old and not any(names.full(n).startswith(("torch.amp.", "torch.autocast")) for n in inside):
            yield from (_Use(part, names.full(part), None) for part in old)


def _modern_branches(script: Script) -> set[tuple[str, ast.AST]]:
    """The branches and functions that also use the new API for the same device: code that chooses by version."""
    return {
        (old, around)
        for old in _OLD
        for call, _ in script.outline.library_calls.get(f"torch.amp.{old.rsplit('.', 1)[-1]}", ())
        if _device_of(call) in {"", old.split(".")[1]} and not _always_raises(call)
        for around in _around(script, call)
    }


def _device_of(call: ast.Call) -> str:
    """The device that a call of the new API names; "" for the default, or a variable."""
    values = [*call.args[:1], *(k.value for k in call.keywords if k.arg in {"device_type", "device"})]
    names = [v.value for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str)]
    return names[0].partition(":")[0] if names else ""


def _is_fallback(script: Script, use: _Use, modern: set[tuple[str, ast.AST]]) -> bool:
    last = use.full.rsplit(".", 1)[-1]
    shared = next((around for around in _around(script, use.name) if (use.full, around) in modern), None)
    if shared is not None and not is_by_device(shared):
        return not runs_unset(script, shared, use.name)
    # `try: return amp.GradScaler("cuda") / except Exception: return torch.cuda.amp.GradScaler()`, wherever amp comes from
    tries = [around for around in _around(script, use.name) if isinstance(around, ast.Try)]
    tried = [node for around in tries for part in around.body for node in ast.walk(part)]
    calls = [node for node in tried if isinstance(node, ast.Call) and node.func is not use.name]
    return any(isinstance(c.func, ast.Attribute) and c.func.attr == last and not _always_raises(c) for c in calls)


def _always_raises(call: ast.Call) -> bool:
    """Whether a call of GradScaler has an argument that it has in no version of torch: what handles it always runs."""
    names = {k.arg for k in call.keywords if k.arg is not None}
    return chain(call.func)[-1:] == ("GradScaler",) and not names <= SCALER_ARGUMENTS


def _around(script: Script, node: ast.AST) -> Iterator[ast.AST]:
    """The branches around a node, up to and including its function."""
    parent: ast.AST | None = node
    while parent is not None:
        if isinstance(parent, (ast.If, ast.IfExp, ast.Try, ast.FunctionDef)):
            main = isinstance(parent, ast.If) and "__name__" in ast.dump(parent.test)
            if not main and not (isinstance(parent, ast.FunctionDef) and len(parent.body) > 8):
                yield parent
            if isinstance(parent, ast.FunctionDef):
                return
        parent = script.outline.parents.get(parent)


def _uses_of(imported: Imported, uses: list[_Use]) -> list[_Use]:
    """The uses whose name comes from this import."""
    local = imported.alias.asname or imported.alias.name.split(".")[0]
    if local == "torch" or imported.full == "torch":
        return []  # the name is spelled out where it is used
    if imported.alias.name == "*":
        return [u for u in uses if imported.full == u.full]
    return [u for u in uses if chain(u.name)[0] == local and u.full.startswith(imported.full)]


def _use_edits(script: Script, use: _Use, new_name: str) -> list[Edit]:
    """The edits that make one use call the new API; none when that is not simple."""
    lines, last, device = script.lines, use.full.rsplit(".", 1)[-1], use.full.split(".")[1]
    edits = [lines.replace(use.name, new_name)] if new_name else []
    if last in {"custom_fwd", "custom_bwd"}:
        if use.call is None:
            end = lines.span(use.name)[1]
            return [*edits, Edit(end, end, f'(device_type="{device}")')] if not _is_partial(script, use) else []
        if use.call.args:
            return []
        return [*edits, _insert(script, use.call, f'device_type="{device}"')]
    call = use.call
    if call is None or any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords):
        return []
    edits.append(_insert(script, call, f'"{device}"'))
    if last == "autocast":
        if len(call.args) > len(_AUTOCAST_ORDER):
            return []
        for keyword, value in zip(_AUTOCAST_ORDER, call.args, strict=False):
            start = lines.span(value)[0]
            if lines.text[start - 1] == "(" and lines.text[: start - 1].rstrip()[-1:] in {"(", ","}:
                return []  # the value is in parentheses
            edits.append(Edit(start, start, f"{keyword}="))
    # Of two edits at one position, the inserted device comes first.
    merged: dict[tuple[int, int], str] = {}
    for edit in edits:
        merged[edit.start, edit.end] = merged.get((edit.start, edit.end), "") + edit.text
    return [Edit(start, end, text) for (start, end), text in sorted(merged.items())]


def _is_partial(script: Script, use: _Use) -> bool:
    return isinstance(script.outline.parents.get(use.name), ast.Call)


def _insert(script: Script, call: ast.Call, text: str) -> Edit:
    """Insert a first argument into a call."""
    opening = script.lines.text.index("(", script.lines.span(call.func)[1]) + 1
    first: list[ast.expr | ast.keyword] = sorted([*call.args, *call.keywords], key=lambda a: (a.lineno, a.col_offset))
    if first:
        start = script.lines.span(first[0])[0]
        bare = not script.lines.text[opening:start].strip()  # the first argument is not in parentheses
        return Edit(start if bare else opening, start if bare else opening, f"{text}, ")
    return Edit(opening, opening, text)


def _import_fix(script: Script, imported: Imported, uses: list[_Use]) -> Fix | None:
    """Change an import and all of its uses, or nothing."""
    statement, lines = imported.statement, script.lines
    if imported.guarded or any(alias.name == "*" for alias in statement.names):
        return None
    if isinstance(statement, ast.Import):
        if len(statement.names) != 1 or imported.alias.name != "torch.cuda.amp":
            return None
        change = lines.replace(imported.alias, f"torch.amp as {imported.alias.asname}")
    elif statement.module == "torch.cuda" and len(statement.names) == 1:
        at = lines.text.find("torch.cuda", *lines.span(statement))
        change = Edit(at, at + len("torch.cuda"), "torch")
    elif statement.module in {"torch.cuda.amp", "torch.cpu.amp"}:
        at = lines.text.find(statement.module, *lines.span(statement))
        change = Edit(at, at + len(statement.module), "torch.amp")
    else:
        return None
    if change.start < 0:
        return None  # written with spaces or on two lines
    edits = [change]
    locals_ = {alias.asname or alias.name for alias in statement.names}
    module = statement.module if isinstance(statement, ast.ImportFrom) else ""
    others = [i for i in script.outline.names.imported if i.statement is not statement]
    if any((i.alias.asname or i.alias.name) in locals_ for i in others):
        return None  # imported in several places, which would all have to change together
    if module and module.endswith(".amp") and any(f"{module}.{a.name}" not in _OLD for a in statement.names):
        return None
    mine = [u for u in uses if chain(u.name)[0] in locals_]
    # A use that is not changed (`ctx = autocast`) would call the new name with the old arguments, and other attributes of
    # the module may not exist in torch.amp.
    if _other_uses(script, locals_, mine):
        return None
    for use in mine:
        use_edits = _use_edits(script, use, "")
        if not use_edits:
            return None
        edits += use_edits
    return Fix("import from torch.amp and pass the device", tuple(sorted(edits)))


def _other_uses(script: Script, names: set[str], mine: list[_Use]) -> bool:
    """Whether imported names are assigned, exported, or read other than by these uses, in types and in isinstance."""
    changed = {id(use.name) for use in mine}
    harmless: set[int] = set()
    for node in ast.walk(script.tree):
        hints = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            hints += node.args[1:]
        harmless |= {id(part) for hint in hints if hint is not None for part in ast.walk(hint)}
        if isinstance(node, ast.Name) and node.id in names and id(node) not in changed | harmless:
            parent = script.outline.parents.get(node)
            if not (isinstance(parent, ast.Attribute) and id(parent) in changed):
                return True
        if isinstance(node, ast.arg) and node.arg in names:
            return True
        if isinstance(node, ast.Constant) and node.value in names:
            return True  # in __all__
    return False


_CHOOSES = regex(r"dtype|^_?((use|enable)_(amp|fp16|bf16|autocast)|(use_)?mixed_precision|amp_enabled)$", re.IGNORECASE)


_APEX = ("scale_loss", "master_params", "initialize")  # functions of apex.amp


class AmpNotImported(ScriptRule):
    """A name of torch.amp, or one that chooses a precision, is used and bound nowhere."""

    code = "HS117"
    name = "amp-not-imported"
    severity = "error"
    reason = (
        "Nothing in the file binds the name, so the line raises NameError. It is usually on the path of one option, such as fp16, and "
        "the default path runs: the mistake shows in the first run with mixed precision."
    )
    bad = (
        "import torch\nscaler = GradScaler('cuda')\nfor x in loader:\n    loss = model(x)\n    scaler.scale(loss).backward()\n"
        "    scaler.step(optimizer)\n    scaler.update()\n".replace("    loss = model(x)\n", _REGION),
        "import torch\ndef evaluate(model, x):\n    with amp.autocast():\n        return model(x)\n",
        "import torch\ndef evaluate(model, x, name):\n    with torch.autocast('cuda', dtype=DTYPES.get(name, torch.bfloat16)):\n"
        "        return model(x)\n",
    )
    good = (
        "import torch\nfrom torch.amp import GradScaler\nscaler = GradScaler('cuda')\nfor x in loader:\n    loss = model(x)\n"
        "    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()\n".replace(
            "    loss = model(x)\n", _REGION
        ),
        "import torch\nfrom mixed import *\ndef evaluate(model, x):\n    with amp.autocast():\n        return model(x)\n",
        "import torch\nDTYPES = {'fp16': torch.float16}\ndef evaluate(model, x, name):\n"
        "    with torch.autocast('cuda', dtype=DTYPES.get(name, torch.bfloat16)):\n        return model(x)\n",
    )
    references = ("https://docs.pytorch.org/docs/stable/amp.html",)

    def check(self, script: Script) -> Iterator[Finding]:
        """Calls of `GradScaler`, `autocast` and functions of `amp` in a file with imports that binds no such name."""
        outline = script.outline
        if script.source.language == "notebook" or not any(
            i.full.split(".")[0] == "torch" for i in outline.names.imported
        ):
            return  # a cell may run another notebook, and a fragment shows no imports
        for name in ("GradScaler", "autocast", *_APEX):
            for call, function in outline.calls.get(name, ()):
                parts = chain(call.func)
                if parts not in {(name,) * (name not in _APEX), ("amp", name)} or is_bound(script, parts[0], function):
                    continue
                owner = "apex" if name in _APEX else "torch"
                module = f"from {owner} import amp" if parts[0] == "amp" else f"from torch.amp import {name}"
                yield self.finding(
                    script.where(call.func),
                    f"`{parts[0]}` is not imported in this file: NameError",
                    instead=module,
                )
        yield from self._unbound_settings(script)

    def _unbound_settings(self, script: Script) -> Iterator[Finding]:
        """Variables named after a dtype or a switch of mixed precision, in a file that binds every other name: no fragment."""
        outline = script.outline
        bound = {*outline.bindings, *(name for function in outline.functions for name in function.params)}
        if not any(map(_CHOOSES.search, outline.variables - bound)):
            return
        names = unbound_names(script)
        if not all(map(_CHOOSES.search, names)):
            return
        for name, node in names.items():
            if not any(isinstance(n, ast.Try) for n in script.above(node)):
                yield self.finding(
                    script.where(node),
                    f"nothing in this file binds `{name}`: NameError",
                    instead=f"define or import {name}",
                )


RULES: tuple[type[Rule], ...] = (DeprecatedAmp, AmpNotImported)
