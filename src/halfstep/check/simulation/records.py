"""Records that a script reads from data files: `settings = json.load(file)`, whose entries are written together.

A run may give two entries any values, but whoever writes the file chooses both: that `bf16` and `loss_scaling` are both true is no
mistake of the script.
"""

from __future__ import annotations

import ast
from functools import cached_property

__all__ = ["Records"]

_READS = {"load", "loads", "safe_load", "full_load"}
_FORMATS = {"json", "yaml", "toml", "tomllib", "OmegaConf"}


class Records:
    """The entries of each record, found when they are first asked for."""

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree

    def combine(self, runs: list[tuple[dict[str, int], bool]]) -> bool:
        """Whether a mistake needs certain values of two entries of one record; `runs` are the answers, and whether each has the mistake."""
        wrong = [answers for answers, is_wrong in runs if is_wrong]
        shared = (
            {question: answer for question, answer in wrong[0].items() if all(a.get(question) == answer for a in wrong)}
            if wrong
            else {}
        )
        decisive = {
            _last(question)
            for question, answer in shared.items()
            if any(answers.get(question, answer) != answer for answers, _ in runs)
        }
        return len(decisive) > 1 and any(len(decisive & entries) > 1 for entries in self._entries.values())

    @cached_property
    def _entries(self) -> dict[str, set[str]]:
        """The entries that the script reads of each variable with the contents of a data file, or with one row of them."""
        nodes = list(ast.walk(self._tree))
        entries: dict[str, set[str]] = {}
        for node in nodes:
            if isinstance(node, ast.Assign) and any(map(_reads, ast.walk(node.value))):
                entries |= {target.id: set() for target in node.targets if isinstance(target, ast.Name)}
        for node in nodes:
            if isinstance(node, ast.For) and isinstance(node.target, ast.Name):
                parts = list(ast.walk(node.iter))
                if any(_reads(part) or (isinstance(part, ast.Name) and part.id in entries) for part in parts):
                    entries[node.target.id] = set()
        for node in nodes if entries else ():
            if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.value, ast.Name):
                name = node.attr if isinstance(node, ast.Attribute) else getattr(node.slice, "value", None)
                entries.get(node.value.id, set()).add(str(name))
        return entries


def _reads(node: ast.AST) -> bool:
    """Whether a node is a call that reads a data file."""
    func = node.func if isinstance(node, ast.Call) else None
    is_known = isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and func.value.id in _FORMATS
    return is_known and isinstance(func, ast.Attribute) and func.attr in _READS


def _last(question: str) -> str:
    """The entry that a question is about: `bf16` of `setting bf16` and of `settings.bf16 == True`."""
    name = question.partition(" == ")[0].removeprefix("setting ")
    return name.rpartition(".")[2].strip("()'[]\"")
