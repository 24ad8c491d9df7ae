"""HS287: the mixed-precision setting of old OpenMMLab configurations, which MMEngine does not read."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.check.finding import Finding
from halfstep.check.rule import Rule, ScriptRule
from halfstep.check.script.script import Script
from halfstep.check.script.syntax.openmmlab import class_of, entries_of, inherits_settings, settings_of

__all__ = ["RULES"]

_HEAD = "optimizer = dict(type='AdamW', lr=6e-5)\n"


class OldFp16Setting(ScriptRule):
    """A configuration for MMEngine asks for fp16 with a key that only MMCV 1 read."""

    code = "HS287"
    name = "mmengine-fp16-ignored"
    severity = "warning"
    reason = (
        "`fp16 = dict(loss_scale=...)` switched mixed precision on in MMCV 1. MMEngine's runner (mmdet 3, mmseg 1, mmpretrain) takes the "
        "precision from `optim_wrapper` alone and ignores the key without a warning: the run trains in float32, with twice the memory of "
        "activations. The option `--amp` of tools/train.py, too, changes `optim_wrapper` and not this key."
    )
    bad = (
        f"{_HEAD}optim_wrapper = dict(type='OptimWrapper', optimizer=optimizer)\nfp16 = dict(loss_scale='dynamic')\n",
        f"{_HEAD}optim_wrapper = {{'type': 'OptimWrapper', 'optimizer': optimizer}}\nfp16 = dict(loss_scale=512.)\n",
        f"{_HEAD}optim_wrapper = dict(optimizer=optimizer)\nfp16 = {{'loss_scale': 512.}}\n",
    )
    good = (
        f"{_HEAD}optim_wrapper = dict(type='AmpOptimWrapper', optimizer=optimizer)\nfp16 = dict(loss_scale='dynamic')\n",
        f"{_HEAD}fp16 = dict(loss_scale=512.)\n",
        f"_base_ = ['../base.py']\n{_HEAD}optim_wrapper = dict(optimizer=optimizer)\nfp16 = dict(loss_scale=512.)\n",
        f"{_HEAD}optim_wrapper = dict(type='OptimWrapper', optimizer=optimizer)\nfp16 = None\n",
    )
    references = (
        "https://github.com/open-mmlab/mmdetection/issues/10865",
        "https://mmengine.readthedocs.io/en/latest/common_usage/speed_up_training.html#mixed-precision-training",
    )
    words = ("optim_wrapper",)

    def check(self, script: Script) -> Iterator[Finding]:
        """A module that assigns both `optim_wrapper` without mixed precision and `fp16`."""
        settings = settings_of(script.tree)
        if "fp16" not in settings or "optim_wrapper" not in settings:
            return
        entries = entries_of(settings["optim_wrapper"].value)
        kind = entries.get("type")
        plain = class_of(kind) == "OptimWrapper" if kind is not None else not inherits_settings(script.tree)
        if entries and plain and "loss_scale" in entries_of(settings["fp16"].value):
            yield self.finding(
                script.where(settings["fp16"]),
                "MMEngine ignores `fp16`: unless the run is started with --amp, it trains in float32",
                instead="optim_wrapper = dict(type='AmpOptimWrapper', loss_scale='dynamic', ...)",
            )


RULES: tuple[type[Rule], ...] = (OldFp16Setting,)
