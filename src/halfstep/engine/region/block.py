"""The block in which a forward pass computes in 16 bits.

`compute_region` is torch.autocast, a new one each time (an autocast object is not re-entrant, and its cache of cast
weights must not outlive an optimizer step), plus a rule for what stays in fp32. In the autocast presets: losses, softmax,
log-softmax, large sums and norms compute in fp32 on every device. torch's two lists of fp32 operations each lack a part:

    CPU     has the losses, but runs softmax, exp, sum and norm in 16 bits
    CUDA    has the others, but not cross_entropy (nor ctc_loss): its log-softmax requests the logits' own dtype, which
            autocast passes through, so a bf16 run of torch.amp rounds log-probabilities to 8 bits unless the logits are fp32

In the lean presets CUDA's list would undo what 16-bit weights gain: a layer norm that gives fp32 makes the layers after it
copy and compute in fp32. There, operations as large as their input give 16 bits. `precision/operations.py` has the names
and reasons, `kernels.py` registers them with torch's own dispatcher, so that they apply whatever class a module has. The
registrations act only inside a Halfstep region; a plain torch.autocast behaves as before.

torch.compile caches compiled code on disk. The cache key of torch 2.11 records that autocast is on but not its dtype (2.13
does), so a model compiled in bf16 was silently reused for fp16; and no torch knows our rules. So a region adds a tag
to the key. (One limit: within one process torch.compile does not guard on the switch, so one compiled function must not be
called both inside a region and inside a plain torch.autocast.)
"""

from __future__ import annotations

import contextlib
import sys
import zlib
from collections import Counter
from collections.abc import Iterator

import torch

from halfstep.engine.region.kernels import install
from halfstep.engine.region.rule import Rule, recomputing, rule_in_thread
from halfstep.precision import operations
from halfstep.precision.formats import COMPUTE_DTYPES

__all__ = ["compute_region", "recomputing"]

_TABLES = repr([getattr(operations, name) for name in operations.__all__])
_VERSION = f"{zlib.crc32(_TABLES.encode()):08x}"  # code compiled by another version's tables is not reused


@contextlib.contextmanager
def compute_region(
    device_type: str, compute: str, *, lean: bool = False, observed: Counter[str] | None = None
) -> Iterator[None]:
    """Compute in `compute` ("bf16", "fp16", or "fp32"/"tf32" for no casts) inside this block.

    `lean` is the rule for 16-bit weights. `observed` counts the operations that give 16 bits where torch.amp gives fp32.
    """
    if compute not in COMPUTE_DTYPES:
        with torch.autocast(device_type, enabled=False):
            yield
        return
    install(device_type, lean=lean)
    dtype = COMPUTE_DTYPES[compute]
    # The cache of cast weights does not know the dtype: inside a region of the other one it would mix them up.
    other = torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type) is not dtype
    rule = Rule.LEAN if lean else Rule.AUTOCAST
    with (
        rule_in_thread(rule, observed),
        torch.autocast(device_type, dtype=dtype, cache_enabled=not other),
        _own_compilations(f"{device_type} {compute} {rule.value}"),
    ):
        yield


@contextlib.contextmanager
def _own_compilations(tag: str) -> Iterator[None]:
    """Give torch.compile a separate cache for what it compiles inside this block."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled in this process yet
        yield
        return
    config = torch.compiler.config
    before = config.cache_key_tag
    config.cache_key_tag = f"{before} halfstep {tag} {_VERSION}"
    try:
        yield
    finally:
        config.cache_key_tag = before
