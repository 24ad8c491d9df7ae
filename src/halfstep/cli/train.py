"""`halfstep train`: train a job in one or several precisions."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from halfstep.cli.options import FilePath, data_option
from halfstep.cli.requirements import require_packages

if TYPE_CHECKING:
    from halfstep.backends.context import RunContext
    from halfstep.jobs.recipes import Recipe
    from halfstep.jobs.targets import Target
    from halfstep.train import TrainConfig
    from halfstep.train.resume import SavedSettings
    from halfstep.train.writer import OpenWriter

__all__ = ["command"]

PAGE = "report.html"  # in the directory of a run
_EXIT = {"SIGINT": 130, "SIGTERM": 143}


@click.command("train")
@click.argument("target", required=False)
@click.option(
    "--precision", "-p", multiple=True, metavar="P", help="Preset, policy or auto (default); may be repeated."
)
@click.option("--steps", type=int, metavar="N", help="Stop after N optimizer steps.")
@click.option("--epochs", type=int, metavar="N", help="Stop after N epochs.")
@click.option("--batch", type=int, metavar="N", help="Micro-batch size, of all ranks together.")
@click.option(
    "--backend",
    metavar="NAME",
    help="On several ranks: ddp, fsdp or deepspeed (default: auto, which is ddp; single with one).",
)
@click.option(
    "--ds-config",
    type=FilePath(),
    metavar="FILE",
    help="DeepSpeed configuration: ZeRO, and unless set here the precision, clipping and accumulation.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="K=V",
    help="Set a field of TrainConfig or of the recipe; may be repeated.",
)
@data_option
@click.option("--recipe", metavar="NAME", help="Published recipe for a ViT on --data: imagenet.")
@click.option(
    "--logger",
    "loggers",
    multiple=True,
    metavar="NAME[:PROJECT]",
    help="Also log to wandb, mlflow or trackio; may be repeated (TensorBoard: automatic if installed).",
)
@click.option("--resume", is_flag=True, help="Resume the run in --out.")
@click.option("--out", type=FilePath(), metavar="DIR", help="Output directory (default: a new one under runs/).")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, without progress.")
def command(
    target: str | None,
    precision: tuple[str, ...],
    steps: int | None,
    epochs: int | None,
    batch: int | None,
    backend: str | None,
    ds_config: Path | None,
    settings: tuple[str, ...],
    data_dir: Path | None,
    recipe: str | None,
    loggers: tuple[str, ...],
    resume: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    """Train TARGET with checkpoints and a run file.

    TARGET is a job file, module:name, a built-in name, timm:NAME, torchvision:NAME or transformers:DIR_OR_CONFIG; the
    default is digits, and with --resume the target of the run.
    With several --precision options, trains once in each and shows the results side by side.

    \b
    halfstep train
    halfstep train job.py --precision bf16-lean --epochs 10 --set max_norm=1.0
    halfstep train job.py --logger wandb:my-project
    halfstep train vit_b_16 --data DIR --recipe imagenet --batch 512
    halfstep train --resume --out runs/digits-bf16-20261115-101500
    torchrun --nproc-per-node 8 -m halfstep train job.py --backend ddp
    torchrun --nproc-per-node 8 -m halfstep train job.py --ds-config ds.json
    """
    require_packages("halfstep train", "numpy", "safetensors")
    from halfstep.backends.launch import read_launch
    from halfstep.errors import SettingError
    from halfstep.jobs.recipes import split_settings
    from halfstep.jobs.targets import load_target
    from halfstep.train.checkpoints import check_out
    from halfstep.train.config import parse_settings
    from halfstep.train.launched import open_ranks, restarted, same_path
    from halfstep.train.resume import saved_settings

    launch = read_launch()
    writers = _writers(loggers)
    of_recipe, others = split_settings(settings) if recipe is not None else ([], list(settings))
    overrides = parse_settings(others)
    for name, value in (
        ("steps", steps),
        ("epochs", epochs),
        ("batch", batch),
        ("backend", backend),
        ("ds_config", ds_config and str(ds_config)),
    ):
        if value is not None:
            if name in overrides:
                raise SettingError(f"{name} is set twice, by --{name} and by --set; remove one.")
            overrides[name] = value
    if overrides.get("ds_config") is not None:
        overrides, precision = _read_deepspeed(overrides, precision, launch.world_size)
    if resume and out is None:
        raise SettingError("--resume needs --out DIR, the directory of the run to resume.")
    if resume and len(precision) > 1:
        raise SettingError("--resume continues one run; pass at most one --precision.")
    if launch.max_restarts and (out is None or len(precision) > 1):
        raise SettingError(
            f"torchrun --max-restarts={launch.max_restarts} needs --out DIR and at most one --precision: a restarted run resumes from "
            "the checkpoints there."
        )
    if out is not None:
        check_out(out)
    if out is not None and not resume:
        resume = restarted(out, launch)
    saved = saved_settings(out) if resume and out is not None else None
    if saved is not None and target is None:
        if saved.source is None:
            raise SettingError(
                f"The run in {out} has no record of its job; name it: halfstep train TARGET --resume --out {out}."
            )
        target = saved.source.target
        if data_dir is None and saved.source.data_dir is not None:
            data_dir = Path(saved.source.data_dir)
    plan = _recipe(recipe, target, of_recipe, saved)
    if plan is None:
        loaded = load_target(target, data_dir=data_dir)
        config = _config(dict(loaded.defaults), overrides, saved)
    else:
        config, plan = _config_of_recipe(plan, overrides, saved)
        loaded = load_target(target, data_dir=data_dir, recipe=plan)
        if launch.is_main:
            _log(plan)
    outcomes = []
    with open_ranks(launch, config) as ranks:
        for policy in precision or ("",):
            where = _folder(out, loaded.name, policy, alone=len(precision) < 2)
            where = same_path(where, ranks, config.timeout)
            outcomes.append(
                _run(
                    loaded,
                    config,
                    policy,
                    where,
                    writers,
                    saved=saved,
                    quiet=as_json,
                    ranks=ranks,
                    launch_id=launch.run_id,
                )
            )
            if launch.is_main:
                _write_page(where)
            if outcomes[-1].stopped_by:
                break
    if launch.is_main:
        _report(outcomes, as_json=as_json)
    if outcomes[-1].stopped_by:
        sys.exit(_EXIT[outcomes[-1].stopped_by])
    if any(outcome.problem for outcome in outcomes):
        sys.exit(1)


def _read_deepspeed(
    overrides: dict[str, Any], precision: tuple[str, ...], world_size: int
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Let a DeepSpeed configuration decide what the command line leaves open; returns the fields and the precisions."""
    from halfstep.train.zero_file import settings_of_file

    results = [
        settings_of_file(Path(overrides["ds_config"]), overrides, each, world_size) for each in precision or (None,)
    ]
    return results[0][0], tuple(policy for _, policy in results)


def _writers(loggers: tuple[str, ...]) -> list[OpenWriter]:
    """What opens the loggers that --logger names."""
    if not loggers:
        return []
    from halfstep.errors import SettingError
    from halfstep.integrations.loggers import parse_logger

    names = [text.partition(":")[0] for text in loggers]
    if len(set(names)) < len(names):
        raise SettingError(f"--logger names a logger twice: {', '.join(loggers)}; remove one.")
    openers = (parse_logger(text) for text in loggers)
    return [opener for opener in openers if opener is not None]


def _folder(out: Path | None, name: str, policy: str, *, alone: bool) -> Path:
    plain = "".join(c if c.isalnum() or c in "-_." else "-" for c in (policy or "auto"))
    if out is None:
        short = "".join(c if c.isalnum() or c in "-_." else "-" for c in name)[:100].strip(
            "-."
        )  # file systems allow 255
        return Path("runs") / f"{short}-{plain}-{time.strftime('%Y%m%d-%H%M%S')}"
    return out if alone else out / plain


def _recipe(text: str | None, target: str | None, pairs: list[str], saved: SavedSettings | None) -> Recipe | None:
    """The recipe of the command line, which a resumed run cannot change, or that of the resumed run."""
    from halfstep.errors import SettingError
    from halfstep.jobs.recipes import read_recipe

    recipe = None if text is None else read_recipe(text, target, pairs)
    if saved is None or saved.source is None:
        return recipe
    text = saved.source.recipe
    before = None if text is None else read_recipe(text, target)
    if recipe is not None and (before is None or not recipe.trains_like(before)):
        raise SettingError(
            f"The run was started with {'no recipe' if before is None else f'--recipe {before}'}, and is resumed with --recipe {recipe}; leave "
            "it out to continue the run, or start a new one."
        )
    return recipe or before


def _config_of_recipe(
    recipe: Recipe, overrides: dict[str, Any], saved: SavedSettings | None
) -> tuple[TrainConfig, Recipe]:
    """The settings of a run with a recipe, and the recipe with the batch and length of the run."""
    from halfstep.errors import SettingError
    from halfstep.train import TrainConfig

    for name, reason in (("optimizer", "optimizer"), ("ds_config", "optimizer, schedule and batch")):
        if overrides.get(name) is not None:
            raise SettingError(
                f"{name}={overrides[name]} and --recipe {recipe.name} both decide the {reason}; remove one of them."
            )
    for name in ("epochs", "batch"):
        if overrides.get(name, 0) is None:
            raise SettingError(
                f"{name}=none: the schedule of the recipe {recipe.name} needs the {name}; set it, and use --steps to stop early."
            )
    if saved is not None and overrides.get("epochs", saved.config["epochs"]) != saved.config["epochs"]:
        raise SettingError(
            f"The schedule of the recipe {recipe.name} is over {saved.config['epochs']} epochs and cannot be changed to {overrides['epochs']} when the run is "
            "resumed; to stop earlier, use --steps."
        )
    fields = recipe.settings() if saved is None else saved.config
    if saved is None and overrides.get("batch") is not None and "accumulate" not in overrides:
        # The published global batch, in as many micro-batches as it takes.
        fields["accumulate"] = max(1, recipe.global_batch // overrides["batch"])
    config = TrainConfig(**{**fields, **overrides})
    run = {name: getattr(config, name) for name in ("batch", "accumulate", "epochs", "ema", "max_norm")}
    return config, recipe.for_run(**run)


def _log(recipe: Recipe) -> None:
    from halfstep.events import log_info

    for line in recipe.describe():
        log_info(line)


def _config(defaults: dict[str, Any], overrides: dict[str, Any], saved: SavedSettings | None) -> TrainConfig:
    from halfstep.train import TrainConfig

    fields = defaults if saved is None else saved.config
    if "steps" in overrides and "epochs" not in overrides and saved is None:
        fields.pop("epochs", None)  # the target's default length, which --steps replaces
    config = TrainConfig(**{**fields, **overrides})
    if config.steps is None and config.epochs is None:
        config = TrainConfig(**{**fields, **overrides, "epochs": 1})
    return config


def _run(
    target: Target,
    config: TrainConfig,
    policy: str,
    out: Path,
    writers: Sequence[OpenWriter],
    *,
    saved: Any,
    quiet: bool,
    ranks: RunContext | None,
    launch_id: str | None,
) -> Any:
    from halfstep.report.train import Progress
    from halfstep.train import train
    from halfstep.train.resume import Source

    policy = policy or ("auto" if saved is None else saved.policy)
    progress = None if quiet or (ranks is not None and ranks.rank > 0) else Progress()
    try:
        return train(
            target.job,
            config,
            precision=policy,
            out=out,
            resume=saved is not None,
            command=sys.argv,
            source=Source(target.source, target.data_dir, target.recipe),
            launch_id=launch_id,
            observer=progress,
            ranks=ranks,
            writers=writers,
        )
    finally:
        if progress is not None:
            progress.close()


def _write_page(out: Path) -> None:
    """Write the page of a run; that it cannot be written does not cost the finished run."""
    from halfstep.cli.watch import RUN_FILE, write_page
    from halfstep.errors import MissingError
    from halfstep.events import log_warning

    try:
        write_page(out / RUN_FILE, out / PAGE)
    except (OSError, MissingError) as error:
        log_warning(f"{out / PAGE} was not written: {error}")


def _report(outcomes: list[Any], *, as_json: bool) -> None:
    from halfstep.events import fold_lines, terminal_width
    from halfstep.report.train import outcome_dict, render_outcome, side_by_side

    if as_json:
        values = [outcome_dict(outcome) for outcome in outcomes]
        click.echo(json.dumps(values if len(values) > 1 else values[0], indent=2))
        return
    if len(outcomes) > 1:
        click.echo(side_by_side(outcomes), nl=False)
    for outcome in outcomes:
        click.echo(fold_lines(render_outcome(outcome), terminal_width(sys.stdout)))
