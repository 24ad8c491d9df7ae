"""Whether the loader feeds the model fast enough: images per second of both, measured while the run goes on.

How it works. Workers report the seconds that decoding each batch took; W busy workers decode W * images / seconds. The model's
time is from the arrival of a batch to the request for the next one: by the clock on a CPU, and between two events in the
stream on a GPU, where the host runs ahead. Neither makes anything wait. The first batches are not counted: workers start, and
kernels are compiled.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Decoding", "Feed", "FeedMeter"]

SKIPPED, FEWEST, MOST = 3, 3, 20  # batches: left out, needed at the end of a short run, and measured


class Decoding:
    """Counts the images that workers decoded, and the seconds that this took them."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.num_images, self.seconds = 0, 0.0

    def add(self, num_images: int, seconds: float) -> None:
        """Add one batch."""
        self.num_images += num_images
        self.seconds += seconds

    @property
    def rate(self) -> float | None:
        """Images per second that the workers together can decode."""
        return self.num_workers * self.num_images / self.seconds if self.seconds else None


@dataclass(frozen=True)
class Feed:
    """Images per second of loader and model, in one process."""

    loader: float | None  # None: the loader does not measure it
    model: float
    num_workers: int | None
    waited: float  # share of the time in which the loop waited for a batch
    num_batches: int  # measured

    @property
    def limit(self) -> str:
        """The slower one: "loader" or "model"."""
        if self.loader is None:
            return "loader" if self.waited > 0.1 else "model"
        return "loader" if self.loader < self.model else "model"

    def as_data(self) -> dict[str, Any]:
        """Plain values, for the run file."""
        return {
            "loader_images_per_second": None if self.loader is None else round(self.loader, 1),
            "model_images_per_second": round(self.model, 1),
            "num_workers": self.num_workers,
            "waited_share": round(self.waited, 4),
            "limit": self.limit,
            "num_batches": self.num_batches,
        }

    def __str__(self) -> str:
        loader = (
            "not measured" if self.loader is None else f"{self.loader:,.0f} images/s with {self.num_workers} worker(s)"
        )
        verdict = "the model limits the speed"
        if self.limit == "loader":
            verdict = "the loader limits the speed: give the process more CPU cores, or store smaller images"
        return (
            f"Loader: {loader}; model: {self.model:,.0f} images/s, in each process ({self.num_batches} batches measured, {self.waited:.0%} of "
            f"the time spent waiting for data); {verdict}."
        )


class FeedMeter:
    """Measures the first batches of a run; `result` returns the measurement once."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._passed = self._num_images = self._num_batches = 0
        self._waited = self._seconds = 0.0
        self._events: list[tuple[Any, Any]] = []
        self._decoding: Decoding | None = None
        self._is_done = False

    def watch(self, loader: Any, batches: Iterator[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        """The (batch, share) pairs of `batches`; those of a loader that decodes images are measured."""
        if not hasattr(loader, "decoding"):
            yield from batches
            return
        self._decoding = loader.decoding
        while True:
            start = time.perf_counter()
            item = next(batches, None)
            if item is None:
                return
            waited = time.perf_counter() - start
            self._passed += 1
            if self._is_done or self._num_batches >= MOST or self._passed <= SKIPPED:
                yield item
                continue
            begin = self._mark()
            yield item
            self._events.append((begin, self._mark()))
            self._waited += waited
            self._seconds += time.perf_counter() - start
            self._num_images += item[1].num_examples
            self._num_batches += 1

    def result(self, *, wait: bool) -> Feed | None:
        """The measurement, once, when it is complete; with `wait`, at the end of the run, also a shorter one."""
        if self._is_done or self._num_batches < (FEWEST if wait else MOST):
            return None
        if self._on_gpu and not wait and not self._events[-1][1].query():
            return None
        self._is_done = True
        busy = sum(self._between(*pair) for pair in self._events)
        rate = None if self._decoding is None else self._decoding.rate
        workers = None if self._decoding is None else self._decoding.num_workers
        waited = self._waited / max(self._seconds, 1e-9)
        return Feed(rate, self._num_images / max(busy, 1e-9), workers, waited, self._num_batches)

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        if not self._on_gpu:
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000
