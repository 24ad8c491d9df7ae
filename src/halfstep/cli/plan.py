"""`halfstep plan`: predict the memory of a training step and how many GPUs it needs."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from halfstep.cli.options import FilePath, data_option
from halfstep.cli.outputs import check_file
from halfstep.cli.requirements import require_packages

if TYPE_CHECKING:
    from halfstep.jobs.targets import Target
    from halfstep.planning import Plan
    from halfstep.planning.ranks.hours import Budget
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
@data_option
@click.option(
    "--strategy",
    "strategies",
    multiple=True,
    metavar="S",
    help="ddp, zero1, zero2, fsdp, hsdp[:GROUP] or zero3; may be repeated (default: all).",
)
@click.option(
    "--bandwidth",
    type=float,
    metavar="GB/S",
    help="Bus bandwidth between GPUs, as nccl-tests reports it: predicts the time of communication.",
)
@click.option(
    "--epochs", type=float, metavar="N", help="Print GPU-hours for this many epochs; needs --rate or --record."
)
@click.option("--examples", type=int, metavar="N", help="Training examples in an epoch (default: the job's).")
@click.option(
    "--rate",
    "rates",
    multiple=True,
    metavar="[P=]N",
    help="Measured examples per second and GPU in precision P; may be repeated.",
)
@click.option(
    "--record",
    type=FilePath(),
    metavar="FILE",
    help="Take rates from a comparison.json of `halfstep compare` on the same GPU.",
)
@click.option("--price", type=float, metavar="X", help="Price of a GPU-hour; also print the cost.")
@click.option("--find", is_flag=True, help="Find the largest micro-batch that fits; on a GPU, confirm it by running.")
@click.option(
    "--verify", is_flag=True, help="Also run the step on this machine's GPU and compare predicted with measured memory."
)
@click.option("--html", type=FilePath(), metavar="FILE", help="Also write the plan as an HTML page.")
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
    strategies: tuple[str, ...],
    bandwidth: float | None,
    epochs: float | None,
    examples: int | None,
    rates: tuple[str, ...],
    record: Path | None,
    price: float | None,
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
    halfstep plan job.py --gpu H200 --gpus 64 --strategy fsdp --bandwidth 45
    halfstep plan job.py --epochs 90 --record comparison.json --price 2.5
    """
    from halfstep.errors import SettingError

    require_packages("halfstep plan", "numpy", *(["jinja2"] if html is not None else []))
    count = None if gpus == "auto" else int(gpus) if gpus.isdecimal() else 0
    if count == 0:
        raise SettingError(f"--gpus {gpus!r} must be auto or an integer of at least 1.")
    if find and (verify or html is not None or batch is not None):
        raise SettingError("--find determines the batch size itself; remove --batch, --verify and --html.")
    hours = {"--epochs": epochs, "--examples": examples, "--rate": rates, "--record": record, "--price": price}
    if find:
        unused = [name for name, value in {**hours, "--bandwidth": bandwidth}.items() if value]
        if unused:
            raise SettingError(f"--find prints only the largest micro-batch; remove {', '.join(unused)}.")
        if len(strategies) > 1 or bool(strategies) != (count is not None):
            raise SettingError("--find on several GPUs needs one --strategy and --gpus N; on one GPU, remove both.")
    if find and gpu is not None:
        raise SettingError("--find uses this machine's GPU or --memory SIZE; remove --gpu.")
    if epochs is None and (rates or record is not None):
        raise SettingError("--rate and --record have no effect without --epochs N, the length of the training; add it.")
    if epochs is not None and bool(rates) == (record is not None):
        raise SettingError(
            "--epochs needs measured speed, which is never guessed: pass either --record FILE or --rate."
        )
    if bandwidth is not None and not bandwidth > 0:
        raise SettingError(f"--bandwidth {bandwidth:g} must be above 0, in GB/s.")
    if html is not None:
        check_file("--html", html)
    if record is not None:
        from halfstep.planning.ranks.hours import read_machines

        read_machines(record)  # the plan, before which its model is unknown, takes seconds
    from halfstep.engine.recompute import parse_recompute
    from halfstep.jobs.targets import load_target
    from halfstep.planning.trace import StepOptions

    loaded = load_target(target, data_dir=data_dir)
    options = StepOptions(accumulate, ema, None if recompute is None else parse_recompute(recompute))
    if find:
        _find(loaded, precision, memory, options, strategies, count, as_json=as_json)
        return
    from halfstep.planning.ranks.hours import make_budget

    budget = make_budget(epochs, examples, price, loaded.job)
    size = batch if batch is not None else dict(loaded.defaults).get("batch", 32)
    settings = {
        "batch": size, "gpu": gpu, "memory": memory, "gpus": count, "strategies": strategies,
        "bandwidth": None if bandwidth is None else bandwidth * 1e9, "name": loaded.name, **asdict(options),
    }  # fmt: skip
    result = _plan(loaded, precision, settings, budget, rates, record, verify=verify)
    _show(loaded, result, options, verify=verify, html=html, as_json=as_json)


def _find(
    target: Target,
    precision: tuple[str, ...],
    memory: str | None,
    options: StepOptions,
    strategies: tuple[str, ...],
    gpus: int | None,
    *,
    as_json: bool,
) -> None:
    from halfstep.errors import SettingError
    from halfstep.events import log_info
    from halfstep.planning import find_batch_size
    from halfstep.report.plan import batch_data, batch_text

    # What this machine would choose is irrelevant for another GPU.
    usual = ("auto",) if memory is None else ("bf16", "bf16-lean")
    strategy = strategies[0] if strategies else None
    results = []
    for each in precision or usual:
        try:
            settings = {"memory": memory, "strategy": strategy, "gpus": gpus, **asdict(options)}
            results.append(find_batch_size(target.job, each, **settings))
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
    precision: tuple[str, ...],
    settings: dict[str, Any],
    budget: Budget | None,
    rates: tuple[str, ...],
    record: Path | None,
    *,
    verify: bool,
) -> Plan:
    """The plan, with rates where GPU-hours were requested."""
    from halfstep.planning import plan
    from halfstep.planning.answers import DEFAULT_PRECISIONS
    from halfstep.planning.measured import require_gpu
    from halfstep.planning.ranks.hours import parse_rates, read_record
    from halfstep.precision.policy import Policy

    if verify:
        require_gpu("--verify")
    precisions = precision or DEFAULT_PRECISIONS
    by_precision = parse_rates(rates, [str(Policy.parse(text)) for text in precisions])
    result = plan(target.job, precision=precisions, **settings)
    if record is not None:
        # A size of memory alone can be any GPU's: the table shows which one the rates were measured on.
        named = result.capacity is not None and (settings["gpu"] is not None or settings["memory"] is None)
        gpu = result.capacity.name if result.capacity is not None and named else None
        recorded = read_record(record, gpu, result.entries[0].estimate.num_params).rates
        by_precision = {e.precision: recorded[e.precision] for e in result.entries if e.precision in recorded}
    return result if budget is None else replace(result, budget=budget, rates=by_precision)


def _show(
    target: Target, result: Plan, options: StepOptions, *, verify: bool, html: Path | None, as_json: bool
) -> None:
    from halfstep.events import terminal_width
    from halfstep.planning import measure_step
    from halfstep.precision.policy import Policy
    from halfstep.report.plan import WIDTH, as_data, as_text, verified_data, verified_text

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
    click.echo(as_text(result, terminal_width(sys.stdout) or WIDTH))
    if measured:
        click.echo("\n" + verified_text(measured))
    if html is not None:
        click.echo(f"\nWrote {html}")
