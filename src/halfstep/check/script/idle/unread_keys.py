"""Keys of a dictionary of settings that nothing in the file reads, other than to print or to log them.

The dictionary is one of the module or of a function, and stays in the file: it is read by literal keys, shown as a whole, or passed
to functions that have it under the same name. The file reads most of its other keys.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.files.python import parse_python
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import all_nodes
from halfstep.check.script.syntax.names import key_of
from halfstep.check.script.syntax.outline import Outline, last_name_of
from halfstep.check.script.syntax.shown import SHOWS, is_message, shows_only
from halfstep.check.script.syntax.unread_settings import FEW, SETTINGS, Settings, for_this_file

__all__ = ["unread_keys"]

_READS = {"get", "pop", "getattr"}
_SHARED = {"items", "keys", "values", "copy"}
_STORES = {"dump", "dumps", "save", "safe_dump", "init", "pformat", "str", "len", "repr", "isinstance"}
_PLAIN = {"object", "Module", "Dataset", "ABC"}  # classes that read no attribute of theirs by a name of the script's
MAX_SHOWN = 2  # variables between a key and the message that shows it

Parents = dict[ast.AST, ast.AST]


def unread_keys(script: Script, settings: Settings) -> Iterator[tuple[ast.AST, str, str]]:
    """The keys, each with what is wrong with it and what should use it."""
    tables = list(_tables(script.tree, settings))
    if not tables:
        return
    settings = for_this_file(script.outline, all_nodes(script.tree), settings)
    tree = _as_written(script)
    if tree is None:
        return
    nodes = list(ast.walk(tree))
    parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
    for name, table in _tables(tree, settings):
        items = zip(table.keys, table.values, strict=True)
        keys = {k.value: (k, v) for k, v in items if isinstance(k, ast.Constant) and isinstance(k.value, str)}
        if len(keys) < len(table.keys):
            continue
        read = _read_keys(nodes, parents, set(keys), table)
        if len(read) < max(FEW, len(keys) * 2 / 3) or not _stays(script.outline, nodes, parents, name):
            continue
        for key, (node, value) in keys.items():
            use = settings.use_of_field(key, value) if key not in read else ""
            if use:
                yield node, f"`{key}` is never read in this file, which reads {len(read)} other keys of `{name}`", use


def _tables(tree: ast.Module, settings: Settings) -> Iterator[tuple[str, ast.Dict]]:
    """The dictionaries with the name of settings that have a key of interest, each with that name."""
    for node in all_nodes(tree):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(node.value, ast.Dict):
            continue
        table = node.value
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        name = key_of(targets[0]) if len(targets) == 1 else ""
        items = zip(table.keys, table.values, strict=True)
        if SETTINGS.search(name.removeprefix("self.")) and any(
            isinstance(key, ast.Constant) and isinstance(key.value, str) and settings.use_of_field(key.value, value)
            for key, value in items
        ):
            yield name, table


def _as_written(script: Script) -> ast.Module | None:
    """The tree of the text: that of the script has the values of settings in the place of what reads them."""
    try:
        return parse_python(script.source.text)
    except (SyntaxError, ValueError, RecursionError):
        return None


def _read_keys(nodes: list[ast.AST], parents: Parents, keys: set[str], table: ast.Dict) -> set[str]:
    """The keys that the file names in another way than to set, to show or to record their value."""
    own = {id(key) for key in table.keys}
    read = set()
    for node in nodes:
        if not isinstance(node, ast.Constant) or node.value not in keys or node.value in read or id(node) in own:
            continue
        if not isinstance(node.value, str) or _is_label(node, parents):
            continue
        if not _is_shown(nodes, parents, node, MAX_SHOWN):
            read.add(node.value)
    return read


def _is_label(node: ast.Constant, parents: Parents) -> bool:
    """Whether a string is the name of an entry in what a logger gets, or the key of an assignment."""
    parent = parents.get(node)
    if isinstance(parent, ast.Subscript):
        return isinstance(parent.ctx, ast.Store)
    is_key = isinstance(parent, ast.Dict) and any(key is node for key in parent.keys)
    return is_key and isinstance(parent, ast.Dict) and is_message(parents, parent)


def _is_shown(nodes: list[ast.AST], parents: Parents, node: ast.AST, depth: int) -> bool:
    """Whether the value that a key or a variable stands for only reaches messages, also through variables of its own."""
    parent = parents.get(node)
    if isinstance(node, ast.Constant):
        is_get = isinstance(parent, ast.Call) and last_name_of(parent.func) in _READS and node in parent.args
        if not is_get and not (isinstance(parent, ast.Subscript) and parent.slice is node):
            return False
        node, parent = parent or node, parents.get(parent or node)
    if isinstance(node, ast.expr) and is_message(parents, node):
        return True
    while isinstance(parent, ast.BinOp | ast.UnaryOp | ast.Call) and depth:
        if isinstance(parent, ast.Call) and last_name_of(parent.func) not in {"int", "float", "bool", "max", "min"}:
            return False
        node, parent = parent, parents.get(parent)
    target = parent.targets[0] if isinstance(parent, ast.Assign) and len(parent.targets) == 1 else None
    if not isinstance(target, ast.Name) or not depth:
        return False
    loads = [n for n in nodes if isinstance(n, ast.Name) and n.id == target.id and isinstance(n.ctx, ast.Load)]
    return bool(loads) and all(_is_shown(nodes, parents, load, depth - 1) for load in loads)


def _stays(outline: Outline, nodes: list[ast.AST], parents: Parents, name: str) -> bool:
    """Whether everything that the file does with a dictionary is to read literal keys, and to show or store it as a whole."""
    attribute = f"self.{name.removeprefix('self.')}"
    is_attribute = False
    for node in nodes:
        key = key_of(node) if isinstance(node, ast.Name | ast.Attribute) else ""
        if key not in (name, attribute) or isinstance(getattr(node, "ctx", None), ast.Store):
            continue
        parent = parents.get(node)
        if isinstance(parent, ast.Assign) and key_of(parent.targets[0]) == attribute:
            is_attribute = True  # `self.config = config`
        elif not _is_stored(nodes, parents, node) and not _keeps(
            outline, parents, node, parent, name.removeprefix("self.")
        ):
            return False
    return not is_attribute or all(
        getattr(b, "id", getattr(b, "attr", "")) in _PLAIN for bs in outline.bases.values() for b in bs
    )


def _keeps(outline: Outline, parents: Parents, node: ast.AST, parent: ast.AST | None, name: str) -> bool:
    if isinstance(parent, ast.Subscript) and parent.value is node:
        return isinstance(parent.slice, ast.Constant)
    if isinstance(parent, ast.Attribute):
        call = parents.get(parent)
        if not isinstance(call, ast.Call) or call.func is not parent:
            return False
        if parent.attr in _READS:
            return bool(call.args) and isinstance(call.args[0], ast.Constant)
        return parent.attr in _SHARED and _is_listed(parents, call)
    if isinstance(parent, ast.keyword):
        call = parents.get(parent)
        is_own = isinstance(call, ast.Call) and _takes(outline, call, name) and parent.arg == name
        return is_own or (parent.arg == "config" and isinstance(call, ast.Call) and last_name_of(call.func) == "init")
    if isinstance(parent, ast.Call) and node in parent.args:
        last = last_name_of(parent.func)
        return last in SHOWS or last in _STORES or _takes(outline, parent, name)
    return isinstance(parent, ast.FormattedValue)


def _is_stored(nodes: list[ast.AST], parents: Parents, node: ast.AST) -> bool:
    """Whether a dictionary is an entry of another one that is only saved: `{"model": model.state_dict(), "config": config}`."""
    whole = parents.get(node)
    outer = parents.get(whole) if isinstance(whole, ast.Dict) else None
    target = outer.targets[0] if isinstance(outer, ast.Assign) and len(outer.targets) == 1 else None
    if isinstance(outer, ast.Call):
        return last_name_of(outer.func) in _STORES
    loads = [
        n
        for n in nodes
        if isinstance(n, ast.Name) and n.id == getattr(target, "id", "") and isinstance(n.ctx, ast.Load)
    ]
    users = [parents.get(load) for load in loads]
    return bool(users) and all(isinstance(call, ast.Call) and last_name_of(call.func) in _STORES for call in users)


def _takes(outline: Outline, call: ast.Call, name: str) -> bool:
    """Whether a call is of a function or class of this file that has the dictionary under the same name."""
    last = last_name_of(call.func)
    named = [f for f in outline.functions if last in (f.name, f.cls if f.name == "__init__" else "")]
    return bool(named) and all(name in f.params for f in named)


def _is_listed(parents: Parents, node: ast.AST) -> bool:
    """Whether the items of a dictionary are only printed or recorded: in a loop, or copied for a logger."""
    parent = parents.get(node)
    if isinstance(parent, ast.For):
        return parent.iter is node and shows_only(parent.body)
    if isinstance(parent, ast.comprehension):
        whole = parents.get(parent)
        return isinstance(whole, ast.expr) and is_message(parents, whole)
    return isinstance(node, ast.expr) and is_message(parents, node)
