"""Flags of training arguments that get a string from elsewhere: `fp16=args.fp16` with `add_argument("--fp16", default="False")`.

A variable of the environment is a string too, and `bool()` of a string is true unless it is empty.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace

from halfstep.check.config.alternatives import Alternatives
from halfstep.check.config.config import Config
from halfstep.check.script.syntax.names import chain, key_of
from halfstep.precision.node import Entry, Scalar

__all__ = ["FALSE_TEXTS", "with_text_flags"]

FALSE_TEXTS = frozenset({"false", "no", "off", "0"})
_FLAGS = ("fp16", "bf16", "fp16_full_eval", "bf16_full_eval")


def with_text_flags(config: Config, call: ast.Call, nodes: Sequence[ast.AST], alternatives: Alternatives) -> Config:
    """The arguments of a call, with the strings that its flags are."""
    texts = _text_flags(call, nodes, alternatives)
    if not texts:
        return config
    entries = [
        Entry(e.key, e.key_span, Scalar(e.value.span, texts[e.key].value)) if e.key in texts else e
        for e in config.root.entries
    ]
    return replace(config, root=replace(config.root, entries=tuple(entries)), assembled=True)


def _text_flags(call: ast.Call, nodes: Sequence[ast.AST], alternatives: Alternatives) -> dict[str, ast.Constant]:
    """The flags of a call that are strings which read as false, each with the literal that sets it."""
    passed = {k.arg: k.value for k in call.keywords if k.arg in _FLAGS and not isinstance(k.value, ast.Constant)}
    texts: dict[str, ast.Constant] = {}
    converted: set[ast.expr] | None = None
    for flag, value in passed.items():
        inner = value.args[0] if isinstance(value, ast.Call) and key_of(value.func) == "bool" and value.args else value
        known = list(alternatives.untested(inner))
        falses = [c for c in known if isinstance(c.value, str) and c.value.casefold() in FALSE_TEXTS]
        if falses and len(known) == len(falses) and flag is not None:
            converted = _converted(nodes) if converted is None else converted
            texts |= {flag: falses[0]} if falses[0] not in converted else {}
    return texts


def _converted(nodes: Sequence[ast.AST]) -> set[ast.expr]:
    """The defaults of command-line options that a type or an action converts: argparse converts a default that is a string."""
    defaults: set[ast.expr] = set()
    for node in nodes:
        if not isinstance(node, ast.Call) or chain(node.func)[-1:] not in {("add_argument",), ("option",)}:
            continue
        keywords = {k.arg: k.value for k in node.keywords}
        is_text = "type" not in keywords or key_of(keywords["type"]) == "str"
        if "default" in keywords and (not is_text or {"action", "is_flag", "callback"} & keywords.keys()):
            defaults.add(keywords["default"])
    return defaults
