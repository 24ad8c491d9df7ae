"""HS3xx: what a named GPU cannot honour.

`--gpu t4` names the hardware a run is for, and these rules hold every format that a script or a configuration asks for
against the table of `halfstep.hardware.devices`. "It runs" is not "it is fast": a T4 multiplies bf16 matrices by converting them to
fp32 and back, and torch.cuda.is_bf16_supported() says True there.
"""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.check.config.config import Config
from halfstep.check.config.deepspeed_facts import DeepSpeed
from halfstep.check.files.source import Settings
from halfstep.check.finding import Finding, Severity
from halfstep.check.rule import ConfigRule, Rule
from halfstep.hardware.devices import ARCHITECTURES, Device, Facts, find_devices
from halfstep.precision.node import Entry, Span

__all__ = ["RULES"]

_TENSOR_CORES = "https://docs.nvidia.com/deeplearning/performance/mixed-precision-training/index.html"
_CAPABILITIES = "https://docs.nvidia.com/cuda/cuda-c-programming-guide/#arithmetic-instructions"
_PLACES: dict[str, tuple[tuple[str, ...], ...]] = {
    "accelerate": (("mixed_precision",),),
    "lightning": (("precision",),),
    "halfstep": (("precision",),),
    "torch": (("dtype",),),
}
_WORDS = {
    "bf16": "bf16", "bfloat16": "bf16", "torch.bfloat16": "bf16", "bf16-mixed": "bf16", "bf16-true": "bf16",
    "bf16-lean": "bf16", "fp16": "fp16", "float16": "fp16", "torch.float16": "fp16", "16": "fp16", "16-mixed": "fp16",
    "16-true": "fp16", "fp16-lean": "fp16", "fp8": "fp8", "transformer-engine": "fp8", "tf32": "tf32",
}  # fmt: skip


def _settings(name: str) -> Settings:
    return Settings(gpu=find_devices(name)[0], gpu_origin=f"--gpu {name}")


class HardwareRule(ConfigRule):
    """A rule that needs to know the GPU."""

    def check(self, config: Config) -> Iterator[Finding]:
        """The findings in `config`, if the GPU is known."""
        gpu = config.settings.gpu
        arch = ARCHITECTURES.get(gpu.arch) if gpu else None
        if gpu and arch:
            yield from self.inspect(config, gpu, arch.facts)

    def inspect(self, config: Config, gpu: Device, facts: Facts) -> Iterator[Finding]:
        """The findings on one GPU."""
        raise NotImplementedError

    def speak(self, config: Config, place: Entry | Span, message: str, instead: str, severity: Severity) -> Finding:
        """A finding that says how the GPU is known, unless the user named it."""
        origin = config.settings.gpu_origin
        told = " (the GPU that nvidia-smi reports)" if origin == "nvidia-smi" else ""
        return self.finding(config.where(place), message + told, instead=instead, severity=severity)


def _asked(config: Config, wanted: str) -> Iterator[Entry]:
    """The entries of a configuration that ask for a format."""
    if config.kind == "deepspeed":
        facts = DeepSpeed(config)
        if wanted in {"fp16", "bf16"} and (facts.fp16 if wanted == "fp16" else facts.bf16):
            name = "fp16" if wanted == "fp16" else facts.bf16_name
            yield from filter(None, [config.entry(name, "enabled")])
        if facts.autocast and facts.dtype("torch_autocast", "dtype") == wanted:
            yield from filter(None, [config.entry("torch_autocast", "dtype")])
        return
    if config.kind == "transformers":
        found = config.entry(wanted)
        if found and config.value(wanted) is True:
            yield found
        return
    for path in _PLACES.get(config.kind, ()):
        found = config.entry(*path)
        value = config.value(*path)
        word = str(value).split(",", maxsplit=1)[0]
        if found and isinstance(value, str | int) and _WORDS.get(word) == wanted:
            yield found


class Bf16NotNative(HardwareRule):
    """bf16 is asked for on hardware that does not compute in it."""

    code = "HS301"
    name = "bf16-not-native"
    severity = "warning"
    reason = (
        "bf16 arithmetic came with Ampere (A100, RTX 30) on NVIDIA's side. Before it (T4, V100, P100, RTX 20) torch converts every "
        "operand to fp32 and back, which is slower than fp32 itself, while torch.cuda.is_bf16_supported() answers True. fp16 with "
        "a loss scale is what those GPUs have tensor cores for, from Volta on."
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
        """bf16 where it is emulated, slow or absent."""
        support = facts["bf16"]
        if support == "native":
            return
        severity: Severity = {"slow": "advice", "emulated": "warning", "none": "error"}[support]  # type: ignore[assignment]
        instead = "Use fp16 with a loss scale." if facts["fp16"] == "native" else "Use fp32."
        for found in _asked(config, "bf16"):
            message = f"bf16 on {gpu.name}: {facts.why('bf16') or support}."
            yield self.speak(config, found, message, instead, severity)


class Fp16NotFaster(HardwareRule):
    """fp16 is asked for on hardware where it brings no speed."""

    code = "HS302"
    name = "fp16-not-faster"
    severity = "warning"
    reason = (
        "The gain of mixed precision comes from tensor cores (Volta and later) or matrix cores. Pascal and the GTX 16 cards have "
        "none, and with the casts and the loss scaling fp16 is often slower than fp32 there; it still halves activations. DeepSpeed "
        "refuses fp16 below compute capability 7.0 unless DS_ALLOW_DEPRECATED_FP16=1 is set."
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
        """fp16 where it is slow or emulated."""
        if facts["fp16"] == "native":
            return
        refused = config.kind == "deepspeed" and gpu.arch in {"sm60", "sm61"}
        for found in _asked(config, "fp16"):
            message = f"fp16 on {gpu.name}: {facts.why('fp16') or facts['fp16']}."
            if refused:
                message += " DeepSpeed refuses it there unless DS_ALLOW_DEPRECATED_FP16=1."
            yield self.speak(config, found, message, "Use fp32.", "error" if refused else "warning")


class Tf32Absent(HardwareRule):
    """TF32 is asked for on hardware that has none."""

    code = "HS303"
    name = "tf32-absent"
    severity = "error"
    reason = (
        "TF32 came with Ampere. Before it Hugging Face's tf32=True raises '--tf32 requires Ampere or a newer GPU arch', while "
        "torch's own switches are accepted and change nothing."
    )
    bad = (
        "from transformers import TrainingArguments\n\nargs = TrainingArguments('out', fp16=True, tf32=True)\n",
        "import torch\n\ntorch.backends.cuda.matmul.allow_tf32 = True\n",
        "import torch\n\ntorch.set_float32_matmul_precision('high')\n",
    )
    good = ("from transformers import TrainingArguments\n\nargs = TrainingArguments('out', fp16=True)\n",)
    references = (
        "https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices",
        "measured: read in transformers 5.22, training_args.py",
    )
    settings = _settings("t4")

    def inspect(self, config: Config, gpu: Device, facts: Facts) -> Iterator[Finding]:
        """Hugging Face's flag, Halfstep's preset, torch's switches."""
        if facts["tf32"] != "none":
            return
        for found in _asked(config, "tf32"):
            message = f"tf32 on {gpu.name}: {facts.why('tf32')}."
            yield self.speak(config, found, message, "Remove it.", "error")
        for key, wanted in (("tf32", {True}), ("matmul", {"high", "medium"})):
            found_switch = config.entry(key) if config.kind == "torch" else None
            value = config.value(key)
            if found_switch and isinstance(value, str | bool) and value in wanted:
                message = f"{config.origin} changes nothing on {gpu.name}: {facts.why('tf32')}."
                yield self.speak(config, config.root.span, message, "Remove it, or keep it for newer GPUs.", "advice")


class Fp8Absent(HardwareRule):
    """fp8 is asked for on hardware that has no fp8 units."""

    code = "HS304"
    name = "fp8-absent"
    severity = "error"
    reason = (
        "fp8 matrix units came with Ada and Hopper (compute capability 8.9 and 9.0) and with AMD's MI300. Elsewhere Transformer "
        "Engine and torch._scaled_mm refuse to run."
    )
    bad = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: fp8\n",
        "import lightning as L\n\ntrainer = L.Trainer(precision='transformer-engine')\n",
    )
    good = ("compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: bf16\n",)
    references = ("https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/index.html", _CAPABILITIES)
    settings = _settings("a100")

    def inspect(self, config: Config, gpu: Device, facts: Facts) -> Iterator[Finding]:
        """fp8 where there is none."""
        if facts["fp8"] != "none":
            return
        for found in _asked(config, "fp8"):
            message = f"fp8 on {gpu.name}: {facts.why('fp8')}."
            yield self.speak(config, found, message, "Use bf16." if facts["bf16"] == "native" else "Use fp16.", "error")


class FlashAttentionAbsent(HardwareRule):
    """FlashAttention 2 is asked for on a GPU it does not support."""

    code = "HS305"
    name = "flash-attention-absent"
    severity = "error"
    reason = (
        "FlashAttention 2 needs Ampere or later and stops on a T4, V100 or RTX 20 card with 'FlashAttention only supports Ampere "
        "GPUs or newer'. torch's own scaled_dot_product_attention (attn_implementation=\"sdpa\") picks a kernel that runs."
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
        """NVIDIA GPUs before Ampere."""
        if config.kind != "torch" or not gpu.arch.startswith(("sm6", "sm7")):
            return
        asked = config.value("attention") == "flash_attention_2" or config.value("flash") is True
        found = config.entry("attention") or config.entry("flash")
        if asked and found:
            message = f"FlashAttention 2 does not run on {gpu.name}, which is older than Ampere."
            yield self.speak(config, found.value.span, message, 'Write attn_implementation="sdpa".', "error")


class SubnormalsFlushed(HardwareRule):
    """fp16 is asked for on hardware whose matrix units flush its subnormals to zero."""

    code = "HS306"
    name = "subnormals-flushed"
    severity = "advice"
    reason = (
        "AMD's MI200 series flushes 16-bit subnormals in its matrix units: fp16 values below 6.1e-5 (2^-14) become 0 in every "
        "product, where other GPUs keep them down to 6e-8. That is 10 bits of range less, so the loss scale must be higher. bf16's "
        "subnormals lie at 1e-38, where nothing is."
    )
    bad = ("from transformers import TrainingArguments\n\nargs = TrainingArguments('out', fp16=True)\n",)
    good = ("from transformers import TrainingArguments\n\nargs = TrainingArguments('out', bf16=True)\n",)
    references = (
        "https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html"
        "#reduced-precision-fp16-and-bf16-gemms-and-convolutions-on-amd-instinct-mi200-devices",
    )
    settings = _settings("mi250x")

    def inspect(self, config: Config, gpu: Device, facts: Facts) -> Iterator[Finding]:
        """The one architecture that does so."""
        if gpu.arch == "gfx90a":
            for found in _asked(config, "fp16"):
                message = f"fp16 on {gpu.name}: its matrix units flush values below 6.1e-5 to zero."
                yield self.speak(config, found, message, "Use bf16, which is as fast there.", "advice")


RULES: tuple[type[Rule], ...] = (
    Bf16NotNative,
    Fp16NotFaster,
    Tf32Absent,
    Fp8Absent,
    FlashAttentionAbsent,
    SubnormalsFlushed,
)
