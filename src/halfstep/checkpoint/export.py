"""Export the weights of a checkpoint as plain safetensors: the fp32 masters, or the masters rounded to bf16.

A lean run's checkpoint stores 16-bit weights and, in the optimizer's state, the bits that were rounded off. Export
joins the two, so the file has the values that the optimizer updates. Any safetensors reader can read it. Slices of a sharded
checkpoint are put together by this process alone.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from torch import Tensor

from halfstep.checkpoint.directory import Checkpoint, open_checkpoint, replaced
from halfstep.checkpoint.names import match_names
from halfstep.checkpoint.retention import CheckpointFolder
from halfstep.checkpoint.stored import StoredTensor, read_all
from halfstep.errors import SettingError, unknown
from halfstep.kernels.layout import MASTER_ENTRIES, master_in
from halfstep.precision.formats import torch_dtype

__all__ = ["DTYPES", "export_weights", "find_checkpoint", "masters_of"]

DTYPES = ("fp32", "bf16")


def find_checkpoint(run: Path, *, best: bool = False) -> Path:
    """The checkpoint that `run` refers to: itself, or the latest (or best) one in a run's directory."""
    if (run / "manifest.json").exists() or not run.is_dir():
        return run  # load_checkpoint explains what is wrong with it, if anything is
    root = run / "checkpoints" if (run / "checkpoints").is_dir() else run
    folder = CheckpointFolder(root)
    checkpoint = folder.best() if best else folder.latest(clean=False)
    if checkpoint is None:
        raise SettingError(
            f"{run} has no {'validated ' if best else ''}checkpoint; pass a run's directory or a checkpoint in it."
        )
    return checkpoint


def masters_of(checkpoint: Checkpoint, *, ema: bool = False) -> dict[str, Tensor]:
    """Every weight and buffer in full precision; with `ema`, the EMA weights instead of the trained ones.

    Of an open checkpoint, only what that needs is read.
    """
    weights, masters = read_all(checkpoint.weights, StoredTensor.read), dict[str, Tensor]()
    engine = checkpoint.state.get("engine") if isinstance(checkpoint.state, dict) else None
    if engine is None:
        raise SettingError(
            f"{checkpoint.path} was not saved by an Engine, so it has no master weights; use its model.safetensors."
        )
    for names, optimizer in zip(engine["names"], engine["optimizers"], strict=True):
        own = match_names(names, weights)
        for name, state in _by_name([own.get(name, name) for name in names], optimizer).items():
            entries = {entry: state[entry] for entry in MASTER_ENTRIES if entry in state}
            master = master_in(read_all(entries, StoredTensor.read), weights[name])
            masters |= {} if master is None else {name: master}
    weights = replaced(weights, masters)
    if ema:
        if engine["ema"] is None:
            raise SettingError(
                f"{checkpoint.path} has no EMA weights; the run was trained without ema=. Export without ema."
            )
        weights = replaced(weights, read_all(engine["ema"]["averages"], StoredTensor.read))
    return weights


def _by_name(names: list[str], optimizer: dict[str, Any]) -> dict[str, dict[str, Any]]:
    order = [index for group in optimizer["param_groups"] for index in group["params"]]
    indices = zip(names, order, strict=True)
    return {name: optimizer["state"][i] for name, i in indices if i in optimizer["state"]}


def export_weights(
    run: Path, out: Path, *, dtype: str = "fp32", best: bool = False, ema: bool = False, force: bool = False
) -> Path:
    """Write the weights of `run` to `out` as one safetensors file."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    if out.exists() and not out.is_file():
        raise SettingError(f"{out} is not a regular file; choose another --out.")
    if out.exists() and not force:
        raise SettingError(f"{out} exists already; choose another --out, or overwrite it with --force.")
    with open_checkpoint(find_checkpoint(run, best=best)) as checkpoint:
        masters = masters_of(checkpoint, ema=ema)
    tensors: dict[str, Tensor] = {}
    for name, tensor in masters.items():
        cast = tensor.to(torch_dtype(dtype)) if tensor.is_floating_point() else tensor
        tensors[name] = (
            cast.clone() if any(cast.data_ptr() == t.data_ptr() for t in tensors.values() if t.numel()) else cast
        )
    aside = out.with_name(f".{out.name}.part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        save_file(
            {n: t.contiguous() for n, t in tensors.items()},
            aside,
            metadata={"format": "pt", "halfstep": checkpoint.meta["policy"]},
        )
        aside.replace(out)
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as an error of its own
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        reason = getattr(error, "strerror", None) or error
        raise SettingError(f"{out} could not be written: {reason}. Free space or choose another --out.") from error
    return out
