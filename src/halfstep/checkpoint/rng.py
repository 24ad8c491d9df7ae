"""Random-number state of Python, NumPy and torch, as plain values that a checkpoint can store."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

from halfstep.events import log_info

__all__ = ["derive_rng", "restore_rng", "rng_state", "seed_everything"]


def seed_everything(seed: int) -> None:
    """Seed every generator a job may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - jobs draw from the global generator


def rng_state() -> dict[str, Any]:
    """The state of every generator that `seed_everything` seeds."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002 - loaders use the global generator
    return {
        "python": random.getstate(),
        "numpy": (
            str(kind),
            torch.from_numpy(np.asarray(keys).astype("int64")),
            int(position),
            int(has_gauss),
            float(gauss),
        ),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_rng(state: dict[str, Any]) -> None:
    """Put every generator back into a state that `rng_state` returned."""
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype("uint32"), *rest))  # noqa: NPY002 - loaders use the global generator
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        if len(state["cuda"]) != torch.cuda.device_count():
            log_info(
                f"Checkpoint has CUDA RNG state for {len(state['cuda'])} GPUs but {torch.cuda.device_count()} are visible; "
                "CUDA RNG state was not restored."
            )
        else:
            torch.cuda.set_rng_state_all(state["cuda"])


def derive_rng(state: dict[str, Any], rank: int, num_ranks: int) -> None:
    """Seed every generator from a state that `rng_state` returned: other numbers on each rank, and the same in each run."""
    text = state["torch"].numpy().tobytes() + f"rank {rank} of {num_ranks}".encode()
    seed_everything(int.from_bytes(hashlib.sha256(text).digest()[:7], "big"))
