"""HS3xx: formats that the target GPU does not support, or does not run faster than fp32.

`--gpu t4` names the target hardware, and these rules compare every format that a script or a configuration requests
with the table in `halfstep.hardware.devices`. A format that runs is not always fast: a T4 computes bf16 matrix products
by converting to fp32 and back, and torch.cuda.is_bf16_supported() returns True there.
"""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.check.config.config import Config
from halfstep.check.config.deepspeed_facts import DeepSpeed
from halfstep.check.files.source import Settings
from halfstep.check.finding import Finding, Severity
from halfstep.check.rule import ConfigRule, Rule
from halfstep.errors import SettingError
from halfstep.hardware.devices import ARCHITECTURES, Device, Facts, find_devices
from halfstep.precision.node import Entry, Span

__all__ = ["RULES"]

_TENSOR_CORES = "https://docs.nvidia.com/deeplearning/performance/mixed-precision-training/index.html"
_CAPABILITIES = "https://docs.nvidia.com/cuda/cuda-c-programming-guide/#arithmetic-instructions"
_KEYS: dict[str, tuple[tuple[str, ...], ...]] = {
    "accelerate": (("mixed_precision",),),
    "lightning": (("precision",),),
    "halfstep": (("precision",),),
    "torch": (("dtype",),),
}
# Names of other tools; a policy of Halfstep is parsed instead.
_FORMAT_OF_NAME = {
    "bf16": "bf16", "bfloat16": "bf16", "torch.bfloat16": "bf16", "bf16-mixed": "bf16", "bf16-true": "bf16", "fp16": "fp16",
    "float16": "fp16", "torch.float16": "fp16", "16": "fp16", "16-mixed": "fp16", "16-true": "fp16", "fp8": "fp8",
    "transformer-engine": "fp8", "tf32": "tf32",
}  # fmt: skip


def _settings(name: str) -> Settings:
    return Settings(gpu=find_devices(name)[0], gpu_origin=f"--gpu {name}")


class HardwareRule(ConfigRule):
    """A rule that applies to a known GPU."""

    def check(self, config: Config) -> Iterator[Finding]:
        """The findings in `config`, if the GPU is known."""
        gpu = config.settings.gpu
        arch = ARCHITECTURES.get(gpu.arch) if gpu else None
        if gpu and arch:
            yield from self.inspect(config, gpu, arch.facts)

    def inspect(self, config: Config, gpu: Device, facts: Facts) -> Iterator[Finding]:
        """The findings on one GPU."""
        raise NotImplementedError

    def report(self, config: Config, place: Entry | Span, message: str, instead: str, severity: Severity) -> Finding:
        """A finding whose message names the origin of the GPU, unless the user named it."""
        detected = config.settings.gpu_origin == "nvidia-smi"
        note = " (GPU detected by nvidia-smi)" if detected else ""
        return self.finding(config.where(place), message + note, instead=instead, severity=severity)


def _requests(config: Config, wanted: str) -> Iterator[Entry]:
    """The entries of a configuration that request a format."""
    if config.kind == "deepspeed":
        deepspeed = DeepSpeed(config)
        if wanted in {"fp16", "bf16"} and (deepspeed.fp16 if wanted == "fp16" else deepspeed.bf16):
            name = "fp16" if wanted == "fp16" else deepspeed.bf16_name
            yield from filter(None, [config.entry(name, "enabled")])
        if deepspeed.autocast and deepspeed.dtype("torch_autocast", "dtype") == wanted:
            yield from filter(None, [config.entry("torch_autocast", "dtype")])
        return
    if config.kind == "transformers":
        entry = config.entry(wanted)
        if entry and config.value(wanted) is True:
            yield entry
        return
    for path in _KEYS.get(config.kind, ()):
        entry = config.entry(*path)
        value = config.value(*path)
        if entry and isinstance(value, str | int) and _format_of(config.kind, str(value)) == wanted:
            yield entry


def _format_of(kind: str, text: str) -> str | None:
    """The format that a precision setting computes in; None if it is unknown."""
    if kind != "halfstep":
        return _FORMAT_OF_NAME.get(text)
    from halfstep.precision.policy import parse_with_notes  # takes 10 ms; only scripts that use Halfstep need it

    try:
        return parse_with_notes(text)[0].compute
    except SettingError:
        return None  # "auto", or invalid, which HS286 reports


def _describe(name: str, gpu: Device, facts: Facts) -> str:
    """How the GPU runs a format and why, as the message of a finding."""
    support = {"none": "not supported"}.get(facts[name], facts[name])
    reason = facts.why(name)
    return f"{name} is {support} on {gpu.name}{': ' + reason if reason else ''}."


class Bf16NotNative(HardwareRule):
    """bf16 is requested on hardware without native bf16 support."""

    code = "HS301"
    name = "bf16-not-native"
    severity = "warning"
    reason = (
        "NVIDIA GPUs have native bf16 support from Ampere on (A100, RTX 30). On older ones (T4, V100, P100, RTX 20) "
        "torch converts every operand to fp32 and back, which is slower than fp32, although "
        "`torch.cuda.is_bf16_supported()` returns True. Volta and Turing have fp16 tensor cores; use fp16 with a loss "
        "scale there."
    )
    bad = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "gradient_clipping": 1.0}',
        "from transformers import TrainingArguments\n\nargs = TrainingArguments('out', bf16=True)\n",
        "import lightning as L\n\ntrainer = L.Trainer(precision='bf16-mixed')\n",
        "import torch\n\nwith torch.autocast('cuda', dtype=torch.bfloat16):\n    loss = model(x)\n",
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: bf16\n",
    )
    good = (
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "fp16": {"enabled": true}, "gradient_clipping": 1.0}',
        "import torch\n\nwith torch.autocast('cuda', dtype=torch.float16):\n    loss = model(x)\n",
    )
    references = (_CAPABILITIES, "https://github.com/pytorch/pytorch/pull/148322")
    settings = _settings("t4")

    def inspect(self, config: Config, gpu: Device, facts: Facts) -> Iterator[Finding]:
        """Report bf16 that is emulated, slow or unsupported."""
        support = facts["bf16"]
        if support == "native":
            return
        severity: Severity = {"slow": "advice", "emulated": "warning", "none": "error"}[support]  # type: ignore[assignment]
        instead = "Use fp16 with a loss scale." if facts["fp16"] == "native" else "Use fp32."
        for entry in _requests(config, "bf16"):
            yield self.report(config, entry, _describe("bf16", gpu, facts), instead, severity)


class Fp16NotFaster(HardwareRule):
    """fp16 is requested on hardware where it is not faster than fp32."""

    code = "HS302"
    name = "fp16-not-faster"
    severity = "warning"
    reason = (
        "Mixed precision is faster because of tensor cores (Volta and later) or matrix cores. Pascal and GTX 16 GPUs "
        "have none: with the casts and the loss scaling, fp16 is often slower than fp32 there, although it halves "
        "activation memory. DeepSpeed raises an error for fp16 below compute capability 7.0 unless "
        "`DS_ALLOW_DEPRECATED_FP16=1` is set."
    )
    bad = (
        "from transformers import TrainingArguments\n\nargs = TrainingArguments('out', fp16=True)\n",
        '{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "fp16": {"enabled": true}}',
        "import torch\n\nwith torch.cuda.amp.autocast():\n    loss = model(x)\n",
    )
    good = ("from transformers import TrainingArguments\n\nargs = TrainingArguments('out')\n",)
    references = (_TENSOR_CORES, "https://www.deepspeed.ai/docs/config-json/#fp16-training-options")
    settings = _settings("p100")

    def inspect(self, config: Config, gpu: Device, facts: Facts) -> Iterator[Finding]:
        """Report fp16 that is slow or emulated."""
        if facts["fp16"] == "native":
            return
        rejected = config.kind == "deepspeed" and gpu.arch in {"sm60", "sm61"}
        for entry in _requests(config, "fp16"):
            message = _describe("fp16", gpu, facts)
            if rejected:
                message += " DeepSpeed raises an error unless DS_ALLOW_DEPRECATED_FP16=1 is set."
            yield self.report(config, entry, message, "Use fp32.", "error" if rejected else "warning")


class Tf32Absent(HardwareRule):
    """TF32 is requested on hardware without TF32 support."""

    code = "HS303"
    name = "tf32-absent"
    severity = "error"
    reason = (
        "NVIDIA GPUs support TF32 from Ampere on. On older ones Hugging Face's `tf32=True` raises '--tf32 requires "
        "Ampere or a newer GPU arch', while torch accepts its own TF32 settings and ignores them."
    )
    bad = (
        "from transformers import TrainingArguments\n\nargs = TrainingArguments('out', fp16=True, tf32=True)\n",
        "import torch\n\ntorch.backends.cuda.matmul.allow_tf32 = True\n",
        "import torch\n\ntorch.set_float32_matmul_precision('high')\n",
    )
    good = ("from transformers import TrainingArguments\n\nargs = TrainingArguments('out', fp16=True)\n",)
    references = (
        "https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices",
        "measured: source code of transformers 5.22, training_args.py",
    )
    settings = _settings("t4")

    def inspect(self, config: Config, gpu: Device, facts: Facts) -> Iterator[Finding]:
        """Check Hugging Face's flag, Halfstep's preset and torch's settings."""
        if facts["tf32"] != "none":
            return
        for entry in _requests(config, "tf32"):
            yield self.report(config, entry, _describe("tf32", gpu, facts), "Remove it.", "error")
        for key, enabling in (("tf32", {True}), ("matmul", {"high", "medium"})):
            setting = config.entry(key) if config.kind == "torch" else None
            value = config.value(key)
            if setting and isinstance(value, str | bool) and value in enabling:
                message = f"`{config.origin}` has no effect on {gpu.name}: {facts.why('tf32')}."
                yield self.report(config, config.root.span, message, "Remove it, or keep it for newer GPUs.", "advice")


class Fp8Absent(HardwareRule):
    """fp8 is requested on hardware without fp8 units."""

    code = "HS304"
    name = "fp8-absent"
    severity = "error"
    reason = (
        "NVIDIA added fp8 matrix units with Ada and Hopper (compute capability 8.9 and 9.0), AMD with the MI300. On "
        "other GPUs Transformer Engine and `torch._scaled_mm` raise an error."
    )
    bad = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: fp8\n",
        "import lightning as L\n\ntrainer = L.Trainer(precision='transformer-engine')\n",
    )
    good = ("compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: bf16\n",)
    references = ("https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/index.html", _CAPABILITIES)
    settings = _settings("a100")

    def inspect(self, config: Config, gpu: Device, facts: Facts) -> Iterator[Finding]:
        """Report fp8 that the GPU does not support."""
        if facts["fp8"] != "none":
            return
        for entry in _requests(config, "fp8"):
            instead = "Use bf16." if facts["bf16"] == "native" else "Use fp16."
            yield self.report(config, entry, _describe("fp8", gpu, facts), instead, "error")


class FlashAttentionAbsent(HardwareRule):
    """FlashAttention 2 is requested on a GPU that it does not support."""

    code = "HS305"
    name = "flash-attention-absent"
    severity = "error"
    reason = (
        "FlashAttention 2 requires Ampere or later and raises 'FlashAttention only supports Ampere GPUs or newer' on "
        'T4, V100 and RTX 20 GPUs. torch\'s `scaled_dot_product_attention` (`attn_implementation="sdpa"`) selects a '
        "supported kernel."
    )
    bad = (
        "from transformers import AutoModelForCausalLM\n\n"
        "model = AutoModelForCausalLM.from_pretrained('m', attn_implementation='flash_attention_2')\n",
        "from transformers import AutoModelForCausalLM\n\n"
        "model = AutoModelForCausalLM.from_pretrained('m', use_flash_attention_2=True)\n",
    )
    good = (
        "from transformers import AutoModelForCausalLM\n\n"
        "model = AutoModelForCausalLM.from_pretrained('m', attn_implementation='sdpa')\n",
    )
    references = ("https://github.com/Dao-AILab/flash-attention#nvidia-cuda-support",)
    settings = _settings("t4")

    def inspect(self, config: Config, gpu: Device, facts: Facts) -> Iterator[Finding]:
        """Report FlashAttention 2 on NVIDIA GPUs before Ampere."""
        if config.kind != "torch" or not gpu.arch.startswith(("sm6", "sm7")):
            return
        requested = config.value("attention") == "flash_attention_2" or config.value("flash") is True
        entry = config.entry("attention") or config.entry("flash")
        if requested and entry:
            message = f"FlashAttention 2 does not support {gpu.name}; it requires Ampere or later."
            yield self.report(config, entry.value.span, message, 'Use `attn_implementation="sdpa"`.', "error")


class SubnormalsFlushed(HardwareRule):
    """fp16 is requested on hardware whose matrix units flush subnormals to zero."""

    code = "HS306"
    name = "subnormals-flushed"
    severity = "advice"
    reason = (
        "The matrix units of AMD's MI200 series flush 16-bit subnormals: fp16 values below 6.1e-5 (2^-14) become 0 in "
        "every matrix product, while other GPUs represent values down to 6e-8. That is 10 bits less range, so the "
        "loss scale must be higher. bf16 subnormals start at 1e-38 and do not matter in practice."
    )
    bad = ("from transformers import TrainingArguments\n\nargs = TrainingArguments('out', fp16=True)\n",)
    good = ("from transformers import TrainingArguments\n\nargs = TrainingArguments('out', bf16=True)\n",)
    references = (
        "https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html"
        "#reduced-precision-fp16-and-bf16-gemms-and-convolutions-on-amd-instinct-mi200-devices",
    )
    settings = _settings("mi250x")

    def inspect(self, config: Config, gpu: Device, facts: Facts) -> Iterator[Finding]:
        """Report fp16 on gfx90a, the only architecture that does this."""
        if gpu.arch == "gfx90a":
            for entry in _requests(config, "fp16"):
                message = f"The matrix units of {gpu.name} flush fp16 values below 6.1e-5 to zero."
                yield self.report(config, entry, message, "Use bf16, which is as fast on this GPU.", "advice")


RULES: tuple[type[Rule], ...] = (
    Bf16NotNative,
    Fp16NotFaster,
    Tf32Absent,
    Fp8Absent,
    FlashAttentionAbsent,
    SubnormalsFlushed,
)
