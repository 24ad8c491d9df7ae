"""What stays in fp32: losses, sums, batch-norm statistics, accumulated gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.engine.engine import Engine
from halfstep.learning.experiment import Outcome, Reading
from halfstep.precision.formats import format_name
from halfstep.precision.policy import Policy

__all__ = ["accumulation", "batchnorm", "losses", "reductions"]


def losses() -> Outcome:
    """The dtype of several losses of the same 16-bit output under autocast."""
    layer, x = nn.Linear(8, 4), torch.randn(16, 8)
    target, classes = torch.randn(16, 4), torch.randint(4, (16,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(x)
        by_torch = {
            "F.cross_entropy": F.cross_entropy(output, classes),
            "F.mse_loss": F.mse_loss(output, target),
            "F.binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits(output, target.sigmoid()),
        }
        error = output - target.to(output.dtype)
        by_hand = {
            "(error * error).mean()": (error * error).mean(),
            "error.abs().mean()": error.abs().mean(),
            "output.logsumexp(-1).mean()": output.logsumexp(-1).mean(),
        }
    exact = float((layer(x) - target).square().mean().detach())
    difference = abs(float(by_hand["(error * error).mean()"].detach()) - exact) / exact
    readings = [Reading(name, format_name(value.dtype)) for name, value in {**by_torch, **by_hand}.items()]
    readings.append(Reading("relative error of the mean square by hand", difference, f"{difference:.1e}"))
    return Outcome(
        tuple(readings),
        all(v.dtype == torch.float32 for v in by_torch.values())
        and all(v.dtype == torch.bfloat16 for v in by_hand.values()),
        "The lesson states that autocast handles loss functions. It does so by name: operations on its list. A loss of your own, made "
        "of subtraction, abs and mean, is on no list and stays in 16 bits: write output.float() first. The lists differ by device.",
    )


def reductions() -> Outcome:
    """Dtypes of softmax, sum and norm under this CPU's autocast, and inside `engine.forward()`."""
    layer, x = nn.Linear(8, 512), torch.randn(4, 8)

    def results(output: Tensor) -> dict[str, Tensor]:
        return {"softmax": output.softmax(-1), "sum": output.sum(), "norm": output.norm()}

    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = results(layer(x))
    engine = Engine(layer, torch.optim.SGD(layer.parameters(), lr=0.1), "bf16")
    with engine.forward():
        region = results(layer(x))
    readings = [
        Reading(f"{name}: autocast on a CPU / Engine", f"{format_name(plain[name].dtype)}/{format_name(region[name].dtype)}",
                f"{format_name(plain[name].dtype)} / {format_name(region[name].dtype)}")
        for name in plain
    ]  # fmt: skip
    on_cuda = {name: _on_list(name, "AutocastCUDA") for name in ("softmax.int", "sum", "norm.Scalar")}
    readings += [Reading(f"{name} on torch's CUDA list", on, "yes" if on else "no") for name, on in on_cuda.items()]
    return Outcome(
        tuple(readings),
        all(t.dtype == torch.bfloat16 for t in plain.values())
        and all(t.dtype == torch.float32 for t in region.values())
        and all(on_cuda.values()),
        "CUDA's autocast runs softmax, sums and norms in fp32; a CPU's does not. So a test on a CPU is no proof for a GPU, nor "
        "the reverse. Inside `engine.forward()` they are fp32 on every device.",
    )


def _on_list(operation: str, key: str) -> bool:
    """Whether torch's autocast of a device has a rule for an operation; needs no such device."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operation}", key))  # noqa: SLF001


def batchnorm() -> Outcome:
    """The running mean of BatchNorm1d on data with mean 10 and momentum 0.01, stored in bf16 and in fp32."""
    means = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        layer = nn.BatchNorm1d(1, momentum=0.01).to(dtype)
        batch = torch.tensor([[9.0], [11.0]] * 8, dtype=dtype)
        for _ in range(1000):
            layer(batch)
        assert layer.running_mean is not None
        means[name] = float(layer.running_mean)
    norm = nn.BatchNorm1d(4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        norm(torch.randn(8, 4).bfloat16())
    assert norm.running_mean is not None
    stored = format_name(norm.running_mean.dtype)
    readings = [
        Reading(f"running mean after 1000 batches, {name}", mean, f"{mean:.3f}") for name, mean in means.items()
    ]
    readings.append(Reading("running statistics of BatchNorm1d under autocast", stored))
    return Outcome(
        tuple(readings),
        abs(means["fp32"] - 10) < 0.01 and abs(means["bf16"] - 10) > 0.5 and stored == "fp32",
        "Each update is 1 % of the distance that is left; in bf16 it is soon smaller than half the spacing, and the mean stops "
        "short of 10. Autocast does not touch the statistics. model.bfloat16() and model.half() do: keep norms in fp32 there.",
    )


def accumulation() -> Outcome:
    """A gradient of 0.01 from each of 1024 micro-batches, summed in each format."""
    num_batches, gradient = 1024, 0.01
    sums = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        total, each = torch.zeros((), dtype=dtype), torch.tensor(gradient, dtype=dtype)
        for _ in range(num_batches):
            total += each
        sums[name] = float(total)
    true = num_batches * gradient
    lean = Policy.parse("bf16-lean")
    formats = lean.grads_format(1), lean.grads_format(4)
    readings = [Reading(f"sum in {name}", value, f"{value:.3f} of {true:.2f}") for name, value in sums.items()]
    readings.append(Reading("gradients of bf16-lean, accumulate 1 / 4", "/".join(formats), " / ".join(formats)))
    return Outcome(
        tuple(readings),
        sums["bf16"] < 0.5 * true
        and 0.005 * true < true - sums["fp16"] < 0.1 * true
        and abs(sums["fp32"] - true) < 1e-3 * true
        and formats == ("bf16", "fp32"),
        "Once the sum is 256 to 512 times the next gradient, bf16 adds nothing; fp16 reaches 8 times as far and only rounds here. Halfstep accumulates in fp32. With a scaler, keep the scale "
        "constant over the window: unscale_, step and update once, at its end.",
    )
