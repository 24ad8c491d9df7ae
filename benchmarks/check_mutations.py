"""The mistakes that `mutate_check.py` puts into scripts: how each is made, and the rules that report it.

A transformation works on the syntax tree and knows scalers, losses and windows by their names alone: what the checker
must find out by analysis, this file takes from how people name things, so that neither can inherit the other's blind spots.
"""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

SCALER = re.compile(r"scaler|grad_scal", re.IGNORECASE)
WINDOW = re.compile(r"accum|grad_acc|acc_steps|iters_to", re.IGNORECASE)
CAST = re.compile(r"autocast|amp_(ctx|context)|(^|\.)ctx$|cast_ctx", re.IGNORECASE)
MODEL = re.compile(r"(^|[._])(model|net|network|unet|transformer|policy|student|generator)$", re.IGNORECASE)
SCHEDULER = re.compile(r"sched", re.IGNORECASE)


class Mutation(ast.NodeTransformer):
    """Changes a tree in place and counts the changes."""

    def __init__(self) -> None:
        self.changes = 0

    def changed(self, node: ast.AST | list[ast.stmt]) -> ast.AST | list[ast.stmt]:
        """A replacement."""
        self.changes += 1
        return node


def method(node: ast.AST, name: str, *, of_scaler: bool = False) -> bool:
    """Whether a node is a call of the method `name`, perhaps of something named as scalers are."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name):
        return False
    return not of_scaler or bool(SCALER.search(ast.unparse(node.func.value)))


def calls(node: ast.AST, start: str) -> bool:
    """Whether a function or method whose name starts like this is called in a node."""
    called = (n.func for n in ast.walk(node) if isinstance(n, ast.Call))
    names = (f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "") for f in called)
    return any(name.startswith(start) for name in names)


def has(node: ast.AST, name: str, *, of_scaler: bool = False) -> bool:
    """Whether the method `name` is called in a node."""
    return any(method(n, name, of_scaler=of_scaler) for n in ast.walk(node))


def steps(node: ast.AST) -> bool:
    """Whether an optimizer steps in a node, with a scaler or alone."""
    called = (n.func.value for n in ast.walk(node) if method(n, "step"))  # type: ignore[attr-defined]
    return any(not SCHEDULER.search(ast.unparse(owner)) for owner in called)


def blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """The lists of statements directly in a node."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield block


def written(text: str) -> list[ast.stmt]:
    """Statements from their text."""
    return ast.parse(text).body


def is_simple(node: ast.AST) -> bool:
    """Whether a node is a statement without a block of its own."""
    return isinstance(node, (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign))


class WithoutUpdate(Mutation):
    """`scaler.update()` is removed."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | list[ast.stmt]:
        """A statement."""
        is_update = method(node.value, "update", of_scaler=True) and not node.value.args  # type: ignore[attr-defined]
        return self.changed(ast.Pass()) if is_update else node


class WithoutUnscale(Mutation):
    """`scaler.unscale_(optimizer)` is removed."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | list[ast.stmt]:
        """A statement."""
        return self.changed(ast.Pass()) if method(node.value, "unscale_", of_scaler=True) else node


class WithoutScale(Mutation):
    """`scaler.scale(loss)` becomes `loss`."""

    def visit_Call(self, node: ast.Call) -> ast.AST | list[ast.stmt]:
        """A call."""
        self.generic_visit(node)
        is_scale = method(node, "scale", of_scaler=True) and len(node.args) == 1
        return self.changed(node.args[0]) if is_scale else node


class Bypassed(Mutation):
    """`scaler.step(optimizer)` becomes `optimizer.step()`."""

    def visit_Call(self, node: ast.Call) -> ast.AST | list[ast.stmt]:
        """A call."""
        self.generic_visit(node)
        if not (method(node, "step", of_scaler=True) and len(node.args) == 1):
            return node
        return self.changed(ast.Call(ast.Attribute(node.args[0], "step", ast.Load()), [], []))


class Unused(WithoutScale):
    """Nothing is scaled, and the optimizer steps alone; the scaler is still created."""

    def visit_Call(self, node: ast.Call) -> ast.AST | list[ast.stmt]:
        """A call."""
        replaced = super().visit_Call(node)
        return Bypassed.visit_Call(self, replaced) if replaced is node else replaced  # type: ignore[arg-type]

    def visit_Expr(self, node: ast.Expr) -> ast.AST | list[ast.stmt]:
        """A statement."""
        if any(method(node.value, name, of_scaler=True) for name in ("update", "unscale_")):
            return self.changed(ast.Pass())
        return self.generic_visit(node)


class Unsaved(Mutation):
    """The scaler's state is in no checkpoint."""

    verbs = ("state_dict",)

    def _is_state(self, node: ast.AST, verb: str = "state_dict") -> bool:
        return any(method(n, verb, of_scaler=True) for n in ast.walk(node))

    def visit_Dict(self, node: ast.Dict) -> ast.AST | list[ast.stmt]:
        """`{"scaler": scaler.state_dict()}`."""
        pairs = list(zip(node.keys, node.values, strict=True))
        kept = [(k, v) for k, v in pairs if not (k is not None and self._is_state(v) and "state_dict" in self.verbs)]
        if len(kept) == len(pairs) or not kept:
            return self.generic_visit(node)
        return self.changed(ast.Dict([k for k, _ in kept], [v for _, v in kept]))

    def visit_Assign(self, node: ast.Assign) -> ast.AST | list[ast.stmt]:
        """`checkpoint["scaler"] = scaler.state_dict()`."""
        is_entry = isinstance(node.targets[0], ast.Subscript) and self._is_state(node.value)
        return self.changed(ast.Pass()) if is_entry and "state_dict" in self.verbs else self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST | list[ast.stmt]:
        """`scaler.load_state_dict(...)`."""
        is_load = "load_state_dict" in self.verbs and method(node.value, "load_state_dict", of_scaler=True)
        return self.changed(ast.Pass()) if is_load else self.generic_visit(node)


class Stateless(Unsaved):
    """The scaler's state is neither saved nor restored."""

    verbs = ("state_dict", "load_state_dict")


class Unrestored(Unsaved):
    """The scaler's state is saved and never restored."""

    verbs = ("load_state_dict",)


class WithoutScaler(Unused):
    """No scaler is left: not its creation, its uses, its state, or a parameter for it."""

    def __init__(self) -> None:
        super().__init__()
        self._state = Stateless()

    def visit_Module(self, node: ast.Module) -> ast.AST:
        """The file, first without the state."""
        self._state.visit(node)
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST | list[ast.stmt]:
        """`scaler = GradScaler()`."""
        return ast.Pass() if calls(node.value, "GradScaler") else self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST | list[ast.stmt]:
        """A call, without the scaler among its arguments."""
        node.args = [a for a in node.args if not _is_scaler(a)]
        node.keywords = [k for k in node.keywords if not _is_scaler(k.value)]
        return super().visit_Call(node)

    def visit_arguments(self, node: ast.arguments) -> ast.AST:
        """The parameters of a function, without the scaler; a default belongs to the parameter that it follows."""
        first = len(node.args) - len(node.defaults)
        kept = [(a, node.defaults[i - first] if i >= first else None) for i, a in enumerate(node.args)]
        kept = [(a, default) for a, default in kept if not SCALER.search(a.arg)]
        node.args, node.defaults = [a for a, _ in kept], [d for _, d in kept if d is not None]
        pairs = [p for p in zip(node.kwonlyargs, node.kw_defaults, strict=True) if not SCALER.search(p[0].arg)]
        node.kwonlyargs, node.kw_defaults = [a for a, _ in pairs], [d for _, d in pairs]
        return self.generic_visit(node)


def _is_scaler(node: ast.expr) -> bool:
    """Whether an argument is the scaler itself."""
    return isinstance(node, (ast.Name, ast.Attribute)) and bool(SCALER.search(ast.unparse(node).split(".")[-1]))


class Undivided(Mutation):
    """`loss / accumulation_steps` becomes `loss`."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST | list[ast.stmt]:
        """An expression."""
        self.generic_visit(node)
        return self.changed(node.left) if self.divides(node.op, node.left, node.right) else node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST | list[ast.stmt]:
        """`loss /= n`."""
        return self.changed(ast.Pass()) if self.divides(node.op, node.target, node.value) else node

    @staticmethod
    def divides(operator: ast.operator, left: ast.AST, right: ast.AST) -> bool:
        """Whether a loss is divided by the length of a window."""
        is_window = isinstance(operator, ast.Div) and WINDOW.search(ast.unparse(right))
        return bool(is_window) and "loss" in ast.unparse(left).lower()


class MovedOut(Mutation):
    """Statements that call `name` leave the condition that ends a window, and run on every micro-batch."""

    name, after = "", False

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        """`if (i + 1) % n == 0:`."""
        self.generic_visit(node)
        test = ast.unparse(node.test)
        if "%" not in test or not WINDOW.search(test) or node.orelse or not calls(node, "step"):
            return node
        moved = [s for s in node.body if self.is_moved(s)]
        node.body = [s for s in node.body if s not in moved]
        if not moved or not node.body:
            node.body += moved
            return node
        return self.changed([node, *moved] if self.after else [*moved, node])

    def is_moved(self, statement: ast.stmt) -> bool:
        """Whether a statement leaves the condition."""
        return calls(statement, self.name) and not calls(statement, "step")


class ClippedAlways(MovedOut):
    """Gradients are clipped on every micro-batch."""

    name = "clip_grad"


class ClearedAlways(MovedOut):
    """Gradients are cleared on every micro-batch."""

    name, after = "zero_grad", True


class UpdatedAlways(MovedOut):
    """The scaler is updated on every micro-batch."""

    name, after = "update", True

    def is_moved(self, statement: ast.stmt) -> bool:
        """`scaler.update()`."""
        return isinstance(statement, ast.Expr) and method(statement.value, "update", of_scaler=True)


class UnscaledAlways(MovedOut):
    """Gradients are unscaled on every micro-batch."""

    name = "unscale_"


class ClearedFirst(Mutation):
    """Gradients are cleared at the start of every micro-batch instead of after the step of the window."""

    def visit_For(self, node: ast.For) -> ast.AST:
        """A loop over micro-batches."""
        self.generic_visit(node)
        ends = [s for s in node.body if isinstance(s, ast.If) and "%" in ast.unparse(s.test)]
        for end in ends:
            if end.orelse or not WINDOW.search(ast.unparse(end.test)) or not steps(end):
                continue
            cleared = [s for s in end.body if is_simple(s) and calls(s, "zero_grad")]
            if cleared and len(cleared) < len(end.body):
                end.body = [s for s in end.body if s not in cleared]
                node.body = [*cleared, *node.body]
                self.changes += 1
        return node


class Reordered(Mutation):
    """Statements of one block change places."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Every node that has blocks."""
        super().generic_visit(node)
        for block in blocks(node):
            if self.reorder(block):
                self.changes += 1
        return node

    def reorder(self, block: list[ast.stmt]) -> bool:
        """Change a block in place; whether it changed."""
        raise NotImplementedError


def place(block: list[ast.stmt], test: Callable[[ast.stmt], bool]) -> int:
    """The first statement of a block for which a test is true; -1 for none."""
    return next((i for i, s in enumerate(block) if test(s)), -1)


def move(block: list[ast.stmt], source: int, target: int) -> bool:
    """Move a statement of a block before another; whether both exist."""
    if source < 0 or target < 0 or source == target:
        return False
    statement = block.pop(source)
    block.insert(target - (target > source), statement)
    return True


class ClippedFirst(Reordered):
    """Gradients are clipped before the backward."""

    def reorder(self, block: list[ast.stmt]) -> bool:
        """The clip moves above the backward of the same block."""
        clip = place(block, lambda s: calls(s, "clip_grad") and not steps(s) and not has(s, "unscale_"))
        back = place(block, lambda s: has(s, "backward") and not steps(s))
        return 0 <= back < clip and move(block, clip, back)


class ClippedLast(Reordered):
    """Gradients are clipped after the step."""

    def reorder(self, block: list[ast.stmt]) -> bool:
        """The clip moves below the step of the same block."""
        clip = place(block, lambda s: calls(s, "clip_grad") and not steps(s) and not has(s, "unscale_"))
        step = place(block, lambda s: is_simple(s) and steps(s))
        return 0 <= clip < step and move(block, clip, step + 1)


class UpdatedFirst(Reordered):
    """The scaler is updated before its step."""

    def reorder(self, block: list[ast.stmt]) -> bool:
        """`scaler.update()` moves above `scaler.step(optimizer)`."""
        step = place(block, lambda s: is_simple(s) and has(s, "step", of_scaler=True))
        update = place(block, lambda s: is_simple(s) and has(s, "update", of_scaler=True))
        return 0 <= step < update and move(block, update, step)


class ScheduledFirst(Reordered):
    """The scheduler steps before the optimizer."""

    def reorder(self, block: list[ast.stmt]) -> bool:
        """`scheduler.step()` moves above the step of the optimizer."""
        later = place(block, lambda s: is_simple(s) and has(s, "step") and not steps(s))
        step = place(block, lambda s: is_simple(s) and steps(s))
        return 0 <= step < later and move(block, later, step)


class ClearedBetween(Reordered):
    """Gradients are cleared between the backward and the step."""

    def reorder(self, block: list[ast.stmt]) -> bool:
        """`zero_grad()` moves from above the backward to below it."""
        clear = place(block, lambda s: is_simple(s) and calls(s, "zero_grad"))
        back = place(block, lambda s: is_simple(s) and has(s, "backward"))
        step = place(block, lambda s: is_simple(s) and steps(s))
        return 0 <= clear < back < step and move(block, clear, back + 1)


class CreatedLate(Reordered):
    """The scaler is created after its first use in the same block."""

    def reorder(self, block: list[ast.stmt]) -> bool:
        """`scaler = GradScaler()` moves below the first statement that uses it."""
        made = place(block, lambda s: isinstance(s, ast.Assign) and calls(s.value, "GradScaler"))
        if made < 0:
            return False
        name = re.escape(ast.unparse(block[made].targets[0]))  # type: ignore[attr-defined]
        used = re.compile(rf"\b{name}\.(scale|step|load_state_dict|state_dict)\b")
        functions = (ast.FunctionDef, ast.ClassDef)
        use = place(block, lambda s: not isinstance(s, functions) and bool(used.search(ast.unparse(s))))
        return made < use and move(block, made, use + 1)


class CreatedInLoop(Reordered):
    """The scaler is created in the loop that uses it."""

    def reorder(self, block: list[ast.stmt]) -> bool:
        """`scaler = GradScaler()` moves to the start of the loop below it."""
        made = place(block, lambda s: isinstance(s, ast.Assign) and calls(s.value, "GradScaler"))
        name = ast.unparse(block[made].targets[0]) if made >= 0 else "?"  # type: ignore[attr-defined]
        for statement in block[made + 1 :] if made >= 0 else ():
            if isinstance(statement, (ast.For, ast.While)) and name in ast.unparse(statement):
                statement.body.insert(0, block.pop(made))
                return True
        return False


class Enclosed(Reordered):
    """The statements below an autocast region, up to the last that `ends` accepts, move into it."""

    @staticmethod
    def ends(statement: ast.stmt) -> bool:
        """Whether a statement is the last that moves."""
        return has(statement, "backward")

    def reorder(self, block: list[ast.stmt]) -> bool:
        """A region and what follows it."""
        for i, region in enumerate(block):
            if not isinstance(region, ast.With) or not any(CAST.search(called(x.context_expr)) for x in region.items):
                continue
            end = place(block[i + 1 :], self.ends)
            if end >= 0 and not has(region, "backward"):
                region.body += block[i + 1 : i + 2 + end]
                del block[i + 1 : i + 2 + end]
                return True
        return False


def called(node: ast.expr) -> str:
    """The function of a call, or the expression itself."""
    return ast.unparse(node.func if isinstance(node, ast.Call) else node)


class StepEnclosed(Enclosed):
    """The step runs inside the autocast region as well."""

    @staticmethod
    def ends(statement: ast.stmt) -> bool:
        """The step."""
        return is_simple(statement) and steps(statement)


class WithoutAutocast(Mutation):
    """No region casts."""

    def visit_With(self, node: ast.With) -> ast.AST | list[ast.stmt]:
        """`with autocast():` becomes its body."""
        self.generic_visit(node)
        kept = [item for item in node.items if not CAST.search(called(item.context_expr))]
        if len(kept) == len(node.items):
            return node
        if kept:
            node.items = kept
            return self.changed(node)
        return self.changed(node.body)


class EvaluatedInFull(WithoutAutocast):
    """Evaluation runs without autocast."""

    _evaluates = False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """A function that evaluates."""
        self._evaluates = bool(re.search(r"eval|valid|test|infer", node.name)) and not has(node, "backward")
        self.generic_visit(node)
        self._evaluates = False
        return node

    def visit_With(self, node: ast.With) -> ast.AST | list[ast.stmt]:
        """A region, inside such a function only."""
        return super().visit_With(node) if self._evaluates else self.generic_visit(node)


class BfloatWithScaler(Mutation):
    """Autocast computes in bfloat16, and the scaler stays."""

    def visit_Call(self, node: ast.Call) -> ast.AST | list[ast.stmt]:
        """`autocast(...)`."""
        self.generic_visit(node)
        if not called(node).endswith("autocast") or any(k.arg == "dtype" for k in node.keywords) or len(node.args) > 1:
            return node
        value = ast.parse("torch.bfloat16", mode="eval").body
        node.keywords.append(ast.keyword("dtype", value))
        return self.changed(node)


class Lowered(Mutation):
    """`model = Model()` is followed by `model = model.bfloat16()`."""

    cast = "bfloat16()"

    def visit_Module(self, node: ast.Module) -> ast.AST:
        """The file, whose optimizers are read first."""
        self.text = ast.unparse(node)
        return self.generic_visit(node)

    def is_trained(self, key: str) -> bool:
        """Whether an optimizer receives the parameters of a variable."""
        return bool(re.search(rf"(Adam\w*|SGD|optim\w*)\([^\n]*\b{re.escape(key)}\.parameters\(\)", self.text))

    def visit_Assign(self, node: ast.Assign) -> ast.AST | list[ast.stmt]:
        """An assignment."""
        key = ast.unparse(node.targets[0])
        made = isinstance(node.value, ast.Call) and called(node.value).split(".")[-1]
        is_class = made and (made[:1].isupper() or made in {"from_pretrained", "get_model", "build_model"})
        if not is_class or re.search("Parallel|EMA|Averaged", str(made)) or not MODEL.search(key):
            return node
        if not self.is_trained(key):
            return node
        return self.changed([node, *written(f"{key} = {key}.{self.cast}")])


class Halved(Lowered):
    """`model = Model()` is followed by `model = model.half()`."""

    cast = "half()"


class LoadedLow(Lowered):
    """`from_pretrained(name)` loads bfloat16 weights."""

    def visit_Assign(self, node: ast.Assign) -> ast.AST | list[ast.stmt]:
        """An assignment."""
        value, key = node.value, ast.unparse(node.targets[0])
        if not (method(value, "from_pretrained") and MODEL.search(key) and self.is_trained(key)):
            return node
        if any(k.arg is None or "dtype" in k.arg for k in value.keywords):  # type: ignore[attr-defined]
            return node
        value.keywords += ast.parse("f(torch_dtype=torch.bfloat16)", mode="eval").body.keywords  # type: ignore[attr-defined]
        return self.changed(node)


class AverageLowered(Mutation):
    """An average of weights is stored in 16 bits."""

    def visit_Assign(self, node: ast.Assign) -> ast.AST | list[ast.stmt]:
        """`ema = copy.deepcopy(model)`."""
        key = ast.unparse(node.targets[0])
        copies = isinstance(node.value, ast.Call) and called(node.value).endswith(("deepcopy", "AveragedModel"))
        if not copies or not re.search(r"ema|shadow|averag", key, re.IGNORECASE):
            return node
        return self.changed([node, *written(f"{key}.to(torch.bfloat16)")])


class MayBeNone(Mutation):
    """`GradScaler(enabled=flag)` becomes `GradScaler() if flag else None`, and its uses stay."""

    def visit_Assign(self, node: ast.Assign) -> ast.AST | list[ast.stmt]:
        """An assignment."""
        value = node.value
        if not (isinstance(value, ast.Call) and called(value).endswith("GradScaler")):
            return node
        flag = next((k.value for k in value.keywords if k.arg == "enabled"), None)
        if flag is None or isinstance(flag, ast.Constant):
            return node
        value.keywords = [k for k in value.keywords if k.arg != "enabled"]
        node.value = ast.IfExp(flag, value, ast.Constant(None))
        return self.changed(node)


class LoggedScaled(Mutation):
    """`scaler.scale(loss).backward()` becomes `loss = scaler.scale(loss)` and `loss.backward()`; the loss is logged later."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """A function."""
        self._text = ast.unparse(node)
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST | list[ast.stmt]:
        """A statement."""
        value = node.value
        if not (method(value, "backward") and method(value.func.value, "scale", of_scaler=True)):  # type: ignore[attr-defined]
            return node
        scale = value.func.value  # type: ignore[attr-defined]
        if not (scale.args and isinstance(scale.args[0], ast.Name)):
            return node
        loss = scale.args[0].id
        later = getattr(self, "_text", "").partition(ast.unparse(node))[2]
        if not re.search(rf"\b{loss}(\.detach\(\))?\.item\(\)", later) or re.search(rf"\b{loss} = ", later):
            return node
        return self.changed(written(f"{loss} = {ast.unparse(scale)}\n{loss}.backward()"))


class SkippedLate(Mutation):
    """A batch is skipped after `unscale_` and before `update`."""

    _loops = 0

    def visit_For(self, node: ast.For) -> ast.AST:
        """A loop."""
        self._loops += 1
        self.generic_visit(node)
        self._loops -= 1
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST | list[ast.stmt]:
        """`scaler.unscale_(optimizer)`."""
        if not self._loops or not method(node.value, "unscale_", of_scaler=True):
            return node
        optimizer = ast.unparse(node.value.args[0]) if node.value.args else "optimizer"  # type: ignore[attr-defined]
        skip = f"if not torch.isfinite(loss):\n    {optimizer}.zero_grad()\n    continue"
        return self.changed([node, *written(skip)])


class StepGuarded(Reordered):
    """The step of the scaler depends on the loss, and its update does not."""

    def reorder(self, block: list[ast.stmt]) -> bool:
        """`scaler.step(optimizer)` after `scaler.scale(loss).backward()`."""
        back = place(block, lambda s: isinstance(s, ast.Expr) and method(s.value, "backward") and has(s, "scale"))
        scaled = [n for n in ast.walk(block[back]) if method(n, "scale", of_scaler=True)] if back >= 0 else []
        loss = scaled[0].args[0] if scaled and scaled[0].args else None  # type: ignore[attr-defined]
        for inner in [block, *(b for s in block[back + 1 :] if isinstance(s, ast.If) for b in blocks(s))]:
            step = place(inner, lambda s: isinstance(s, ast.Expr) and method(s.value, "step", of_scaler=True))
            if step > (back if inner is block else -1) and isinstance(loss, ast.Name):
                inner[step : step + 1] = written(f"if torch.isfinite({loss.id}):\n    {ast.unparse(inner[step])}")
                return True
        return False


class BareBackward(Mutation):
    """`accelerator.backward(loss)` becomes `loss.backward()`."""

    def visit_Call(self, node: ast.Call) -> ast.AST | list[ast.stmt]:
        """A call."""
        self.generic_visit(node)
        if not (method(node, "backward") and len(node.args) == 1 and called(node).endswith("accelerator.backward")):
            return node
        return self.changed(ast.Call(ast.Attribute(node.args[0], "backward", ast.Load()), [], []))


class DividedTwice(Mutation):
    """The loss passed to `accelerator.backward` is divided by the steps that the Accelerator knows."""

    def visit_Module(self, node: ast.Module) -> ast.AST:
        """The file, whose Accelerator is read first."""
        made = [n for n in ast.walk(node) if isinstance(n, ast.Call) and called(n).endswith("Accelerator")]
        found = [k.value for n in made for k in n.keywords if k.arg == "gradient_accumulation_steps"]
        self._steps = found[0] if len(found) == 1 and not isinstance(found[0], ast.Constant) else None
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST | list[ast.stmt]:
        """A call."""
        self.generic_visit(node)
        is_backward = method(node, "backward") and len(node.args) == 1 and called(node).endswith("accelerator.backward")
        if self._steps is None or not is_backward:
            return node
        node.args = [ast.BinOp(node.args[0], ast.Div(), self._steps)]
        return self.changed(node)


class EnteredTwice(Mutation):
    """The block of `accelerator.accumulate` is split in two."""

    def visit_With(self, node: ast.With) -> ast.AST | list[ast.stmt]:
        """`with accelerator.accumulate(model):`."""
        self.generic_visit(node)
        at = place(node.body, lambda s: has(s, "backward"))
        if len(node.items) != 1 or not called(node.items[0].context_expr).endswith(".accumulate") or at < 1:
            return node
        return self.changed([ast.With(node.items, node.body[:at]), ast.With(node.items, node.body[at:])])


@dataclass(frozen=True)
class Kind:
    """A mistake: how it is made, the rules that report it, and what a script must and must not contain."""

    mutation: type[Mutation]
    rules: frozenset[str]
    needs: tuple[str, ...] = ()
    never: tuple[str, ...] = ()


def _kind(mutation: type[Mutation], rules: str, needs: str = "GradScaler .step(", never: str = "") -> Kind:
    return Kind(mutation, frozenset(rules.split()), tuple(needs.split()), tuple(never.split()))


_LOW = "float16|autocast|GradScaler|Accelerator"  # scripts without 16 bits are not the checker's subject
KINDS = {
    "missing-update": _kind(WithoutUpdate, "HS101"),
    "unscaled-backward": _kind(WithoutScale, "HS102"),
    "bypassed-scaler": _kind(Bypassed, "HS103", "GradScaler .scale("),
    "missing-unscale": _kind(WithoutUnscale, "HS104", "GradScaler clip_grad_"),
    "unscale-every-micro-batch": _kind(UnscaledAlways, "HS106", "% GradScaler unscale_"),
    "update-every-micro-batch": _kind(UpdatedAlways, "HS107", "% GradScaler"),
    "update-before-step": _kind(UpdatedFirst, "HS108 HS115"),
    "clip-after-step": _kind(ClippedLast, "HS109", f"clip_grad {_LOW}"),
    "scaled-loss-logged": _kind(LoggedScaled, "HS111"),
    "skipped-after-unscale": _kind(SkippedLate, "HS112 HS157", "GradScaler unscale_"),
    "guarded-step": _kind(StepGuarded, "HS115", never="unscale_ raise"),
    "clip-before-backward": _kind(ClippedFirst, "HS118", f"clip_grad {_LOW}"),
    "bf16-with-scaler": _kind(BfloatWithScaler, "HS120"),
    "scaler-in-loop": _kind(CreatedInLoop, "HS121"),
    "scaler-unused": _kind(Unused, "HS122 HS123"),
    "scaler-removed": _kind(WithoutScaler, "HS123", "GradScaler .step( autocast", "bfloat16 bf16"),
    "scaler-before-creation": _kind(CreatedLate, "HS132"),
    "scaler-without-autocast": _kind(WithoutAutocast, "HS134", "GradScaler .scale( autocast", ".half("),
    "backward-inside-autocast": _kind(Enclosed, "HS140 HS187", "autocast|amp backward"),
    "step-inside-autocast": _kind(StepEnclosed, "HS141 HS140 HS187", "autocast|amp backward"),
    "evaluation-in-full": _kind(EvaluatedInFull, "HS149", "autocast backward"),
    "bf16-weights": _kind(Lowered, "HS151", ".step( float16|autocast", "deepspeed"),
    "bf16-load": _kind(LoadedLow, "HS151", ".step( from_pretrained", "deepspeed"),
    "fp16-weights": _kind(Halved, "HS160 HS161 HS166 HS199", ".step( float16|autocast|Accelerator", "deepspeed"),
    "ema-in-16-bits": _kind(AverageLowered, "HS153", ".step("),
    "cleared-between": _kind(ClearedBetween, "HS156", f"zero_grad {_LOW}"),
    "scaler-stateless": _kind(Stateless, "HS170"),
    "scaler-not-restored": _kind(Unrestored, "HS171"),
    "scaler-never-saved": _kind(Unsaved, "HS172 HS170"),
    "scaler-may-be-none": _kind(MayBeNone, "HS176"),
    "accumulate-twice": _kind(EnteredTwice, "HS178", "accumulate"),
    "undivided-loss": _kind(Undivided, "HS180", f"% .backward( {_LOW}", "accelerator.backward"),
    "cleared-every-micro-batch": _kind(ClearedAlways, "HS181", f"% zero_grad {_LOW}"),
    "cleared-first": _kind(ClearedFirst, "HS181", f"% zero_grad {_LOW}"),
    "bare-backward": _kind(BareBackward, "HS185", "accelerator.backward"),
    "divided-twice": _kind(DividedTwice, "HS188 HS182", "accelerator.backward gradient_accumulation_steps"),
    "clip-every-micro-batch": _kind(ClippedAlways, "HS189 HS104 HS106", f"% clip_grad {_LOW}"),
    "scheduler-before-step": _kind(ScheduledFirst, "HS195", f".step( {_LOW}"),
}


def mutants(text: str, kinds: dict[str, Kind]) -> Iterator[tuple[str, str]]:
    """The name of each kind that can be put into a script, with the script that has it."""
    for name, kind in kinds.items():
        is_able = all(any(word in text for word in words.split("|")) for words in kind.needs)
        if is_able and not any(word in text for word in kind.never):
            mutation = kind.mutation()
            tree = ast.fix_missing_locations(mutation.visit(ast.parse(text)))
            if mutation.changes:
                yield name, ast.unparse(tree)
