"""HS296: an optimizer that DeepSpeed does not accept with offloaded optimizer states."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep.check.config.config import Config
from halfstep.check.config.deepspeed_facts import DeepSpeed
from halfstep.check.config.joint import JointRule, Use
from halfstep.check.config.objects import optimizer_calls
from halfstep.check.finding import Finding
from halfstep.check.regex import regex
from halfstep.check.rule import Rule
from halfstep.check.rules.config.joint import BF16, script_with
from halfstep.check.script.syntax.children import all_nodes
from halfstep.check.script.syntax.names import read_names

__all__ = ["RULES"]

# Classes of other libraries, and DeepSpeed's own for the GPU.
_FOREIGN = (
    "torch.optim.", "transformers.AdamW", "transformers.optimization.AdamW", "transformers.Adafactor", "apex.optimizers.",
    "bitsandbytes.optim.", "deepspeed.ops.adam.FusedAdam", "deepspeed.ops.lamb.FusedLamb",
)  # fmt: skip
_OFFLOADS = regex(
    r"""["']deepspeed_stage_[23]_offload["']|DeepSpeed(?:Strategy|Plugin)\((?:(?!config\s*=).)*\boffload_optimizer\s*=\s*True""",
    re.DOTALL,
)
_INSTEAD = "Use `deepspeed.ops.adam.DeepSpeedCPUAdam`, or set the optimizer in the configuration."
_LIGHTNING = (
    "import lightning as L\n{imports}\n\nclass Module(L.LightningModule):\n    def configure_optimizers(self):\n"
    "        return {optimizer}(self.parameters(), lr=1e-4)\n\n"
    "trainer = L.Trainer(strategy='deepspeed_stage_2_offload', precision='bf16-mixed')\ntrainer.fit(Module())\n"
)


class ClientOptimizerOffloaded(JointRule):
    """A torch optimizer is passed together with optimizer offload."""

    code = "HS296"
    name = "client-optimizer-offloaded"
    severity = "error"
    reason = (
        "DeepSpeed updates offloaded optimizer states with its own CPU optimizer: any other optimizer raises "
        "ZeRORuntimeException unless `zero_force_ds_cpu_optimizer` is false. Lightning passes the optimizer of "
        "`configure_optimizers` on in the same way."
    )
    bad = (
        script_with(
            BF16,
            2,
            "",
            more=", 'offload_optimizer': {'device': 'cpu'}",
            loop="opt = torch.optim.AdamW(model.parameters())\n"
            "engine, *_ = deepspeed.initialize(model=model, optimizer=opt, config=ds_config)\n",
        ),
        _LIGHTNING.format(imports="import torch", optimizer="torch.optim.AdamW"),
    )
    good = (
        script_with(
            BF16,
            2,
            "",
            more=", 'offload_optimizer': {'device': 'cpu'}",
            loop="from deepspeed.ops.adam import DeepSpeedCPUAdam\nopt = DeepSpeedCPUAdam(model.parameters())\n"
            "engine, *_ = deepspeed.initialize(model=model, optimizer=opt, config=ds_config)\n",
        ),
        _LIGHTNING.format(imports="from deepspeed.ops.adam import DeepSpeedCPUAdam", optimizer="DeepSpeedCPUAdam"),
    )
    references = (
        "https://www.deepspeed.ai/docs/config-json/#optimizer-offloading",
        "https://github.com/Lightning-AI/pytorch-lightning/issues/17603",
        "measured: source code of DeepSpeed 0.19.6, _configure_optimizer",
    )

    def check(self, config: Config) -> Iterator[Finding]:
        """Report an offload block, or a strategy of Lightning that offloads, with an optimizer that does not run on the CPU."""
        yield from super().check(config)
        if config.kind == "lightning" and config.root.call:
            yield from self._lightning(config)

    def inspect(self, use: Use, config: Config) -> Iterator[Finding]:
        """Report `deepspeed.initialize(optimizer=...)` with an offload block, also where it is called under a condition."""
        made = use.engines.made if use.engines is not None else []
        if len(made) != 1 or not DeepSpeed(config).offloads_optimizer:
            return
        forced = config.value("zero_force_ds_cpu_optimizer")
        names = [use.names.full(call.func) for call in optimizer_calls(made[0], use.nodes)]
        if forced in {None, True} and names and all(map(_is_foreign, names)):
            message = f"DeepSpeed raises ZeRORuntimeException for {names[0]} with `offload_optimizer`."
            yield self.finding(use.where(made[0]), message, instead=_INSTEAD)

    def _lightning(self, config: Config) -> Iterator[Finding]:
        entry = config.entry("strategy")
        text = config.source.text
        if entry is None or "zero_force_ds_cpu_optimizer" in text or "CPUAdam" in text or "CPULion" in text:
            return
        strategy = text[entry.value.span.start : entry.value.span.end]
        names = _configured(text) if _OFFLOADS.search(strategy) else []
        if names and all(map(_is_foreign, names)):
            message = f"The strategy offloads the optimizer, and DeepSpeed raises ZeRORuntimeException for {names[0]}."
            yield self.finding(config.where(entry), message, instead=_INSTEAD)


def _is_foreign(name: str) -> bool:
    """Whether an optimizer class is known, and is none of DeepSpeed's for the CPU."""
    return name.startswith(_FOREIGN)


def _configured(text: str) -> list[str]:
    """The optimizers that `configure_optimizers` of the modules in a script creates, by their full names."""
    try:
        nodes = all_nodes(ast.parse(text))
    except (SyntaxError, ValueError):
        return []
    names = read_names((n, False) for n in nodes if isinstance(n, (ast.Import, ast.ImportFrom)))
    hooks = [n for n in nodes if isinstance(n, ast.FunctionDef) and n.name == "configure_optimizers"]
    calls = [names.full(n.func) for hook in hooks for n in ast.walk(hook) if isinstance(n, ast.Call)]
    return [full for full in calls if re.search(r"optim|adam", full, re.IGNORECASE) and "lr_scheduler" not in full]


RULES: tuple[type[Rule], ...] = (ClientOptimizerOffloaded,)
