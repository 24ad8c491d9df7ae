"""What watching costs inside the libraries that people train with: transformers' Trainer, Accelerate and Lightning.

    python benchmarks/bench_integrations.py [--library trainer accelerate lightning] [--precision fp16] [--rounds 5] [--json FILE]
    python benchmarks/bench_integrations.py --tiny       a small model anywhere; its times mean nothing

The model is GPT-2 of transformers with random weights, 124 M parameters, 8 x 1024 tokens. A run is the library's own loop over 170 steps, with
nothing of Halfstep or with its callback at every=100, and the time is that of the last 100 steps: a Watch samples steps 1, 2, 4, ... 64
whatever `every` is, and of those 100 steps it samples one. Runs alternate; a cost is the median over the rounds of the ratio of
times in a round, less 1, with the least and the largest.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from halfstep.hardware.environment import environment

FIRST, LAST = 70, 170
LIMIT = 0.01
LR = 1e-4


class Clock:
    """Seconds from the end of step `first` to that of step `last`, with the GPU waited for at both."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.step, self.seconds, self._start = 0, 0.0, 0.0

    def tick(self) -> None:
        """A step is over."""
        self.step += 1
        if self.step in {self.first, self.last}:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            now = time.perf_counter()
            self.seconds, self._start = now - self._start, now


class Tokens:
    """Examples of random tokens."""

    def __init__(self, num: int, length: int, vocabulary: int) -> None:
        self._rows = torch.randint(0, vocabulary, (num, length), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


def run_trainer(model: nn.Module, data: Tokens, batch: int, precision: str, clock: Clock, *, watched: bool) -> None:
    """transformers' Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from halfstep.integrations.transformers import HalfstepCallback

    class Ticks(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.tick()

    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            max_steps=clock.last,
            per_device_train_batch_size=batch,
            learning_rate=LR,
            logging_steps=clock.last,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            **{precision: True} if torch.cuda.is_available() else {"use_cpu": True},
        )
        callbacks = [HalfstepCallback(every=100)] if watched else []
        Trainer(model, args, train_dataset=data, callbacks=[*callbacks, Ticks()]).train()


def run_accelerate(model: nn.Module, data: Tokens, batch: int, precision: str, clock: Clock, *, watched: bool) -> None:
    """A loop as Accelerate documents it."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from halfstep.integrations.accelerate import attach

    AcceleratorState._reset_state(reset_partial_state=True)  # noqa: SLF001 - it keeps the precision of the run before
    accelerator = Accelerator(mixed_precision=precision if torch.cuda.is_available() else "no")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=torch.cuda.is_available())
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch))  # type: ignore[arg-type]
    session = attach(accelerator, every=100) if watched else None
    while clock.step < clock.last:
        for inputs in loader:
            accelerator.backward(model(**inputs).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            clock.tick()
            if clock.step == clock.last:
                break
    if session is not None:
        session.close()
    accelerator.free_memory()


def run_lightning(model: nn.Module, data: Tokens, batch: int, precision: str, clock: Clock, *, watched: bool) -> None:
    """Lightning's Trainer with its own precision plugin, so that only the callback differs."""
    import lightning

    from halfstep.integrations.lightning import HalfstepCallback

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, inputs: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(**inputs).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=LR)

    class Ticks(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, *_: Any) -> None:
            clock.tick()

    trainer = lightning.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=1,
        precision=("16-mixed" if precision == "fp16" else "bf16-mixed") if torch.cuda.is_available() else "32-true",
        max_steps=clock.last,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*([HalfstepCallback(every=100)] if watched else []), Ticks()],
    )
    trainer.fit(Module(), DataLoader(data, batch))  # type: ignore[arg-type]


LIBRARIES: dict[str, Callable[..., None]] = {
    "trainer": run_trainer,
    "accelerate": run_accelerate,
    "lightning": run_lightning,
}


def build(*, tiny: bool) -> tuple[nn.Module, Tokens, int]:
    """A GPT-2, its data and the batch."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape: dict[str, int] = (
        {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 64} if tiny else {}
    )
    config = GPT2Config(**shape, bos_token_id=0, eos_token_id=0)
    batch = 2 if tiny else 8
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = GPT2LMHeadModel(config)
    return model, Tokens(batch * 32, config.n_positions, config.vocab_size), batch


def measure(library: str, precision: str, rounds: int, *, tiny: bool) -> dict[str, Any]:
    """Seconds of the timed steps, without and with the callback, by round."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    first, last = (2, 4) if tiny else (FIRST, LAST)
    for number in range(rounds):
        for watched in (False, True) if number % 2 == 0 else (True, False):
            model, data, batch = build(tiny=tiny)
            clock = Clock(first, last)
            LIBRARIES[library](model, data, batch, precision, clock, watched=watched)
            seconds[watched].append(clock.seconds / (last - first))
    costs = sorted(after / before - 1 for before, after in zip(seconds[False], seconds[True], strict=True))
    cost = statistics.median(costs)
    return {
        "library": library,
        "precision": precision,
        "ms": 1e3 * statistics.median(seconds[False]),
        "ms watched": 1e3 * statistics.median(seconds[True]),
        "cost": cost,
        "least": costs[0],
        "largest": costs[-1],
        "met": cost <= LIMIT,
    }


def main() -> None:
    """Measure the libraries in turn and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--library", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument("--precision", choices=("fp16", "bf16"), default="fp16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in ("halfstep", "lightning.pytorch", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    print(f"{environment()}")
    print("| library | ms per step | watched | cost at every=100 | least to largest |\n|---|---|---|---|---|")
    rows = []
    for library in args.library:
        row = measure(library, args.precision, args.rounds, tiny=args.tiny)
        rows.append(row)
        print(
            f"| {library}, {args.precision} | {row['ms']:.2f} | {row['ms watched']:.2f} | {row['cost']:+.2%} | "
            f"{row['least']:+.2%} to {row['largest']:+.2%} |",
            flush=True,
        )
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
