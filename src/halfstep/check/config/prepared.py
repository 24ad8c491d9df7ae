"""Models that an Accelerator prepares, in scripts that are written to run with DeepSpeed, and the calls that load into them.

After `model = accelerator.prepare(model)` such a model is DeepSpeed's engine where the launcher or a plugin chooses it. Which
one it is, `accelerate launch` decides: a script counts if it passes a plugin or has a branch for DeepSpeed of its own.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from halfstep.check.script.syntax.names import Names, key_of, last_name

__all__ = ["PreparedModels", "read_prepared"]

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_NAME = "deepspeed"


@dataclass(eq=False)
class PreparedModels:
    """The calls of `prepare`, and the variables that each one returns."""

    accelerator: str = ""  # the last name of its variable
    prepares: list[tuple[ast.Call, set[str]]] = field(default_factory=list)
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)
    precision: str = ""  # the Accelerator's mixed_precision; "" if the launcher or an option decides

    def __bool__(self) -> bool:
        return bool(self.prepares)

    def mode(self, configured: str | None) -> str | None:
        """The mode of an engine with a configuration: Accelerate adds its own precision to one that turns none on."""
        if not self.prepares or configured != "fp32":
            return configured
        return "fp32" if self.precision == "no" else self.precision or None

    def loaded(self, call: ast.Call, nodes: tuple[ast.AST, ...]) -> str:
        """The prepared model into which `load_state_dict` loads; "" for any other object, or without DeepSpeed."""
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        if owner is None or self._is_without(call):
            return ""
        model = self._wrapped(owner)
        if not model and (key := key_of(owner)):
            values = [n.value for n in nodes if isinstance(n, ast.Assign) and key in map(key_of, n.targets)]
            wrapped = {self._wrapped(v) for v in values if self._around(v) is self._around(call)}
            model = wrapped.pop() if len(wrapped) == 1 else ""
        model = model or key_of(owner)
        if not _is_model(model, nodes):
            return ""
        return model if any(model in names and self._precedes(p, call, model) for p, names in self.prepares) else ""

    def restores_optimizer(self, call: ast.Call, loads: list[ast.Call]) -> bool:
        """Whether the function of a call also loads the state of the prepared optimizer, whose masters are part of it."""
        owners = [
            key_of(c.func.value)
            for c in loads
            if isinstance(c.func, ast.Attribute) and self._around(c) is self._around(call)
        ]
        prepared = {name for _, names in self.prepares for name in names}
        return any(owner in prepared and "opt" in last_name(owner).lower() for owner in owners)

    def _wrapped(self, value: ast.expr) -> str:
        """The `model` of `model.module` and of `accelerator.unwrap_model(model)`."""
        func = value.func if isinstance(value, ast.Call) else None
        if isinstance(value, ast.Call) and isinstance(func, ast.Attribute) and func.attr == "unwrap_model":
            return key_of(value.args[0]) if value.args else ""
        key = key_of(value)
        return key.removesuffix(".module") if key.endswith(".module") else ""

    def _precedes(self, prepare: ast.Call, call: ast.Call, model: str) -> bool:
        """Whether a model has been prepared where a call stands: further up, or in the constructor of its class."""
        made, here = self._around(prepare), self._around(call)
        if made is here:
            return prepare.lineno < call.lineno
        if not isinstance(made, _FUNCTIONS) or made.name != "__init__" or not model.startswith("self."):
            return False
        return here is not None and self.parents.get(made) is self.parents.get(here)

    def _around(self, node: ast.AST) -> ast.AST | None:
        parent = self.parents.get(node)
        while parent is not None and not isinstance(parent, _FUNCTIONS):
            parent = self.parents.get(parent)
        return parent

    def _is_without(self, node: ast.AST) -> bool:
        """Whether a node is in the branch of a test for DeepSpeed that may run without it."""
        child, parent = node, self.parents.get(node)
        while parent is not None:
            text = ast.unparse(parent.test).lower() if isinstance(parent, ast.If) else ""
            is_negated = "!=" in text or "not " in text
            if isinstance(parent, ast.If) and _NAME in text and (is_negated or child not in parent.body):
                return True
            child, parent = parent, self.parents.get(parent)
        return False


def read_prepared(nodes: tuple[ast.AST, ...], names: Names) -> PreparedModels:
    """The models that the one Accelerator of a script prepares, if the script is written to run with DeepSpeed."""
    calls = [n for n in nodes if isinstance(n, ast.Call)]
    made = [c for c in calls if names.full(c.func) == "accelerate.Accelerator"]
    if len(made) != 1 or not _is_for_deepspeed(nodes, made[0]):
        return PreparedModels()
    parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
    bound = parents.get(made[0])
    key = last_name(key_of(bound.targets[0])) if isinstance(bound, ast.Assign) else ""
    prepares = []
    for call in calls:
        func, parent = call.func, parents.get(call)
        owner = last_name(key_of(func.value)) if isinstance(func, ast.Attribute) and func.attr == "prepare" else ""
        if owner == key != "" and isinstance(parent, ast.Assign):
            parts = [p for t in parent.targets for p in (t.elts if isinstance(t, ast.Tuple) else [t])]
            prepares.append((call, {key_of(part) for part in parts} - {"", "_"}))
    value = next((k.value for k in made[0].keywords if k.arg == "mixed_precision"), None)
    precision = value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""
    return PreparedModels(key, prepares, parents, precision)


def _is_model(key: str, nodes: tuple[ast.AST, ...]) -> bool:
    """Whether a variable is called or asked for its parameters, unlike an optimizer or a scheduler."""
    return any(isinstance(n, ast.Call) and key_of(n.func) in {key, f"{key}.parameters"} for n in nodes)


def _is_for_deepspeed(nodes: tuple[ast.AST, ...], made: ast.Call) -> bool:
    """Whether an Accelerator gets a plugin of DeepSpeed, or the script has a test for DeepSpeed."""
    plugin = next((k.value for k in made.keywords if k.arg == "deepspeed_plugin"), None)
    if plugin is not None and not isinstance(plugin, ast.Constant):
        return True
    tests = (n.test for n in nodes if isinstance(n, (ast.If, ast.IfExp)))
    return any(_names_deepspeed(part) for test in tests for part in ast.walk(test))


def _names_deepspeed(part: ast.AST) -> bool:
    """`DistributedType.DEEPSPEED`, its text, or `accelerator.state.deepspeed_plugin`."""
    if isinstance(part, ast.Constant):
        return part.value == "DEEPSPEED"
    return isinstance(part, ast.Attribute) and part.attr in {"DEEPSPEED", "deepspeed_plugin"}
