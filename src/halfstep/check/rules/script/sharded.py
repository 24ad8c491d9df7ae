"""HS127-HS128: scalers for sharded models."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.flow.event import Event
from halfstep.check.script.flow.guard import Guard, possible
from halfstep.check.script.objects.values import Scaler, argument, constant
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.names import key_of

__all__ = ["RULES"]

_TRAIN = """\
import torch
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_fn(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


class FsdpPlainScaler(ScriptRule):
    """FullyShardedDataParallel is used with a GradScaler that checks only the local rank."""

    code = "HS127"
    name = "fsdp-plain-scaler"
    severity = "warning"
    reason = (
        "With FullyShardedDataParallel each rank stores a shard of the gradients. A plain GradScaler detects an overflow only on the "
        "rank where it occurs: that rank skips, the others step, and weights and scales diverge. ShardedGradScaler combines the "
        "overflow checks of all ranks. (`fully_shard`, the successor, works with the plain GradScaler.)"
    )
    bad = (
        "import torch\nfrom torch.distributed.fsdp import FullyShardedDataParallel as FSDP\nmodel = FSDP(Net())\n"
        + _TRAIN.partition("\n")[2],
        "import torch\nfrom torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
        "from torch.nn.parallel import DistributedDataParallel as DDP\nif args.fsdp:\n    model = FSDP(Net())\nelse:\n"
        "    model = DDP(Net())\n" + _TRAIN.partition("\n")[2],
    )
    good = (
        "import torch\nfrom torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
        "from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler\nmodel = FSDP(Net())\n"
        + _TRAIN.partition("\n")[2].replace('torch.amp.GradScaler("cuda")', "ShardedGradScaler()"),
        "import torch\nimport torch.distributed.fsdp as fsdp\n"
        "model = fsdp.FullyShardedDataParallel(Net(), sharding_strategy=fsdp.ShardingStrategy.NO_SHARD)\n"
        + _TRAIN.partition("\n")[2],
    )
    references = ("https://docs.pytorch.org/docs/stable/fsdp.html", "https://github.com/pytorch/pytorch/issues/64632")

    def check(self, script: Script) -> Iterator[Finding]:
        """Plain scalers in scripts that wrap with FSDP only."""
        wraps = list(script.events("wrap_fsdp"))
        plain = [
            s
            for s in script.scalers
            if s.api in {"torch.amp.GradScaler", "torch.cuda.amp.GradScaler"} and s.enabled != "no"
        ]
        if not wraps or not plain or all(map(_keeps_whole, wraps)):
            return
        other = any("Sharded" in name and "DataParallel" not in name for name in script.outline.loads)
        if other or len(plain) != len(script.scalers):
            plain = [scaler for scaler in plain if _comes_first(script, scaler, wraps)]
        plain = [scaler for scaler in plain if not _is_of_other_kind(script, scaler, wraps)]
        if not plain or not (script.has("scaler_step") or all(_leaves_file(s) for s in plain)):
            return
        sharded = [e for e in wraps if any(possible(e.guards, s.guards) for s in script.near(e, "scaler_step"))]
        sharded = sharded if script.has("scaler_step") and not other else wraps
        if not sharded:
            return
        # A script that also wraps with DistributedDataParallel chooses; the scaler is wrong where it chooses FSDP.
        chosen = script.has("wrap_ddp") or all(e.guards for e in sharded)
        state = "the model is sharded by FullyShardedDataParallel"
        state = f"where {state}, " if chosen else f"{state}, but "
        for scaler in plain:
            yield self.finding(
                script.where(scaler.node),
                f"{state}this scaler detects overflows only on its own rank",
                instead="torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler()",
            )


def _leaves_file(scaler: Scaler) -> bool:
    """Whether a function returns the scaler, for a loop of another file."""
    if isinstance(scaler.parent, ast.Return):
        return True
    names = (n for n in ast.walk(scaler.function.node) if isinstance(n, ast.Return) and n.value is not None)
    return bool(scaler.key) and any(key_of(part) == scaler.key for n in names for part in ast.walk(n))


def _is_of_other_kind(script: Script, scaler: Scaler, wraps: list[Event]) -> bool:
    """Whether another class creates the scaler, by a method that the classes which wrap have as well: each kind has its own."""
    cls, name = scaler.function.cls, scaler.function.name
    classes = {event.function.cls for event in wraps}
    if not cls or cls in classes:
        return False
    return all(owner and name in script.outline.classes.get(owner, {}) for owner in classes)


def _comes_first(script: Script, scaler: Scaler, wraps: list[Event]) -> bool:
    """Whether `if amp: GradScaler()` comes before `elif fsdp: ShardedGradScaler()`, so that with both it is the plain one."""
    events = list(script.events("make_scaler"))
    mine = [e for e in events if e.node is scaler.node]
    others = [e for e in events if e.node in script.scaler_of and "Sharded" in script.scaler_of[e.node].api]
    wrapped = {guard for wrap in wraps for guard in wrap.guards if guard.is_true}
    for a, b in ((a, b) for a in mine for b in others):
        chosen = {guard for guard in b.guards if guard in wrapped}
        after = any(guard.is_true and Guard(guard.text, is_true=False) in b.guards for guard in a.guards)
        if chosen and after and possible(a.guards, tuple(chosen)):
            return True
    return False


def _keeps_whole(event: Event) -> bool:
    """Whether FSDP only replicates: NO_SHARD reduces the gradients as DistributedDataParallel does."""
    strategy = argument(event.node, None, "sharding_strategy") if isinstance(event.node, ast.Call) else None
    return key_of(strategy).endswith("NO_SHARD")


class ShardedScalerFused(ScriptRule):
    """A ShardedGradScaler is used with a fused optimizer."""

    code = "HS128"
    name = "sharded-scaler-fused"
    severity = "warning"
    reason = (
        "A fused optimizer checks for overflow inside its step, where ShardedGradScaler does not combine the ranks: one rank skips, "
        "the others step (measured on torch 2.13: scales 2.0 and 4.0 after one overflow). With unscale_ first it raises RuntimeError."
    )
    bad = (
        "import torch\nfrom torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler\n"
        "optimizer = torch.optim.AdamW(model.parameters(), fused=True)\nscaler = ShardedGradScaler()\n"
        "for x in loader:\n    optimizer.zero_grad()\n    scaler.scale(model(x)).backward()\n    scaler.step(optimizer)\n    scaler.update()\n",
    )
    good = (
        "import torch\nfrom torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler\n"
        "optimizer = torch.optim.AdamW(model.parameters(), fused=False)\nscaler = ShardedGradScaler()\n"
        "for x in loader:\n    optimizer.zero_grad()\n    scaler.scale(model(x)).backward()\n    scaler.step(optimizer)\n    scaler.update()\n",
    )
    references = (
        "https://github.com/pytorch/pytorch/pull/76918",
        "measured: torch 2.13, two ranks, scales 2.0 and 4.0 after one overflow",
    )

    def check(self, script: Script) -> Iterator[Finding]:
        """Fused optimizers in scripts that use ShardedGradScaler only."""
        if not script.scalers or any("Sharded" not in s.api for s in script.scalers):
            return
        reported = set()
        for event in script.events("make_optimizer"):
            fused = argument(event.node, None, "fused") if isinstance(event.node, ast.Call) else None
            if constant(fused) is True and event.node not in reported:
                reported.add(event.node)
                yield self.finding(
                    script.where(event.node),
                    "with fused=True, ShardedGradScaler does not combine the overflow checks of the ranks",
                    instead="use fused=False, or fully_shard with torch.amp.GradScaler",
                )


RULES: tuple[type[Rule], ...] = (FsdpPlainScaler, ShardedScalerFused)
