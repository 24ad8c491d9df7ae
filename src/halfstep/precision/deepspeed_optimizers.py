"""The optimizers of DeepSpeed: which names it knows, which ZeRO accepts, which it removed, and who clips.

The rules of `halfstep check`, `Policy.from_deepspeed` and the DeepSpeed backend all read these tables, so that they
report the same thing in the same words. Sources: DeepSpeed 0.19.8, runtime/engine.py and runtime/zero/utils.py.
"""

from __future__ import annotations

from typing import Literal

__all__ = [
    "BUILT_IN",
    "BY_LAYER",
    "MAX_GRAD_NORM_EFFECT",
    "ONE_BIT",
    "ONE_BIT_REMOVED",
    "TESTED_WITH_ZERO",
    "TORCH",
    "ZeroSupport",
    "one_bit_removed",
    "one_bit_with_zero",
    "untested_advice",
    "zero_support",
    "zero_support_of_class",
]

ONE_BIT = ("onebitadam", "zerooneadam", "onebitlamb")  # the compressed optimizers, in lower case
ONE_BIT_REMOVED = (0, 19, 7)  # the first release without them
# Names that DeepSpeed recognizes itself, in any case.
BUILT_IN = ("adam", "adamw", "adagrad", "lamb", "lion", "muon", "muadam", "muadamw", "musgd", *ONE_BIT)
# Class names in torch.optim, case-sensitive: DeepSpeed looks them up with getattr.
TORCH = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam", "RAdam", "RMSprop",
    "Rprop", "SGD", "SparseAdam",
)  # fmt: skip
TESTED_WITH_ZERO = frozenset({"adam", "adamw", "adagrad", "lion", "muon", "muadam", "muadamw"})
# Optimizers whose step uses norms, means or products over a full parameter, by DeepSpeed's and torch's names.
BY_LAYER = frozenset({"lamb", "Adafactor", "LBFGS"})

# What DeepSpeed does with max_grad_norm in optimizer.params; measured on 0.19.6 and 0.19.8.
MAX_GRAD_NORM_EFFECT = (
    "DeepSpeed clips with the top-level `gradient_clipping`. When it builds the optimizer, `max_grad_norm` in "
    "`optimizer.params` raises \"'max_grad_norm' is not supported as an optimizer parameter\". Up to 0.19.5 "
    "DeepSpeed first logs that it passes the value on (fp16) or sets it to 0.0 (fp32); it does neither. If you "
    "pass your own optimizer object, the key is ignored. It never clips."
)

# Classes of torch.optim that treat every element alone, so that a flat shard is stepped as the whole parameter is.
_TORCH_ELEMENTWISE = ("ASGD", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
_BY_LAYER_CLASSES = ("adafactor", "fusedlamb", "lamb", "lars", "lbfgs", "muon", "shampoo", "soap")

ZeroSupport = Literal["tested", "elementwise", "by layer", "one bit", "unknown"]

# type() of an optimizer object must be one of these exactly: ZeRO does not accept subclasses.
_TESTED_CLASSES = frozenset({
    ("torch", "Adam"), ("torch", "AdamW"), ("torch", "Adagrad"), ("deepspeed", "FusedAdam"), ("deepspeed", "DeepSpeedCPUAdam"),
    ("deepspeed", "ZenFlowCPUAdam"), ("deepspeed", "DeepSpeedCPUAdagrad"), ("deepspeed", "DeepSpeedCPULion"),
    ("deepspeed", "FusedLion"), ("deepspeed", "MuonWithAuxAdam"), ("apex", "FusedAdam"),
})  # fmt: skip


def one_bit_removed(kind: str) -> str:
    """What happened to a 1-bit optimizer, and what to use."""
    return (
        f"DeepSpeed 0.19.7 removed {kind} (1-bit Adam, 0/1 Adam and 1-bit LAMB), and later releases fail with an "
        "unexplained AssertionError. They compress full momentum tensors, so they run without ZeRO only. Use AdamW, or "
        "keep DeepSpeed 0.18.2, the last release that scales the fp16 loss without ZeRO"
    )


def one_bit_with_zero(stage: int) -> str:
    """Why a 1-bit optimizer does not run with ZeRO."""
    return f"1-bit optimizers need unsharded momenta, and ZeRO stage {stage} shards them; use stage 0"


def untested_advice(kind: str, support: ZeroSupport) -> str:
    """What to watch with an optimizer that ZeRO has not tested."""
    if support == "by layer":
        return (
            f"{kind} needs whole layers, and ZeRO passes it flat shards, so its updates depend on the number of ranks; use "
            "AdamW or stage 0"
        )
    return (
        "compare a short run with stage 0: ZeRO passes the optimizer flat shards, which is safe only if it treats every "
        "element alone"
    )


def zero_support(kind: str) -> ZeroSupport:
    """How ZeRO treats an optimizer named in `optimizer.type`."""
    name = kind.casefold()
    if name in ONE_BIT:
        return "one bit"
    if name in TESTED_WITH_ZERO:
        return "tested"
    if kind in BY_LAYER or name in BY_LAYER:
        return "by layer"
    return "elementwise" if name in BUILT_IN or kind in TORCH else "unknown"


def zero_support_of_class(path: str) -> ZeroSupport:
    """How ZeRO treats an optimizer object, by the dotted name of its class, such as `torch.optim.sgd.SGD`."""
    package, name = path.split(".", maxsplit=1)[0], path.rpartition(".")[2]
    if (package, name) in _TESTED_CLASSES:
        return "tested"
    if name.casefold() in _BY_LAYER_CLASSES:
        return "by layer"
    if name.casefold() in ONE_BIT:
        return "one bit"
    return "elementwise" if package == "torch" and name in _TORCH_ELEMENTWISE else "unknown"
