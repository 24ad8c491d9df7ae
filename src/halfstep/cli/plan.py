"""`halfstep plan`: predict the memory of a training step and how many GPUs it needs."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from halfstep.cli.requirements import require_packages

if TYPE_CHECKING:
    from halfstep.jobs.targets import Target
    from halfstep.planning.trace import StepOptions

__all__ = ["command"]


@click.command("plan")
@click.argument("target", required=False)
@click.option("--batch", type=int, metavar="N", help="Global batch size (default: the target's).")
@click.option(
    "--precision", "-p", multiple=True, metavar="P", help="Preset or policy; may be repeated (default: five presets)."
)
@click.option(
    "--gpu", metavar="NAME", help="GPU to plan for, e.g. A100 or 'RTX 4090' (default: this machine's, if it has one)."
)
@click.option("--memory", metavar="SIZE", help="Memory of the GPU instead of its name, e.g. 80GiB.")
@click.option(
    "--gpus",
    default="auto",
    show_default=True,
    metavar="N|auto",
    help="Maximum number of GPUs (auto: no limit).",
)
@click.option(
    "--accumulate", type=int, default=1, show_default=True, metavar="N", help="Number of micro-batches per batch."
)
@click.option("--ema", is_flag=True, help="Include an EMA of the weights.")
@click.option(
    "--recompute", metavar="cheap|SHARE", help="Recompute activations of repeated blocks in the backward pass."
)
@click.option(
    "--data",
    "data_dir",
    type=click.Path(path_type=Path),
    metavar="DIR|SHARDS",
    help="ImageNet-style folder or WebDataset shards for the ViT targets.",
)
@click.option("--find", is_flag=True, help="Find the largest micro-batch that fits; on a GPU, confirm it by running.")
@click.option(
    "--verify", is_flag=True, help="Also run the step on this machine's GPU and compare predicted with measured memory."
)
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Also write the plan as an HTML page.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    target: str | None,
    batch: int | None,
    precision: tuple[str, ...],
    gpu: str | None,
    memory: str | None,
    gpus: str,
    accumulate: int,
    ema: bool,
    recompute: str | None,
    data_dir: Path | None,
    find: bool,
    verify: bool,
    html: Path | None,
    as_json: bool,
) -> None:
    """Predict the memory of a training step of TARGET and how many GPUs it needs.

    Nothing is allocated and no GPU is needed: the step runs on fake tensors.

    \b
    halfstep plan vit_l_16 --batch 1024 --gpu A100
    halfstep plan job.py --batch 64 --memory 24GiB --precision bf16-lean
    halfstep plan job.py --find --memory 80GiB
    """
    from halfstep.errors import SettingError

    require_packages("halfstep plan", "numpy", *(["jinja2"] if html is not None else []))
    count = None if gpus == "auto" else int(gpus) if gpus.isdecimal() else 0
    if count == 0:
        raise SettingError(f"--gpus {gpus!r} must be auto or an integer of at least 1.")
    if find and (verify or html is not None or batch is not None or count is not None):
        raise SettingError("--find determines the batch size itself; remove --batch, --gpus, --verify and --html.")
    if find and gpu is not None:
        raise SettingError("--find uses this machine's GPU or --memory SIZE; remove --gpu.")
    if html is not None and (html.is_dir() or not html.absolute().parent.is_dir()):
        raise SettingError(f"--html {html} cannot be written: pass a file name in an existing directory.")
    from halfstep.engine.recompute import parse_recompute
    from halfstep.jobs.targets import load_target
    from halfstep.planning.trace import StepOptions

    loaded = load_target(target, data_dir=data_dir)
    options = StepOptions(accumulate, ema, None if recompute is None else parse_recompute(recompute))
    if find:
        _find(loaded, precision, memory, options, as_json=as_json)
        return
    _plan(loaded, batch, precision, gpu, memory, count, options, verify=verify, html=html, as_json=as_json)


def _find(
    target: Target, precision: tuple[str, ...], memory: str | None, options: StepOptions, *, as_json: bool
) -> None:
    from halfstep.errors import SettingError
    from halfstep.events import log_info
    from halfstep.planning import find_batch_size
    from halfstep.report.plan import batch_data, batch_text

    # What this machine would choose is irrelevant for another GPU.
    usual = ("auto",) if memory is None else ("bf16", "bf16-lean")
    results = []
    for each in precision or usual:
        try:
            results.append(find_batch_size(target.job, each, memory=memory, **asdict(options)))
        except SettingError as error:
            if precision or not results:
                raise
            log_info(f"{each} is skipped. {error}")  # it was not requested, and there is another result to show
    if as_json:
        click.echo(json.dumps([batch_data(result) for result in results], indent=2))
        return
    for result in results:
        click.echo(batch_text(result))


def _plan(
    target: Target,
    batch: int | None,
    precision: tuple[str, ...],
    gpu: str | None,
    memory: str | None,
    gpus: int | None,
    options: StepOptions,
    *,
    verify: bool,
    html: Path | None,
    as_json: bool,
) -> None:
    from halfstep.planning import measure_step, plan
    from halfstep.planning.answers import DEFAULT_PRECISIONS
    from halfstep.planning.measured import require_gpu
    from halfstep.precision.policy import Policy
    from halfstep.report.plan import as_data, as_text, verified_data, verified_text

    if verify:
        require_gpu("--verify")
    size = batch if batch is not None else dict(target.defaults).get("batch", 32)
    result = plan(
        target.job,
        size,
        precision=precision or DEFAULT_PRECISIONS,
        gpu=gpu,
        memory=memory,
        gpus=gpus,
        **asdict(options),
        name=target.name,
    )
    measured = []
    if verify:
        measured = [
            (entry, measure_step(target.job, Policy.parse(entry.precision), entry.estimate.batch, options))
            for entry in result.entries
        ]
    if html is not None:
        from halfstep.report.plan_page import render_plan_page

        html.write_text(render_plan_page(result), encoding="utf-8")
    if as_json:
        data = as_data(result)
        if verify:
            data["measured"] = verified_data(measured)
        click.echo(json.dumps(data, indent=2))
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 100
    click.echo(as_text(result, width))
    if measured:
        click.echo("\n" + verified_text(measured))
    if html is not None:
        click.echo(f"\nWrote {html}")
