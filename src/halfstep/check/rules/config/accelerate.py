"""Rules for Accelerate: its YAML file and `Accelerator(...)`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from halfstep.check.config.config import Config
from halfstep.check.config.deepspeed_facts import uses_another_engine
from halfstep.check.config.deepspeed_schema import PARENT_BLOCK
from halfstep.check.config.edits import literal, replace_value
from halfstep.check.config.kind import DEEPSPEED_KEYS
from halfstep.check.finding import Edit, Finding, Fix
from halfstep.check.pins import pins_for
from halfstep.check.regex import regex
from halfstep.check.rule import ConfigRule, Rule
from halfstep.hardware.versions import matches
from halfstep.precision.node import Block

__all__ = ["RULES"]

_MODES = ("no", "fp16", "bf16", "fp8")
_CORRECTIONS = {
    "float16": "fp16", "half": "fp16", "16": "fp16", "16-mixed": "fp16", "true": "fp16", "amp": "fp16",
    "bfloat16": "bf16", "bf16-mixed": "bf16", "fp32": "no", "float32": "no", "none": "no", "32": "no", "false": "no",
}  # fmt: skip
_DEEPSPEED = "https://huggingface.co/docs/accelerate/usage_guides/deepspeed"
_ACCELERATOR = "https://huggingface.co/docs/accelerate/package_reference/accelerator"
_DEEPSPEED_BLOCKS = frozenset({
    "fp16", "bf16", "bfloat16", "torch_autocast", "data_types", "zero_optimization", "optimizer", "scheduler",
    "activation_checkpointing",
})  # fmt: skip
# Settings that accelerate 1.15 rejects next to a DeepSpeed file (DeepSpeedPlugin._deepspeed_config_checks).
_SET_BY_FILE = (
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device", "offload_param_device",
    "offload_param_nvme_path", "offload_optimizer_nvme_path", "zero3_save_16bit_model",
)  # fmt: skip


_FILE = regex(r"\.(json|ya?ml)$")
# The releases that raise for fp16 without a GPU; 0.16.0 added the test of the device (accelerate#909).
_REJECTS_CPU = ">=0.11,<0.16"


class UnknownMixedPrecision(ConfigRule):
    """`mixed_precision` has a value that Accelerate does not accept."""

    code = "HS261"
    name = "unknown-mixed-precision"
    severity = "error"
    reason = (
        "Accelerate accepts `no`, `fp16`, `bf16` and `fp8` and raises 'Unknown mixed_precision mode' for anything "
        "else, including torch dtype names and Lightning's `16-mixed`. YAML reads an unquoted `no` as false, which "
        "Accelerate accepts, and an unquoted `yes` as true, which it rejects."
    )
    bad = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: float16\nnum_processes: 8\n",
        "from accelerate import Accelerator\n\naccelerator = Accelerator(mixed_precision='bfloat16')\n",
        "from accelerate import Accelerator\n\naccelerator = Accelerator(mixed_precision=True)\n",
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: 16\nnum_processes: 8\n",
        "from accelerate import Accelerator\n\naccelerator = Accelerator(mixed_precision='bf16' if args.bf16 else 'fp32')\n",
        "from accelerate import Accelerator\n\nparser.add_argument('--precision', choices=['fp32', 'bf16'], default='bf16')\n"
        "args = parser.parse_args()\naccelerator = Accelerator(mixed_precision=args.precision)\n",
    )
    good = (
        'compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: "fp16"\nnum_processes: 8\n',
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: no\nnum_processes: 8\n",
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_processes: 8\n",
        "from accelerate import Accelerator\n\naccelerator = Accelerator(mixed_precision=args.mixed_precision)\n",
        "from accelerate import Accelerator\n\nprecision = 'fp32'\n"
        "accelerator = Accelerator(mixed_precision='no' if precision == 'fp32' else precision)\n",
    )
    references = (_ACCELERATOR, "measured: accelerate 1.15 raises ValueError")

    def check(self, config: Config) -> Iterator[Finding]:
        """Report a literal that is not a valid mode."""
        entry = config.entry("mixed_precision")
        if config.kind != "accelerate" or entry is None:
            return
        value = config.value("mixed_precision")
        if value is False and not config.root.call:
            return
        if (isinstance(value, str) and value.casefold() not in _MODES) or isinstance(value, (bool, int)):
            mode = _CORRECTIONS.get(str(value).casefold())
            fix = (
                replace_value(config, entry.value, mode, f"Replace with {mode}")
                if isinstance(value, str) and mode and not config.assembled
                else None
            )
            yield self.finding(
                config.where(entry),
                f"`mixed_precision` {'may be' if config.assembled else 'is'} {value!r}; Accelerate accepts only {', '.join(_MODES)}.",
                instead=f"Set it to {literal(config, mode or 'bf16')}.",
                fix=fix,
            )


class DeepSpeedFileConflict(ConfigRule):
    """`deepspeed_config_file` is combined with settings that only the DeepSpeed file may set."""

    code = "HS262"
    name = "deepspeed-file-conflict"
    severity = "error"
    reason = (
        "With `deepspeed_config_file`, Accelerate reads these settings from the DeepSpeed file. If the Accelerate "
        "file also sets `mixed_precision`, `zero_stage`, `gradient_clipping` or a similar key, it raises a "
        "ValueError: 'When using deepspeed_config_file, the following accelerate config variables will be ignored'."
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
    references = (
        _DEEPSPEED + "#deepspeed-config-file",
        "measured: source code of accelerate 1.15, utils/dataclasses.py",
    )

    def check(self, config: Config) -> Iterator[Finding]:
        """Report the first conflicting setting and list the others."""
        file = config.value("deepspeed_config", "deepspeed_config_file")
        kind = config.value("distributed_type")
        is_file = config.kind == "accelerate" and not config.root.call and isinstance(file, str) and file != "none"
        if not is_file or str(kind).upper() != "DEEPSPEED":
            return
        paths: list[tuple[str, ...]] = [("deepspeed_config", key) for key in _SET_BY_FILE]
        paths.append(("mixed_precision",))
        conflicts = [entry for path in paths if (entry := config.entry(*path)) and config.value(*path) is not None]
        if conflicts:
            names = ", ".join(f"`{entry.key}`" for entry in conflicts)
            verb, pronoun = ("conflicts", "it") if len(conflicts) == 1 else ("conflict", "them")
            yield self.finding(
                config.where(conflicts[0]),
                f"{names} {verb} with `deepspeed_config_file: {file}`; Accelerate raises a ValueError.",
                instead=f"Remove {pronoun} here and set {pronoun} in the DeepSpeed file.",
            )


class Fp16OnCpu(ConfigRule):
    """fp16 mixed precision is requested on the CPU."""

    code = "HS263"
    name = "accelerate-fp16-on-cpu"
    severity = "advice"
    reason = (
        "Since 0.16 Accelerate ignores fp16 on a CPU and trains in fp32, without a warning and without a loss scale; 0.11 to "
        "0.15 raise 'fp16 mixed precision requires a GPU' on machines without one. CPUs with 16-bit matrix instructions support "
        "bf16; on all others mixed precision is slower than fp32."
    )
    bad = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nuse_cpu: true\nmixed_precision: fp16\n",
        "from accelerate import Accelerator\n\naccelerator = Accelerator(cpu=True, mixed_precision='fp16')\n",
    )
    good = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nuse_cpu: true\nmixed_precision: bf16\n",
        "from accelerate import Accelerator\n\naccelerator = Accelerator(cpu=args.cpu, mixed_precision='fp16')\n",
    )
    references = (
        _ACCELERATOR,
        "https://github.com/huggingface/accelerate/pull/909",
        "measured: accelerate 1.15.0, Accelerator(cpu=True, mixed_precision='fp16') has no scaler and computes in float32",
    )

    def check(self, config: Config) -> Iterator[Finding]:
        """Report fp16 together with an explicit CPU setting."""
        if config.kind != "accelerate" or config.value("mixed_precision") != "fp16":
            return
        if config.value("use_cpu") is True or (config.root.call and config.value("cpu") is True):
            entry = config.entry("mixed_precision")
            assert entry is not None
            settings = config.settings
            folder = str(Path(config.source.path).absolute().parent)
            pin = pins_for(folder, settings.pins, look_up=settings.look_up).get("accelerate")
            raises = pin is not None and matches(pin.version, _REJECTS_CPU)
            effect = (
                f"{pin} raises a ValueError without a GPU" if raises else "Accelerate ignores it and trains in fp32"
            )
            message = f"fp16 mixed precision is requested on the CPU; {effect}."
            instead = "Use bf16, or no to disable mixed precision."
            yield self.finding(config.where(entry), message, instead=instead, severity="error" if raises else None)


class RemovedFp16Argument(ConfigRule):
    """`Accelerator` is called with the removed `fp16` argument."""

    code = "HS264"
    name = "removed-fp16-argument"
    severity = "error"
    reason = (
        "`Accelerator(fp16=...)` was replaced by `mixed_precision=...` when bf16 support was added, and was later "
        "removed: the call raises a TypeError for an unexpected keyword argument."
    )
    bad = ("from accelerate import Accelerator\n\naccelerator = Accelerator(fp16=True)\n",)
    good = (
        'from accelerate import Accelerator\n\naccelerator = Accelerator(mixed_precision="fp16")\n',
        "from accelerate import Accelerator\n\naccelerator = Accelerator(mixed_precision='fp16')\n",
    )
    references = (_ACCELERATOR, "measured: accelerate 1.15 raises TypeError")

    def check(self, config: Config) -> Iterator[Finding]:
        """Report the keyword argument in a call."""
        entry = config.entry("fp16")
        if config.kind != "accelerate" or not config.root.call or entry is None:
            return
        fix = None
        value = config.value("fp16")
        mode = '"no"' if value is False else '"fp16"'
        is_keyword = config.source.text[entry.key_span.start] not in "\"'"  # not a key that `**` unpacks
        if isinstance(value, bool) and "mixed_precision" not in config.root and is_keyword:
            edit = Edit(entry.span.start, entry.span.end, f"mixed_precision={mode}")
            fix = Fix("Replace with mixed_precision", (edit,))
        message = "`Accelerator` no longer accepts `fp16`; the call raises a TypeError."
        yield self.finding(config.where(entry), message, instead=f"Use `mixed_precision={mode}`.", fix=fix)


class AccelerateOffloadIgnored(ConfigRule):
    """Parameter offload is requested below ZeRO stage 3, where it has no effect."""

    code = "HS265"
    name = "accelerate-offload-ignored"
    severity = "warning"
    reason = (
        "Accelerate passes `offload_param_device` to DeepSpeed, which partitions and offloads parameters at ZeRO "
        "stage 3 only. At lower stages the setting saves no memory, and no warning is logged."
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
        """Report an offload device at stage 0, 1 or 2."""
        if config.kind != "accelerate" or uses_another_engine(config):
            return
        stage = config.value("deepspeed_config", "zero_stage")
        device = config.value("deepspeed_config", "offload_param_device")
        entry = config.entry("deepspeed_config", "offload_param_device")
        if stage in {0, 1, 2} and not isinstance(stage, bool) and device in {"cpu", "nvme"} and entry:
            message = (
                f"`offload_param_device: {device}` has no effect at ZeRO stage {stage}; only stage 3 partitions "
                "parameters."
            )
            yield self.finding(
                config.where(entry), message, instead="Set `zero_stage: 3`, or `offload_param_device: none`."
            )


class DeepSpeedBlockIgnored(ConfigRule):
    """`deepspeed_config` contains settings that Accelerate does not pass on to DeepSpeed."""

    code = "HS266"
    name = "accelerate-deepspeed-block-ignored"
    severity = "warning"
    reason = (
        "`deepspeed_config` in an Accelerate file has Accelerate's keys (`zero_stage`, `gradient_clipping`, the offload "
        "devices). Keys of a DeepSpeed file, such as `fp16` with the loss scale, `bf16`, `zero_optimization`, `optimizer` or "
        "`reduce_bucket_size`, are not read there: Accelerate builds the DeepSpeed configuration from its own keys, with the "
        "default loss scale, and logs nothing. All of `deepspeed_config` is ignored unless `distributed_type` is "
        "DEEPSPEED: the run then has neither ZeRO nor its fp32 master weights."
    )
    bad = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\n"
        "  fp16:\n    enabled: true\n    initial_scale_power: 12\nmixed_precision: fp16\nnum_processes: 8\n",
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\n"
        "  reduce_bucket_size: 500000000\nmixed_precision: bf16\nnum_processes: 8\n",
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\ndeepspeed_config:\n  zero_stage: 2\n"
        "mixed_precision: bf16\nnum_processes: 8\n",
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\ndeepspeed_config: ds_config.json\n"
        "mixed_precision: bf16\nnum_processes: 8\n",
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\ndeepspeed_config: ds_config.json\n"
        "num_processes: 8\n",
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\ndeepspeed_config: {ds_config.json}\nnum_processes: 8\n",
    )
    good = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\n"
        "mixed_precision: fp16\nnum_processes: 8\n",
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\ndeepspeed_config:\n"
        "  deepspeed_config_file: ds_config.json\nnum_processes: 8\n",
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\ndeepspeed_config: {}\nmixed_precision: bf16\n",
    )
    references = (_DEEPSPEED, "measured: source code of accelerate 1.15, commands/launch.py and utils/launch.py")

    def check(self, config: Config) -> Iterator[Finding]:
        """Report the whole block under another engine, or each block of a DeepSpeed file in it."""
        entry = config.entry("deepspeed_config") if config.kind == "accelerate" and not config.root.call else None
        if entry is None:
            return
        block = config.block("deepspeed_config")
        engine = config.value("distributed_type")
        path = config.value("deepspeed_config") if block is None else None
        other = uses_another_engine(config)
        if other and (isinstance(path, str) or (block and block.entries)):
            message = (
                f"`deepspeed_config` has no effect with `distributed_type: {engine}`; without `--use_deepspeed` on the "
                "command line, DeepSpeed is not used."
            )
            instead = "Set `distributed_type: DEEPSPEED`, or remove `deepspeed_config`."
            yield self.finding(config.where(entry.key_span), message, instead=instead)
        elif isinstance(path, str) and str(engine).upper() == "DEEPSPEED":
            message = "`deepspeed_config` is a string; Accelerate expects a block and raises an AttributeError."
            instead = f"Write a block with `deepspeed_config_file: {path}`."
            yield self.finding(config.where(entry), message, instead=instead, severity="error")
        for inner in block.entries if block and not other else ():
            is_block = inner.key in _DEEPSPEED_BLOCKS and isinstance(inner.value, Block)
            known = inner.key in DEEPSPEED_KEYS or inner.key in PARENT_BLOCK
            if is_block or (known and inner.key not in _SET_BY_FILE and not isinstance(inner.value, Block)):
                effect = "its settings have no effect" if is_block else "it has no effect"
                message = f"Accelerate does not read `{inner.key}` in `deepspeed_config`; {effect}."
                instead = "Move it to a DeepSpeed file and name that in `deepspeed_config_file`."
                yield self.finding(config.where(inner.key_span), message, instead=instead)
            elif _FILE.search(inner.key):  # `{ds_config.json}` is a mapping without a value
                message = f"`{inner.key}` is a key of `deepspeed_config` here, which Accelerate does not read: the file is not used."
                yield self.finding(
                    config.where(inner.key_span), message, instead=f"Write `deepspeed_config_file: {inner.key}` in it."
                )


RULES: tuple[type[Rule], ...] = (
    UnknownMixedPrecision,
    DeepSpeedFileConflict,
    Fp16OnCpu,
    RemovedFp16Argument,
    AccelerateOffloadIgnored,
    DeepSpeedBlockIgnored,
)
