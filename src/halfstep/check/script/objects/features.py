"""What a script uses of the features that advisories are about, each with its place.

The names are those of `halfstep.hardware.advisory.FEATURES`, and a few more that show that a program avoids a defect:
`cudnn_off`, `sdpa_kernel`, `other_attention`, `autocast`, `mix_order_off`. A feature is reported only if the text shows
it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from functools import lru_cache

from halfstep.check.regex import regex
from halfstep.check.script.objects.values import argument, constant
from halfstep.check.script.syntax.children import all_nodes
from halfstep.check.script.syntax.names import Names, chain, read_names

__all__ = ["features_of_script"]

_NORMS = {"LayerNorm": "layer_norm", "RMSNorm": "layer_norm", "GroupNorm": "group_norm"}
_CONVOLUTIONS = {"Conv1d", "Conv2d", "Conv3d", "ConvTranspose2d"}
_LENGTH = regex(r"seq|context|ctx|block_size|max_len|max_tokens|length")
_ADAM8BIT = regex(r"(?:Paged)?(?:Adam|AdamW|Ademamix)8bit")
_SIXTEEN = {"torch.float16", "torch.bfloat16", "torch.half"}
_AUTOCAST = {"torch.autocast", "torch.amp.autocast", "torch.cuda.amp.autocast"}
# Features that consist of two calls.
_TOGETHER = {"fsdp2_fp16": ("fsdp2", "accelerate_fp16"), "diffusers_cudnn": ("cudnn_backend", "context_parallel")}
# The nodes that can show a feature.
_SHOWING = (
    ast.Call, ast.With, ast.AsyncWith, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign,
    ast.keyword, ast.Constant,
)  # fmt: skip

Use = tuple[str, ast.AST]


@lru_cache(maxsize=1)  # several rules look at one script
def features_of_script(tree: ast.Module) -> dict[str, ast.AST]:
    """The features a script uses, each with the first node that shows it."""
    every = all_nodes(tree)
    names = read_names((node, False) for node in every if isinstance(node, (ast.Import, ast.ImportFrom)))
    nodes = [node for node in every if isinstance(node, _SHOWING)]
    parameters = _parameters(nodes, names)
    features: dict[str, ast.AST] = {}
    for node in sorted(nodes, key=_position):
        for name, place in _uses(node, names, parameters):
            features.setdefault(name, place)
    for name, parts in _TOGETHER.items():
        if all(part in features for part in parts):
            features[name] = features[parts[0]]
    return features


def _position(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def _uses(node: ast.AST, names: Names, parameters: set[str]) -> Iterator[Use]:
    if isinstance(node, ast.Call):
        yield from _called(node, names, parameters)
    elif isinstance(node, (ast.With, ast.AsyncWith)):
        yield from _lost_gradients(node, names)
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        for decorator in node.decorator_list:
            if names.full(decorator) == "torch.compile":
                yield "compile", decorator
    elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.keyword)):
        yield from _long_sequence(node)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "MIX_ORDER_REDUCTION" in node.value:
        yield "mix_order_off", node


def _called(call: ast.Call, names: Names, parameters: set[str]) -> Iterator[Use]:
    full = names.full(call.func)
    parts = chain(call.func) or ((call.func.attr,) if isinstance(call.func, ast.Attribute) else ())
    last = parts[-1] if parts else ""
    yield from _attention(call, last, names)
    yield from _torch(call, full, last, names, parameters)
    yield from _libraries(call, full, last)


def _attention(call: ast.Call, last: str, names: Names) -> Iterator[Use]:
    if last == "scaled_dot_product_attention":
        yield "sdpa", call
        mask = argument(call, 3, "attn_mask")
        if mask is not None and constant(mask) is not None and not (isinstance(mask, ast.IfExp) and _may_be_none(mask)):
            yield "sdpa_mask", call
    elif last == "generate_square_subsequent_mask" and argument(call, None, "dtype") is None:
        yield "float_mask", call
    elif last == "enable_cudnn_sdp" and constant(argument(call, 0, "enabled")) is False:
        yield "cudnn_off", call
    elif last in {"sdpa_kernel", "sdp_kernel"}:
        yield from (("sdpa_kernel", call), ("cudnn_off", call))
    elif last == "generate" and names.uses("transformers"):
        yield "generate", call
    attention = constant(argument(call, None, "attn_implementation"))
    if isinstance(attention, str) and attention != "sdpa":
        yield "other_attention", call


def _may_be_none(mask: ast.IfExp) -> bool:
    return constant(mask.body) is None or constant(mask.orelse) is None


def _torch(call: ast.Call, full: str, last: str, names: Names, parameters: set[str]) -> Iterator[Use]:
    if full == "torch.compile" or (last == "compile" and names.uses("torch") and _is_model(call)):
        yield "compile", call
    elif full in _AUTOCAST:
        yield "autocast", call
        if names.full(argument(call, None, "dtype") or ast.Constant(0)) == "torch.bfloat16":
            yield "autocast_bf16", call
    elif last in _NORMS:
        yield _NORMS[last], call
    elif last in _CONVOLUTIONS:
        yield "conv", call
    elif last == "GradScaler":
        yield "grad_scaler", call
    elif last == "ShardedGradScaler":
        yield "sharded_scaler", call
    elif last == "unscale_":
        yield "unscale", call
    elif full in {"torch.optim.Adam", "torch.optim.AdamW"}:
        yield "adam", call
    elif (last in {"half", "bfloat16"} and not call.args and isinstance(call.func, ast.Attribute)) or (
        last == "to" and any(names.full(a) in _SIXTEEN for a in (*call.args, *(k.value for k in call.keywords)))
    ):
        yield "half_model", call
    elif last == "chunk" and _reads(call.func, parameters):
        yield "shared_modulation", call
    if full.startswith("torch.optim.") and constant(argument(call, None, "fused")) is True:
        yield "fused_optimizer", call
    if full == "torch.device" or last == "to":
        device = constant(argument(call, 0, "device"))
        if isinstance(device, str) and device.partition(":")[0] == "mps":
            yield "mps", call


def _reads(node: ast.AST, attributes: set[str]) -> bool:
    return any(isinstance(n, ast.Attribute) and n.attr in attributes for n in ast.walk(node))


def _is_model(call: ast.Call) -> bool:
    """Whether `x.compile(...)` compiles a module: `re.compile` and Keras models have positional arguments."""
    parts = chain(call.func)
    return len(parts) > 1 and parts[0] not in {"re", "regex"} and not call.args and "model" in parts[-2].lower()


def _libraries(call: ast.Call, full: str, last: str) -> Iterator[Use]:
    if _ADAM8BIT.fullmatch(last):
        yield "adam8bit", call
    elif last == "LigerFusedLinearCrossEntropyLoss" and constant(argument(call, None, "reduction")) == "none":
        yield "liger_none", call
    elif last == "set_attention_backend" and constant(argument(call, 0, "backend")) == "_native_cudnn":
        yield "cudnn_backend", call
    elif last in {"enable_parallelism", "ContextParallelConfig"}:
        yield "context_parallel", call
    elif last == "DotProductAttention" and full.startswith("transformer_engine"):
        yield "te_attention", call
    elif last == "FullyShardedDataParallelPlugin" and constant(argument(call, None, "fsdp_version")) == 2:
        yield "fsdp2", call
    elif last == "Accelerator" and constant(argument(call, None, "mixed_precision")) == "fp16":
        plugins = [k.value for k in call.keywords if k.arg in {"fsdp_plugin", None}]
        if any(constant(plugin) is not None for plugin in plugins):
            yield "accelerate_fp16", call


def _long_sequence(node: ast.Assign | ast.AnnAssign | ast.keyword) -> Iterator[Use]:
    """A length above 65,536 that is written as a number."""
    value = constant(node.value)
    if not isinstance(value, int) or isinstance(value, bool) or not 2**16 < value <= 2**24:
        return
    if isinstance(node, ast.keyword):
        targets = [node.arg or ""]
    else:
        targets = [ast.unparse(t) for t in (node.targets if isinstance(node, ast.Assign) else [node.target])]
    if any(_LENGTH.search(target.lower()) for target in targets):
        yield "long_sequence", node


def _parameters(nodes: Sequence[ast.AST], names: Names) -> set[str]:
    """The attributes that are assigned an `nn.Parameter`."""
    return {
        target.attr
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        if names.full(node.value.func) == "torch.nn.Parameter"
        for target in node.targets
        if isinstance(target, ast.Attribute)
    }


def _lost_gradients(region: ast.With | ast.AsyncWith, names: Names) -> Iterator[Use]:
    """A module that is called under no_grad and again with gradients, in one autocast region with a cache."""
    opened = [item.context_expr for item in region.items if isinstance(item.context_expr, ast.Call)]
    casts = [call for call in opened if names.full(call.func) in _AUTOCAST]
    if not casts or constant(argument(casts[0], None, "cache_enabled")) is False:
        return
    frozen: set[str] = set()  # what is called under no_grad
    for statement in region.body:
        if isinstance(statement, (ast.With, ast.AsyncWith)) and _is_no_grad(statement, names):
            frozen |= {ast.unparse(call.func) for call in _plain_calls(statement.body)}
            continue
        if any(isinstance(n, (ast.With, ast.AsyncWith)) and _is_no_grad(n, names) for n in ast.walk(statement)):
            continue  # under a condition: the text does not decide what runs first
        for call in _plain_calls([statement]):
            if ast.unparse(call.func) in frozen:
                yield "no_grad_in_autocast", call
                return


def _is_no_grad(statement: ast.With | ast.AsyncWith, names: Names) -> bool:
    # Tensors of inference_mode are never cached, so only no_grad loses gradients.
    return any(
        isinstance(item.context_expr, ast.Call) and names.full(item.context_expr.func) == "torch.no_grad"
        for item in statement.items
    )


def _plain_calls(statements: list[ast.stmt]) -> Iterator[ast.Call]:
    """The calls of variables and attributes named like modules, in nested statements too."""
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and _MODULE.search(".".join(chain(node.func))):
                yield node


_MODULE = regex(r"(?:^|\.)(?:\w*model|\w*net|\w*encoder|\w*decoder|\w*backbone|unet|transformer|generator|module)$")
