"""The mistakes that simulated runs of a script show."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.simulation.calls import Simulation
from halfstep.check.simulation.gradients import Mishap, Raised
from halfstep.check.simulation.library import Stopped
from halfstep.check.simulation.paths import Exhausted, Path, Search
from halfstep.check.simulation.relevance import Relevance
from halfstep.check.simulation.values import Class, Env, Func, Instance, Unknown

__all__ = ["mishaps", "trains"]

_OF_TORCH = {"train", "step", "update", "forward", "backward", "eval", "fit", "run"}  # methods that others have as well
MAX_STEPS = 60_000  # statements and expressions of all runs of a script, half a second
MAX_ROOT_STEPS = 30_000
MAX_TEXT = 120_000
NUM_CALLS = 3  # of a method that a run of another file calls again and again


def trains(text: str) -> bool:
    """Whether a script is worth running: it has a training loop in mixed precision, and is no library."""
    return ".backward(" in text and ("GradScaler" in text or "autocast" in text) and len(text) < MAX_TEXT


def mishaps(tree: ast.Module, table: dict[str, str]) -> Iterator[Mishap]:
    """The mistakes in runs of a script; `table` maps local names to what they import."""
    relevance = Relevance(tree)
    targets = _targets(tree)
    seen: set[tuple[str, ast.AST]] = set()
    left = MAX_STEPS
    for root in (None, *_roots(tree, relevance)):
        search = Search(min(left, MAX_ROOT_STEPS))
        for path in search.paths():
            run = Simulation(relevance, table, path)
            run.targets = targets
            _run(run, tree, root, path)
            for mishap in run.gradients.mishaps:
                if (mishap.code, mishap.node) not in seen:
                    seen.add((mishap.code, mishap.node))
                    yield mishap
        left -= min(left, MAX_ROOT_STEPS) - max(search.steps, 0)


def _run(run: Simulation, tree: ast.Module, root: ast.AST | None, path: Path) -> None:
    module = Env()
    try:
        if root is None:
            run.run(tree.body, module)
            return
        definitions = [s for s in tree.body if isinstance(s, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign | ast.Try | ast.If) and not run.relevance.acts_now(s)]
        run.run(definitions, module)
        _call_root(run, module, root)
    except (Exhausted, Raised, Stopped):
        pass
    del path


def _call_root(run: Simulation, module: Env, root: ast.AST) -> None:
    run.roots = frozenset({root})
    for value in list(module.variables.values()):
        if isinstance(value, Func) and value.node is root:
            run.call_function(value, [], {}, root)
            return
        if isinstance(value, Class):
            for member in value.attributes.values():
                if isinstance(member, Func) and member.node is root:
                    constructor = value.lookup("__init__")
                    instance = Instance(value, path_key(value))
                    for each in reversed(value.lineage()):
                        instance.attributes |= {k: v for k, v in each.attributes.items() if not isinstance(v, Func)}
                    if isinstance(constructor, Func):
                        run.roots = frozenset({constructor.node})
                        run.call_function(Func(constructor.node, constructor.env, instance, value), [], {}, root)
                        run.roots = frozenset({root})
                    instance.is_built = True
                    for _ in range(NUM_CALLS):
                        run.gradients.forget()
                        run.call_function(Func(member.node, member.env, instance, value), [], {}, root)
                    return


def path_key(cls: Class) -> str:
    """The key of the object whose method is run."""
    return cls.node.name


def _roots(tree: ast.Module, relevance: Relevance) -> Iterator[ast.AST]:
    """Functions and methods that act, and that nothing in the script calls or passes on."""
    used: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            used.add(node.id)
        elif isinstance(node, ast.Attribute):
            is_own = isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}
            if is_own or ast.unparse(node.value) == "super()" or node.attr not in _OF_TORCH:
                used.add(node.attr)
    for function in relevance.functions():
        name = getattr(function, "name", "")
        if name not in used and name != "__init__" and relevance.is_top_level(function, tree):
            yield function


def _targets(tree: ast.Module) -> dict[ast.AST, str]:
    """The variables that calls are assigned to."""
    targets: dict[ast.AST, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.targets[0], ast.Name | ast.Attribute):
            targets[node.value] = ast.unparse(node.targets[0])
    return targets


_ = Unknown
