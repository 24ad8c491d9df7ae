"""A short training run with one fault: which steps were skipped, and everything that it left behind, to be compared bit for bit."""

from __future__ import annotations

import logging
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from halfstep.engine.engine import Engine

__all__ = ["print_results", "same", "seed_everything", "train"]


def seed_everything(seed: int) -> None:
    """Seed torch, Python and numpy, from which transformers draws masks."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002


def train(
    engine: Engine,
    model: nn.Module,
    injector: Any,
    draw: Callable[[], Any],
    losses_of: Callable[[Any], Any],
    *,
    steps: int,
    accumulate: int,
    at: tuple[int, int],
    watched: bool,
) -> tuple[list[bool], list[Any]]:
    """Train with the injector's fault in one micro-batch, `at` its step and place in the window, and close the engine."""
    skipped: list[bool] = []
    left: list[Any] = []
    for step in range(steps):
        for micro in range(accumulate):
            batch, due = draw(), (step, micro) == at
            if due:
                injector.arm(batch)

            def compute(batch: Any = batch, due: bool = due) -> Any:
                injector.is_due = due  # until the next one: checkpoints compute parts again during the backward pass
                return losses_of(batch)

            with engine.forward():
                losses = compute()
            several: list[Tensor] = losses if isinstance(losses, list) else [losses]
            for number, loss in enumerate(several):
                engine.backward(loss, retain_graph=number + 1 < len(several))
            left += [loss.detach().clone() for loss in several]
            result = engine.step(replay=compute if watched else None)
        skipped.append(result.skipped)
        if step == at[0]:
            injector.disarm()
    state = engine.state_dict()
    state.pop("truth")  # it differs between code that was compiled and code from the compiler's cache
    left += [state, torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()]  # noqa: NPY002
    left += [model.state_dict(), dict(model.named_buffers())]
    engine.close()
    return skipped, left


def print_results(outcomes: Iterable[Any], groups_of: Callable[[Any], tuple[str, ...]], *, show: bool) -> None:
    """Print each outcome that is wrong, or all of them, then how many were right and undisturbed by the groups of their faults."""
    for name in ("halfstep", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    table: dict[str, Counter[str]] = {}
    for outcome in outcomes:
        for row in dict.fromkeys(("all", *groups_of(outcome.fault))):
            table.setdefault(row, Counter()).update(faults=1, right=outcome.right, undisturbed=outcome.undisturbed)
        if show or not outcome.right or not outcome.undisturbed:
            print(outcome, outcome.autopsy, sep="\n", end="\n\n", flush=True)
    for row, counts in table.items():
        share = counts["right"] / counts["faults"]
        print(
            f"{row:28} {counts['faults']:4} faults  {counts['right']:4} right ({share:.1%})  {counts['undisturbed']:4} undisturbed"
        )


def same(one: Any, other: Any) -> bool:
    """Whether two trees are bit for bit equal: -0 is not 0, and NaN equals only itself."""
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bits(one), _bits(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other) if isinstance(one, float) else bool(one == other)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
