"""Puts one mistake into public training scripts that have none of its kind, and counts how many the checker finds.

    python benchmarks/mutate_check.py FILES [--files 200] [--seed 0] [--only missing-unscale] [--misses FOLDER]

FILES is a folder with public scripts, which are not part of this project. Labelled files (`score_check.py`) show which
mistakes people make; they are few. Here every script that does something right is a test: without its `scaler.update()`
it is wrong, in a structure that nobody here chose. A transformation is crude, and some of its results are no mistakes
(a scaler that is disabled, a loss that the framework divides), so the shares are lower bounds.
"""

import argparse
import ast
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from halfstep.check import check_path

SCALER = re.compile(r"scaler|grad_scal", re.IGNORECASE)
WINDOW = re.compile(r"accum|grad_acc|acc_steps|iters_to", re.IGNORECASE)


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


class Undivided(Mutation):
    """`loss / accumulation_steps` becomes `loss`."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST | list[ast.stmt]:
        """An expression."""
        self.generic_visit(node)
        return self.changed(node.left) if self._divides(node.op, node.left, node.right) else node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST | list[ast.stmt]:
        """`loss /= n`."""
        return self.changed(ast.Pass()) if self._divides(node.op, node.target, node.value) else node

    @staticmethod
    def _divides(operator: ast.operator, left: ast.AST, right: ast.AST) -> bool:
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
        moved = [s for s in node.body if calls(s, self.name) and not calls(s, "step")]
        node.body = [s for s in node.body if s not in moved]
        if not moved or not node.body:
            node.body += moved
            return node
        return self.changed([node, *moved] if self.after else [*moved, node])


class ClippedAlways(MovedOut):
    """Gradients are clipped on every micro-batch."""

    name = "clip_grad"


class ClearedAlways(MovedOut):
    """Gradients are cleared on every micro-batch."""

    name, after = "zero_grad", True


@dataclass(frozen=True)
class Kind:
    """A mistake: how it is made, the rules that report it, and what a script must contain."""

    mutation: type[Mutation]
    rules: frozenset[str]
    needs: tuple[str, ...]


KINDS = {
    "missing-update": Kind(WithoutUpdate, frozenset({"HS101"}), ("GradScaler", ".step(")),
    "unscaled-backward": Kind(WithoutScale, frozenset({"HS102"}), ("GradScaler", ".step(")),
    "bypassed-scaler": Kind(Bypassed, frozenset({"HS103"}), ("GradScaler", ".scale(")),
    "missing-unscale": Kind(WithoutUnscale, frozenset({"HS104"}), ("GradScaler", "clip_grad_")),
    "undivided-loss": Kind(Undivided, frozenset({"HS180"}), ("%", ".backward(")),
    "clip-every-micro-batch": Kind(ClippedAlways, frozenset({"HS189", "HS104", "HS106"}), ("%", "clip_grad")),
    "cleared-every-micro-batch": Kind(ClearedAlways, frozenset({"HS181"}), ("%", "zero_grad")),
}


def mutants(text: str, kinds: dict[str, Kind]) -> Iterator[tuple[str, str]]:
    """The name of each kind that can be put into a script, with the script that has it."""
    for name, kind in kinds.items():
        if all(word in text for word in kind.needs):
            mutation = kind.mutation()
            tree = ast.fix_missing_locations(mutation.visit(ast.parse(text)))
            if mutation.changes:
                yield name, ast.unparse(tree)


def score(paths: list[Path], kinds: dict[str, Kind], num_files: int, misses: Path | None) -> dict[str, Counter[str]]:
    """Per kind, how many mutants there were and how many were found."""
    table = {name: Counter[str]() for name in kinds}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "train.py"

        def codes(text: str) -> set[str]:
            copy.write_text(text)
            return {finding.code for finding in check_path(copy)}

        used = 0
        for path in paths:
            try:
                text = path.read_text()
                made = list(mutants(text, kinds))
            except (SyntaxError, UnicodeDecodeError, RecursionError, ValueError):
                continue
            if not made:
                continue
            before = codes(text)
            used += 1
            for name, changed in made:
                if before & kinds[name].rules:
                    continue
                hit = bool(codes(changed) & kinds[name].rules)
                table[name].update(mutants=1, found=int(hit))
                if misses is not None and not hit:
                    target = misses / name / f"{path.parts[-2]}-{path.name}"
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_text(changed)
            if used == num_files:
                break
    return table


def main(arguments: list[str] | None = None, write: Callable[[str], object] = print) -> int:
    """Score the scripts of a folder and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", type=Path)
    parser.add_argument("--files", dest="num_files", type=int, default=200, help="scripts to change")
    parser.add_argument("--seed", type=int, default=0, help="of their order")
    parser.add_argument("--only", choices=KINDS, help="one kind of mistake")
    parser.add_argument("--misses", type=Path, help="a folder for the changed scripts in which nothing was found")
    options = parser.parse_args(arguments)
    paths = sorted(options.files.rglob("*.py"))
    if not paths:
        parser.error(f"{options.files} has no Python files.")
    random.Random(options.seed).shuffle(paths)
    kinds = {options.only: KINDS[options.only]} if options.only else KINDS
    write("| mistake | rule | found |\n|---|---|---|")
    for name, counts in score(paths, kinds, options.num_files, options.misses).items():
        share = f" ({counts['found'] / counts['mutants']:.2f})" if counts["mutants"] else ""
        write(f"| {name} | {', '.join(sorted(KINDS[name].rules))} | {counts['found']} of {counts['mutants']}{share} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
