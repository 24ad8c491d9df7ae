"""Measures how fast each number format multiplies matrices on this machine, in a second or two.

How it works. One square product per format, timed after a warm-up, with the device synchronised around each
timing; the result is the median and the spread of several timings. An emulated format can be hundreds of times
slower than fp32 (0.2 GFLOP/s on an Arm CPU). So each format starts with a small product. One that is far slower than
fp32 there stays small enough for the time budget, and fp32 is timed again at that size, so that the ratio is of equal
sizes. The others are timed at fp32's size.

A matrix product is the best case of a format. `halfstep compare` measures what a model gains.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from halfstep.errors import SettingError
from halfstep.hardware.accelerator import pick_device
from halfstep.hardware.onednn import ignore_fallback_warnings
from halfstep.hardware.probe import Hardware
from halfstep.hardware.tf32 import tf32
from halfstep.hardware.torch_build import require_torch

__all__ = ["Measured", "confirm", "is_unsteady", "measure_matmuls"]

SMALLEST = 64  # rows and columns; fp8 products want multiples of 16
# Large enough to fill the device: 4096 on a GPU, 1024 on a few CPU cores.
LARGEST = {"cpu": 1024}
LARGEST_GPU = 4096
BATCH_SECONDS = 0.002  # products shorter than this are timed several at a time, because of the clock's resolution
UNSTEADY = 0.5  # timings whose middle half spans more than this share of the median are inconclusive
MEANINGFUL = 256  # below this size a product is mostly overhead, and only a large difference is conclusive
FAR_SLOWER = 8  # times; slower ones are timed in smaller products, to stay within the time budget
FASTER, AS_FAST = 1.2, 1.1  # above the first a format is faster than fp32, below the second it is not


@dataclass(frozen=True)
class Measured:
    """One format's speed in a square matrix product on this machine."""

    format: str
    gflops_median: float  # 10^9 floating-point operations per second
    spread: float  # the middle half of the timings spans this share of the median
    runs: int
    ratio_to_fp32: float  # against fp32 at the same size; fp32 itself is 1
    size: int  # rows and columns of the matrices

    @property
    def speed(self) -> str:
        """The median in GFLOP/s, as text: whole numbers where it is large, digits where it is small."""
        return f"{self.gflops_median:,.0f}" if self.gflops_median >= 1000 else f"{self.gflops_median:.3g}"

    def __str__(self) -> str:
        return (
            f"{self.format}: {self.speed} GFLOP/s (spread {self.spread:.0%} of {self.runs} runs, "
            f"{self.size} x {self.size}), {self.ratio_to_fp32:.2g} x fp32"
        )


@dataclass(frozen=True)
class _Timing:
    gflops: float
    spread: float
    runs: int


def measure_matmuls(size: int | None = None, seconds: float = 1.5) -> tuple[Measured, ...]:
    """Time a square matrix product in every format torch can run on this machine's device.

    `size` is the largest product tried, and `seconds` the approximate total, without import and first use of the device. The global random state and the TF32 switches are left as they were.
    """
    torch = require_torch("Measuring matrix products")
    if size is not None and size < SMALLEST:
        raise SettingError(f"size={size} is too small to time; use {SMALLEST} or more, or leave it out.")
    if not 0 < seconds < math.inf:
        raise SettingError(f"seconds={seconds} must be above 0 and finite; 1.5 is usual.")
    device = pick_device().type
    largest = size or LARGEST.get(device, LARGEST_GPU)
    names = [name for name in ("fp32", "tf32", "bf16", "fp16", "fp8") if name != "tf32" or _has_tf32(torch, device)]
    share = seconds / (len(names) + 1)  # one share is for fp32 at the sizes of slower formats
    reference: dict[int, _Timing] = {}
    results: list[Measured] = []
    fp32_once, full = math.inf, SMALLEST
    with torch.no_grad(), warnings.catch_warnings():
        ignore_fallback_warnings()  # the measured number shows the same in fewer lines
        for name in names:
            try:
                with _tf32(device, name):
                    if name == "fp32":
                        fp32_once = _quick(torch, device, name, SMALLEST)
                        n = full = _grow(torch, device, name, largest, share)
                    else:
                        # A format that is not far slower than fp32 gets more time, to reach fp32's size.
                        near = _quick(torch, device, name, SMALLEST) < FAR_SLOWER * fp32_once
                        n = _grow(torch, device, name, full, share * 4 if near else share)
                    timing = _time(torch, device, _product(torch, device, name, n), n, share)
            except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError):
                continue  # torch cannot run this format here
            if name == "fp32":
                reference[n] = timing
            elif n not in reference:
                with _tf32(device, "fp32"):
                    reference[n] = _time(torch, device, _product(torch, device, "fp32", n), n, share / 4)
            ratio = timing.gflops / reference[n].gflops
            results.append(Measured(name, timing.gflops, timing.spread, timing.runs, ratio, n))
    return tuple(results)


def is_unsteady(result: Measured, measured: Iterable[Measured]) -> bool:
    """Whether the timings of a format, or those of fp32, vary too much to say which is faster; a large difference shows anyway."""
    spread = max(m.spread for m in (result, *measured) if m is result or m.format == "fp32")
    return spread > UNSTEADY and FAR_SLOWER > result.ratio_to_fp32 > 1 / FAR_SLOWER


def confirm(hardware: Hardware, measured: Iterable[Measured]) -> tuple[str, ...]:
    """Compare the table of facts with the measurement; one sentence per format."""
    measured = tuple(measured)
    sentences = []
    for result in measured:
        if result.format == "fp32":
            continue
        support, ratio = hardware.support[result.format], result.ratio_to_fp32
        summary = f"{result.format}: measured at {ratio:.2g}x the speed of fp32, {support!r} in the table"
        if is_unsteady(result, measured):
            sentences.append(
                f"{summary}: inconclusive, the timings vary too much; repeat it when the machine is less busy."
            )
        elif result.size < MEANINGFUL and ratio > 0.5:
            sentences.append(
                f"{summary}: inconclusive, the product is too small; repeat it when the machine is less busy."
            )
        elif AS_FAST <= ratio <= FASTER:
            sentences.append(f"{summary}: inconclusive, too close to fp32.")
        elif (ratio > FASTER) is (support == "native"):
            sentences.append(f"{summary}: they agree.")
        else:
            sentences.append(
                f"{summary}: they disagree. Repeat the measurement; if it is the same, trust it over the table."
            )
    return tuple(sentences)


def _has_tf32(torch: Any, device: str) -> bool:
    return bool(device == "cuda" and not torch.version.hip and torch.cuda.get_device_capability() >= (8, 0))


def _tf32(device: str, name: str) -> AbstractContextManager[object]:
    """Time fp32 as IEEE fp32 and tf32 as TF32, regardless of the switches of the process."""
    return tf32(name == "tf32") if device == "cuda" else nullcontext()


def _grow(torch: Any, device: str, name: str, largest: int, share: float) -> int:
    """The largest size of a format's product that fits its share of the time budget."""
    n = fitting = min(SMALLEST, largest)
    while True:
        once = _quick(torch, device, name, n)
        if once * 8 <= share:
            fitting = n
        # The next size is tried if two products of it, at up to 8 times the cost, fit half of the share. It is
        # measured and not extrapolated: on a busy machine, much of the time of a small product is overhead.
        # Sizes only double, so that a wrong estimate for a slow format costs seconds at most, never minutes.
        if 2 * n > largest or once * 8 > share or once * 8 * 2 > share / 2:
            return fitting
        n *= 2


def _quick(torch: Any, device: str, name: str, n: int) -> float:
    """The shortest time of one product in seconds, without the first call, which loads kernels."""
    product = _product(torch, device, name, n)
    _clock(torch, device, product, 1)
    best, end = math.inf, time.perf_counter() + 0.05
    for _ in range(3):
        best = min(best, _clock(torch, device, product, 1))
        if time.perf_counter() > end:
            break
    return best


def _time(torch: Any, device: str, product: Callable[[], Any], n: int, seconds: float) -> _Timing:
    _clock(torch, device, product, 1)
    once = _clock(torch, device, product, 1)
    batch = max(1, math.ceil(BATCH_SECONDS / max(once, 1e-7)))
    rates: list[float] = []
    end = time.perf_counter() + seconds * 0.7  # the rest was spent on finding the size and warming up
    while len(rates) < 2 or (len(rates) < 5 and time.perf_counter() < end + 2 * seconds) or _continues(rates, end):
        rates.append(2 * n**3 * batch / _clock(torch, device, product, batch) / 1e9)
    low, median, high = statistics.quantiles(rates, n=4)
    return _Timing(median, (high - low) / median, len(rates))


def _continues(rates: list[float], end: float) -> bool:
    return len(rates) < 100 and time.perf_counter() < end


def _clock(torch: Any, device: str, product: Callable[[], Any], times: int) -> float:
    _synchronise(torch, device)
    start = time.perf_counter()
    for _ in range(times):
        product()
    _synchronise(torch, device)
    return max(time.perf_counter() - start, 1e-9)


def _synchronise(torch: Any, device: str) -> None:
    if device != "cpu":
        getattr(torch, device).synchronize()


def _product(torch: Any, device: str, name: str, n: int) -> Callable[[], Any]:
    """A function that multiplies two n by n matrices in a format."""
    generator = torch.Generator(device=device).manual_seed(0)  # leave the global random state alone
    a, b = (torch.randn(n, n, generator=generator, device=device) for _ in range(2))
    if name == "fp8":
        # MI300 has the "fnuz" variant of fp8; all other hardware has the OCP variant.
        fnuz = bool(torch.version.hip) and "gfx94" in torch.cuda.get_device_properties(0).gcnArchName
        dtype = torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn
        a8, b8 = a.to(dtype), b.to(dtype).t()  # the second operand must be column-major
        one = torch.ones((), device=device)
        multiply = torch._scaled_mm  # noqa: SLF001 - its public successor needs torch 2.10
        return lambda: multiply(a8, b8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name, torch.float32)
    a, b = a.to(dtype), b.to(dtype)
    return lambda: a @ b
