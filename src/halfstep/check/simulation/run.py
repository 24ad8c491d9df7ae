"""One simulated run: its state, and what its parts call of each other.

decisions    unknown conditions         -> the answers of this run
expressions  names, attributes, tables  -> values
comprehensions  loops in expressions   -> lists and tables
operators    operators and comparisons  -> values
assignments  targets                    -> variables
contexts     generators, `with`         -> what is run inside and between
statements   branches, loops            -> what is run, how often
functions    the script's functions     -> what they return
objects      methods                    -> events of scalers, optimizers and losses
library      torch                      -> regions, scalers, optimizers
python       Python's own functions     -> values
foreign      what is not known          -> what may have happened
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any

from halfstep.check.simulation.bounds import Bounds
from halfstep.check.simulation.gradients import Gradients
from halfstep.check.simulation.paths import Path
from halfstep.check.simulation.relevance import Relevance
from halfstep.check.simulation.values import Autocast, Env, Func, NoGrad, Optimizer, Suspended, Tensor

__all__ = ["Run"]


class Run:
    """The state of a run."""

    def __init__(
        self,
        relevance: Relevance,
        table: dict[str, str],
        targets: dict[ast.AST, str],
        path: Path,
        entered: set[ast.AST] | None = None,
    ) -> None:
        self.relevance, self.table, self.targets, self.path = relevance, table, targets, path
        self.entered: set[ast.AST] = (
            set() if entered is None else entered
        )  # functions that this or an earlier run has called
        self.gradients = Gradients(are_cleared=relevance.clears, reads_gradients=relevance.reads_gradients)
        self.regions: list[Autocast | NoGrad] = []
        self.opened: list[Autocast | NoGrad] = []  # regions that the script has entered without `with`
        self.consumers: list[Callable[[Any], None]] = []  # what consumes the values of generators that run
        self.has_lowered = False  # weights, or anything else, were converted by the script itself
        self.loops: list[bool] = []  # those that run, and whether they train
        self.active: list[ast.AST] = []  # functions that run
        self.sites: list[ast.AST] = []  # their calls
        self.bounds = Bounds()
        self.bindings: dict[str, Any] = {}  # values of unknown keys that this run has decided on
        self.asked: dict[int, tuple[Tensor, str]] = {}  # tensors that conditions have tested, by identity
        self.none_since: dict[str, int] = {}  # variables called scaler that are None, and how much was decided before
        self.objects: dict[str, Any] = {}  # scalers and optimizers that another file created, by key
        self.roots: frozenset[ast.AST] = frozenset()  # functions that nothing in the script calls

    # --- what the parts call of each other ------------------------------------------------------------------------------

    def value(self, node: ast.expr, env: Env) -> Any:
        """The value of an expression."""
        raise NotImplementedError

    def attribute(self, base: Any, name: str, node: ast.AST) -> Any:
        """An attribute of a value."""
        raise NotImplementedError

    def assign(self, target: ast.expr, value: Any, env: Env) -> None:
        """Assign to a name, an attribute, an element or several."""
        raise NotImplementedError

    def element(self, base: dict[Any, Any] | list[Any] | tuple[Any, ...] | str, index: Any) -> Any:
        """An element of a container of the script's own."""
        raise NotImplementedError

    def run(self, body: list[ast.stmt], env: Env) -> None:
        """Run a block."""
        raise NotImplementedError

    def call(self, function: Any, args: list[Any], kwargs: dict[str, Any], node: ast.AST) -> Any:
        """What a call gives."""
        raise NotImplementedError

    def call_function(self, function: Func, args: list[Any], kwargs: dict[str, Any], node: ast.AST) -> Any:
        """What a function of the script returns."""
        raise NotImplementedError

    def run_function(self, function: Func, args: list[Any], kwargs: dict[str, Any], node: ast.AST) -> Any:
        """Run the statements of a function."""
        raise NotImplementedError

    def enter(self, context: Any) -> Any:
        """Enter a context that a stack leaves later."""
        raise NotImplementedError

    def collected(self, generator: Suspended) -> list[Any]:
        """What a generator yields."""
        raise NotImplementedError

    def call_method(self, base: Any, name: str, args: list[Any], kwargs: dict[str, Any], node: ast.Call) -> Any:
        """What a call of a method gives."""
        raise NotImplementedError

    def call_library(self, full: str, args: list[Any], kwargs: dict[str, Any], node: ast.AST) -> Any:
        """What a function or class of a library gives."""
        raise NotImplementedError

    def call_unknown(self, key: str, args: list[Any], kwargs: dict[str, Any], node: ast.AST) -> Any:
        """What a function of another file gives."""
        raise NotImplementedError

    def call_native(self, base: Any, name: str, args: list[Any]) -> Any:
        """What a method of a list, dictionary or string gives."""
        raise NotImplementedError

    def forward(self, key: str, args: list[Any]) -> Tensor:
        """What a model, or a function that is not known, computes from its arguments."""
        raise NotImplementedError

    def hand_over(self, name: str, values: list[Any]) -> None:
        """Code of another file gets these values."""
        raise NotImplementedError

    def may_train(self, name: str) -> bool:
        """Whether a hook, or a method of an unknown base class, may run a backward pass or a step."""
        raise NotImplementedError

    def optimizer(self, name: str, args: list[Any], node: ast.AST) -> Optimizer:
        """A new optimizer over what is passed first."""
        raise NotImplementedError

    def optimizer_from(self, name: str, values: list[Any], node: ast.AST) -> Optimizer | None:
        """The optimizer that a function of another file creates from a model, or wraps; None if it does neither."""
        raise NotImplementedError

    def models_in(self, value: Any) -> frozenset[str] | None:
        """The models whose parameters a value has; None: not known."""
        raise NotImplementedError

    def as_object(self, value: Any, method: str = "step") -> Any:
        """The scaler or optimizer that an unknown value is by its name, if that has this method."""
        raise NotImplementedError

    def as_optimizer(self, value: Any, name: str) -> Any:
        """The optimizer that a scaler is given."""
        raise NotImplementedError

    def names_object(self, target: str) -> bool:
        """Whether a variable is named like a scaler or an optimizer."""
        raise NotImplementedError

    def sequence(self, value: Any) -> Any:
        """What a loop over a value runs through."""
        return value

    def elements(self, value: Any, limit: int) -> Iterator[Any]:
        """What a loop over a value assigns."""
        raise NotImplementedError

    def iterations(self, node: ast.AST) -> int:
        """How often a loop over something unknown is run."""
        raise NotImplementedError

    def may_cast(self, context: Any, node: ast.expr) -> bool:
        """Whether an unknown context may be an autocast region."""
        raise NotImplementedError

    def format_here(self) -> tuple[frozenset[str], ast.AST | None]:
        """The format of the autocast region that this computes in, and the region."""
        raise NotImplementedError

    def has_no_graph(self) -> bool:
        """Whether this runs without a graph."""
        raise NotImplementedError

    # --- queries ----------------------------------------------------------------------------------------------------------

    def target_of(self, node: ast.AST) -> str:
        """The variable that a call is assigned to, as the text has it."""
        return self.targets.get(node, "")

    def place_of(self, node: ast.AST, *, is_own: bool = True) -> str:
        """The place of a call, and of those of the functions around it if each of them gives an object of its own."""
        places = [node, *(reversed(self.sites) if is_own else ())]
        return ",".join(f"{getattr(p, 'lineno', 0)}:{getattr(p, 'col_offset', 0)}" for p in places)

    def is_root(self, function: Func) -> bool:
        """Whether nothing in the script calls a function."""
        return function.node in self.roots and not self.active
