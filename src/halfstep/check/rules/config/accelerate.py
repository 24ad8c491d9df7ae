"""Accelerate: its YAML file and `Accelerator(...)`."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.check.config.config import Config
from halfstep.check.config.edits import literal, replace_value
from halfstep.check.finding import Edit, Finding, Fix
from halfstep.check.rule import ConfigRule, Rule

__all__ = ["RULES"]

_MODES = ("no", "fp16", "bf16", "fp8")
_MEANT = {
    "float16": "fp16", "half": "fp16", "16": "fp16", "16-mixed": "fp16", "true": "fp16", "amp": "fp16",
    "bfloat16": "bf16", "bf16-mixed": "bf16", "fp32": "no", "float32": "no", "none": "no", "32": "no", "false": "no",
}  # fmt: skip
_DEEPSPEED = "https://huggingface.co/docs/accelerate/usage_guides/deepspeed"
_ACCELERATOR = "https://huggingface.co/docs/accelerate/package_reference/accelerator"
# What accelerate 1.15 refuses beside a DeepSpeed file (DeepSpeedPlugin._deepspeed_config_checks).
_DECIDED_BY_FILE = (
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device", "offload_param_device",
    "offload_param_nvme_path", "offload_optimizer_nvme_path", "zero3_save_16bit_model",
)  # fmt: skip


class UnknownMixedPrecision(ConfigRule):
    """mixed_precision has a value that Accelerate does not know."""

    code = "HS261"
    name = "unknown-mixed-precision"
    severity = "error"
    reason = (
        "Accelerate takes no, fp16, bf16 and fp8, and raises 'Unknown mixed_precision mode' for anything else: torch's dtype names "
        "and Lightning's 16-mixed are not its words. Unquoted, YAML reads `no` as false, which Accelerate understands; `yes` is "
        "true, which it does not."
    )
    bad = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: float16\nnum_processes: 8\n",
        "from accelerate import Accelerator\n\naccelerator = Accelerator(mixed_precision='bfloat16')\n",
        "from accelerate import Accelerator\n\naccelerator = Accelerator(mixed_precision=True)\n",
    )
    good = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: no\nnum_processes: 8\n",
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_processes: 8\n",
        "from accelerate import Accelerator\n\naccelerator = Accelerator(mixed_precision=args.mixed_precision)\n",
    )
    references = (_ACCELERATOR, "measured: accelerate 1.15 raises ValueError")

    def check(self, config: Config) -> Iterator[Finding]:
        """A literal off the list."""
        found = config.entry("mixed_precision")
        if config.kind != "accelerate" or found is None:
            return
        value = config.value("mixed_precision")
        if value is False and not config.root.call:
            return
        if (isinstance(value, str) and value.casefold() not in _MODES) or isinstance(value, bool):
            meant = _MEANT.get(str(value).casefold())
            fix = (
                replace_value(config, found.value, meant, f"Write {meant}")
                if isinstance(value, str) and meant
                else None
            )
            yield self.finding(
                config.where(found),
                f"mixed_precision is {value!r}, and Accelerate knows {', '.join(_MODES)}.",
                instead=f"Write {literal(config, meant or 'bf16')}.",
                fix=fix,
            )


class DeepSpeedFileConflict(ConfigRule):
    """A DeepSpeed file is named beside settings that only the file may decide."""

    code = "HS262"
    name = "deepspeed-file-conflict"
    severity = "error"
    reason = (
        "With deepspeed_config_file Accelerate takes everything from that file, and refuses an Accelerate file that also sets "
        "mixed_precision, zero_stage, gradient_clipping and their like: 'When using deepspeed_config_file, the following "
        "accelerate config variables will be ignored', a ValueError."
    )
    bad = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\ndeepspeed_config:\n"
        "  deepspeed_config_file: ds_config.json\n  zero3_init_flag: true\nmixed_precision: bf16\nnum_processes: 8\n",
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\ndeepspeed_config:\n"
        "  deepspeed_config_file: ds_config.json\n  zero_stage: 2\nnum_processes: 8\n",
    )
    good = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\ndeepspeed_config:\n"
        "  deepspeed_config_file: ds_config.json\n  zero3_init_flag: true\nnum_processes: 8\n",
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\ndeepspeed_config:\n"
        "  zero_stage: 2\n  gradient_clipping: 1.0\nmixed_precision: bf16\nnum_processes: 8\n",
    )
    references = (_DEEPSPEED + "#deepspeed-config-file", "measured: read in accelerate 1.15, utils/dataclasses.py")

    def check(self, config: Config) -> Iterator[Finding]:
        """The first conflicting setting, with the others named."""
        file = config.value("deepspeed_config", "deepspeed_config_file")
        kind = config.value("distributed_type")
        is_file = config.kind == "accelerate" and not config.root.call and isinstance(file, str) and file != "none"
        if not is_file or str(kind).upper() != "DEEPSPEED":
            return
        paths: list[tuple[str, ...]] = [("deepspeed_config", key) for key in _DECIDED_BY_FILE]
        paths.append(("mixed_precision",))
        given = [found for path in paths if (found := config.entry(*path)) and config.value(*path) is not None]
        if given:
            names = ", ".join(found.key for found in given)
            yield self.finding(
                config.where(given[0]),
                f"{names} beside deepspeed_config_file {file!r}: Accelerate takes them from the file, and stops.",
                instead="Remove them here and set them in the DeepSpeed file.",
            )


class Fp16OnCpu(ConfigRule):
    """fp16 mixed precision is asked for on the CPU."""

    code = "HS263"
    name = "accelerate-fp16-on-cpu"
    severity = "error"
    reason = (
        "Accelerate refuses fp16 on a CPU ('fp16 mixed precision requires a GPU'). CPUs that compute in 16 bits at all do it in "
        "bf16; on others mixed precision is slower than fp32."
    )
    bad = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nuse_cpu: true\nmixed_precision: fp16\n",
        "from accelerate import Accelerator\n\naccelerator = Accelerator(cpu=True, mixed_precision='fp16')\n",
    )
    good = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nuse_cpu: true\nmixed_precision: bf16\n",
        "from accelerate import Accelerator\n\naccelerator = Accelerator(cpu=args.cpu, mixed_precision='fp16')\n",
    )
    references = (_ACCELERATOR, "measured: read in accelerate 1.15, accelerator.py")

    def check(self, config: Config) -> Iterator[Finding]:
        """Both settings written out."""
        if config.kind != "accelerate" or config.value("mixed_precision") != "fp16":
            return
        if config.value("use_cpu") is True or (config.root.call and config.value("cpu") is True):
            found = config.entry("mixed_precision")
            assert found is not None
            message = "fp16 mixed precision on the CPU: Accelerate stops with a ValueError."
            yield self.finding(config.where(found), message, instead="Use bf16, or no.")


class RemovedFp16Argument(ConfigRule):
    """Accelerator is called with an fp16 argument, which it no longer has."""

    code = "HS264"
    name = "removed-fp16-argument"
    severity = "error"
    reason = "Accelerator(fp16=...) was replaced by mixed_precision= when bf16 came, and later removed: the call raises a TypeError on an unexpected argument."
    bad = ("from accelerate import Accelerator\n\naccelerator = Accelerator(fp16=True)\n",)
    good = ("from accelerate import Accelerator\n\naccelerator = Accelerator(mixed_precision='fp16')\n",)
    references = (_ACCELERATOR, "measured: accelerate 1.15 raises TypeError")

    def check(self, config: Config) -> Iterator[Finding]:
        """The keyword in a call."""
        found = config.entry("fp16")
        if config.kind != "accelerate" or not config.root.call or found is None:
            return
        fix = None
        value = config.value("fp16")
        if isinstance(value, bool) and "mixed_precision" not in config.root:
            word = '"fp16"' if value else '"no"'
            edit = Edit(found.span.start, found.span.end, f"mixed_precision={word}")
            fix = Fix("Write mixed_precision", (edit,))
        message = "Accelerator has no argument fp16 any more, and raises a TypeError."
        yield self.finding(config.where(found), message, instead='Write mixed_precision="fp16".', fix=fix)


class AccelerateOffloadIgnored(ConfigRule):
    """Parameters are to be offloaded below ZeRO-3, where nothing offloads them."""

    code = "HS265"
    name = "accelerate-offload-ignored"
    severity = "warning"
    reason = (
        "offload_param_device is passed on to DeepSpeed, which partitions and offloads parameters at ZeRO stage 3 only. Below it "
        "the setting saves nothing, and nobody says so."
    )
    bad = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\n"
        "  offload_optimizer_device: cpu\n  offload_param_device: cpu\nmixed_precision: bf16\n",
    )
    good = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n"
        "  offload_param_device: cpu\nmixed_precision: bf16\n",
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\n"
        "  offload_param_device: none\nmixed_precision: bf16\n",
    )
    references = (_DEEPSPEED, "https://www.deepspeed.ai/docs/config-json/#parameter-offloading")

    def check(self, config: Config) -> Iterator[Finding]:
        """A device at stage 0, 1 or 2."""
        if config.kind != "accelerate":
            return
        stage = config.value("deepspeed_config", "zero_stage")
        device = config.value("deepspeed_config", "offload_param_device")
        found = config.entry("deepspeed_config", "offload_param_device")
        if stage in {0, 1, 2} and not isinstance(stage, bool) and device in {"cpu", "nvme"} and found:
            message = f"offload_param_device {device} has no effect at ZeRO stage {stage}; only stage 3 partitions parameters."
            yield self.finding(config.where(found), message, instead="Use zero_stage: 3, or none.")


RULES: tuple[type[Rule], ...] = (
    UnknownMixedPrecision,
    DeepSpeedFileConflict,
    Fp16OnCpu,
    RemovedFp16Argument,
    AccelerateOffloadIgnored,
)
