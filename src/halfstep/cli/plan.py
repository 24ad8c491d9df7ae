"""`halfstep plan`: predict the memory of a training step, and on how many GPUs it fits."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import click

__all__ = ["command"]


@click.command("plan")
@click.argument("target", required=False)
@click.option("--batch", type=int, metavar="N", help="The global batch (default: the target's usual one).")
@click.option(
    "--precision", "-p", multiple=True, metavar="P", help="A preset or policy; may be repeated (default: five of them)."
)
@click.option(
    "--gpu", metavar="NAME", help="The GPU to plan for: A100, 'RTX 4090' (default: this machine's, if it has one)."
)
@click.option("--memory", metavar="SIZE", help="The memory of a GPU instead of its name: 80GiB.")
@click.option(
    "--gpus",
    default="auto",
    show_default=True,
    metavar="N|auto",
    help="How many GPUs there are at the most; auto: as many as it takes.",
)
@click.option(
    "--accumulate", type=int, default=1, show_default=True, metavar="N", help="Micro-batches that make the batch."
)
@click.option("--ema", is_flag=True, help="Count a moving average of the weights.")
@click.option(
    "--data", "data_dir", type=click.Path(path_type=Path), metavar="DIR", help="An ImageNet-style folder for the ViTs."
)
@click.option("--find", is_flag=True, help="Find the largest micro-batch; on a GPU, confirm it by trial.")
@click.option(
    "--verify", is_flag=True, help="Also run the step on this machine's GPU and show predicted against measured."
)
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Write the plan as an HTML page as well.")
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
    data_dir: Path | None,
    find: bool,
    verify: bool,
    html: Path | None,
    as_json: bool,
) -> None:
    """Predict the memory of a training step of TARGET, and on how many GPUs it fits.

    Nothing is allocated and no GPU is needed: the step runs on tensors without numbers.

    \b
    halfstep plan vit_l_16 --batch 1024 --gpu A100
    halfstep plan job.py --batch 64 --memory 24GiB --precision bf16-lean
    halfstep plan job.py --find --memory 80GiB
    """
    from halfstep.errors import SettingError
    from halfstep.hardware.torch_build import require_torch
    from halfstep.jobs.targets import load_target

    require_torch("halfstep plan")
    count = None if gpus == "auto" else int(gpus) if gpus.isdecimal() else 0
    if count == 0:
        raise SettingError(f"--gpus {gpus!r} must be auto or a number of GPUs, 1 or more.")
    if find and (verify or html is not None or batch is not None or count is not None):
        raise SettingError("--find looks for the batch itself; leave out --batch, --gpus, --verify and --html with it.")
    if find and gpu is not None:
        raise SettingError("--find tries batches on this machine's GPU, or plans for --memory SIZE; leave out --gpu.")
    if html is not None and (html.is_dir() or not html.absolute().parent.is_dir()):
        raise SettingError(f"--html {html} cannot be written: give the name of a file in a folder that exists.")
    found = load_target(target, data_dir=data_dir)
    if find:
        _find(found, precision, memory, accumulate, ema=ema, as_json=as_json)
        return
    _plan(found, batch, precision, gpu, memory, count, accumulate, ema=ema, verify=verify, html=html, as_json=as_json)


def _find(
    found: Any, precision: tuple[str, ...], memory: str | None, accumulate: int, *, ema: bool, as_json: bool
) -> None:
    from halfstep.errors import SettingError
    from halfstep.events import say
    from halfstep.planning import find_batch_size
    from halfstep.report.plan import found_data, found_text

    # This machine's choice says nothing about another GPU.
    usual = ("auto",) if memory is None else ("bf16", "bf16-lean")
    results = []
    for each in precision or usual:
        try:
            results.append(find_batch_size(found.job, each, memory=memory, accumulate=accumulate, ema=ema))
        except SettingError as error:
            if precision or not results:
                raise
            say(f"{each} is left out. {error}")  # nobody asked for it, and there is an answer to show
    if as_json:
        click.echo(json.dumps([found_data(result) for result in results], indent=2))
        return
    for result in results:
        click.echo(found_text(result))


def _plan(
    found: Any,
    batch: int | None,
    precision: tuple[str, ...],
    gpu: str | None,
    memory: str | None,
    gpus: int | None,
    accumulate: int,
    *,
    ema: bool,
    verify: bool,
    html: Path | None,
    as_json: bool,
) -> None:
    from halfstep.planning import measure_step, plan
    from halfstep.planning.answers import DEFAULT_PRECISIONS
    from halfstep.planning.measured import require_gpu
    from halfstep.planning.trace import StepOptions
    from halfstep.precision.policy import Policy
    from halfstep.report.plan import as_data, as_text, verified_data, verified_text

    if verify:
        require_gpu("--verify")
    size = batch if batch is not None else dict(found.defaults).get("batch", 32)
    made = plan(
        found.job,
        size,
        precision=precision or DEFAULT_PRECISIONS,
        gpu=gpu,
        memory=memory,
        gpus=gpus,
        accumulate=accumulate,
        ema=ema,
        name=found.name,
    )
    seen = []
    if verify:
        options = StepOptions(accumulate, ema)
        seen = [
            (entry, measure_step(found.job, Policy.parse(entry.precision), entry.estimate.batch, options))
            for entry in made.entries
        ]
    if html is not None:
        from halfstep.report.plan_page import render_plan_page

        html.write_text(render_plan_page(made), encoding="utf-8")
    if as_json:
        data = as_data(made)
        if verify:
            data["measured"] = verified_data(seen)
        click.echo(json.dumps(data, indent=2))
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 100
    click.echo(as_text(made, width))
    if seen:
        click.echo("\n" + verified_text(seen))
    if html is not None:
        click.echo(f"\nWrote {html}")
