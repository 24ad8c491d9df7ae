"""HS288: weights that are loaded into DeepSpeed's engine without its fp32 masters."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.config.config import Config
from halfstep.check.config.deepspeed_facts import DeepSpeed
from halfstep.check.config.joint import JointRule, Use
from halfstep.check.finding import Finding
from halfstep.check.rule import Rule
from halfstep.check.script.syntax.names import key_of, last_name

__all__ = ["RULES"]

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_CALLERS = 3  # functions that train through other functions

_START = (
    "import deepspeed\nimport torch\n\nmodel = Net()\n{before}engine, optimizer, _, _ = deepspeed.initialize(model=model, config=ds_config)\n"
    "{after}for x, y in loader:\n    loss = loss_fn(engine(x), y)\n    engine.backward(loss)\n    engine.step()\n"
)
_PREPARED = """\
import torch
from accelerate import Accelerator, DeepSpeedPlugin

accelerator = Accelerator(mixed_precision="bf16", deepspeed_plugin=DeepSpeedPlugin(zero_stage=2, gradient_clipping=1.0))
model = Net()
{before}optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
{after}for x, y in loader:
    accelerator.backward(loss_fn(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
"""


class MastersNotRefreshed(JointRule):
    """Weights are loaded into DeepSpeed's engine, but its fp32 masters keep the old ones."""

    code = "HS288"
    name = "masters-not-refreshed"
    severity = "error"
    reason = (
        "`deepspeed.initialize` copies the weights into fp32 masters, and in fp16 and bf16 every step writes the masters back over the "
        "16-bit weights. `engine.module.load_state_dict` changes only the 16-bit weights: the first step discards what was loaded and "
        "continues from the weights that the model had before. With ZeRO stage 3 the parameters are empty there as well. Load before "
        "`deepspeed.initialize`, use `engine.load_checkpoint`, or call `engine.optimizer.refresh_fp32_params()` at stages 0 to 2. The state of the prepared "
        "optimizer contains the masters."
    )
    bad = (
        _START.format(before="", after="engine.module.load_state_dict(torch.load('model.pt'))\n"),
        _PREPARED.format(before="", after="accelerator.unwrap_model(model).load_state_dict(torch.load('model.pt'))\n"),
        _PREPARED.format(
            before="", after="model.load_state_dict(state['model'])\nscheduler.load_state_dict(state['scheduler'])\n"
        ),
    )
    good = (
        _START.format(before="model.load_state_dict(torch.load('model.pt'))\n", after=""),
        _START.format(before="", after="engine.load_checkpoint('checkpoints')\n"),
        _START.format(
            before="",
            after="engine.module.load_state_dict(torch.load('model.pt'))\nengine.optimizer.refresh_fp32_params()\n",
        ),
        _PREPARED.format(before="model.load_state_dict(torch.load('model.pt'))\n", after=""),
        _PREPARED.format(before="", after="accelerator.load_state('checkpoint')\n"),
        _PREPARED.format(
            before="", after="model.load_state_dict(state['model'])\noptimizer.load_state_dict(state['optimizer'])\n"
        ),
    )
    references = (
        "https://deepspeed.readthedocs.io/en/latest/model-checkpointing.html",
        "measured: source code of DeepSpeed 0.19.8, load_checkpoint calls refresh_fp32_params after the module is loaded",
    )

    def inspect(self, use: Use, config: Config) -> Iterator[Finding]:
        """Report an engine, or its module, that loads a state and is trained afterwards, if nothing refreshes the masters."""
        deepspeed = DeepSpeed(config)
        text = use.source.text
        if deepspeed.weights == "fp32" or "refresh_fp32_params" in text or "safe_set_full_fp32_param" in text:
            return
        gathered = {
            id(inner)
            for n in use.nodes
            if isinstance(n, ast.With) and any("GatheredParameters" in ast.unparse(i.context_expr) for i in n.items)
            for inner in ast.walk(n)
        }
        parents = {child: node for node in use.nodes for child in ast.iter_child_nodes(node)}
        loads = list(use.calls("load_state_dict"))
        for call in loads:
            engine = _loaded(use, call)
            if engine and id(call) not in gathered and _trains_after(use, call, parents, _steps(use)):
                mode = "" if deepspeed.weights else "in fp16 and bf16 "
                yield self.finding(
                    use.where(call),
                    f"This loads the weights of `{engine}` without its fp32 masters: {mode}the first step overwrites them.",
                    instead=f"Load them before deepspeed.initialize, or with {engine}.load_checkpoint.",
                    severity=None if deepspeed.weights else "warning",
                )
            model = use.prepared.loaded(call, use.nodes) if use.prepared and not engine else ""
            if not model or id(call) in gathered or use.prepared.restores_optimizer(call, loads):
                continue
            if _trains_after(use, call, parents, _backwards(use)):
                yield self.finding(
                    use.where(call),
                    f"With DeepSpeed in fp16 and bf16, this loads the weights of `{model}` without its fp32 masters: the first step overwrites them.",
                    instead="Load them before accelerator.prepare, or with accelerator.load_state.",
                    severity="warning",
                )


def _loaded(use: Use, call: ast.Call) -> str:
    """The engine whose weights a call loads: through itself, its module, a variable that is its module, or the model it wraps."""
    owner = key_of(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    if use.engines is not None and use.engines.is_without(call):
        return ""
    engines = _visible(use, call)
    name = owner.removesuffix(".module")
    if name == owner and name in engines and not _is_engine_yet(use, call, name):
        return ""
    return name if name in engines else _unwrapped(use, call, owner) or _wrapping(use, call, owner)


def _unwrapped(use: Use, call: ast.Call, owner: str) -> str:
    """The engine of which a variable is the module: of `net = engine.module`, or `getattr(engine, "module", engine)`."""
    for node in use.nodes if owner else ():
        if not isinstance(node, ast.Assign) or owner not in map(key_of, node.targets):
            continue
        arms = [node.value.body, node.value.orelse] if isinstance(node.value, ast.IfExp) else [node.value]
        for arm in arms:
            engine = _engine_in(arm)
            if engine in _visible(use, node) and _reaches(use, node, call, owner):
                return engine
    return ""


def _engine_in(value: ast.expr) -> str:
    """The `engine` of `engine.module` and of `getattr(engine, "module", ...)`."""
    if isinstance(value, ast.Call) and key_of(value.func) == "getattr" and len(value.args) > 1:
        name = value.args[1]
        return key_of(value.args[0]) if isinstance(name, ast.Constant) and name.value == "module" else ""
    return key_of(value).removesuffix(".module") if key_of(value).endswith(".module") else ""


def _wrapping(use: Use, call: ast.Call, owner: str) -> str:
    """The engine that was created around a model before a call, where the variable still is that model."""
    created = use.engines.made if use.engines is not None else []
    for node in use.nodes if owner and created else ():
        made = node.value if isinstance(node, ast.Assign) else None
        while isinstance(made, ast.Subscript):
            made = made.value
        if not isinstance(node, ast.Assign) or not isinstance(made, ast.Call) or made not in created:
            continue
        models = {key_of(k.value) for k in made.keywords if k.arg == "model"} | {key_of(a) for a in made.args[1:2]}
        bound = {key_of(part) for target in node.targets for part in ast.walk(target)}
        names = bound & _visible(use, call)
        if owner in models - bound and names and _line(made) < _line(call) and _reaches(use, node, call, owner):
            return min(names)
    return ""


def _reaches(use: Use, assign: ast.Assign, call: ast.Call, key: str) -> bool:
    """Whether a variable of an assignment is the one that a call uses, and no condition separates the two."""
    if use.engines is None:
        return True
    scopes = [use.engines.scope(n, *((ast.ClassDef,) if key.startswith("self.") else ())) for n in (assign, call)]
    if scopes[0] is not None and scopes[0] is not scopes[1]:
        return False
    return not use.engines.are_apart(assign, call)


def _is_engine_yet(use: Use, call: ast.Call, name: str) -> bool:
    """Whether a variable is the engine where a call stands, and not still the model that becomes one under the same name."""
    made = use.engines.made if use.engines is not None else []
    models = {key_of(k.value) for m in made for k in m.keywords if k.arg == "model"}
    models |= {key_of(m.args[1]) for m in made if len(m.args) > 1}
    if use.engines is None or name not in models:
        return True
    here = [m for m in made if use.engines.scope(m) is use.engines.scope(call)]
    return bool(here) and all(m.lineno < call.lineno for m in here)


def _visible(use: Use, node: ast.AST) -> set[str]:
    """The engines that a node can name; one that another file creates only by its name."""
    named = {use.engine} if use.initialize is not None or use.engine.endswith("engine") else set()
    return (named | (use.engines.visible(node) if use.engines is not None else set())) - {""}


def _steps(use: Use) -> list[ast.AST]:
    """The calls of `engine.step()`."""
    steps = [c for c in use.calls("step") if isinstance(c.func, ast.Attribute)]
    return [c for c in steps if isinstance(c.func, ast.Attribute) and key_of(c.func.value) in _visible(use, c)]


def _backwards(use: Use) -> list[ast.AST]:
    """The calls of `accelerator.backward(loss)`."""
    calls = ((c, c.func) for c in use.calls("backward"))
    owned = ((c, key_of(f.value)) for c, f in calls if isinstance(f, ast.Attribute))
    return [c for c, key in owned if last_name(key) == use.prepared.accelerator]


def _trains_after(use: Use, call: ast.Call, parents: dict[ast.AST, ast.AST], training: list[ast.AST]) -> bool:
    """Whether a model may be trained after a call: not if all training of the function that contains it is further up."""
    functions = {n.name: n for n in use.nodes if isinstance(n, _FUNCTIONS)}
    if not training:
        return False
    for _ in range(_CALLERS):  # calls of functions that train
        names = {f.name for n in training if (f := _around(n, parents)) is not None and f.name in functions}
        called = [n for n in use.nodes if isinstance(n, ast.Call) and key_of(n.func).rpartition(".")[2] in names]
        training += [n for n in called if n not in training]
    node: ast.AST = call
    for _ in range(_CALLERS):
        around = _around(node, parents)
        near = [n for n in training if _around(n, parents) is around]
        if near:
            return any(_line(n) > _line(node) or _share_loop(n, node, parents) for n in near)
        name = around.name if around is not None else ""
        sites = [n for n in use.nodes if isinstance(n, ast.Call) and key_of(n.func).rpartition(".")[2] == name]
        if not name or not sites:
            return around is None or not _only_evaluates(around, node)
        node = min(sites, key=_line)
    return True


def _only_evaluates(function: ast.FunctionDef | ast.AsyncFunctionDef, after: ast.AST) -> bool:
    """Whether a function sets its models to evaluation after a node, and none of them back to training."""
    calls = [n for n in ast.walk(function) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    following = {c.func.attr for c in calls if isinstance(c.func, ast.Attribute) and _line(c) > _line(after)}
    return "eval" in following and following.isdisjoint({"train", "backward"})


def _around(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    parent = parents.get(node)
    while parent is not None and not isinstance(parent, _FUNCTIONS):
        parent = parents.get(parent)
    return parent if isinstance(parent, _FUNCTIONS) else None


def _share_loop(one: ast.AST, other: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether a loop runs both nodes: then the first also runs after the second."""
    return bool(_loops(one, parents) & _loops(other, parents))


def _loops(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> set[ast.AST]:
    loops: set[ast.AST] = set()
    parent = parents.get(node)
    while parent is not None and not isinstance(parent, _FUNCTIONS):
        loops |= {parent} if isinstance(parent, (ast.For, ast.AsyncFor, ast.While)) else set()
        parent = parents.get(parent)
    return loops


def _line(node: ast.AST) -> int:
    return getattr(node, "lineno", 0)


RULES: tuple[type[Rule], ...] = (MastersNotRefreshed,)
