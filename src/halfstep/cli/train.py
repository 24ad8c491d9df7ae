"""`halfstep train`: train a job in one or several precisions."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import click

__all__ = ["command"]

_EXIT = {"SIGINT": 130, "SIGTERM": 143}


@click.command("train")
@click.argument("target", required=False)
@click.option(
    "--precision", "-p", multiple=True, metavar="P", help="A preset, a policy or auto (default); may be repeated."
)
@click.option("--steps", type=int, metavar="N", help="Stop after N optimizer steps.")
@click.option("--epochs", type=int, metavar="N", help="Stop after N epochs.")
@click.option("--batch", type=int, metavar="N", help="Examples in a micro-batch.")
@click.option("--set", "settings", multiple=True, metavar="K=V", help="Set a field of TrainConfig; may be repeated.")
@click.option(
    "--data", "data_dir", type=click.Path(path_type=Path), metavar="DIR", help="An ImageNet-style folder for the ViTs."
)
@click.option("--resume", is_flag=True, help="Go on with the run in --out.")
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="DIR", help="Where the run is written (default: under runs/)."
)
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON and show no progress.")
def command(
    target: str | None,
    precision: tuple[str, ...],
    steps: int | None,
    epochs: int | None,
    batch: int | None,
    settings: tuple[str, ...],
    data_dir: Path | None,
    resume: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    """Train TARGET (a job file, module:name or built-in; digits by default, the run's own with --resume) with checkpoints and a run file.

    With several --precision, trains in each, one after the other, and shows the results side by side.
    """
    from halfstep.errors import SettingError
    from halfstep.hardware.torch_build import require_torch
    from halfstep.jobs.targets import load_target
    from halfstep.train.config import parse_settings
    from halfstep.train.resume import saved_settings

    require_torch("halfstep train")
    given = parse_settings(settings)
    for name, value in (("steps", steps), ("epochs", epochs), ("batch", batch)):
        if value is not None:
            if name in given:
                raise SettingError(f"{name} is given twice, by --{name} and by --set; keep one.")
            given[name] = value
    if resume and out is None:
        raise SettingError("--resume needs --out DIR, the directory of the run to go on with.")
    if resume and len(precision) > 1:
        raise SettingError("--resume goes on with one run; give at most one --precision.")
    saved = saved_settings(out) if resume and out is not None else None
    if saved is not None and target is None:
        if saved.source is None:
            raise SettingError(
                f"The run in {out} does not say which job it trained; name it: halfstep train TARGET --resume."
            )
        target = saved.source.target
        if data_dir is None and saved.source.data_dir is not None:
            data_dir = Path(saved.source.data_dir)
    found = load_target(target, data_dir=data_dir)
    outcomes = []
    for policy in precision or ("",):
        where = _folder(out, found.name, policy, alone=len(precision) < 2)
        outcomes.append(_run(found, given, policy, where, saved=saved, quiet=as_json))
        if outcomes[-1].stopped_by:
            break
    _report(outcomes, as_json=as_json)
    if outcomes[-1].stopped_by:
        sys.exit(_EXIT[outcomes[-1].stopped_by])


def _folder(out: Path | None, name: str, policy: str, *, alone: bool) -> Path:
    plain = "".join(c if c.isalnum() or c in "-_." else "-" for c in (policy or "auto"))
    if out is None:
        short = "".join(c if c.isalnum() or c in "-_." else "-" for c in name).strip("-.")
        return Path("runs") / f"{short}-{plain}-{time.strftime('%Y%m%d-%H%M%S')}"
    return out if alone else out / plain


def _run(found: Any, given: dict[str, Any], policy: str, out: Path, *, saved: Any, quiet: bool) -> Any:
    from halfstep.report.train import Progress
    from halfstep.train import TrainConfig, train
    from halfstep.train.resume import Source

    fields = dict(found.defaults) if saved is None else saved.config
    if "steps" in given and "epochs" not in given and saved is None:
        fields.pop("epochs", None)  # the target's usual length, which the user's own replaces
    config = TrainConfig(**{**fields, **given})
    if config.steps is None and config.epochs is None:
        config = TrainConfig(**{**fields, **given, "epochs": 1})
    policy = policy or ("auto" if saved is None else saved.policy)
    shown = None if quiet else Progress()
    try:
        return train(
            found.job,
            config,
            precision=policy,
            out=out,
            resume=saved is not None,
            command=sys.argv,
            source=Source(found.source, found.data_dir),
            observer=shown,
        )
    finally:
        if shown is not None:
            shown.close()


def _report(outcomes: list[Any], *, as_json: bool) -> None:
    from halfstep.report.train import outcome_dict, render_outcome, side_by_side

    if as_json:
        found = [outcome_dict(o) for o in outcomes]
        click.echo(json.dumps(found if len(found) > 1 else found[0], indent=2))
        return
    if len(outcomes) > 1:
        click.echo(side_by_side(outcomes), nl=False)
    for outcome in outcomes:
        click.echo(render_outcome(outcome))
