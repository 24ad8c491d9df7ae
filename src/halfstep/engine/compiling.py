"""Values of `compile=`, and compiling a model in place.

`True` is torch.compile with its defaults. A string is one of its modes; "reduce-overhead" and "max-autotune" also record the
compiled forward and backward as CUDA graphs, so that the host launches a graph instead of each kernel. "blocks" compiles the
repeated blocks (`engine/repeats.py`) and leaves the rest eager: one compiled block serves a whole stack, because torch.compile
passes parameters as arguments, so compilation takes as long as for one block of each kind.

Blocks share compiled code while what the compiler checks is equal: class, structure, shapes, dtypes and Python attributes
that the forward reads. Where blocks differ (a drop rate by depth, a shifted window), each kind is compiled. torch.compile would give up at the ninth and run the rest in eager mode, so the limit is raised to what this model
may need, and many compilations of one stack are logged.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from halfstep.engine.members import Members
from halfstep.engine.repeats import Stack, repeated_blocks
from halfstep.engine.rerun.caches import find_cache_classes, has_cache, without_caches
from halfstep.errors import SettingError
from halfstep.events import log_once

__all__ = [
    "BLOCKS",
    "GRAPH_MODES",
    "MODES",
    "SWITCH",
    "check_compile",
    "compile_model",
    "parse_compile",
    "records_graphs",
    "start_workers",
]

BLOCKS = "blocks"
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")  # torch.compile's
GRAPH_MODES = ("reduce-overhead", "max-autotune")
SWITCH = {
    "on": True,
    "true": True,
    "1": True,
    "off": False,
    "false": False,
    "0": False,
}  # spellings on the command line
_VARIANTS = 4  # of one block's code: training and validation, and a second shape of batches in each


def check_compile(compile: Any) -> None:  # noqa: A002 - the option's name
    """Raise for a `compile=` that is neither a switch, nor "blocks", nor a mode of torch.compile."""
    if isinstance(compile, str):
        if compile not in (BLOCKS, *MODES):
            raise SettingError(
                f"compile={compile!r} is neither on nor off, nor {BLOCKS!r}, nor a mode of torch.compile: {', '.join(MODES)}."
            )
    elif not isinstance(compile, bool):
        raise SettingError(
            f"compile={compile!r} must be True, False, {BLOCKS!r} or a mode of torch.compile: {', '.join(MODES)}."
        )


def parse_compile(text: str) -> bool | str:
    """The setting that a string names: a switch, "blocks" or a mode; torch's default mode is `True`."""
    value: bool | str = SWITCH.get(text.casefold(), text)
    check_compile(value)
    return True if value == "default" else value


def records_graphs(compile: bool | str, device: torch.device) -> bool:  # noqa: A002
    """Whether this setting records CUDA graphs on this device."""
    return device.type == "cuda" and compile in GRAPH_MODES


def start_workers(model: nn.Module, compile: bool | str) -> None:  # noqa: A002
    """Start the compiler's worker processes, if this setting will compile kernels for a GPU.

    They import torch, which takes seconds, and until they are ready the compiler compiles one kernel after the other in this
    process. torch starts them when it compiles its first graph, which is too late for the kernels of the first block: on an H200,
    ViT-L/16 with `compile="blocks"` then takes 9.4 s to the end of its second step, and 8.4 s if they are started first.
    """
    if compile and any(p.is_cuda for p in model.parameters()):
        workers = importlib.import_module("torch._inductor.async_compile").AsyncCompile
        getattr(workers, "wakeup", lambda: None)()  # not public: without it, torch starts them later


def compile_model(
    model: nn.Module,
    compile: bool | str,  # noqa: A002
    undo: contextlib.ExitStack | None = None,
    *,
    budget: float | None = None,  # the share of activations that the compiled code may keep
) -> None:
    """Compile the model's call in place, if the setting is on; `undo` takes back what is set for the process."""
    if not compile:
        return
    if compile == BLOCKS:
        stacks = repeated_blocks(model)
        if stacks:
            _compile_blocks(stacks, undo or contextlib.ExitStack(), budget)
            return
        log_once(f'compile="blocks": {type(model).__name__} has no repeated blocks; the whole model is compiled.')
    mode = compile if isinstance(compile, str) and compile != BLOCKS else None
    # A member of several is called, their holder never.
    for module in model.children() if isinstance(model, Members) else (model,):
        _compile(module, _options(mode, budget))


def _compile(module: nn.Module, options: dict[str, Any]) -> None:
    if not type(module).forward.__module__.startswith("torch.") or "forward" in vars(module):
        module.compile(**options)
        return
    # The compiler skips torch's own functions and traces what they call. Of a bare nn.Sequential of torch's layers it
    # would compile nothing, and of one of other modules each by itself; a function of ours around it is one graph.
    call: Callable[..., Any] = module._call_impl  # noqa: SLF001 - what torch's compile() compiles

    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    module._compiled_call_impl = torch.compile(forward, **options)  # noqa: SLF001 - where nn.Module.compile() stores it


def _options(mode: str | None, budget: float | None) -> dict[str, Any]:
    """The arguments of torch.compile."""
    if budget is None:
        return {"mode": mode}

    def backend(graph: Any, inputs: Any) -> Any:
        """torch.compile's own, with a share of activations to keep; set only while it compiles this graph."""
        with torch._functorch.config.patch(activation_memory_budget=budget):  # noqa: SLF001 - the only way to set it
            return torch._inductor.compile(graph, inputs, options=torch._inductor.list_mode_options(mode or "default"))  # noqa: SLF001

    return {"backend": backend}


# --- blocks ---------------------------------------------------------------------------------------------------------


def _compile_blocks(stacks: tuple[Stack, ...], undo: contextlib.ExitStack, budget: float | None) -> None:
    find_cache_classes()
    num_blocks = sum(len(stack.blocks) for stack in stacks)
    _raise_limits(_VARIANTS * num_blocks, undo)
    options = _options(None, budget)  # one for all: compiled code is shared within one backend
    for stack in stacks:
        counter = _Counter(stack)
        for block in stack.modules:
            _compile(block, options)
            block._compiled_call_impl = counter.around(block)  # noqa: SLF001 - where nn.Module.compile() stores it


def _raise_limits(limit: int, undo: contextlib.ExitStack) -> None:
    """Let torch.compile compile one function this many times before it gives up on it."""
    config = torch._dynamo.config  # noqa: SLF001 - torch.compile's settings have no public module
    for name in ("recompile_limit", "accumulated_recompile_limit"):
        before = getattr(config, name)
        if before < limit:
            undo.callback(setattr, config, name, before)
            setattr(config, name, limit)


class _Counter:
    """Counts how often the blocks of one stack were compiled, and logs it if most of them were compiled separately."""

    def __init__(self, stack: Stack) -> None:
        self._stack, self.num_compiled = stack, 0

    def around(self, block: nn.Module) -> Callable[..., Any]:
        """The compiled call of a block, counted; with a key-value cache, which is specific to each layer, the eager one."""
        counters = torch._dynamo.utils.counters  # noqa: SLF001 - the compiler's own
        compiled: Any = block._compiled_call_impl  # noqa: SLF001
        eager: Callable[..., Any] = block._call_impl  # noqa: SLF001

        def counted(*args: Any, **kwargs: Any) -> Any:
            if has_cache(args, kwargs):
                if not torch.is_grad_enabled():  # generating text
                    return eager(*args, **kwargs)
                args, kwargs = without_caches(args, kwargs)
            before = counters["stats"]["unique_graphs"]
            try:
                return compiled(*args, **kwargs)
            finally:
                if counters["stats"]["unique_graphs"] != before:
                    self._add()

        return counted

    def _add(self) -> None:
        self.num_compiled += 1
        if self.num_compiled == max(_VARIANTS * self._stack.num_structures + 1, len(self._stack.blocks) // 2):
            log_once(
                f'compile="blocks": {self.num_compiled} of the {len(self._stack.blocks)} blocks in {self._stack.name or "the model"} were compiled separately, because '
                "they differ in a value that their forward reads (TORCH_LOGS=recompiles shows it). Results are right; "
                "compilation takes longer than for one block."
            )
