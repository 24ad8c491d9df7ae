"""What is recorded of a run of the reader's script, and the rows that grade it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from halfstep.check.finding import Finding

__all__ = ["Backward", "Clip", "Grade", "Layer", "Row", "Run", "RunSpec", "Step"]

Ended = Literal["end", "exit", "error", "timeout", "died", "not run"]


@dataclass(frozen=True)
class RunSpec:
    """One run of a script: what is changed in it, and what is observed."""

    script: str
    inject: tuple[int, ...] = ()  # backward passes, counted from 0, after which a gradient gets an inf
    boost: float | None = None  # the norm that the gradients are enlarged to after each backward pass
    layers: bool = False  # whether the outputs of modules are searched for inf and NaN
    operators: bool = True  # whether dtypes of products and live bytes are observed, which slows the run down
    max_init_scale: float | None = (
        None  # the largest initial scale of a GradScaler, so that early steps are not skipped
    )
    bf16_supported: bool = True  # what torch.cuda.is_bf16_supported() returns


@dataclass(frozen=True)
class Backward:
    """One backward pass."""

    compute: str  # the narrowest format of its matrix products: fp32, fp16, bf16
    scaled: bool  # whether it went through the output of scaler.scale
    scale: float
    under_autocast: bool
    injected: bool
    finite: bool  # all gradients
    fresh: bool = True  # whether gradients were cleared before it


@dataclass(frozen=True)
class Clip:
    """A call of torch's clipping functions."""

    kind: Literal["norm", "value"]
    limit: float


@dataclass(frozen=True)
class Step:
    """One attempt to update the weights: scaler.step, or optimizer.step by itself."""

    backward: int  # the number of backward passes before it
    via_scaler: bool
    applied: bool  # False if the scaler skipped it
    weights: str  # the dtype of the parameters
    model: str  # the shapes of the parameters
    seconds: float  # since the previous step ended
    peak_bytes: int
    true_norm: float | None = None  # of the gradient of the loss; None if it was not seen
    received_norm: float | None = None  # of the gradient that the optimizer applied
    true_max: float | None = None
    received_max: float | None = None
    cosine: float | None = None
    clip: Clip | None = None
    from_update: bool = False  # received_* are computed from the change of the weights
    finite_weights: bool = True
    scale_after: float | None = None  # of the scaler, after the following update


@dataclass(frozen=True)
class Layer:
    """A module whose output had inf or NaN although its inputs, and the outputs of its parts, had none."""

    names: tuple[str, ...]  # as the script could call it
    compute: str


@dataclass(frozen=True)
class Run:
    """What a script did in one run."""

    ended: Ended
    error: str = ""
    line: int | None = None
    exit_code: int = 0
    output: str = ""
    seconds: float = 0.0
    backwards: tuple[Backward, ...] = ()
    steps: tuple[Step, ...] = ()
    num_updates: int = 0
    pending_updates: int = 0  # optimizers that were stepped by a scaler without a following update
    clock_reads: tuple[int, ...] = ()  # the number of steps before each reading
    memory_reads: tuple[tuple[int, str, float], ...] = ()  # number of steps before it, function, value
    resets: tuple[int, ...] = ()  # of the peak, as the number of steps before each
    layers: tuple[Layer, ...] = ()
    all_layers: tuple[str, ...] = ()
    formats_forward: tuple[str, ...] = ()  # of the forward passes that were seen
    variables: dict[str, str] = field(default_factory=dict)  # strings in capitals that the script defines

    @property
    def fine(self) -> bool:
        """Whether the script ran to its end."""
        return self.ended == "end" or (self.ended == "exit" and self.exit_code == 0)

    @property
    def num_skipped(self) -> int:
        """Steps that the scaler skipped, and non-finite gradients that the script dropped without a step."""
        tried = {step.backward - 1 for step in self.steps}
        last = len(self.backwards) - 1
        dropped = sum(
            not b.finite and i not in tried and (i == last or self.backwards[i + 1].fresh)
            for i, b in enumerate(self.backwards)
        )
        return sum(not step.applied for step in self.steps) + dropped

    def backward_of(self, step: Step) -> Backward | None:
        """The last backward pass before a step."""
        return self.backwards[step.backward - 1] if 0 < step.backward <= len(self.backwards) else None

    def compute_of(self, step: Step) -> str:
        """The format that a step was computed in."""
        backward = self.backward_of(step)
        return backward.compute if backward else "fp32"

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Run:
        """The run that the host wrote."""
        backwards = tuple(Backward(**each) for each in data.pop("backwards", ()))
        steps = tuple(
            Step(**(each | {"clip": Clip(**each["clip"]) if each["clip"] else None})) for each in data.pop("steps", ())
        )
        layers = tuple(Layer(tuple(each["names"]), each["compute"]) for each in data.pop("layers", ()))
        reads = tuple((int(n), str(name), float(value)) for n, name, value in data.pop("memory_reads", ()))
        rest: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
        return cls(backwards=backwards, steps=steps, layers=layers, memory_reads=reads, **rest)


@dataclass(frozen=True)
class Row:
    """One criterion: what was expected, what was measured, and what to do if it is not met."""

    name: str
    expected: str
    measured: str
    passed: bool
    to_do: str = ""


@dataclass(frozen=True)
class Grade:
    """A graded practice."""

    number: int
    title: str
    rows: tuple[Row, ...]
    findings: tuple[Finding, ...] = ()
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether every criterion is met."""
        return all(row.passed for row in self.rows)
