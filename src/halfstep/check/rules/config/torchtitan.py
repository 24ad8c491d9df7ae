"""Rules for torchtitan's TOML files."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.check.config.config import Config
from halfstep.check.finding import Finding
from halfstep.check.rule import KindRule, Rule
from halfstep.precision.node import Items, Scalar

__all__ = ["RULES"]

_CONFIG = "https://github.com/pytorch/torchtitan/blob/v0.2.2/torchtitan/config/job_config.py"
_FLOAT8 = "https://github.com/pytorch/torchtitan/blob/main/docs/float8.md"
_HEAD = '[job]\ndescription = "Llama 3 8B"\n\n[model]\nname = "llama3"\nflavor = "8B"\n'
_TRAINING = "\n[training]\nlocal_batch_size = 1\nseq_len = 8192\nsteps = 1000\n"
# Values that torchtitan accepts; it rejects every other one when it parses the file.
_ACCEPTED = {
    "dtype": ("bfloat16", "float32"),
    "mixed_precision_param": ("bfloat16", "float32"),
    "mixed_precision_reduce": ("float32", "bfloat16"),  # bfloat16: only in releases after 0.2.2, and in forks
}
_FLOAT8_NAMES = frozenset({"float8", "quantize.linear.float8"})
_FLOAT8_BLOCKS = (("float8",), ("quantize", "linear", "float8"))
_OUTPUT = ("output", "lm_head")


class TorchtitanRule(KindRule):
    """A rule for torchtitan's files."""

    kind = "torchtitan"


class TorchtitanBf16Weights(TorchtitanRule):
    """`training.dtype` creates bf16 weights, which train without an fp32 master copy."""

    code = "HS509"
    name = "torchtitan-bf16-weights"
    severity = "warning"
    reason = (
        "`training.dtype` is the default dtype in which torchtitan creates the model: with bfloat16 the weights, their "
        "gradients and the optimizer states are bf16, and an update below 1/512 of a weight has no effect. Mixed "
        "precision is a separate setting that is on by default: `mixed_precision_param` computes in bf16 from fp32 "
        "weights."
    )
    bad = (_HEAD + _TRAINING + 'dtype = "bfloat16"\n',)
    good = (
        _HEAD + _TRAINING + 'dtype = "float32"\n',
        _HEAD + _TRAINING + 'mixed_precision_param = "bfloat16"\n',
        _HEAD + _TRAINING + 'dtype = "bfloat16"\n\n[lora]\nr = 32\n',
    )
    references = (_CONFIG, "https://github.com/NVIDIA-NeMo/Automodel/pull/2248")

    def inspect(self, config: Config) -> Iterator[Finding]:
        """Report bfloat16."""
        entry = config.entry("training", "dtype")
        tunes_adapter = any("lora" in table.key or "peft" in table.key for table in config.root.entries)
        if entry and config.value("training", "dtype") == "bfloat16" and not tunes_adapter:
            message = (
                "`training.dtype` creates the weights in bf16, without an fp32 master copy; updates below 1/512 of a "
                "weight are lost."
            )
            instead = "Remove it: `mixed_precision_param` computes in bf16 by default, from fp32 weights."
            yield self.finding(config.where(entry), message, instead=instead)


class TorchtitanRejectedFormat(TorchtitanRule):
    """A precision setting has a value that torchtitan rejects."""

    code = "HS510"
    name = "torchtitan-rejected-format"
    severity = "error"
    reason = (
        "torchtitan accepts float32 and bfloat16 for `dtype` and `mixed_precision_param`, and float32 for "
        "`mixed_precision_reduce` (later releases bfloat16 too). There is no fp16, because it has no loss scaling, and "
        "short names such as bf16 are unknown. Other values stop it when it parses the file."
    )
    bad = (
        _HEAD + _TRAINING + 'mixed_precision_param = "float16"\n',
        _HEAD + _TRAINING + 'mixed_precision_reduce = "fp32"\n',
    )
    good = (
        _HEAD + _TRAINING + 'mixed_precision_param = "bfloat16"\n',
        _HEAD + _TRAINING + 'mixed_precision_reduce = "float32"\n',
    )
    references = (_CONFIG,)

    def inspect(self, config: Config) -> Iterator[Finding]:
        """Compare each of the three settings with what torchtitan accepts."""
        for key, accepted in _ACCEPTED.items():
            entry = config.entry("training", key)
            value = config.value("training", key)
            if entry and isinstance(value, str) and value not in accepted:
                message = f"torchtitan does not accept {value!r} for `{key}`."
                yield self.finding(config.where(entry), message, instead=f"Use {' or '.join(map(repr, accepted))}.")


class TorchtitanFloat8Output(TorchtitanRule):
    """The float8 converter also converts the output layer."""

    code = "HS511"
    name = "torchtitan-float8-output"
    severity = "warning"
    reason = (
        "torchtitan's float8 converter converts every linear layer with dimensions divisible by 16 whose name does not "
        "contain an entry of `filter_fqns`, which is empty by default. The logits come out of the output layer, and "
        "fp8's 4 significant bits reach the loss directly; torchtitan's own files, like other fp8 recipes, keep that "
        "layer in bf16."
    )
    bad = (
        _HEAD + 'converters = ["float8"]\n' + _TRAINING + "\n[quantize.linear.float8]\nfilter_fqns = []\n",
        _HEAD + 'converters = ["quantize.linear.float8"]\n' + _TRAINING,
    )
    good = (
        _HEAD + 'converters = ["float8"]\n' + _TRAINING + '\n[quantize.linear.float8]\nfilter_fqns = ["output"]\n',
        _HEAD + _TRAINING + "\n[quantize.linear.float8]\nfilter_fqns = []\n",
        _HEAD
        + 'converters = ["float8"]\n'
        + _TRAINING
        + '\n[float8]\nfilter_fqns = ["auto_filter_small_kn", "output"]\n',
    )
    references = (_FLOAT8, "https://github.com/pytorch/torchtitan/pull/1063", "https://arxiv.org/abs/2209.05433")

    def inspect(self, config: Config) -> Iterator[Finding]:
        """Report an enabled converter whose filter has no name of the output layer."""
        entry = config.entry("model", "converters")
        names = _strings(config, "model", "converters")
        if entry is None or names is None or not names & _FLOAT8_NAMES:
            return
        filters: set[str] = set()
        for block in _FLOAT8_BLOCKS:
            part = _strings(config, *block, "filter_fqns")
            if part is None:
                return
            filters |= part
        if not any(name in text or text in name for text in filters for name in _OUTPUT):
            message = "The float8 converter also converts the output layer: `filter_fqns` does not name it."
            yield self.finding(config.where(entry), message, instead='Add "output" to `filter_fqns`.')


def _strings(config: Config, *path: str) -> set[str] | None:
    """The strings of a list, or of a comma-separated string; None if the text does not decide them."""
    entry = config.entry(*path)
    if entry is None:
        return set()
    if isinstance(entry.value, Items):
        values = [node.value if isinstance(node, Scalar) else None for node in entry.value.items]
        return {str(value) for value in values} if all(isinstance(value, str) for value in values) else None
    value = config.value(*path)
    return {part.strip() for part in value.split(",")} if isinstance(value, str) else None


RULES: tuple[type[Rule], ...] = (TorchtitanBf16Weights, TorchtitanRejectedFormat, TorchtitanFloat8Output)
