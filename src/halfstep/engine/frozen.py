"""Frozen parameters that change: a momentum encoder inside a model whose frozen weights are stored in 16 bits.

Lean presets round frozen parameters too, and they have no master: nothing trains them. But a momentum encoder (MoCo, BYOL)
is frozen and moves by 0.1 % of a difference per step, which 16 bits lose, so it stops following. Which parameters are
of this kind shows only while the model runs. So the first updates look for it, and the Engine warns once, by name.

Two signs, neither of which waits for the device:

    address and version counter     on the host, in the first updates: changed in three in a row, or in every other one for longer
    checksum of the bits            a few times early on, for edits through `.data`, which no counter records: changed twice

A single change is a checkpoint that was loaded, and harmless.

Under presets with fp32 weights a frozen 16-bit base is accepted as it is. If it is unfrozen later, its updates are rounded to
16 bits with no master; that is reported as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from halfstep.engine.setup import PreparedRun
from halfstep.events import log_warning
from halfstep.hardware.units import few
from halfstep.kernels.table import copied_to
from halfstep.optim.trainable import unsupported_kind
from halfstep.precision.formats import DTYPES_16_BIT
from halfstep.scaling.readback import Readback

__all__ = ["FrozenWatch"]

_LAST_UPDATE = 100  # the search ends here
_CHECKSUMS_AT = frozenset({1, 2, 3, 10, 30, _LAST_UPDATE})
# Of the score of a parameter: an update with another version, one with the same, and the warning.
_RISE, _FALL, _LIMIT = 2, 1, 6
_NUM_CHECKSUMS = 2  # checksums that differ from the one before
_CHUNK = 1 << 22  # elements per checksum kernel, whose temporary tensors are int64


class FrozenWatch:
    """Looks for changing frozen parameters of a lean run; `check` is called after every update."""

    def __init__(self, run: PreparedRun, swapped: Iterable[Tensor] = ()) -> None:
        """`swapped` are parameters that the Engine itself writes, for validation on the EMA: their versions show nothing."""
        named = dict(run.module.named_parameters())
        self._run, self._swapped = run, {id(p) for p in swapped}
        frozen = {
            name: p
            for name, p in named.items()
            if not p.requires_grad and p.dtype in DTYPES_16_BIT and unsupported_kind(p) is None
        }
        is_lean = run.policy.params != "fp32"
        self._params, self._without_master = (frozen, {}) if is_lean else ({}, frozen)
        self._trainable = [name for name, p in named.items() if p.requires_grad]
        self._updates = 0
        self._versions: dict[str, tuple[int, int]] = {}
        self._scores = dict.fromkeys(self._params, 0)
        self._checksums: Tensor | None = None
        self._differences = dict.fromkeys(self._params, 0)
        self._readback = Readback()

    def check(self) -> None:
        """Compare with the last update; warns once, and then looks no more."""
        if self._without_master:
            self._check_unfrozen()
        if not self._params:
            return
        self._updates += 1
        self._compare_versions()
        if self._updates in _CHECKSUMS_AT:
            self._compare_checksums()
        for _, flags in self._readback.deliver(wait=False):
            for name, differs in zip(self._params, flags, strict=True):
                self._differences[name] += bool(differs)
        changing = [name for name, param in self._params.items() if self._changes(name) and not self._is_trained(param)]
        if changing:
            log_warning(_message(changing, self._trainable, str(self._run.policy)))
        # A copy from the device may still be on its way after the last checksum.
        if changing or (self._updates >= _LAST_UPDATE and not len(self._readback)):
            self._params = {}

    def _check_unfrozen(self) -> None:
        trained = [
            name for name, param in self._without_master.items() if param.requires_grad and param.grad is not None
        ]
        if trained:
            log_warning(
                f"Parameters that were frozen when the Engine was built are trained now, in 16 bits and without a master: {few(trained)}. "
                "Updates below half a ulp are lost. Unfreeze before Engine(...), with fp32 weights, or use a lean preset."
            )
            self._without_master = {}

    def _changes(self, name: str) -> bool:
        return self._scores[name] >= _LIMIT or self._differences[name] >= _NUM_CHECKSUMS

    def _is_trained(self, param: Tensor) -> bool:
        """Whether it is trained after all: unfrozen later, or frozen only now and then, as in a GAN."""
        return param.requires_grad or any("step" in o.state.get(param, {}) for o in self._run.optimizers)

    def _compare_versions(self) -> None:
        for name, param in self._params.items():
            own = (param.data_ptr(), param._version)  # noqa: SLF001 - torch's count of in-place changes has no public name
            changed = id(param) not in self._swapped and self._versions.get(name, own) != own
            self._scores[name] = self._scores[name] + _RISE if changed else max(self._scores[name] - _FALL, 0)
            self._versions[name] = own

    def _compare_checksums(self) -> None:
        sums = _checksums(list(self._params.values()))
        if self._checksums is not None:
            self._readback.push(sums != self._checksums)
        self._checksums = sums


@torch.no_grad()
def _checksums(params: Sequence[Tensor]) -> Tensor:
    """One number per 16-bit parameter, from all of its bits: int64 on the device of the first."""
    sums = []
    for param in params:
        total = torch.zeros((), dtype=torch.int64, device=param.device)
        bits = param.detach().reshape(-1).view(torch.int16)
        for start in range(0, len(bits), _CHUNK):
            wide = bits[start : start + _CHUNK].to(torch.int64)
            total += (wide * wide).add_(wide, alpha=3).sum()  # of the plain bits, one up and one down would cancel
        sums.append(copied_to(total, params[0].device))
    return torch.stack(sums)


def _message(changing: Sequence[str], trainable: Sequence[str], policy: str) -> str:
    patterns = {pattern: None for name in changing if (pattern := _module_pattern(name, trainable))}
    way_out = (
        f"Keep their modules in fp32: keep_fp32={'|'.join(patterns)} in the precision."
        if patterns
        else "Put them into a module and keep that in fp32 (keep_fp32=NAME), or register them as buffers, which are not cast."
    )
    return (
        f"Frozen parameters are being changed without gradients, as in a momentum encoder: {few(list(changing))}. {policy} stores "
        f"them in 16 bits, where changes below half a ulp are lost and they stop following. {way_out}"
    )


def _module_pattern(name: str, trainable: Sequence[str]) -> str:
    """The outermost module around a frozen parameter that has no trainable ones; at least the parameter's own."""
    path = name.split(".")[:-1]
    for length in range(1, len(path)):
        module = ".".join(path[:length])
        if not any(other.startswith(f"{module}.") for other in trainable):
            return module
    return ".".join(path)
