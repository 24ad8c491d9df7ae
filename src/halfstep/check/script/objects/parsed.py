"""TrainingArguments that a parser of the command line creates: HfArgumentParser, TrlParser.

The script does not show their values, but each flag has a name: the arguments are returned as a call with `fp16=args.fp16`
and `bf16=args.bf16`, which rules compare with what else depends on them (`torch.float16 if args.fp16 else ...`).
"""

from __future__ import annotations

import ast

from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Function, Outline

__all__ = ["is_parsed", "parsed_arguments"]

_PARSES = frozenset({
    "parse_args_into_dataclasses", "parse_args_and_config", "parse_dict", "parse_json_file", "parse_yaml_file",
})  # fmt: skip
_NAME = "TrainingArguments"


def parsed_arguments(outline: Outline, node: ast.expr | None, function: Function) -> ast.Call | None:
    """The arguments that a variable has from a parser, as a call with its precision flags; None if it has not."""
    key = key_of(node)
    values = [binding.value for binding in outline.lookup(key, function)] if key else []
    if node is None or not values or not all(map(_is_parse, values)):
        return None
    flags = [
        ast.keyword(name, ast.copy_location(ast.Attribute(node, name, ast.Load()), node)) for name in ("fp16", "bf16")
    ]
    return ast.copy_location(ast.Call(ast.Name(_NAME, ast.Load()), [], flags), node)


def is_parsed(arguments: ast.Call | None) -> bool:
    """Whether arguments are those of a parser, so that the command line may add an engine."""
    return arguments is not None and not hasattr(arguments.func, "lineno")


def _is_parse(value: ast.expr | None) -> bool:
    # `[0]` and `[-1]` take one of the dataclasses.
    inner = value.value if isinstance(value, ast.Subscript) else value
    return isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) and inner.func.attr in _PARSES
