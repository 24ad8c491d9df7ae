"""`halfstep export`: the weights of a run as plain safetensors."""

from __future__ import annotations

import json
from pathlib import Path

import click

from halfstep.cli.options import FilePath
from halfstep.cli.requirements import require_packages
from halfstep.hardware.units import bytes_text

__all__ = ["command"]


@click.command("export")
@click.argument("run", type=FilePath())
@click.option("--dtype", default="fp32", show_default=True, metavar="fp32|bf16", help="fp32 writes the master weights.")
@click.option(
    "--out",
    type=FilePath(),
    metavar="FILE",
    help="File to write (default: RUN/weights-DTYPE.safetensors).",
)
@click.option(
    "--best", is_flag=True, help="Export the checkpoint with the best validation result instead of the latest."
)
@click.option("--ema", is_flag=True, help="Export the EMA instead of the weights.")
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(run: Path, dtype: str, out: Path | None, best: bool, ema: bool, force: bool, as_json: bool) -> None:
    """Write the weights of RUN (a run directory or a checkpoint) as one safetensors file.

    The names are the model's own, so that `safetensors.torch.load_file` and `load_state_dict` read it.

    \b
    halfstep export runs/mine
    halfstep export runs/mine --best --ema --dtype bf16 --out model.safetensors
    """
    require_packages("halfstep export", "numpy", "safetensors")
    from halfstep.checkpoint.export import export_weights

    target = out or (run if run.is_dir() else run.parent) / f"weights-{dtype}.safetensors"
    written = export_weights(run, target, dtype=dtype, best=best, ema=ema, force=force)
    size = written.stat().st_size
    click.echo(
        json.dumps({"path": str(written), "dtype": dtype, "bytes": size})
        if as_json
        else f"{written} ({bytes_text(size)}, {dtype})"
    )
