"""Rules for the TOML and JSON files of kohya's sd-scripts, musubi-tuner and kohya_ss."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.check.config.config import Config
from halfstep.check.config.recipes import is_absent
from halfstep.check.finding import Finding, Severity
from halfstep.check.rule import KindRule, Rule

__all__ = ["RULES"]

_SOURCE = "https://github.com/kohya-ss/sd-scripts/blob/main/"
_FULL = (
    '[train]\npretrained_model_name_or_path = "sdxl.safetensors"\noptimizer_type = "AdamW8bit"\nlearning_rate = 1e-5\n'
)
_NETWORK = 'network_module = "networks.lora"\nnetwork_dim = 16\n'
# sd-scripts' own optimizers; it loads others by a dotted path, and some of those round stochastically.
_PLAIN = (
    "adamw",
    "pagedadamw",
    "lion",
    "pagedlion",
    "sgdnesterov",
    "dadapt",
    "prodigy",
    "adafactor",
    "radamschedulefree",
)
_LOST = {"bf16": "1/512", "fp16": "1/4096"}


class KohyaRule(KindRule):
    """A rule for the arguments of kohya's training scripts."""

    kind = "kohya"


class KohyaFullWeights(KohyaRule):
    """`full_bf16` or `full_fp16` trains the weights in 16 bits without an fp32 master copy."""

    code = "HS512"
    name = "kohya-16-bit-weights"
    severity = "warning"
    reason = (
        "`mixed_precision` alone computes in 16 bits from fp32 weights. `full_bf16` and `full_fp16` also convert the "
        "trained weights and their gradients, and the optimizer updates them as they are: in bf16 an update below 1/512 "
        "of a weight has no effect, in fp16 below 1/4096. Adafactor with `fused_backward_pass` rounds bf16 weights "
        "stochastically and is not affected. It is advice for LoRA, whose weights start near 0."
    )
    bad = (
        _FULL + 'mixed_precision = "bf16"\nfull_bf16 = true\n',
        _FULL + 'mixed_precision = "fp16"\nfull_fp16 = true\n',
        _FULL + _NETWORK + 'mixed_precision = "bf16"\nfull_bf16 = true\n',
        '{"pretrained_model_name_or_path": "sdxl", "optimizer": "AdamW", "save_precision": "bf16",\n'
        ' "mixed_precision": "bf16", "full_bf16": true, "full_fp16": false}',
    )
    good = (
        _FULL + 'mixed_precision = "bf16"\nfull_bf16 = false\n',
        _FULL.replace("AdamW8bit", "Adafactor")
        + 'mixed_precision = "bf16"\nfull_bf16 = true\nfused_backward_pass = true\n',
        _FULL.replace("AdamW8bit", "prodigyplus.ProdigyPlusScheduleFree")
        + 'mixed_precision = "bf16"\nfull_bf16 = true\n',
    )
    references = (
        _SOURCE + "sdxl_train.py",
        _SOURCE + "library/adafactor_fused.py",
        "https://arxiv.org/abs/2010.06192",
    )

    def inspect(self, config: Config) -> Iterator[Finding]:
        """Report the flag that is in effect, with an optimizer of sd-scripts."""
        name = config.value("optimizer_type") or config.value("optimizer")
        plain = name is None or (isinstance(name, str) and "." not in name and name.lower().startswith(_PLAIN))
        for dtype in ("fp16", "bf16"):  # sd-scripts looks at fp16 first
            entry = config.entry(f"full_{dtype}")
            if entry is None or config.value(entry.key) is not True:
                continue
            rounds = dtype == "bf16" and not is_absent(config, "fused_backward_pass")
            if plain and not rounds and config.value("mixed_precision") in {dtype, None}:
                is_adapter = any(config.entry(key) for key in ("network_module", "network_dim", "LoRA_type"))
                weights = "the adapter's weights" if is_adapter else "the weights"
                message = (
                    f"`{entry.key}` trains {weights} in {dtype} without an fp32 master copy; updates below "
                    f"{_LOST[dtype]} of a weight are lost."
                )
                instead = f'Remove it: `mixed_precision = "{dtype}"` computes in {dtype} from fp32 weights.'
                severity: Severity = "advice" if is_adapter else "warning"
                yield self.finding(config.where(entry), message, instead=instead, severity=severity)
            return


class KohyaFlagMismatch(KohyaRule):
    """`full_bf16` or `full_fp16` contradicts `mixed_precision`."""

    code = "HS513"
    name = "kohya-precision-mismatch"
    severity = "error"
    reason = (
        'sd-scripts asserts that `full_fp16` comes with `mixed_precision = "fp16"` and `full_bf16` with bf16, and '
        "stops after it has loaded the model. With both flags it reads `full_fp16` only."
    )
    bad = (
        _FULL + 'mixed_precision = "fp16"\nfull_bf16 = true\n',
        _FULL + 'mixed_precision = "no"\nfull_fp16 = true\n',
    )
    good = (
        _FULL + 'mixed_precision = "fp16"\n',
        _FULL + 'mixed_precision = "fp16"\nfull_bf16 = false\n',
    )
    references = (_SOURCE + "train_network.py",)

    def inspect(self, config: Config) -> Iterator[Finding]:
        """Compare the flag that is in effect with the mode."""
        for dtype in ("fp16", "bf16"):
            entry = config.entry(f"full_{dtype}")
            mode = config.value("mixed_precision")
            if entry is not None and config.value(entry.key) is True:
                if mode in {"no", "fp16", "bf16"} and mode != dtype:
                    message = f'`{entry.key}` requires `mixed_precision = "{dtype}"`; with "{mode}" sd-scripts fails an assertion.'
                    yield self.finding(config.where(entry), message, instead=f"Remove it, or set {dtype}.")
                return


RULES: tuple[type[Rule], ...] = (KohyaFullWeights, KohyaFlagMismatch)
