"""`halfstep export`: the weights of a run as plain safetensors."""

from __future__ import annotations

import json
from pathlib import Path

import click

__all__ = ["command"]


@click.command("export")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--dtype", default="fp32", show_default=True, metavar="fp32|bf16", help="fp32 writes the masters.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The file to write (default: RUN/weights-DTYPE.safetensors).",
)
@click.option("--best", is_flag=True, help="The best validated checkpoint instead of the latest.")
@click.option("--ema", is_flag=True, help="The moving average instead of the weights.")
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def command(run: Path, dtype: str, out: Path | None, best: bool, ema: bool, force: bool, as_json: bool) -> None:
    """Write the weights of RUN (a run's directory or a checkpoint) as one safetensors file."""
    from halfstep.checkpoint.export import export_weights
    from halfstep.hardware.torch_build import require_torch

    require_torch("halfstep export")
    target = out or (run if run.is_dir() else run.parent) / f"weights-{dtype}.safetensors"
    written = export_weights(run, target, dtype=dtype, best=best, ema=ema, force=force)
    size = written.stat().st_size
    click.echo(
        json.dumps({"path": str(written), "dtype": dtype, "bytes": size})
        if as_json
        else f"{written} ({size:,} bytes, {dtype})"
    )
