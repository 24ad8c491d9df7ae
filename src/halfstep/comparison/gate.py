"""Gates for continuous integration: `--fail-if "bf16.loss_gap > 0.02"`.

A gate compares figures (`ROW.METRIC`) and numbers, combined with + - * /, parentheses, `and`, `or` and `not`:

    bf16.loss_gap > 0.02
    bf16-lean.samples_per_second < 1.1 * torch-amp.samples_per_second
    fp16.skips > 5 or fp16.metric < 0.95

How it works. Row labels such as `bf16-lean,states=8bit` are not Python names, so the text is first split into tokens: the
longest known label followed by a metric becomes a placeholder name, numbers are normalized, and everything else must be
an operator, a keyword or a parenthesis. The tokens are parsed by the standard `ast` module, and the tree is walked with a
whitelist of nodes; nothing is ever compiled or evaluated as Python.

A figure that was not measured, because its row failed or did not run, fails the gate: a check that could not be made has
not passed.
"""

from __future__ import annotations

import ast
import itertools
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from halfstep.comparison.rows import METRICS
from halfstep.errors import SettingError, nearest

__all__ = ["Gate", "GateResult", "check_gate", "parse_gate"]

Figures = Mapping[str, Mapping[str, float | None]]  # row label -> metric -> value
Figure = tuple[str, str]  # row label, metric

_COMPARISONS: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip
_UNARY: dict[type[ast.unaryop], Callable[[float], float]] = {ast.USub: operator.neg, ast.Not: operator.not_}
_NUMBER = re.compile(r"\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?")
_KEYWORD = re.compile(r"(?:and|or|not)(?![\w.-])")
_OPERATOR = re.compile(r">=|<=|==|!=|[><+\-*/()]")
_NEEDS_OPERAND = {">=", "<=", "==", "!=", ">", "<", "+", "-", "*", "/", "and", "or", "not"}
_METRIC = re.compile(r"\w+")
_NAME = re.compile(r"[^\W\d][^\s()<>*/+]*")  # anything like a row's label, for the message about an unknown one
_MAX_LENGTH = 20_000  # characters
_MAX_PARENTHESES = 20
_MAX_DEPTH = 200  # of the syntax tree; a sum of n terms has depth n


@dataclass(frozen=True)
class Gate:
    """A parsed gate."""

    text: str
    tree: ast.expr
    names: Mapping[str, Figure]  # placeholder -> figure

    @property
    def figures(self) -> tuple[Figure, ...]:
        """The figures it reads, each once."""
        return tuple(dict.fromkeys(self.names.values()))


@dataclass(frozen=True)
class GateResult:
    """The outcome of a gate, with the values of its figures."""

    text: str
    failed: bool
    values: str

    def __str__(self) -> str:
        return f"{'FAILED' if self.failed else 'passed'}: fail if {self.text}  ({self.values})"


def parse_gate(text: str, labels: Sequence[str]) -> Gate:
    """Parse a gate over rows with these labels; a mistake is a SettingError with its position and what is known."""
    reader = _Reader(text, labels)
    if len(text) > _MAX_LENGTH:
        raise reader.error(f"the text is longer than {_MAX_LENGTH:,} characters")
    source, columns = reader.tokenize()
    try:
        tree = ast.parse(source, mode="eval").body
    except SyntaxError as error:
        raise reader.error("unexpected token", _original(columns, max(0, (error.offset or 1) - 1))) from None
    except (RecursionError, MemoryError):
        raise reader.error(f"more than {_MAX_DEPTH} nested operations") from None
    _check(tree, reader, columns)
    if not any(isinstance(node, ast.Compare) for node in ast.walk(tree)):
        raise reader.error("nothing is compared")
    return Gate(text, tree, reader.names)


def check_gate(gate: Gate, figures: Figures) -> GateResult:
    """Evaluate a gate."""
    values = {(row, metric): figures.get(row, {}).get(metric) for row, metric in gate.figures}
    shown = ", ".join(
        f"{row}.{metric} = {'not measured' if value is None else f'{value:.6g}'}"
        for (row, metric), value in values.items()
    )
    known = {figure: value for figure, value in values.items() if value is not None and not math.isnan(value)}
    if len(known) < len(values):  # wherever it stands: `and` does not hide it
        return GateResult(gate.text, failed=True, values=f"{shown}: a check that could not be made has not passed")
    try:
        failed = bool(_evaluate(gate.tree, {name: known[figure] for name, figure in gate.names.items()}))
    except ZeroDivisionError:
        return GateResult(gate.text, failed=True, values=f"{shown}: division by zero")
    return GateResult(gate.text, failed, shown)


class _Reader:
    """Splits the text of a gate into tokens that Python's grammar accepts."""

    def __init__(self, text: str, labels: Sequence[str]) -> None:
        self.text, self.labels = text, list(labels)
        self.names: dict[str, Figure] = {}

    def error(self, problem: str, place: int | None = None) -> SettingError:
        text = self.text if len(self.text) <= 200 else f"{self.text[:200]}..."
        at = "" if place is None else f", column {place + 1} ({self.text[place : place + 20]!r})"
        return SettingError(
            f"--fail-if {text!r}{at}: {problem}{'' if problem.endswith('?') else '.'} Write e.g. {self.labels[-1]}.loss_gap > 0.02, combined with and, or, not. "
            f"Rows: {', '.join(self.labels)}. Metrics: {', '.join(METRICS)}."
        )

    def tokenize(self) -> tuple[str, list[tuple[int, int]]]:
        """The tokens joined by spaces, and for each its column there and in the text."""
        labels = sorted(self.labels, key=len, reverse=True)
        source, columns, depth, place, symbol = "", [], 0, 0, ""
        while place < len(self.text):
            if self.text[place].isspace():
                place += 1
                continue
            symbol, end = self._token(place, labels)
            depth += (symbol == "(") - (symbol == ")")
            if depth > _MAX_PARENTHESES:
                raise self.error(f"parentheses are nested deeper than {_MAX_PARENTHESES} levels", place)
            if depth < 0:
                raise self.error("unmatched closing parenthesis", place)
            columns.append((len(source), place))
            source += f"{symbol} "
            place = end
        if depth:
            raise self.error("unmatched opening parenthesis", self.text.rindex("("))
        if not source:
            raise self.error("the expression is empty")
        if symbol in _NEEDS_OPERAND:
            raise self.error(f"a figure or a number is missing after {symbol!r}", columns[-1][1])
        return source.rstrip(), columns

    def _token(self, place: int, labels: Sequence[str]) -> tuple[str, int]:
        """The token at `place`, and where it ends in the text."""
        label = next((x for x in labels if self.text.startswith(f"{x}.", place)), None)
        if label is not None:
            return self._figure(label, place)
        number = _NUMBER.match(self.text, place)
        if number:
            value = float(number[0])
            return "1e999" if math.isinf(value) else repr(value), number.end()
        other = _KEYWORD.match(self.text, place) or _OPERATOR.match(self.text, place)
        if other:
            return other[0], other.end()
        name = _NAME.match(self.text, place)
        if name is None:
            raise self.error("unexpected character", place)
        row, dot, _ = name[0].rpartition(".")
        if not dot:
            raise self.error(f"expected ROW.METRIC instead of {name[0][:60]!r}", place)
        raise self.error(f"unknown row {row[:60]!r}{_suggest(row, self.labels)}", place)

    def _figure(self, label: str, place: int) -> tuple[str, int]:
        start = place + len(label) + 1
        match = _METRIC.match(self.text, start)
        metric = match[0] if match else ""
        if metric not in METRICS:
            raise self.error(f"unknown metric {metric[:60]!r}{_suggest(metric, METRICS)}", start)
        end = start + len(metric)
        if self.text[end : end + 1] == ".":
            raise self.error(f"{self.text[place:end]} is a number and has no attributes", end)
        name = f"figure{len(self.names)}"
        self.names[name] = (label, metric)
        return name, end


def _suggest(name: str, known: Sequence[str] | Mapping[str, str]) -> str:
    close = nearest(name[:60], known)
    return f". Did you mean {close!r}?" if close else ""


def _original(columns: list[tuple[int, int]], column: int) -> int:
    """The column in the text of the token that contains `column` of the joined tokens."""
    return max(place for start, place in columns if start <= column)


def _check(tree: ast.expr, reader: _Reader, columns: list[tuple[int, int]]) -> None:
    """Reject every node that is not on the whitelist, and trees too deep to evaluate."""
    pending: list[tuple[ast.expr, int]] = [(tree, 1)]
    while pending:  # a loop, because the tree may be deeper than Python's stack
        node, depth = pending.pop()
        if depth > _MAX_DEPTH:
            raise reader.error(f"more than {_MAX_DEPTH} nested operations", _original(columns, node.col_offset))
        children: list[ast.expr]
        match node:
            case ast.BoolOp(values=children):
                pass
            case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in _COMPARISONS for op in ops):
                children = [left, *others]
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                children = [left, right]
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
                children = [operand]
            case ast.Name() | ast.Constant(value=float()):
                children = []
            case _:
                place = _original(columns, node.col_offset)
                raise reader.error("only comparisons, arithmetic, and, or, not and parentheses are allowed", place)
        pending += [(child, depth + 1) for child in children]


def _evaluate(node: ast.expr, values: Mapping[str, float]) -> float | bool:
    match node:
        case ast.BoolOp(op=ast.And(), values=parts):
            return all(_evaluate(part, values) for part in parts)
        case ast.BoolOp(values=parts):
            return any(_evaluate(part, values) for part in parts)
        case ast.Compare(left=left, ops=ops, comparators=others):
            sides = [_evaluate(side, values) for side in (left, *others)]
            pairs = zip(ops, itertools.pairwise(sides), strict=True)
            return all(_COMPARISONS[type(op)](*pair) for op, pair in pairs)
        case ast.BinOp(left=left, op=op, right=right):
            return _ARITHMETIC[type(op)](_evaluate(left, values), _evaluate(right, values))
        case ast.UnaryOp(op=op, operand=operand):
            return _UNARY[type(op)](_evaluate(operand, values))
        case ast.Name(id=name):
            return values[name]
        case ast.Constant(value=float(number)):
            return number
    raise AssertionError(ast.dump(node))
