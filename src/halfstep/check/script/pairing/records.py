"""A format and the flag of its scaler as two fields of one record: `Precision("fp16", torch.float16, device.type == "cuda")`."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from halfstep.check.regex import regex
from halfstep.check.script.flow.event import Event
from halfstep.check.script.objects.values import Scaler, argument, text_of
from halfstep.check.script.pairing.device_tests import asks_for_cuda
from halfstep.check.script.pairing.scaler_condition import Omission
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.children import all_nodes
from halfstep.check.script.syntax.names import key_of, last_name

__all__ = ["omitted_by_record"]

_DEVICE = regex(r"cuda|gpu|cpu|mps|xpu|npu|device|available")
_FLOAT16 = {"torch.float16", "torch.half"}


def omitted_by_record(script: Script, scalers: Sequence[Scaler], opened: Event) -> Omission | None:
    """The record with float16 and a scaler for CUDA alone, where the region takes its dtype from it on every device."""
    flag = argument(scalers[0].node, None, "enabled") if len(scalers) == 1 else None
    regions = opened.regions[-1].autocasts
    if not isinstance(flag, ast.Attribute) or not regions or any(_DEVICE.search(g.text) for g in opened.guards):
        return None
    for region in regions:
        device, dtype = argument(region.node, 0, "device_type"), region.dtype_node
        if not isinstance(dtype, ast.Attribute) or last_name(key_of(dtype.value)) != last_name(key_of(flag.value)):
            return None
        may_be_mps = "mps" in region.devices or "'mps'" in script.source.text or '"mps"' in script.source.text
        if device is None or isinstance(device, ast.Constant) or region.enabled != "yes" or not may_be_mps:
            return None
        for made in _made_with(script, dtype.attr, flag.attr):
            return Omission(
                made,
                "on devices other than CUDA, such as MPS, this disables the scaler, and",
                "a GradScaler for every device, or bfloat16 on the others",
            )
    return None


def _made_with(script: Script, dtype: str, flag: str) -> Iterator[ast.Call]:
    """The calls that make a record of float16 whose flag asks for CUDA, where no test has asked for the device."""
    for node in all_nodes(script.tree):
        fields = (
            [key_of(s.target) for s in node.body if isinstance(s, ast.AnnAssign)]
            if isinstance(node, ast.ClassDef)
            else []
        )
        if not isinstance(node, ast.ClassDef) or not {dtype, flag} <= set(fields):
            continue
        for call, _ in script.outline.calls.get(node.name, ()):
            value = argument(call, fields.index(dtype), dtype)
            is_float16 = value is not None and script.outline.names.full(value) in _FLOAT16
            asked = argument(call, fields.index(flag), flag)
            tests = (n.test for n in script.above(call) if isinstance(n, (ast.If, ast.IfExp)))
            is_for_cuda = asked is not None and asks_for_cuda(asked)
            if is_float16 and is_for_cuda and not any(_DEVICE.search(text_of(test)) for test in tests):
                yield call
