"""Names that a file reads, parameters that a function does not, and whether another class may."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Collection, Iterator

from halfstep.check.regex import regex
from halfstep.check.script.syntax.outline import Function, Outline

__all__ = [
    "fixed_dtypes",
    "inherits",
    "is_hidden",
    "is_setting",
    "is_unread",
    "key_strings",
    "last_of",
    "loads",
    "mentions",
    "read_names",
    "reads_by_name",
    "training_functions",
    "unread_argument",
    "unread_parameters",
]

_DTYPE = regex(r"(torch_|model_)?dtype")
MAX_FUNCTIONS = 200  # followed from the calls of `backward` and `step` upwards
_READS_FILE = {"read", "readline", "read_text"}
_OPENS_FILE = {"open", "readlines"}


def last_of(node: ast.expr) -> str:
    """The last name of a decorator, with or without arguments."""
    func = node.func if isinstance(node, ast.Call) else node
    return func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")


def mentions(node: ast.AST, name: str) -> bool:
    """Whether a variable occurs in a statement."""
    return any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(node))


def loads(node: ast.AST, name: str) -> bool:
    """Whether a statement reads a variable."""
    return any(isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load) for n in ast.walk(node))


def read_names(nodes: Collection[ast.AST]) -> set[str]:
    """The attributes that are read, and every string: `getattr(args, "amp")`."""
    names = {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}
    return names | {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def key_strings(outline: Outline, nodes: Collection[ast.AST]) -> set[str]:
    """The strings that may name an attribute: `getattr(args, "amp")`, `options["amp"]`, not `precision == "fp16"`.

    A value that something is compared with, a choice or a default of an option and what a keyword argument gets name none.
    """
    strings = (n for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str))
    return {str(n.value) for n in strings if not _is_value(outline, n)}


def _is_value(outline: Outline, node: ast.AST) -> bool:
    """Whether a string is compared, or stands for a keyword argument."""
    parent = outline.parents.get(node)
    if isinstance(parent, (ast.List, ast.Tuple, ast.Set)):
        node, parent = parent, outline.parents.get(parent)
    while isinstance(parent, ast.IfExp) and node is not parent.test:
        node, parent = parent, outline.parents.get(parent)
    if isinstance(parent, ast.Compare):
        is_member = node is parent.left and isinstance(parent.ops[0], (ast.In, ast.NotIn))  # `"amp" in options`
        return not is_member
    return isinstance(parent, ast.keyword)


def reads_by_name(outline: Outline) -> bool:
    """Whether a script may read a variable by its name: `globals()`, and `eval` of anything but the text of a file."""
    sites = [site.call for name in ("globals", "locals", "exec") for site in outline.calls.get(name, ())]
    sites += [site.call for site in outline.calls.get("vars", ()) if not site.call.args]
    evaluated = [site for site in outline.calls.get("eval", ()) if site.call.args]
    sites += [call for call, function in evaluated if not _is_file_text(outline, call.args[0], function)]
    return any(isinstance(call.func, ast.Name) for call in sites)


def _is_file_text(outline: Outline, node: ast.expr, function: Function) -> bool:
    """Whether an expression is read from a file: `f.read()`, `line` or `line.strip()` of `for line in f`."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in _READS_FILE:
            return True
        node = node.func.value
    if not isinstance(node, ast.Name):
        return False
    values = outline.values(node.id, function)
    if values and all(isinstance(value, ast.Call) and last_of(value) in _READS_FILE for value in values):
        return True
    opened, lines = set(), []
    part: ast.AST | None = node
    while (part := outline.parents.get(part) if part is not None else None) is not None:
        if isinstance(part, ast.With):
            files = [
                i for i in part.items if isinstance(i.context_expr, ast.Call) and last_of(i.context_expr) == "open"
            ]
            opened |= {item.optional_vars.id for item in files if isinstance(item.optional_vars, ast.Name)}
        loops = getattr(part, "generators", [part] if isinstance(part, ast.For) else [])
        lines += [loop.iter for loop in loops if isinstance(loop.target, ast.Name) and loop.target.id == node.id]
    return any(
        last_of(n) in _OPENS_FILE or getattr(n, "id", "") in opened
        for it in lines
        for n in ast.walk(it)
        if isinstance(n, ast.expr)
    )


def is_hidden(outline: Outline, name: str, function: Function, tree: ast.AST) -> bool:
    """Whether every function that reads a name binds one of its own, so that nothing reads the variable of `function`."""
    if reads_by_name(outline):
        return False
    # Its own function first: most variables are read there.
    for node in itertools.chain(ast.walk(function.node), ast.walk(tree)):
        if isinstance(node, ast.Global | ast.Nonlocal) and name in node.names:
            return False
        is_variable = isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
        # `train.scaler` of another file may be the module's; `self.scaler` is no variable.
        is_member = isinstance(node, ast.Attribute) and node.attr == name and getattr(node.value, "id", "") != "self"
        if is_member or (is_variable and _may_read(outline, node, name, function.node)):
            return False
    return True


def _may_read(outline: Outline, node: ast.AST, name: str, home: ast.AST) -> bool:
    """Whether a name may mean the variable of `home`: no function between them binds it, and one around them is `home`."""
    child, scope = node, outline.parents.get(node)
    while scope is not None and scope is not home:
        # A default, a decorator and an annotation are read outside the function.
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef) and any(child is part for part in scope.body):
            arguments = scope.args
            params = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
            if name in {a.arg for a in params if a is not None} or outline.by_function(name).get(scope):
                return False
        child, scope = scope, outline.parents.get(scope)
    return scope is home


def inherits(outline: Outline, cls: str) -> bool:
    """Whether a class has a base class, which may read its attributes and ask for its parameters."""
    return any(getattr(base, "id", "") != "object" for base in outline.bases.get(cls, ()))


def is_unread(text: str, function: Function, name: str) -> bool:
    """Whether nothing in the body of a function names a parameter: by the text, as the tree has values in the place of variables."""
    body = function.body
    if not isinstance(function.node, ast.Module) and ast.get_docstring(function.node, clean=False) is not None:
        body = body[1:]
    lines = text.splitlines()[body[0].lineno - 1 : body[-1].end_lineno] if body else []
    return not any(re.search(rf"(?<!\.)\b{name}\b", line.partition("#")[0]) for line in lines)


def is_setting(value: ast.expr | None) -> bool:
    """Whether a value is read from settings: `cfg.amp`, `cfg["amp"]` and `cfg.get("amp", False)`."""
    if isinstance(value, ast.Subscript):
        return isinstance(value.slice, ast.Constant) and isinstance(value.slice.value, str)
    is_read = isinstance(value, ast.Call) and last_of(value) in {"get", "getattr", "pop", "getenv", "getboolean"}
    return is_read or isinstance(value, ast.Attribute)


def unread_parameters(function: Function, text: str, names: re.Pattern[str]) -> Iterator[ast.arg]:
    """The parameters with one of some names that a function, which is more than `pass`, never reads."""
    if isinstance(function.node, ast.Module) or len(function.body) < 2:
        return
    arguments = function.node.args
    wanted = [a for a in (*arguments.args, *arguments.kwonlyargs) if names.fullmatch(a.arg)]
    yield from (a for a in wanted if is_unread(text, function, a.arg))


def fixed_dtypes(outline: Outline, text: str) -> Iterator[tuple[ast.arg, Function, str]]:
    """Parameters for a dtype that a function never reads, with the function and the dtype that it loads a model in."""
    if "locals" in outline.calls:
        return
    loaded: dict[Function, set[str]] = {}
    for call, function in outline.calls.get("from_pretrained", ()):
        fixed = [outline.names.full(k.value) for k in call.keywords if k.arg in {"dtype", "torch_dtype"}]
        loaded.setdefault(function, set()).update(fixed)
    for function, fulls in loaded.items():
        # A method, or a function with a decorator, may have the signature that another class or library asks for.
        if isinstance(function.node, ast.Module) or function.method or function.node.decorator_list:
            continue
        full = next(iter(fulls)) if len(fulls) == 1 else ""  # with two, something else decides
        arguments = function.node.args
        for parameter in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs) if full else ():
            sharing = [f for f in outline.functions if parameter.arg in f.params]
            if _DTYPE.fullmatch(parameter.arg) and not any(_is_named(text, f, parameter.arg) for f in sharing):
                yield parameter, function, full


def _is_named(text: str, function: Function, name: str) -> bool:
    """Whether the code of a function has a name in another place than the left of a `=`, as in `load(dtype=torch.float16)`."""
    first = function.body[0]
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    body = function.body[is_text:]
    lines = text.splitlines()[body[0].lineno - 1 : body[-1].end_lineno] if body else []
    return any(re.search(rf"(?<!\.)\b{name}\b(?!\s*=[^=])", line.partition("#")[0]) for line in lines)


def training_functions(outline: Outline) -> set[Function]:
    """The functions that run a backward pass and a step, themselves or through other functions of the file."""
    return _reaching(outline, "backward") & _reaching(outline, "step")


def _reaching(outline: Outline, method: str) -> set[Function]:
    functions = {function for _, function in outline.calls.get(method, ())}
    waiting = list(functions)
    while waiting and len(functions) < MAX_FUNCTIONS:
        function = waiting.pop()
        for call, caller in outline.calls.get(function.name, ()):
            if caller not in functions and outline.call_target(call, caller) is function:
                functions.add(caller)
                waiting.append(caller)
    return functions


def unread_argument(
    outline: Outline, text: str, function: Function, name: str, training: Collection[Function]
) -> ast.arg | None:
    """The parameter of one of the functions that train, which only other files call, if no function of this one reads its name."""
    is_nested = function.parent is not None and not isinstance(function.parent.node, ast.Module)
    if isinstance(function.node, ast.Module) or is_nested or function.name in outline.loads or function not in training:
        return None
    # Another function that reads it: the two may share a signature.
    if not all(is_unread(text, other, name) for other in outline.functions if name in other.params):
        return None
    arguments = function.node.args
    return next(a for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs) if a.arg == name)
