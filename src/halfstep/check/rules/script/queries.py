"""HS200, HS269: functions that report whether a format is supported: names that torch does not have, and those not called."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.objects.values import text_of
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import all_nodes
from halfstep.check.script.syntax.names import chain

__all__ = ["RULES"]

# Functions that answer whether a format is available, by their full names; `is_available` counts for a precision flag only.
_QUERIES = regex(
    r"torch\.(?:cuda|xpu|npu|mlu|musa)\.is_bf16_supported|unsloth\.is_b(?:f|float)16_supported|"
    r"transformers\.(?:utils\.|utils\.import_utils\.)?is_torch_(?:bf16|tf32|fp16)\w*|"
    r"torch\.is_autocast_enabled|torch\.amp\.(?:autocast_mode\.)?is_autocast_available|accelerate\.utils\.is_\w+_available"
)
_EITHER = regex(rf"{_QUERIES.pattern}|torch\.(?:cuda|xpu|mps|backends\.mps)\.is_available")
_NAMED = regex(
    r"\b(?:is_(?:bf|bfloat|fp)16_supported|is_torch_(?:bf16|tf32|fp16)\w*|is_autocast_(?:enabled|available)|"
    r"is_(?:bf16|fp16|fp8)_available|(?:cuda|xpu|mps)\.is_available)\b(?!\s*\()"
)
# The same without what stands before it: the regex engine searches for the literal prefix first, ten times as fast.
_ASKED = regex(
    r"is_(?:(?:bf|bfloat|fp)16_supported|torch_(?:bf16|tf32|fp16)\w*|autocast_(?:enabled|available)|"
    r"(?:bf16|fp16|fp8)_available|available)\b(?!\s*\()"
)
# Names that people write for functions and dtypes of torch, and that no release of it has.
_INVENTED = {
    **dict.fromkeys(
        (f"torch.{module}{name}" for module in ("", "cuda.", "cuda.amp.", "amp.") for name in (
            "is_bfloat16_supported", "is_bf16_available", "is_bfloat16_available")),
        "torch.cuda.is_bf16_supported(including_emulation=False)",
    ),
    **dict.fromkeys(
        ("torch.is_bf16_supported", "torch.amp.is_bf16_supported", "torch.cuda.amp.is_bf16_supported"),
        "torch.cuda.is_bf16_supported(including_emulation=False)",
    ),
    **dict.fromkeys(
        ("torch.cuda.is_fp16_supported", "torch.cuda.is_float16_supported"), "torch.cuda.is_available(): every GPU has float16"
    ),
    "torch.bf16": "torch.bfloat16",
    "torch.fp16": "torch.float16",
    "torch.fp32": "torch.float32",
}  # fmt: skip
_WRITTEN = regex(
    r"torch\.(?:cuda\.)?(?:amp\.)?(?:is_(?:bf|bfloat|fp|float)16_(?:supported|available)|(?:bf16|fp16|fp32)\b)"
)
_PROBES = regex(r"attr\(")
_SWITCH = regex(r"(^|_)(fp16|bf16|tf32|fp8|amp|half|enabled|mixed_precision|float16|bfloat16)(_|$)")


class QueryNotCalled(ScriptRule):
    """A function that reports whether a format is supported is used as a value and not called."""

    code = "HS269"
    name = "precision-query-not-called"
    severity = "error"
    reason = (
        "`torch.cuda.is_bf16_supported` without parentheses is the function itself, which is always true: the choice between bf16 and "
        "fp16 picks bf16 on every GPU, and `not torch.cuda.is_bf16_supported` is always False. On a GPU without bf16 the run fails or "
        "emulates the format at a fraction of its speed."
    )
    bad = (
        "import torch\n\ndtype = torch.bfloat16 if torch.cuda.is_bf16_supported else torch.float16\n",
        "import torch\nfrom transformers import TrainingArguments\n\n"
        "args = TrainingArguments('out', fp16=not torch.cuda.is_bf16_supported, bf16=torch.cuda.is_bf16_supported)\n",
        "import torch\n\nscaler = torch.amp.GradScaler('cuda', enabled=torch.cuda.is_available)\nprint(scaler)\n",
    )
    good = (
        "import torch\n\ndtype = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16\n",
        "import torch\n\nsupported = torch.cuda.is_bf16_supported\ndtype = torch.bfloat16 if supported(including_emulation=False) else torch.float16\n",
        "import torch\n\nif hasattr(torch.cuda, 'is_bf16_supported') and torch.cuda.is_bf16_supported(including_emulation=False):\n    print('bf16')\n",
    )
    references = ("https://docs.pytorch.org/docs/stable/generated/torch.cuda.is_bf16_supported.html",)
    words = ("is_bf16_supported", "is_bfloat16_supported", "bf16_available")

    def check(self, script: Script) -> Iterator[Finding]:
        """Queries as a condition, as an operand of `and`, `or` and `not`, or as the value of a precision flag."""
        if not _names_query(script.source.text):
            return
        full = script.outline.names.full
        assigned = {text_of(t) for n in all_nodes(script.tree) if isinstance(n, ast.Assign) for t in n.targets}
        conditions = list(_conditions(script.tree))
        # `use_bf16 = torch.cuda.is_bf16_supported`, of which only the truth counts later.
        flags = {text_of(node) for node, _ in conditions if isinstance(node, (ast.Name, ast.Attribute))}
        assigns = [n for n in all_nodes(script.tree) if isinstance(n, ast.Assign)]
        flags -= script.outline.calls.keys()
        conditions += [(n.value, True) for n in assigns if text_of(n.targets[0]) in flags]
        for node, flag in conditions:
            name = full(node) if isinstance(node, (ast.Attribute, ast.Name)) else None
            if text_of(node) in assigned:
                continue  # a test replaces the function
            if _asks_accelerator(node) or (name and (_QUERIES if not flag else _EITHER).fullmatch(name)):
                yield self.finding(
                    script.where(node),
                    f"`{text_of(node)}` is a function, which is always true; it is not called",
                    instead=f"{text_of(node)}()",
                )


class InventedName(ScriptRule):
    """A precision query or a dtype is read from torch under a name that torch does not have."""

    code = "HS200"
    name = "invented-torch-name"
    severity = "error"
    reason = (
        "`torch.cuda.is_bfloat16_supported` and `torch.bf16` raise AttributeError. The function is `torch.cuda.is_bf16_supported`; "
        "`is_bfloat16_supported` is Unsloth's name for it. The line is often reached late: after the data is prepared and the model is loaded."
    )
    bad = (
        "import torch\nfrom transformers import TrainingArguments\n\n"
        "def arguments():\n    return TrainingArguments('out', bf16=torch.cuda.is_bfloat16_supported())\n",
        "import torch\n\ndef load(x):\n    with torch.autocast('cuda', dtype=torch.bf16):\n        return model(x)\n",
    )
    good = (
        "import torch\nfrom transformers import TrainingArguments\n\n"
        "def arguments():\n    return TrainingArguments('out', bf16=torch.cuda.is_bf16_supported(including_emulation=False))\n",
        "import torch\n\ndtype = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16\n",
        "from transformers import TrainingArguments\nfrom unsloth import is_bfloat16_supported\n\n"
        "args = TrainingArguments('out', bf16=is_bfloat16_supported())\n",
        "import torch\n\nif hasattr(torch.cuda, 'is_bfloat16_supported') and torch.cuda.is_bfloat16_supported():\n    print('bf16')\n",
        "import torch\n\ntorch.bf16 = torch.bfloat16\nx = torch.zeros(2, dtype=torch.bf16)\n",
    )
    references = (
        "https://docs.pytorch.org/docs/stable/generated/torch.cuda.is_bf16_supported.html",
        "https://docs.pytorch.org/docs/stable/tensor_attributes.html#torch.dtype",
        "measured: torch 2.13.0, AttributeError for each name",
    )
    words = ("is_bfloat16_supported", "torch.bf16", "torch.fp16", "torch.fp32", "bf16_available", "fp16_supported")

    def check(self, script: Script) -> Iterator[Finding]:
        """Names below torch that are read, without a test for them or a handler of the error."""
        if not _WRITTEN.search(script.source.text):
            return
        names = script.outline.names
        nodes = [n for n in all_nodes(script.tree) if isinstance(n, ast.Attribute)]
        added = {names.full(n) for n in nodes if isinstance(n.ctx, ast.Store)}
        reported: set[tuple[str, ast.AST | None]] = set()  # the first read of a function raises
        for node in sorted(nodes, key=lambda n: n.lineno):
            right = _INVENTED.get(full := names.full(node))
            if right is None or full in added or names.ambiguous(node) or _is_tried(script, node):
                continue
            function = next((n for n in script.above(node) if isinstance(n, (ast.FunctionDef, ast.Lambda))), None)
            if (full, function) in reported:
                continue
            reported.add((full, function))
            yield self.finding(script.where(node), f"torch has no `{full}`: AttributeError", instead=right)


def _is_tried(script: Script, node: ast.AST) -> bool:
    """Whether an `except` handles the error of a statement, or a condition around it asks whether the name exists."""
    for parent in script.above(node):
        test = parent.test if isinstance(parent, (ast.If, ast.IfExp)) else parent
        if isinstance(parent, ast.Try) or (
            isinstance(test, (ast.BoolOp, ast.Call, ast.Compare, ast.UnaryOp)) and _PROBES.search(text_of(test))
        ):
            return True
    return False


def _names_query(text: str) -> bool:
    """Whether a text names a query that it does not call there, imports aside: most files need no closer look."""
    if not _ASKED.search(text):
        return False
    for match in _NAMED.finditer(text):
        before = text[text.rfind("\n", 0, match.start()) + 1 : match.start()].lstrip()
        is_imported = not before and text[match.end() : match.end() + 1] in {",", "\n", ""}
        if not is_imported and not before.startswith(("from ", "import ", "@")):
            return True
    return False


def _asks_accelerator(node: ast.expr) -> bool:
    """Whether an expression is `get_accelerator().is_bf16_supported` of DeepSpeed."""
    if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Call):
        return False
    asks = node.attr in {"is_bf16_supported", "is_fp16_supported"}
    return asks and chain(node.value.func)[-1:] == ("get_accelerator",)


def _conditions(tree: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    """Each expression of which only the truth counts, and whether it is the value of a precision flag."""
    for node in all_nodes(tree):
        if isinstance(node, (ast.If, ast.IfExp, ast.While, ast.Assert)):
            yield from ((part, False) for part in _operands(node.test))
        elif isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg and _SWITCH.search(keyword.arg.lower()):
                    yield from ((part, True) for part in _operands(keyword.value))
        elif isinstance(node, ast.Assign) and (names := chain(node.targets[0])) and _SWITCH.search(names[-1].lower()):
            yield from ((part, True) for part in _operands(node.value) if part is not node.value)
        elif isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            named = (v for k, v in pairs if isinstance(k, ast.Constant) and _SWITCH.search(str(k.value).lower()))
            yield from ((part, True) for value in named for part in _operands(value))


def _operands(node: ast.expr) -> Iterator[ast.expr]:
    """The operands of `and`, `or` and `not`, or the expression itself."""
    if isinstance(node, ast.BoolOp):
        for value in node.values:
            yield from _operands(value)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield from _operands(node.operand)
    else:
        yield node


RULES: tuple[type[Rule], ...] = (InventedName, QueryNotCalled)
