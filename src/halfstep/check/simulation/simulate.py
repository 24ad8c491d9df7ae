"""The mistakes that simulated runs of a script show.

Rules look for patterns; what hides a mistake from them is structure: a backward pass in another method, a region in an attribute,
two optimizers of which one is unscaled, an attribute that only one setting creates. So a script is also run, statement by
statement, on symbolic values. Nothing of it is imported or executed. Its runs differ in the answers to what the text does not decide (`paths`), and
`gradients` follows what torch's scaler and optimizers do, so that a run shows what raises or computes wrong numbers.

What a run cannot know (what code of another file does with an optimizer) ends what it can say until the script itself settles it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from halfstep.check.script.assumed.enums import write_members
from halfstep.check.script.syntax.children import nodes_in
from halfstep.check.script.syntax.plain import branch_matches
from halfstep.check.simulation.contexts import Closed, Left
from halfstep.check.simulation.gradients import Mishap, Raised
from halfstep.check.simulation.library import Stopped
from halfstep.check.simulation.paths import Exhausted, Path, Search
from halfstep.check.simulation.records import Records
from halfstep.check.simulation.relevance import Relevance
from halfstep.check.simulation.settings.annotated import takes_settings
from halfstep.check.simulation.settings.chosen import ChosenRun, is_command
from halfstep.check.simulation.settings.offers import Offers, in_words, may_offer, strings_of_formats
from halfstep.check.simulation.simulation import Simulation
from halfstep.check.simulation.typed import Typed
from halfstep.check.simulation.values import Class, Env, Func, Instance, Suspended, Unknown

__all__ = ["mishaps"]

MAX_STEPS = 150_000  # statements and expressions of all runs of a script, about a second
MAX_ROOT_STEPS = 75_000
MAX_VARIANTS = 12  # runs with a precision setting of their own
NUM_PATHS = 3  # of the run with the defaults, whose settings leave little open
MAX_CHOSEN_STEPS = 120_000  # of all runs with chosen settings
NUM_CALLS = 3  # of a method that a run of another file calls again and again
_OF_TORCH = {"train", "step", "update", "forward", "backward", "eval", "fit", "run"}  # methods that others have as well
_OF_FORMATS = {"HS120", "HS123"}  # whether a format and a scaler fit
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINES = (
    *_FUNCTIONS,
    ast.ClassDef,
    ast.Import,
    ast.ImportFrom,
    ast.Assign,
    ast.AnnAssign,
    ast.Try,
    ast.If,
)


def mishaps(tree: ast.Module, table: dict[str, str]) -> Iterator[Mishap]:
    """The mistakes in runs of a script; `table` maps local names to what they import."""
    branch_matches(tree)
    chosen = list(_mishaps_of_offers(tree, table)) if may_offer(table) else []
    chosen += [other for mishap in chosen if mishap.code == "HS120" for other in _alike(mishap, _targets(tree))]
    write_members(tree)
    relevance, targets, records = Relevance(tree), _targets(tree), Records(tree)
    reported: set[ast.AST] = set()
    left = MAX_STEPS
    entered: set[ast.AST] = set()
    for root in (None, *_roots(tree, relevance)):
        if root in entered:
            continue
        search = Search(min(left, MAX_ROOT_STEPS))
        in_root: list[Mishap] = []
        runs: list[tuple[Path, set[ast.AST]]] = []
        for path in search.paths():
            in_run = _mishaps_of(Typed(relevance, table, targets, path, entered), tree, root)
            runs.append((path, {mishap.node for mishap in in_run}))
            for mishap in in_run:
                if mishap.node not in reported:  # what follows from it in other runs is no mistake of its own
                    reported.add(mishap.node)
                    in_root.append(mishap)
        for mishap in in_root:
            answers = [(path.answers, mishap.node in nodes) for path, nodes in runs]
            if mishap.code not in _OF_FORMATS or not records.combine(answers):
                yield mishap
        left -= min(left, MAX_ROOT_STEPS) - max(search.steps, 0)
    yield from (mishap for mishap in chosen if mishap.node not in reported)


def _mishaps_of_offers(tree: ast.Module, table: dict[str, str]) -> Iterator[Mishap]:
    """The mistakes in the run with the defaults of the settings that a script offers, and in those with one precision setting changed."""
    relevance, targets, formats = Relevance(tree), _targets(tree), strings_of_formats(tree)
    takers = takes_settings(tree)
    roots = (None, *(root for root in _roots(tree, relevance) if root in takers or is_command(root)))
    offers = Offers({}, formats)
    waiting: list[dict[str, Any]] = [{}]
    reported: set[tuple[str, int]] = set()
    left = MAX_CHOSEN_STEPS
    for chosen in waiting:  # grows
        for root in roots:
            search = Search(left)
            for number, path in enumerate(islice(search.paths(), 1 if chosen else NUM_PATHS)):
                own = Offers(chosen, formats)
                before = path.steps
                in_run = _mishaps_of(ChosenRun(own, relevance, table, targets, path), tree, root)
                left -= before - path.steps
                # In further paths another device may decide about both.
                is_sure = not number and not path.has_guessed_format()
                for mishap in in_run if is_sure else [m for m in in_run if m.code not in _OF_FORMATS]:
                    place = (mishap.code, getattr(mishap.node, "lineno", 0))
                    if place not in reported:
                        reported.add(place)
                        yield mishap if not chosen else replace(mishap, message=f"{in_words(chosen)}, {mishap.message}")
                if not chosen:
                    offers.add(own)
        if not chosen and offers.is_read:
            waiting += list(offers.variants())[:MAX_VARIANTS]
        if left <= 0:
            return


def _alike(mishap: Mishap, targets: dict[ast.AST, str]) -> Iterator[Mishap]:
    """The same for the scalers that other runs create under the same name, with the same flag: one for FSDP, one for all else."""
    name, flag = targets.get(mishap.node, ""), _flag(mishap.node)
    for node in targets if name and flag else ():
        if node is not mishap.node and targets[node] == name and _flag(node) == flag:
            yield replace(mishap, node=node)


def _flag(node: ast.AST) -> str:
    """What enables a new scaler."""
    is_scaler = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("GradScaler")
    flags = [k.value for k in node.keywords if k.arg == "enabled"] if isinstance(node, ast.Call) and is_scaler else []
    return ast.unparse(flags[0]) if flags else ""


def _mishaps_of(run: Simulation, tree: ast.Module, root: ast.AST | None) -> list[Mishap]:
    """The mistakes in one run: of the module, or of a function that another file calls."""
    module = Env()
    try:
        if root is None:
            run.run(tree.body, module)
        else:
            run.run([s for s in tree.body if isinstance(s, _DEFINES) and not run.relevance.acts_now(s)], module)
            _call_root(run, module, root)
    except (Raised, Stopped):
        run.path.has_raised = not run.gradients.backwards
    except (Exhausted, Left, Closed):  # a `return` outside a function ends a run too
        pass
    return run.gradients.mishaps


def _call_root(run: Simulation, module: Env, root: ast.AST) -> None:
    run.roots = frozenset({root})
    for value in list(module.variables.values()):
        if isinstance(value, Func) and value.node is root:
            result = run.call_function(value, [], {}, root)
            if isinstance(result, Suspended):
                run.collected(result)
            return
        if isinstance(value, Class):
            for member in value.attributes.values():
                if isinstance(member, Func) and member.node is root:
                    _call_method(run, value, member)
                    return


def _call_method(run: Simulation, cls: Class, method: Func) -> None:
    """Build an object and call its method a few times, as another file would."""
    instance = Instance(cls, cls.node.name)
    for each in reversed(cls.lineage()):
        instance.attributes |= {key: value for key, value in each.attributes.items() if not isinstance(value, Func)}
    constructor = cls.lookup("__init__")
    if isinstance(constructor, Func):
        run.roots |= {constructor.node}
        run.call_function(Func(constructor.node, constructor.env, instance, cls), [], {}, constructor.node)
    instance.is_built = True
    for name in run.relevance.placeholders(instance.attributes):
        instance.attributes[name] = Unknown(f"self.{name}")
    for _ in range(1 if run.relevance.has_training_loop(method.node) else NUM_CALLS):
        run.gradients.forget()
        run.call_function(Func(method.node, method.env, instance, cls), [], {}, method.node)


def _roots(tree: ast.Module, relevance: Relevance) -> Iterator[ast.AST]:
    """Functions and methods that act, and that nothing in the script calls or defines again.

    One that is only passed on is among them: `mp.spawn(train, ...)` calls it, and `fit(step)` has entered it before.
    """
    used: set[str] = set()
    for node in nodes_in(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            used.add(node.func.id)
        elif isinstance(node, ast.Attribute):
            is_own = isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}
            if is_own or ast.unparse(node.value) == "super()" or node.attr not in _OF_TORCH:
                used.add(node.attr)
    bodies = [tree.body, *(s.body for s in tree.body if isinstance(s, ast.ClassDef))]
    last = {(number, s.name): s for number, body in enumerate(bodies) for s in body if isinstance(s, _FUNCTIONS)}
    unused = {function for (_, name), function in last.items() if name not in used and name != "__init__"}
    yield from (function for function in relevance.functions() if function in unused)


def _targets(tree: ast.Module) -> dict[ast.AST, str]:
    """The variables that calls are assigned to."""
    targets: dict[ast.AST, str] = {}
    for node in nodes_in(tree):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and isinstance(node.targets[0], ast.Name | ast.Attribute)
        ):
            targets[node.value] = ast.unparse(node.targets[0])
    return targets
