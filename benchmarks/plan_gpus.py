"""The tables of docs/many-gpus.md, computed by `halfstep.plan`: no GPU is needed.

    python benchmarks/plan_gpus.py [TABLE ...]           write the tables, or those named, into docs/many-gpus.md (minutes each)
    python benchmarks/plan_gpus.py [TABLE ...] --check   exit with 1 if they would change

The first question is that of ViT-Large on ImageNet: can mixed precision halve 8 GPUs? The rates of the GPU-hours are those of
the recorded comparison on an H200. The last table is a plan on paper: nobody has run it.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F

from halfstep.data import SyntheticImages
from halfstep.hardware.units import gib_text
from halfstep.jobs.job import Job
from halfstep.jobs.models.vit import Block, ViT
from halfstep.jobs.targets import load_target
from halfstep.planning import Answer, plan
from halfstep.planning.capacity import capacity_of
from halfstep.planning.estimator import Estimator
from halfstep.planning.ranks.counts import Fleet, on_exactly
from halfstep.planning.ranks.hours import Budget, read_record
from halfstep.planning.sharding import layout_of
from halfstep.precision.policy import Policy

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "many-gpus.md"
RECORD = ROOT / "benchmarks" / "results" / "compare_vit_l_16_h200_2026-11-15.json"
PRECISIONS = ("fp32", "bf16", "bf16-lean")
IMAGENET, EPOCHS = 1_281_167, 300
H100 = capacity_of("H100 SXM", None)
BUS_BANDWIDTH = 50e9  # bytes per second, assumed


def large_job() -> Job:
    """A ViT of the dimensions of ViT-22B: 48 blocks of width 6144, 14-pixel patches."""
    return Job(
        model=lambda: ViT(image_size=224, patch=14, dim=6144, depth=48, heads=48, num_classes=1000),
        data=lambda batch_size, split: SyntheticImages(split, batch_size),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]).float(), batch[1]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4),
        shard=(Block,),
        name="vit_22b_14",
    )


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def count(answer: Answer) -> str:
    """The number of GPUs and the examples on each."""
    if answer.rejected:
        return "-"
    return "none" if answer.num_gpus is None else f"{answer.num_gpus} x {answer.micro_batch}"


def sent(answer: Answer) -> str:
    """Gigabytes that a GPU sends per update."""
    return "-" if answer.traffic is None else f"{answer.traffic.total / 1e9:.2f}"


def vit_large(batch: int) -> str:
    """The smallest number of A100 GPUs by precision and strategy, and what they send."""
    result = plan(load_target("vit_l_16").job, batch, precision=PRECISIONS, gpu="A100 40GB", name="vit_l_16")
    head = ["precision", *(answer.strategy for answer in result.entries[0].answers)]
    return "\n\n".join(
        [
            f"Global batch {batch}, minimum number of GPUs x images on each:",
            markdown(head, [[e.precision, *map(count, e.answers)] for e in result.entries]),
            "GB that each of them sends per update:",
            markdown(head, [[e.precision, *map(sent, e.answers)] for e in result.entries]),
        ]
    )


def hours() -> str:
    """GPU-hours at the recorded rates, all of the H200 they were measured on."""
    record = read_record(RECORD, "NVIDIA H200", 304_326_632)
    budget = Budget(EPOCHS, IMAGENET)
    rows = []
    for name in ("fp32", "tf32", "bf16", "bf16-lean", "bf16-lean,states=8bit", "bf16-lean,states=8bit,compile=on"):
        rate = record.rates[name].examples_per_second
        rows.append([name, f"{rate:,.0f}", f"{budget.gpu_hours(rate):,.0f}"])
    return markdown(["precision", "images/s, recorded", f"H200 hours, {EPOCHS} epochs"], rows)


@cache
def large_estimator(precision: str) -> Estimator:
    """The large job in one precision; both tables have the same micro-batch on each GPU, so it is traced once."""
    return Estimator(large_job(), Policy.parse(precision), usable_bytes=H100.usable_bytes)


def fleet(num_gpus: int, batch: int) -> str:
    """One row per precision and strategy on an exact number of GPUs."""
    rows = []
    for precision in ("bf16", "bf16-lean,states=8bit"):
        estimator = large_estimator(precision)
        traced = estimator.trace(batch // num_gpus)
        layout = layout_of(estimator.policy, traced.parts, traced.units, traced.buckets, accumulate=1)
        for strategy in ("ddp", "fsdp", "hsdp"):
            answer = on_exactly(estimator, layout, strategy, batch, H100.usable_bytes, Fleet(num_gpus))
            rows.append([precision, *_fleet_cells(answer)])
    head = [
        "precision",
        "strategy",
        "GiB on each GPU",
        "all-gather GB",
        "reduce-scatter GB",
        "all-reduce GB",
        "seconds",
    ]
    title = f"{num_gpus:,} GPUs, global batch {batch:,} ({batch // num_gpus} images on each):"
    return f"{title}\n\n{markdown(head, rows)}"


def _fleet_cells(answer: Answer) -> list[str]:
    traffic = answer.traffic
    assert traffic is not None
    memory = gib_text(answer.need_bytes) + ("" if answer.fits else ", too large")
    sizes = [f"{size / 1e9:.1f}" for size in (traffic.all_gather, traffic.reduce_scatter, traffic.all_reduce)]
    return [answer.strategy, memory, *sizes, f"{traffic.seconds(BUS_BANDWIDTH):.2f}"]


TABLES = {
    "vit-large-896": lambda: vit_large(896),
    "vit-large-1024": lambda: vit_large(1024),
    "hours": hours,
    "fleet-64": lambda: fleet(64, 1024),
    "fleet-1024": lambda: fleet(1024, 16_384),
}


def put(page: str, name: str, text: str) -> str:
    """Replace what is between the two markers of a table."""
    start, end = f"<!-- {name}: written by benchmarks/plan_gpus.py -->", f"<!-- end of {name} -->"
    pattern = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
    if len(pattern.findall(page)) != 1:
        raise SystemExit(f"{PAGE.name} needs exactly one pair of markers {start} and {end}.")
    return pattern.sub(lambda _: f"{start}\n\n{text}\n\n{end}", page)


def main(arguments: list[str]) -> int:
    """Write the tables, or compare them with the page."""
    names = [name for name in arguments if name != "--check"] or list(TABLES)
    changed = False
    for name in names:
        text = TABLES[name]()
        page = PAGE.read_text(encoding="utf-8")
        new = put(page, name, text)
        changed |= new != page
        if "--check" not in arguments:
            PAGE.write_text(new, encoding="utf-8")
    return int(changed and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
