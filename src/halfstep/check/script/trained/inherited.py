"""The class that an attribute of `self` belongs to: a base class may create the model that a method of another class trains."""

from __future__ import annotations

import ast

from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Outline

__all__ = ["owning_class"]

MAX_DEPTH = 6  # classes between an object's own one and the first of its bases


def owning_class(outline: Outline, key: str, cls: str) -> str:
    """The class of the file that sets an attribute of the objects of a class: itself, a base of it, or the only class that extends it.

    Where two classes that extend the same one set an attribute, each has its own.
    """
    has_bases = any(key_of(base) in outline.classes for base in outline.bases.get(cls, ()))
    setters = {b.function.cls for b in outline.bindings.get(key, ()) if not _is_none(b.value)} - {""}
    if not has_bases and (cls in setters or not setters):
        return cls
    own = _bases_of(outline, cls)
    related = {setter for setter in setters if setter in own or cls in _bases_of(outline, setter)}
    # From the class that extends all others to the first base.
    chain = sorted(related, key=lambda setter: -len(_bases_of(outline, setter)))
    if not chain:
        return cls
    inside = {*_bases_of(outline, chain[0])}
    top = chain[-1]
    beneath = {setter for setter in setters if top in _bases_of(outline, setter)}
    return top if beneath <= inside else cls


def _bases_of(outline: Outline, cls: str) -> list[str]:
    """A class of the file and those it extends, nearest first."""
    names = [cls]
    for name in names:  # grows
        bases = [key_of(base) for base in outline.bases.get(name, ())]
        names += [base for base in bases if base in outline.classes and base not in names]
        if len(names) > MAX_DEPTH:
            break
    return names


def _is_none(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is None
