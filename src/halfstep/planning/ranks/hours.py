"""GPU-hours and cost of a number of epochs, from a measured rate: speed is never predicted.

    GPU-hours = epochs x examples per epoch / (examples per second and GPU) / 3600

The rate is that of one GPU, so the same number of GPU-hours on more GPUs assumes that each stays as fast, communication and
smaller micro-batches included. Rates come from a `halfstep compare` record, with the machine they were measured on, or from
the user.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.backends.context import RunContext
from halfstep.errors import SettingError
from halfstep.hardware.probe import find_gpu
from halfstep.jobs.job import Job
from halfstep.precision.policy import Policy

__all__ = ["Budget", "Rate", "Record", "count_examples", "make_budget", "parse_rates", "read_machines", "read_record"]

RESULT = "comparison.json"


@dataclass(frozen=True)
class Budget:
    """The training that GPU-hours are computed for."""

    epochs: float
    examples: int  # in an epoch
    price: float | None = None  # of a GPU-hour, in any currency

    def gpu_hours(self, examples_per_second: float) -> float:
        """Hours of one GPU at this rate, or of several together if each has it."""
        return self.epochs * self.examples / examples_per_second / 3600

    def cost(self, examples_per_second: float) -> float | None:
        """The price of these hours, if one was given."""
        return None if self.price is None else self.price * self.gpu_hours(examples_per_second)


@dataclass(frozen=True)
class Rate:
    """Training examples per second of one GPU, and where the number comes from."""

    examples_per_second: float
    source: str


@dataclass(frozen=True)
class Record:
    """The rates of one machine in a `halfstep compare` record."""

    machine: str
    num_params: int
    rates: Mapping[str, Rate]  # by precision


def make_budget(
    epochs: float | None, examples: int | None, price: float | None, job: Job | None = None
) -> Budget | None:
    """The budget of a command's options; None without `epochs`. Without `examples`, the job's own number."""
    if epochs is None:
        for name, value in (("--examples", examples), ("--price", price)):
            if value is not None:
                raise SettingError(f"{name} has no effect without --epochs N, the length of the training; add it.")
        return None
    for name, number in (("--epochs", epochs), ("--examples", examples), ("--price", price)):
        if number is not None and not (math.isfinite(number) and number > 0):
            raise SettingError(f"{name} {number} must be above 0.")
    if examples is None:
        examples = None if job is None else count_examples(job)
    if examples is None:
        raise SettingError(
            "GPU-hours need the number of training examples in an epoch, and the data does not have one. Add --examples N."
        )
    return Budget(epochs, examples, price)


def count_examples(job: Job) -> int | None:
    """The number of training examples in an epoch, if the job's data has one; generated data does not."""
    loader = job.call("data", RunContext(batch_size=1), split="train", epoch=0)
    for value in (loader, getattr(loader, "dataset", None)):
        number = getattr(value, "num_examples", None)
        if isinstance(number, int):
            return number
    try:
        return len(loader.dataset)
    except (AttributeError, TypeError):
        return None


def parse_rates(texts: Sequence[str], precisions: Sequence[str]) -> dict[str, Rate]:
    """Rates written as PRECISION=NUMBER, or as NUMBER where one precision is planned."""
    rates = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            raise SettingError(
                f"--rate {text!r}: write PRECISION=NUMBER, e.g. bf16=930, in examples per second and GPU."
            )
        if not name and len(precisions) != 1:
            raise SettingError(
                f"--rate {text}: a rate belongs to one precision, and {len(precisions)} are planned. Write "
                f"--rate {precisions[0]}={number}, or plan one with --precision."
            )
        precision = str(Policy.parse(name)) if name else precisions[0]
        if precision not in precisions:
            raise SettingError(f"--rate {text}: {precision} is not planned; add --precision {precision}, or remove it.")
        if precision in rates:
            raise SettingError(f"--rate for {precision} is set twice; remove one.")
        rates[precision] = Rate(value, "--rate")
    return rates


def read_record(path: Path, gpu: str | None, num_params: int) -> Record:
    """The rates in a comparison.json, or in the directory of a comparison, that were measured on `gpu` with this model.

    Rates are at the mean time of a step, because slow steps count in a run.
    """
    file, records = read_machines(path)
    machines = " and ".join(record.machine for record in records)
    here = [record for record in records if gpu is None or _model_of(record.machine) == _model_of(gpu)]
    if not here:
        raise SettingError(
            f"{file} was measured on {machines}, and the plan is for {gpu}: rates of another GPU would be a guess. Plan for "
            f"--gpu {records[0].machine.split()[-1] if records else 'NAME'}, or pass --rate."
        )
    if len(here) > 1:
        raise SettingError(f"{file} has several machines, {machines}; name the one to plan for with --gpu.")
    if here[0].num_params != num_params:
        raise SettingError(
            f"{file} is about a model of {here[0].num_params:,} parameters, and this job has {num_params:,}: not the same. "
            "Compare this job, or pass --rate."
        )
    return here[0]


def read_machines(path: Path) -> tuple[Path, list[Record]]:
    """The file with the result of a comparison, and its record of each machine."""
    file = path / RESULT if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        return file, [_record(values, machine, file) for machine in values["machines"]]
    except OSError as error:
        raise SettingError(f"{file} cannot be read: {error.strerror or error}. Check the path.") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SettingError(
            f"{file} is not a result of halfstep compare ({type(error).__name__}: {error}); pass its comparison.json."
        ) from error


def _model_of(gpu: str) -> str:
    """One name for a GPU that torch, its vendor and the table of GPUs may write differently."""
    try:
        return find_gpu(gpu).name
    except SettingError:
        return gpu


def _record(values: dict[str, Any], machine: dict[str, Any], file: Path) -> Record:
    name, several = machine["machine"], len(values["machines"]) > 1
    rates = {}
    for row in values["rows"]:
        if row["status"] != "done" or (several and row["machine"] != name) or not row.get("mean_seconds"):
            continue
        label = row["label"].removesuffix(f" @ {name}")
        samples = row["samples_per_second"]["value"] * row["step_seconds"]["value"]
        source = f"recorded on {name} at batch {machine['batch']} ({file.name})"
        # A rate is that of one device; records of earlier versions are of one rank.
        rates[label] = Rate(samples / row["mean_seconds"] / row.get("num_ranks", 1), source)
    return Record(name, machine["num_params"], rates)
