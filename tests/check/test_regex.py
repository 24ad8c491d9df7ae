"""Expressions that are compiled on first use."""

import importlib
import pkgutil
import re

import pytest

import halfstep.check
from halfstep.check import regex as module
from halfstep.check.regex import regex


def constants():
    """Every deferred expression that is a constant of a module of the package."""
    for info in pkgutil.walk_packages(halfstep.check.__path__, "halfstep.check."):
        for name, value in vars(importlib.import_module(info.name)).items():
            for each in value.values() if isinstance(value, dict) else (value,):
                if isinstance(each, module._Deferred):
                    yield f"{info.name}.{name}", each


def test_expression_behaves_like_the_compiled_one():
    """Its methods and attributes are those of `re.compile`."""
    later, compiled = regex(r"b(.)", re.IGNORECASE), re.compile(r"b(.)", re.IGNORECASE)
    assert later.search("abc").group(1) == compiled.search("abc").group(1)
    assert later.sub(r"\1", "aBc") == compiled.sub(r"\1", "aBc")
    assert (later.pattern, later.flags) == (compiled.pattern, compiled.flags)
    assert regex(rb"\d+").findall(b"1 22") == [b"1", b"22"]


def test_expression_is_compiled_on_first_use():
    """A wrong expression raises where it is used, not where it is defined."""
    wrong = regex("(")
    with pytest.raises(re.error):
        wrong.search("")


def test_method_is_looked_up_once(monkeypatch):
    """The second use does not compile again."""
    later = regex("a")
    later.search("a")
    monkeypatch.setattr(re, "compile", None)
    assert later.search("a")


def test_every_constant_compiles():
    """No expression of the package is wrong; importing its module does not show that."""
    compiled = {name: each.pattern for name, each in constants()}
    assert len(compiled) > 300
