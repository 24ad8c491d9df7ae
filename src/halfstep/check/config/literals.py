"""Python literals as configuration trees with positions."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import replace

from halfstep.check.script.syntax.children import all_nodes
from halfstep.check.script.syntax.names import Names, chain
from halfstep.precision.node import UNKNOWN, Block, Entry, Items, Node, Scalar, Span

__all__ = ["Literals", "copied_name", "literals_of", "subscript"]

_CHANGES = frozenset({"update", "pop", "setdefault", "clear", "popitem", "merge"})
_NAMESPACES = frozenset(
    {
        "create",
        "SimpleNamespace",
        "Namespace",
        "EasyDict",
        "edict",
        "AttrDict",
        "DotDict",
        "Munch",
        "ConfigDict",
        "DictConfig",
        "Box",
    }
)
_MAX_DEPTH = 50
_MAX_FOLLOWED = 3  # variables inside dictionaries of variables: each level may repeat the one below
# The nodes that bind names, and those that assign or change values; most nodes do neither.
_BINDING = {ast.Name, ast.Attribute, ast.arg, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.alias}
_NOTED = {ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Delete, ast.Call}
Path = tuple[str, ...]


class Literals:
    """Reads expressions of one script; a name bound once to a constant is that constant."""

    def __init__(self, nodes: Sequence[ast.AST], text: str, names: Names) -> None:
        self.names = names
        self.text = text
        self.lines = text.split("\n")
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line) + 1)
        self.constants: dict[str, ast.Constant] = {}
        self.variables: dict[int, str] = {}  # id of a dictionary expression -> the variable it is bound to
        self.changes: dict[str, list[Path | None]] = {}  # variable -> the keys that are set later; None: any
        self.changed_at: dict[str, list[ast.AST]] = {}  # variable -> the statement or call of each of these changes
        self.blocks: dict[str, ast.expr] = {}  # variable -> the dictionary it is bound to
        functions = (n for n in nodes if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))
        self.functions = [(n.lineno, n.end_lineno or 0) for n in functions]  # outer ones first
        self.namespaces: dict[
            str, ast.expr
        ] = {}  # variable -> the dictionary, or the call, that its attributes come from
        self.bound_at: dict[str, list[int]] = {}  # variable -> the lines that bind it
        self.all_blocks: dict[str, list[ast.expr]] = {}  # variable -> every dictionary it is bound to
        self._followed: list[ast.expr] = []  # the dictionaries of variables that are being read
        self._updates: list[tuple[str, Path, ast.Call]] = []  # read once all dictionaries are known
        bound: dict[str, int] = {}
        for node in nodes:
            kind = type(node)
            if kind in _BINDING:
                if name := _bound_name(node):
                    bound[name] = bound.get(name, 0) + 1
                    self.bound_at.setdefault(name, []).append(getattr(node, "lineno", 0))
            elif kind in _NOTED:
                self._note(node)
        self.constants = {name: value for name, value in self.constants.items() if bound.get(name) == 1}
        self.blocks = {name: value for name, value in self.blocks.items() if bound.get(name) == 1}
        self.namespaces = {name: value for name, value in self.namespaces.items() if bound.get(name) == 1}
        for name, path, call in self._updates:
            self._change_many(name, path, call)

    def _note(self, node: ast.AST) -> None:
        """Record the bindings and changes that a statement makes."""
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Subscript):
                    for name, keys in _paths(target):
                        self._change(name, keys, node)
                elif name := ".".join(chain(target)):
                    self.variables[id(node.value)] = name
                    if isinstance(node.value, ast.Constant) and not isinstance(node, ast.AugAssign):
                        self.constants[name] = node.value
                    elif self.is_block(node.value) and not isinstance(node, ast.AugAssign):
                        self.blocks[name] = node.value
                        self.all_blocks.setdefault(name, []).append(node.value)
                    elif (made := _namespace_of(node.value)) is not None:
                        self.namespaces[name] = made
        elif isinstance(node, ast.Delete):
            for target in node.targets:
                self._change(*subscript(target), node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
            name, path = subscript(node.func.value)
            if node.func.attr == "update":
                self._updates.append((name, path or (), node))
            else:
                key = node.args[0] if node.args else None
                known = isinstance(key, ast.Constant) and isinstance(key.value, str)
                self._change(
                    name, (*(path or ()), key.value) if known and isinstance(key, ast.Constant) else None, node
                )

    def _change(self, name: str, path: tuple[object, ...] | None, node: ast.AST) -> None:
        if name:
            self.changes.setdefault(name, []).append(None if path is None else tuple(map(str, path)))
            self.changed_at.setdefault(name, []).append(node)

    def _change_many(self, name: str, path: Path, call: ast.Call) -> None:
        update = call.args[0] if call.args else None
        if isinstance(update, ast.Name) and update.id not in self.changes:
            update = self.blocks.get(update.id, update)
        keys: list[str | None] = [keyword.arg for keyword in call.keywords]
        if isinstance(update, ast.Dict):
            keys += [str(k.value) if isinstance(k, ast.Constant) else None for k in update.keys]
        elif update is not None:
            keys.append(None)
        for key in keys:
            self._change(name, None if key is None else (*path, key), call)

    def name_of(self, node: ast.AST) -> str:
        """The variable an expression is bound to, or ""."""
        return self.variables.get(id(node), "")

    def is_block(self, node: ast.AST) -> bool:
        """Whether an expression is a dictionary written out: `{...}`, `dict(...)`, or a copy of the variable of one."""
        if isinstance(node, ast.Dict):
            return True
        if (source := copied_name(node)) is not None:
            return source.id in self.all_blocks
        is_dict = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict"
        return is_dict and bool(getattr(node, "keywords", ()))

    def span(self, node: ast.AST) -> Span:
        """The characters of a node; ast counts columns in bytes of UTF-8."""
        start = self._offset(getattr(node, "lineno", 1), getattr(node, "col_offset", 0))
        end = self._offset(getattr(node, "end_lineno", 1) or 1, getattr(node, "end_col_offset", 0) or 0)
        return Span(start, max(start, end))

    def _offset(self, line: int, column: int) -> int:
        text = self.lines[line - 1] if line <= len(self.lines) else ""
        if not text.isascii():
            column = len(text.encode()[:column].decode(errors="ignore"))
        return self.starts[min(line, len(self.starts)) - 1] + column

    def node(self, node: ast.AST, depth: int = 0) -> Node:
        """The tree of an expression; anything but a literal is unknown."""
        span = self.span(node)
        if depth > _MAX_DEPTH:
            return Scalar(span, UNKNOWN)
        if isinstance(node, ast.Dict):
            return self._dictionary(node, span, depth)
        if isinstance(node, ast.Call) and self.is_block(node):
            return self._copy(node, depth) or self.call(node, depth=depth)
        if isinstance(node, (ast.List, ast.Tuple)):
            return Items(span, tuple(self.node(item, depth + 1) for item in node.elts))
        if isinstance(node, ast.Name) and (block := self._named_block(node, depth)) is not None:
            return block
        return Scalar(span, self._scalar(node), self.text[span.start : span.end])

    def _copy(self, call: ast.Call, depth: int) -> Block | None:
        """The dictionary that `copy.deepcopy(base)` or `dict(base, stage=2)` creates."""
        source = copied_name(call)
        base = self._named_block(source, depth) if source is not None else None
        if base is None:
            return None if source is None else Block(self.span(call), (), open=True)
        own = self.call(call, depth=depth)
        keys = set(own.keys())
        return replace(base, entries=(*(e for e in base.entries if e.key not in keys), *own.entries))

    def _named_block(self, node: ast.Name, depth: int) -> Block | None:
        """The dictionary of a variable; the keys that the script sets in it later are unknown."""
        source = self._local_block(node) if len(self._followed) < _MAX_FOLLOWED else None
        if source is None or source in self._followed:
            return None
        self._followed.append(source)
        root = self.node(source, depth + 1)
        self._followed.pop()
        changes = self.changes.get(node.id, ())
        if not isinstance(root, Block) or None in changes:
            return None
        changed = {path[0] for path in changes if path}
        entries = tuple(
            e if e.key not in changed else Entry(e.key, e.key_span, Scalar(e.key_span, UNKNOWN)) for e in root.entries
        )
        return replace(root, entries=entries, open=root.open or bool(changed - {e.key for e in root.entries}))

    def _local_block(self, node: ast.Name) -> ast.expr | None:
        """The dictionary that a variable of the function or of the module is; None if it has other values."""
        blocks = self.all_blocks.get(node.id, ())
        if not blocks:
            return None
        first, last = self._scope(node.lineno)
        inside = [b for b in blocks if first <= b.lineno <= node.lineno and self._scope(b.lineno) == (first, last)]
        num_bound = sum(first <= line <= last for line in self.bound_at.get(node.id, ()))
        return inside[0] if len(inside) == 1 and num_bound == 1 else self.blocks.get(node.id)

    def _scope(self, line: int) -> tuple[int, int]:
        """The lines of the function around a line."""
        return next((f for f in reversed(self.functions) if f[0] <= line <= f[1]), (1, 1 << 30))

    def _dictionary(self, node: ast.Dict, span: Span, depth: int) -> Block:
        entries: list[Entry] = []
        merged: set[str] = set()  # keys of another dictionary, which a key of this one replaces
        is_open = False
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                if key.value in merged:
                    entries = [e for e in entries if e.key != key.value]
                merged.discard(key.value)
                entries.append(Entry(key.value, self.span(key), self.node(value, depth + 1)))
            elif key is None and isinstance(base := self.node(value, depth + 1), Block):  # `{**base, "stage": 2}`
                keys = set(base.keys())
                entries = [*(e for e in entries if e.key not in keys), *base.entries]
                merged |= keys
                is_open = is_open or base.open
            else:
                is_open = True
        return Block(span, tuple(entries), open=is_open)

    def call(self, call: ast.Call, depth: int = 0) -> Block:
        """The keyword arguments of a call as a block; open if `**` adds more."""
        entries = []
        for keyword in call.keywords:
            if keyword.arg is not None:
                start = self._offset(keyword.lineno, keyword.col_offset)
                key = Span(start, start + len(keyword.arg))
                entries.append(Entry(keyword.arg, key, self.node(keyword.value, depth + 1)))
        is_open = any(keyword.arg is None for keyword in call.keywords) or any(
            isinstance(a, ast.Starred) for a in call.args
        )
        return Block(self.span(call), tuple(entries), open=is_open, call=True)

    def spread(self, call: ast.Call) -> Block:
        """The keyword arguments of a call with `**options` expanded where a dictionary of the script shows them."""
        block = self.call(call)
        entries = list(block.entries)
        is_open = any(isinstance(a, ast.Starred) for a in call.args)
        for options in (keyword.value for keyword in call.keywords if keyword.arg is None):
            name = ".".join(chain(options))
            source = options if self.is_block(options) else self.blocks.get(name)
            changes = self.changes.get(name, ()) if source is not options else ()
            root = self.node(source) if source is not None else self._part(options)
            if not isinstance(root, Block) or None in changes:
                is_open = True
                continue
            changed = {path[0] for path in changes if path}
            entries += [
                e if e.key not in changed else Entry(e.key, e.key_span, Scalar(e.key_span, UNKNOWN))
                for e in root.entries
            ]
            is_open = is_open or root.open or bool(changed - {e.key for e in root.entries})
        return replace(block, entries=tuple(entries), open=is_open)

    def _part(self, node: ast.expr) -> Node | None:
        """The part of a dictionary that `config["trainer"]` is, or `config.trainer` of a namespace; None if the script may change it."""
        if isinstance(node, ast.Attribute):
            return self._attribute(chain(node))
        name, path = subscript(node)
        source = self.blocks.get(name) if isinstance(node, ast.Subscript) else None
        if source is None or path is None or name in self.changes:
            return None
        return _inside(self.node(source), path)

    def _attribute(self, names: Sequence[str]) -> Node | None:
        """What `config.trainer.precision` is after `config = OmegaConf.create({...})`, unless the script sets it or a part around it."""
        for count in range(1, len(names)):
            name = ".".join(names[:count])
            source = self.namespaces.get(name)
            if source is None:
                continue
            longer = (".".join(names[:end]) for end in range(count + 1, len(names) + 1))
            if name in self.changes or any(other in self.bound_at for other in longer):
                return None
            root = self.call(source) if isinstance(source, ast.Call) else self.node(source)
            return _inside(root, names[count:])
        return None

    def _scalar(self, node: ast.AST) -> object:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, (ast.Name, ast.Attribute)):
            name = ".".join(chain(node))
            if name in self.constants:
                return self.constants[name].value
            full = self.names.full(node)
            part = self._attribute(chain(node)) if self.namespaces and not full else None
            if isinstance(part, Scalar):
                return part.value
            return full if full in {"torch.float16", "torch.bfloat16", "torch.float32"} else UNKNOWN
        if isinstance(node, ast.Subscript):
            part = self._part(node)
            return part.value if isinstance(part, Scalar) else UNKNOWN
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self._scalar(node.operand)
            return -value if isinstance(value, int | float) and not isinstance(value, bool) else UNKNOWN
        return UNKNOWN


_last: list[tuple[ast.Module, Literals]] = []


def literals_of(tree: ast.Module, text: str, names: Names) -> Literals:
    """The literals of a script; two readers ask for the same one, so the last is remembered."""
    if not _last or _last[0][0] is not tree:
        _last[:] = [(tree, Literals(all_nodes(tree), text, names))]
    return _last[0][1]


def _namespace_of(value: ast.AST) -> ast.expr | None:
    """The dictionary of `OmegaConf.create({...})`, or the call itself of `SimpleNamespace(precision=16)`; None for anything else."""
    if not isinstance(value, ast.Call) or "".join(chain(value.func)[-1:]) not in _NAMESPACES:
        return None
    if value.args:
        is_dict = len(value.args) == 1 and not value.keywords and isinstance(value.args[0], ast.Dict)
        return value.args[0] if is_dict else None
    return value if value.keywords and all(k.arg for k in value.keywords) else None


def _inside(root: Node | None, path: Sequence[str]) -> Node | None:
    """What a tree has under these keys."""
    for key in path:
        entry = root.entry(key) if isinstance(root, Block) else None
        root = entry.value if entry is not None else None
    return root


def copied_name(node: ast.AST) -> ast.Name | None:
    """The variable that `copy.deepcopy(base)`, `base.copy()` or `dict(base)` copies."""
    if not isinstance(node, ast.Call):
        return None
    last = "".join(chain(node.func)[-1:])
    source: ast.expr | None = node.args[0] if last in {"deepcopy", "dict"} and len(node.args) == 1 else None
    if last == "copy" and isinstance(node.func, ast.Attribute):
        source = node.args[0] if node.args else node.func.value
    return source if isinstance(source, ast.Name) else None


def subscript(target: ast.expr) -> tuple[str, Path | None]:
    """The variable and the keys of `config["fp16"]["enabled"]`; None for keys that are not string literals."""
    path: list[str] = []
    known = True
    while isinstance(target, ast.Subscript):
        index = target.slice
        if isinstance(index, ast.Constant) and isinstance(index.value, str):
            path.append(index.value)
        else:
            known = False
        target = target.value
    return ".".join(chain(target)), tuple(reversed(path)) if known else None


def _paths(target: ast.Subscript) -> Iterator[tuple[str, Path | None]]:
    """The variable and keys that an assignment sets, one for each arm of `config["bf16" if ok else "fp16"]`."""
    name, path = subscript(target)
    index = target.slice
    arms = (index.body, index.orelse) if isinstance(index, ast.IfExp) else ()
    outer = subscript(target.value)[1]
    if outer is not None and arms and all(isinstance(a, ast.Constant) and isinstance(a.value, str) for a in arms):
        yield from ((name, (*outer, str(arm.value))) for arm in arms if isinstance(arm, ast.Constant))
    else:
        yield name, path


def _bound_name(node: ast.AST) -> str:
    """The name that a node binds in any way, or ""; a name bound twice has no single value."""
    if isinstance(node, (ast.Name, ast.Attribute)):
        return "" if isinstance(node.ctx, ast.Load) else ".".join(chain(node))
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return node.name
    return (node.asname or node.name).split(".")[0] if isinstance(node, ast.alias) else ""
