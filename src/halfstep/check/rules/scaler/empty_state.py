"""HS601: the empty state of a disabled scaler, loaded into an enabled one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.rules.script.checkpoint import DOCS, once
from halfstep.check.script.flow.event import Event
from halfstep.check.script.flow.order import is_amp, scalers_at
from halfstep.check.script.objects.expressions import conditions_of
from halfstep.check.script.objects.values import UNKNOWN, Scaler, argument, constant, text_of
from halfstep.check.script.pairing.device_tests import asks_for_cuda, tests_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of, last_name
from halfstep.check.script.syntax.outline import MAX_BINDINGS, Function

__all__ = ["RULES"]

_CHECKPOINT = r"\w*(ckpt|checkpoint|ckp|resume|state|saved)\w*"
# The settings of the run that is resumed: `args = checkpoint["args"]`, `Namespace(**checkpoint["args"])`, `checkpoint["args"].amp`.
_SETTINGS = regex(
    rf"(args|cfg|conf|config|hparams|opts?)\b.*=.*\b{_CHECKPOINT}(\[|\.get\()|\b{_CHECKPOINT}\[['\"](args|cfg|config|opt)['\"]\]\."
)
_SINGLE = regex(r"\w+\.(\w+)\s*=[^=]")
_WORD = regex(r"\w+")
_FLOAT16 = regex(r" (==|is) .*(?<!b)(float16|fp16|half)\b")
_OF_HARDWARE = regex(r"is_available|is_bf16_supported|capability|device|cuda")
_RESUME = """\
import torch
scaler = torch.amp.GradScaler("cuda", enabled=args.amp)
if args.resume:
    checkpoint = torch.load(args.resume)
    optimizer.load_state_dict(checkpoint["optimizer"])
    {load}
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16, enabled=args.amp):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
torch.save({{"optimizer": optimizer.state_dict(), "scaler": {state}}}, path)
"""
_LOAD = 'scaler.load_state_dict(checkpoint["scaler"])'


class EmptyScalerState(ScriptRule):
    """A run without mixed precision saves an empty scaler state, which raises where mixed precision loads it."""

    code = "HS601"
    name = "empty-scaler-state"
    severity = "advice"
    reason = (
        "The state of a GradScaler with enabled=False is {}. An enabled scaler that loads it raises RuntimeError: The source state dict is "
        "empty, possibly because it was saved from a disabled instance of GradScaler. So the checkpoint of a run without mixed precision "
        "cannot be resumed with it. Tests like `'scaler' in checkpoint`, `is not None` or `if scaler:` do not help: the entry and the object are there. In the "
        "other direction a disabled scaler ignores what it loads."
    )
    bad = (_RESUME.format(load=_LOAD, state="scaler.state_dict()"),)
    good = (
        _RESUME.format(load=f'if checkpoint["scaler"]: {_LOAD}', state="scaler.state_dict()"),
        _RESUME.format(
            load=f'if checkpoint["scaler"] is not None: {_LOAD}', state="scaler.state_dict() if args.amp else None"
        ),
    )
    references = (DOCS, "measured: GradScaler.load_state_dict of torch 2.13")

    def check(self, script: Script) -> Iterator[Finding]:
        """Scalers that a setting enables, whose state is saved without it and loaded whatever it is."""
        loads = once(script.events("load_scaler"))
        if not loads or _takes_settings(script):
            return
        saved = once(script.events("save_scaler"))
        for load in loads:
            scalers = scalers_at(script, load)
            if len(scalers) != 1 or not _is_optional(script, scalers[0]) or _is_checked(script, load):
                continue
            own = [e for e in saved if last_name(e.scaler) == last_name(load.scaler)]
            switches = _without_format(script, scalers[0])
            own = [e for e in own if not _is_of_amp(script, e, switches)]
            if not own or not _is_same_entry(script, load, own):
                continue
            state = text_of(argument(load.node, 0, "state_dict") if isinstance(load.node, ast.Call) else None)
            flag = scalers[0].enabled
            run = f"with `{flag.removeprefix('not ')}`" if flag.startswith("not ") else f"without `{flag}`"
            yield self.finding(
                script.where(load.node),
                f"a run {run} saves {{}} ({script.at(own[0].node)}): resumed with it, this raises RuntimeError",
                instead=f"if {state}: {load.local.scaler}.load_state_dict({state})",
            )


def _without_format(script: Script, scaler: Scaler) -> set[str]:
    """The parts of a scaler's flag that leave its format open: `cfg.amp` of `cfg.amp and cfg.dtype == "float16"`."""
    tests = list(_tests(script, scaler))
    formats = [t for t in tests if isinstance(t, ast.Compare) and _FLOAT16.search(text_of(t))]
    return {text_of(t) for t in tests if t not in formats} if formats else set()


def _is_of_amp(script: Script, event: Event, switches: set[str]) -> bool:
    """Whether a state is saved only with a scaler that is on; not if all asked is that it exists, or `switches`, with bfloat16 too."""
    keys = "|".join(re.escape(key) for key in {event.scaler, event.local.scaler, last_name(event.scaler)})
    aside = re.compile(rf"(?<![\w.])({keys})( is not None)?(?![\w.(\[])|\b[\w.]*save_?\w*")
    guards = (*event.guards, *conditions_of(script.outline, event.node))
    asked = {part for text, _ in guards for part in text.partition("#")[0].split(" and ")} - switches
    return any(is_amp((aside.sub("", text), True)) for text in asked)


def _takes_settings(script: Script) -> bool:
    """Whether a script reads the settings of the run that is resumed, and more of them than single entries such as `["data"]["path"]`."""
    text = script.source.text
    matches = list(_SETTINGS.finditer(text))
    if not matches:
        return False
    flags = {key for scaler in script.scalers for key in _WORD.findall(scaler.enabled)}
    matches = [m for m in matches if not _is_other_setting(m[0], flags)]
    lines = {text.count("\n", 0, match.start()) + 1 for match in matches}
    # Of the whole file: the outline leaves out functions without a word of precision.
    functions = [n for n in ast.walk(script.tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    harmless = {line for function in functions for line in _read_by_entry(script, function, lines)}
    return not lines <= harmless


def _is_other_setting(text: str, flags: set[str]) -> bool:
    """Whether a line restores one setting that does not switch a scaler: `args.start_epoch = checkpoint["epoch"]`."""
    single = _SINGLE.match(text)
    return single is not None and single[1] not in flags and not is_amp((single[1], True))


def _read_by_entry(script: Script, function: ast.AST, lines: set[int]) -> Iterator[int]:
    """The lines where a function assigns settings of a checkpoint to a local variable and reads entries that are not about precision."""
    here = lines & set(range(getattr(function, "lineno", 0), (getattr(function, "end_lineno", 0) or 0) + 1))
    if not here:
        return
    parents = {child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
    flags = [(argument(s.node, None, "enabled"), s.function) for s in script.scalers]
    levels = max([1, *(_levels(script, flag, scope) for flag, scope in flags)])
    for statement in parents:
        target = statement.targets[0] if isinstance(statement, ast.Assign) and statement.lineno in here else None
        if not isinstance(target, ast.Name) or not _entry_name(getattr(statement, "value", None)):
            continue
        uses = [n for n in parents if isinstance(n, ast.Name) and n.id == target.id and isinstance(n.ctx, ast.Load)]
        uses = [use for use in uses if not _only_asks(parents[use])]
        entries = [_entry_of(parents, use) for use in uses]
        if all(depth >= levels and not is_amp((text_of(entry), True)) for entry, depth in entries):
            yield target.lineno


def _only_asks(parent: ast.AST) -> bool:
    """Whether settings are only asked for their type, or for an entry that is not about precision: `"fold" not in saved`."""
    if isinstance(parent, ast.Call):
        return key_of(parent.func) == "isinstance"
    return isinstance(parent, ast.Compare) and _asks_if_present(parent) and not is_amp((text_of(parent.left), True))


def _entry_of(parents: dict[ast.AST, ast.AST], settings: ast.expr) -> tuple[ast.expr, int]:
    """What is read of settings, and at which depth: `cfg.get("data", {}).get("path")` at 2."""
    entry, depth = settings, 0
    while isinstance(parent := parents.get(entry), ast.expr):
        if not isinstance(parent, ast.Attribute) and not (
            _entry_name(parent) and entry not in getattr(parent, "args", ())
        ):
            break
        depth += not (isinstance(parent, ast.Attribute) and parent.attr == "get")
        entry = parent
    return entry, depth


def _levels(script: Script, flag: ast.expr | None, function: Function, limit: int = 3) -> int:
    """How deep in the settings a flag is: 1 for `args.amp`, 2 for `train_cfg.get("amp")` where `train_cfg = cfg["train"]`."""
    values = script.outline.values(key_of(flag), function) if flag is not None and key_of(flag) and limit else []
    if values:
        return max(_levels(script, value, function, limit - 1) for value in values[:MAX_BINDINGS])
    if not isinstance(flag, ast.Attribute) and not _entry_name(flag):
        return 0
    owner = flag.func if isinstance(flag, ast.Call) else flag
    return 1 + _levels(script, getattr(owner, "value", None), function, limit)


def _is_optional(script: Script, scaler: Scaler) -> bool:
    """Whether a setting enables a scaler that is there with and without it; the hardware of a run seldom changes."""
    flag = argument(scaler.node, None, "enabled")
    if flag is None or scaler.enabled in {"yes", "no", UNKNOWN} or scaler.enabled not in text_of(flag):
        return False
    tests = list(_tests(script, scaler)) or list(_parts(script, flag, scaler.function))
    return not all(asks_for_cuda(test) or _OF_HARDWARE.search(text_of(test)) for test in tests)


def _parts(script: Script, flag: ast.expr, function: Function, limit: int = 3) -> Iterator[ast.expr]:
    """The single tests of a flag, `a` and `b` of `not (a and b)`, with variables followed."""
    if isinstance(flag, ast.UnaryOp) and isinstance(flag.op, ast.Not):
        yield from _parts(script, flag.operand, function, limit)
    elif isinstance(flag, ast.BoolOp):
        yield from (part for value in flag.values for part in _parts(script, value, function, limit))
    else:
        values = script.outline.values(key_of(flag), function)[:MAX_BINDINGS] if key_of(flag) and limit else []
        for value in values or [flag]:
            yield from _parts(script, value, function, limit - 1 if values else 0) if value is not flag else [flag]


def _tests(script: Script, scaler: Scaler) -> Iterator[ast.expr]:
    """What must be true where a scaler is enabled, with the calls that variables are assigned; each part of an `and` by itself."""
    for test, _ in tests_of(script, scaler):
        values = script.outline.values(key_of(test), scaler.function) if key_of(test) else []
        for value in values or [test]:
            is_bool = isinstance(value, ast.Call) and text_of(value.func) == "bool" and len(value.args) == 1
            asked = value.args[0] if is_bool and isinstance(value, ast.Call) else value
            yield from asked.values if isinstance(asked, ast.BoolOp) and isinstance(asked.op, ast.And) else [asked]


def _is_checked(script: Script, load: Event) -> bool:
    """Whether a scaler only loads a state that is not empty, or the error is caught."""
    call = load.node
    state = argument(call, 0, "state_dict") if isinstance(call, ast.Call) else None
    if (
        state is None
        or not (key_of(state) or _entry_name(state))
        or any(isinstance(n, ast.Try) for n in script.above(call))
    ):
        return True
    tests = [n.test for n in script.above(call) if isinstance(n, (ast.If, ast.IfExp))]
    parts = [p for test in tests for p in (test.values if isinstance(test, ast.BoolOp) else [test])]
    names = {text_of(state), _entry_name(state) or text_of(state)}
    others = [p for p in parts if not isinstance(p, ast.Compare) or "len(" in text_of(p) or "{}" in text_of(p)]
    # `if scaler:` looks at the object, not at its state.
    others = [p for p in others if not _is_of_scaler(p, load)]
    if any(name in text_of(part) for part in others for name in names):
        return True
    owner = re.split(r"\W", text_of(state))[0]
    asked = [text_of(p) for p in parts if not (isinstance(p, ast.Compare) and _asks_if_present(p))]
    if any(is_amp((text, True)) and owner in text for text in asked):
        return True  # `if checkpoint["amp"] and args.amp:`
    # `if not state: return`
    return bool(re.search(rf"\bnot\s+{re.escape(text_of(state))}\s*(:|and|or)", script.source.text))


def _is_of_scaler(test: ast.expr, load: Event) -> bool:
    """Whether a test looks at the scaler object: `if scaler:`, `if scaler.is_enabled():`, `isinstance(scaler, GradScaler)`."""
    parts = [test.func, *test.args] if isinstance(test, ast.Call) else [test]
    owners = [
        p.value if isinstance(p, ast.Attribute) and isinstance(test, ast.Call) and p is test.func else p for p in parts
    ]
    return any(text_of(owner) in {load.scaler, load.local.scaler} for owner in owners)


def _asks_if_present(test: ast.Compare) -> bool:
    """Whether a test is `"scaler" in checkpoint`, or that something is not None."""
    return isinstance(test.ops[0], (ast.In, ast.NotIn)) or constant(test.comparators[0]) is None


def _is_same_entry(script: Script, load: Event, saved: list[Event]) -> bool:
    """Whether what is loaded was saved here: the entry of the same name, or a file of its own."""
    state = argument(load.node, 0, "state_dict") if isinstance(load.node, ast.Call) else None
    name = _entry_name(state)
    if name:
        return name in {_saved_as(script, event.node) for event in saved}
    values = script.outline.values(key_of(state), load.function)
    return bool(values) and all(isinstance(v, ast.Call) and text_of(v.func) == "torch.load" for v in values)


def _entry_name(state: ast.expr | None) -> str:
    """`scaler` of `checkpoint["scaler"]` and of `checkpoint.get("scaler")`; "" for anything else."""
    if isinstance(state, ast.Subscript):
        return str(constant(state.slice)) if isinstance(constant(state.slice), str) else ""
    is_get = isinstance(state, ast.Call) and isinstance(state.func, ast.Attribute) and state.func.attr == "get"
    return str(constant(state.args[0])) if is_get and isinstance(state, ast.Call) and state.args else ""


def _saved_as(script: Script, node: ast.AST) -> str:
    """The name of the entry that a state is saved as, in a dictionary, as a keyword or by an assignment."""
    parent = script.outline.parents.get(node)
    if isinstance(parent, ast.Dict):
        return next((str(constant(k)) for k, v in zip(parent.keys, parent.values, strict=True) if v is node), "")
    if isinstance(parent, ast.keyword):
        return parent.arg or ""
    return _entry_name(parent.targets[0]) if isinstance(parent, ast.Assign) else ""


RULES: tuple[type[Rule], ...] = (EmptyScalerState,)
