"""The facts of one script: its traces, scalers and autocast regions, each with its place in the text.

    names      imports and aliases          -> torch.cuda.amp.autocast
    outline    functions, assignments       -> what `scaler` may be
    literals   arguments                    -> `fp16=True` for `fp16=CFG.fp16`
    choices    expressions                  -> every dtype, device or string that one may be
    values     calls                        -> an autocast region and its dtype, a scaler
    recognise  calls                        -> scale, backward, unscale, clip, step, update
    saving     calls                        -> the objects whose state a checkpoint contains
    flow       statements of one function   -> events under guards, loops and regions
    trace      functions combined           -> what a run does, in order
    weights    names of one model           -> the dtype of its weights
    training   optimizers and Trainers      -> which 16-bit weights they update

A text that does not mention mixed precision is not parsed at all, which is the case for most files of a project.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from halfstep.check.files.python import parse_python
from halfstep.check.files.source import Source
from halfstep.check.finding import Place
from halfstep.check.regex import regex
from halfstep.check.script.assumed.enums import write_members
from halfstep.check.script.assumed.named_parts import write_named_parts
from halfstep.check.script.assumed.partials import write_partials
from halfstep.check.script.flow.event import Event
from halfstep.check.script.flow.trace import Trace, read_traces
from halfstep.check.script.objects.modules import classes_under_autocast
from halfstep.check.script.objects.training import Training
from halfstep.check.script.objects.values import AUTOCASTS, Autocast, Scaler, autocasts_of, make_scaler
from halfstep.check.script.regions.callers import functions_in_autocast
from halfstep.check.script.syntax.edits import Lines
from halfstep.check.script.syntax.literals import write_in_place
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import MAX_BINDINGS, Function, Outline
from halfstep.check.script.syntax.plain import make_plain
from halfstep.check.script.syntax.relevant import NO_WORDS, RuleWords, shortest
from halfstep.check.script.syntax.returned import receivers_of
from halfstep.check.script.syntax.visit import read_outline
from halfstep.check.script.syntax.words import contains_any, without_comments, without_documentation
from halfstep.check.settings import Settings

__all__ = ["Script", "code_of", "read_script"]

# The words that rules over scripts look for, and those that rules over configurations look for in addition. Searching
# for each word is several times faster than one pattern. Only short words need a check of their boundaries; a
# pattern is tried only where the text contains its word.
_RULED = (
    "autocast", "GradScaler", "unscale_", ".scale(", ".half(", "float16", "torch.half", "HalfTensor", "is_bf16_supported",
)  # fmt: skip
_RULED_SHORT = {
    word: regex(pattern)
    for word, pattern in {
        "apex": r"apex(?!\w)(?<!\wapex)", ".amp": r"\.amp(?!\w)", "amp.": r"amp\.(?<!\wamp\.)", "import amp": r"import amp(?!\w)",
    }.items()
}  # fmt: skip
_TRAINS = ("backward(", "Trainer", "TrainingArguments", "optimizer", ".fit(")
# Of other files: transformers' models leave autocast with the first, and gather sharded weights with the others.
_HELPER = "maybe_autocast"
_GATHERS = ("is_deepspeed_zero3_enabled", "integrations.deepspeed", "import deepspeed", "deepspeed.zero.")
_MENTIONED = ("fp16", "bf16", "deepspeed", "loss_scale", "TrainingArguments", "mixed_precision")
_MENTIONED_SHORT = {
    "amp": regex(r"amp(?!\w)(?<!\wamp)"),
    "precision": regex(r"precision(?<!\wprecision)[\"']?\s*[=:]"),
}
# Without any of these calls there is no training loop whose order could be wrong.
_ACTS = {"backward", "manual_backward", "autocast", "GradScaler", "scale", "unscale_", "scale_loss", "initialize"}


@dataclass(eq=False)
class Script:
    """The facts of one script. Empty (`about` is False) if it does not mention mixed precision."""

    source: Source
    settings: Settings
    tree: ast.Module
    about: bool = True
    outline: Outline = field(default_factory=lambda: Outline(Function(ast.Module([], []), "<module>")))
    is_assumed: bool = False  # a setting has one value: what the script does with the others is left out

    @cached_property
    def traces(self) -> tuple[Trace, ...]:
        """What each root of the script does, in order."""
        acts = self.outline.calls.keys() & _ACTS or "autocast" in self.outline.loads
        # The class may only annotate the parameter that another file passes.
        acts = acts or any(i.full.endswith("GradScaler") for i in self.outline.names.imported)
        return read_traces(self.outline) if self.about and acts else ()

    @cached_property
    def training(self) -> Training:
        """The models with 16-bit weights, and what trains them."""
        return Training(self.outline)

    @cached_property
    def lines(self) -> Lines:
        """The text by lines, for places and edits."""
        return Lines(self.source.text)

    @cached_property
    def scalers(self) -> tuple[Scaler, ...]:
        """Every GradScaler the script creates."""
        names = [n for n in self.outline.calls if "scaler" in n.lower()]
        names += [
            i.alias.asname for i in self.outline.names.imported if i.full.endswith("GradScaler") and i.alias.asname
        ]
        calls = [c for name in dict.fromkeys(names) for c in self.outline.calls.get(name, ())]
        made = [make_scaler(self.outline, call, function) for call, function in calls]
        return tuple(each for scaler in made if scaler is not None for each in self._each(scaler))

    def _each(self, scaler: Scaler) -> Iterator[Scaler]:
        """A scaler, or each of those that a function creates which is called for several."""
        keys = receivers_of(self.outline, scaler.parent) if not scaler.key else {""}
        is_known = 1 < len(keys) <= MAX_BINDINGS and "" not in keys
        yield from (dataclasses.replace(scaler, key=key) for key in sorted(keys)) if is_known else (scaler,)

    @cached_property
    def scaler_of(self) -> dict[ast.AST, Scaler]:
        """The scalers by the calls that create them."""
        return {scaler.node: scaler for scaler in self.scalers}

    @cached_property
    def _scalers_by_name(self) -> dict[str, list[Scaler]]:
        by_name: dict[str, list[Scaler]] = {}
        for scaler in self.scalers:
            by_name.setdefault(scaler.key.rsplit(".", 1)[-1], []).append(scaler)
        return by_name

    def scalers_named(self, key: str) -> list[Scaler]:
        """The scalers assigned to the last name of `key`, at most as many as hand-written code has."""
        return self._scalers_by_name.get(key.rsplit(".", 1)[-1], [])[:MAX_BINDINGS]

    @cached_property
    def autocasts(self) -> tuple[Autocast, ...]:
        """Every call that creates an autocast region, wherever it is written."""
        regions = []
        for api in AUTOCASTS & self.outline.library_calls.keys():
            for call, function in self.outline.library_calls[api]:
                regions += [
                    dataclasses.replace(a, where=self.where(call)) for a in autocasts_of(self.outline, call, function)
                ]
        return tuple(sorted(regions, key=lambda a: (a.where.line, a.where.column)))

    @cached_property
    def _by_kind(self) -> dict[str, list[Event]]:
        by_kind: dict[str, list[Event]] = {}
        for trace in self.traces:
            for event in trace:
                by_kind.setdefault(event.kind, []).append(event)
        return by_kind

    @cached_property
    def _parts(self) -> dict[Function, int]:
        """Functions by the part of the script they belong to: see `near`."""
        # Union-find over traces: two traces that share a function, a class or global variables are one part.
        first: dict[Function | str, int] = {}  # the first trace in which each function, class or the module occurs
        joined = list(range(len(self.traces)))  # each trace and an earlier one of the same part
        for number, trace in enumerate(self.traces):
            functions = {event.function for event in trace}
            # Test methods share a class and nothing else.
            names = {f.cls for f in functions if f.cls and not f.name.lstrip("_").startswith("test")}
            names |= {key_of(b) for cls in names for b in self.outline.bases.get(cls, ())} & self.outline.classes.keys()
            names |= {"<module>"} if any(self._is_global(event) for event in trace) else set()
            members: set[Function | str] = {*functions, *names}
            for member in members:
                joined[_top(joined, first.setdefault(member, number))] = _top(joined, number)
        return {member: _top(joined, number) for member, number in first.items() if isinstance(member, Function)}

    def _is_global(self, event: Event) -> bool:
        """Whether an event inside a function is about a global variable."""
        root = (event.optimizer or event.scaler).partition(".")[0].partition("[")[0]
        if not root or root == "self" or event.roots:
            return False
        scope: Function | None = event.function
        while scope is not None and scope is not self.outline.module:
            if root in scope.params or any(b.function is scope for b in self.outline.bindings.get(root, ())):
                return False
            scope = scope.parent
        return True

    def near(self, event: Event, *kinds: str) -> Iterator[Event]:
        """The events of these kinds connected to `event`: through calls, a shared class or global variables."""
        part = self._parts.get(event.function)  # None: no trace has this function
        return (e for e in self.events(*kinds) if part is not None and self._parts[e.function] == part)

    def events(self, *kinds: str) -> Iterator[Event]:
        """Each event of these kinds, once per trace it is in."""
        for kind in kinds:
            yield from self._by_kind.get(kind, ())

    def has(self, *kinds: str) -> bool:
        """Whether any trace has such an event."""
        return any(kind in self._by_kind for kind in kinds)

    def where(self, node: ast.AST) -> Place:
        """The place of a node, for `Rule.finding`."""
        line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
        end_line, end_column = getattr(node, "end_lineno", None), getattr(node, "end_col_offset", None)
        first = self.lines.column(line, column)
        if end_line is None or end_column is None:
            return self.source.place(line, first)
        return self.source.place(line, first, end_line, self.lines.column(end_line, end_column))

    def at(self, node: ast.AST) -> str:
        """The line of a node in a message, as the reader counts it: in a notebook with its cell."""
        place = self.where(node)
        return f"line {place.line}" if place.cell is None else f"line {place.line} of cell {place.cell}"

    @cached_property
    def classes_under_autocast(self) -> dict[str, frozenset[str]]:
        """The classes whose forward runs under autocast in this file, with the dtypes it may use ("?": unknown)."""
        return classes_under_autocast(self.outline, self.events("enter_autocast"))

    @cached_property
    def functions_in_autocast(self) -> frozenset[Function]:
        """The functions that some caller in the file calls inside a region."""
        if not any(word in self.source.text for word in ("autocast", "amp")):
            return frozenset()
        return functions_in_autocast(self.outline, self.classes_under_autocast)

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """The ancestors of a node, innermost first, up to its function or the module."""
        return self.outline.above(node)

    def statement(self, node: ast.AST) -> ast.stmt | None:
        """The statement a node is part of."""
        parent: ast.AST | None = node
        while parent is not None and not isinstance(parent, ast.stmt):
            parent = self.outline.parents.get(parent)
        return parent


def _top(joined: list[int], number: int) -> int:
    """The trace that represents all those joined with this one."""
    while joined[number] != number:
        joined[number] = joined[joined[number]]
        number = joined[number]
    return number


def _mentions(text: str, words: tuple[str, ...], short: Mapping[str, re.Pattern[str]]) -> bool:
    if contains_any(text, words):
        return True
    return any(word in text and pattern.search(text) for word, pattern in short.items())


def code_of(text: str) -> str:
    """The part of a text in which a mention of precision matters; where it trains, comments show what it is about."""
    code = without_documentation(text)
    if contains_any(code, _TRAINS):
        return code
    code = without_comments(code).replace(_HELPER, "")
    for name in _GATHERS if "deepspeed" in code else ():
        code = code.replace(name, "")
    return code


def read_script(source: Source, settings: Settings, words: RuleWords = NO_WORDS) -> Script:
    """Read a script's facts; SyntaxError if it cannot be parsed.

    `words` are those that single rules declare; a script that mentions one is read as well.
    """
    text = source.text
    own_words = shortest((*_RULED, *words.words))
    ruled = _mentions(text, own_words, _RULED_SHORT)
    code = code_of(text) if ruled or "deepspeed" in text else text
    ruled = ruled and (code is text or _mentions(code, own_words, _RULED_SHORT))
    if not ruled:
        if not _mentions(code, _MENTIONED, _MENTIONED_SHORT):
            return Script(source, settings, ast.Module([], []), about=False)
        ruled = _mentions(code, words.lines, {})
    tree = parse_python(text, source.path)
    # A script that only contains configurations needs no outline: no HS1xx rule applies.
    if not ruled:
        return Script(source, settings, tree)
    write_members(tree, with_properties=False)
    make_plain(tree)
    write_named_parts(tree, text)
    write_partials(tree, text)
    outline = read_outline(tree, text, (*words.words, *words.lines))
    # PaddlePaddle has classes and methods of the same names, with other rules.
    if outline.names.uses("paddle") and not any(i.full.split(".")[0] == "torch" for i in outline.names.imported):
        return Script(source, settings, tree)
    write_in_place(outline)
    return Script(source, settings, tree, outline=outline)
