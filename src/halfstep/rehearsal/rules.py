"""Which dtype an operation of an fp32 step would give under fp16 or bf16 autocast, by the name of the torch function.

A rehearsal computes in fp32, so it has to know which results would have been 16-bit. There are five rules:

    lower      inputs are cast to 16 bits, the result is 16-bit: products, convolutions, attention
    fp32       16-bit inputs are cast to fp32, the result is fp32: losses, softmax, sums, exponentials
    promote    the widest dtype of the inputs, as torch promotes: additions, activation functions
    first      the dtype of the first input: operations in place, and normalisation layers on a CPU
    view       the same elements as the first input

The names come from `precision/operations.py`, which the Engine's regions use too, and from torch's autocast lists.
"""

from __future__ import annotations

from halfstep.precision.operations import FP32_INPUTS, FP32_OUTPUTS

__all__ = ["FIRST", "FP32", "LOWER", "PROMOTE", "RULES", "VIEW", "rule_of"]

LOWER, FP32, PROMOTE, FIRST, VIEW = RULES = ("lower", "fp32", "promote", "first", "view")

_LOWER = {
    "linear", "bilinear", "matmul", "__matmul__", "__rmatmul__", "mm", "mv", "bmm", "addmm", "addmv", "addr", "addbmm", "baddbmm",
    "einsum", "chain_matmul", "multi_dot", "linalg_multi_dot", "prelu", "scaled_dot_product_attention", "conv1d", "conv2d", "conv3d",
    "conv_tbc", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell",
    "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
}  # fmt: skip
_FP32 = {
    *FP32_INPUTS, *FP32_OUTPUTS, "softmax", "_softmax", "log_softmax", "softmin", "cross_entropy", "kl_div", "vector_norm",
    "matrix_norm", "__pow__", "__rpow__", "float", "double",
}  # fmt: skip
_NORMS = {"layer_norm", "group_norm", "rms_norm", "instance_norm"}  # CUDA's list has these; batch norm is on none
_ALIASES = {"__get__", "detach", "requires_grad_", "contiguous", "alias", "type_as"}


def rule_of(name: str, device_type: str) -> str:
    """The rule for a torch function; one that no list names follows torch's promotion."""
    if name in _LOWER:
        return LOWER
    if name in _FP32 or "_loss" in name or "cross_entropy" in name:
        return FP32
    if name in _NORMS:
        return FP32 if device_type == "cuda" else FIRST
    if name == "batch_norm":
        return FIRST
    if name in _ALIASES:
        return VIEW
    in_place = name.endswith("_") and not name.endswith("__")
    return FIRST if in_place or name.startswith("__i") else PROMOTE
