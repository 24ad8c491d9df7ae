"""`halfstep mcp`: the commands that answer questions, as tools for agents and editors."""

from __future__ import annotations

import sys

import click

__all__ = ["command"]

_INSTRUCTIONS = (
    "Mixed-precision training for PyTorch. check finds precision mistakes in training scripts and configurations; explain has the "
    "concepts and the rules; probe shows which formats the hardware runs natively and which precision to use; plan predicts the "
    "memory of a training step; run_file summarises a run of `halfstep train`. Results are JSON."
)


@click.command("mcp")
def command() -> None:
    """Serve check, explain, plan, probe and run files over the Model Context Protocol, on standard input and output.

    Started by an agent or an editor, whose configuration names the command. Relative paths are relative to the directory
    that it is started in. No tool runs code of yours, except plan, which imports its target.

    \b
    halfstep mcp
    claude mcp add halfstep -- halfstep mcp
    """
    if sys.stdin.isatty():
        click.echo("halfstep mcp: waiting for a client on standard input; Ctrl-C ends it.", err=True)
    from halfstep import __version__
    from halfstep.integrations.mcp import Tool, serve

    tools = [Tool(check), Tool(explain), Tool(plan, reads_only=False), Tool(probe), Tool(run_file)]
    serve(tools, name="halfstep", version=__version__, instructions=_INSTRUCTIONS)


async def check(
    paths: list[str] | None = None,
    source: str | None = None,
    filename: str = "stdin.py",
    select: list[str] | None = None,
    ignore: list[str] | None = None,
    gpu: str | None = None,
    deepspeed: str | None = None,
) -> str:
    """Find precision mistakes in training scripts, notebooks and DeepSpeed or Trainer configurations. Reads only; nothing is run.

    Pass either `paths` (files and directories), or `source`, a text, with a `filename` whose suffix is its language (.py, .json,
    .yaml, ...). `select` and `ignore` take rule codes (HS104), prefixes (HS1), names or severities. `gpu` ("T4") also reports what
    that GPU does not support; `deepspeed` is the version that configurations are checked for. Returns a list of findings with
    code, line, message, what to write instead, and the edits of a fix. Call explain with a code for the reasons.
    """
    from halfstep.integrations.mcp import run_command

    if (paths is None) == (source is None):
        raise _error("Pass either paths or source.")
    if paths is not None and "-" in paths:
        raise _error("Standard input belongs to the protocol; pass the text as source.")
    options = [f"--select={each}" for each in select or ()] + [f"--ignore={each}" for each in ignore or ()]
    options += _options(gpu=gpu, deepspeed=deepspeed)
    if source is not None:
        return await run_command(
            ["check", "--format=json", f"--stdin-filename={filename}", *options, "--", "-"], source
        )
    return await run_command(["check", "--format=json", "--no-cache", *options, "--", *(paths or ())])


async def explain(topic: str = "") -> str:
    """Explain a concept of mixed precision with its numbers ("loss-scaling"), or a rule of check by code ("HS104") or name.

    Without a topic, returns the topics. Reads only; nothing is run.
    """
    from halfstep.integrations.mcp import run_command

    return await run_command(["explain", "--json", "--", *topic.split()])


async def plan(
    target: str,
    batch: int | None = None,
    precision: list[str] | None = None,
    gpu: str | None = None,
    memory: str | None = None,
    gpus: int | None = None,
    accumulate: int | None = None,
    strategy: list[str] | None = None,
) -> str:
    """Predict the memory of a training step and how many GPUs it needs, on fake tensors: no GPU is needed.

    This imports and runs the code of `target`: a job file ("job.py", "job.py:name"), "package.module:name", a built-in name
    ("digits", "vit_l_16"), "timm:NAME", "torchvision:NAME" or "transformers:DIR_OR_CONFIG". `batch` is the global batch size,
    `precision` a list of presets or policies ("bf16-lean,states=8bit"), `gpu` a name ("A100") or `memory` a size ("80GiB"),
    `gpus` the maximum number, `strategy` any of ddp, zero1, zero2, fsdp, hsdp, zero3. May take a minute for a large model.
    """
    from halfstep.integrations.mcp import run_command

    options = _options(batch=batch, gpu=gpu, memory=memory, gpus=gpus, accumulate=accumulate)
    options += [f"--precision={each}" for each in precision or ()] + [f"--strategy={each}" for each in strategy or ()]
    return await run_command(["plan", "--json", *options, "--", target])


async def probe(gpu: str | None = None) -> str:
    """Show which formats this machine, or the GPU with this name ("T4"), runs natively or emulates, and which precision to use.

    Every format that is not chosen has the reason, and known defects of the installed libraries are listed. Nothing is run.
    """
    from halfstep.integrations.mcp import run_command

    return await run_command(["probe", "--json", *_options(gpu=gpu)])


async def run_file(path: str) -> str:
    """Summarise a run of `halfstep train` from its directory or run file, also while it trains. Reads only; nothing is run.

    Returns the last step with its loss and scale, skipped steps, the last validation, counts of events, the last events with their
    advice (which module overflowed, and in which pass), and the truth table: what is really stored and computed in which format.
    """
    from halfstep.integrations.mcp import run_command

    return await run_command(["watch", "--json", "--", path])


def _options(**values: object) -> list[str]:
    return [f"--{name}={value}" for name, value in values.items() if value is not None]


def _error(message: str) -> Exception:
    from mcp.server.mcpserver.exceptions import ToolError

    error: Exception = ToolError(message)
    return error
