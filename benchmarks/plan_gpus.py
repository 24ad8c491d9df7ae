"""The tables of docs/many-gpus.md, computed by `halfstep.plan`: no GPU is needed.

    python benchmarks/plan_gpus.py           write the tables into docs/many-gpus.md (several minutes)
    python benchmarks/plan_gpus.py --check   exit with 1 if they would change

The first question is that of ViT-Large on ImageNet: can mixed precision halve 8 GPUs? The rates of the GPU-hours are those of
the recorded comparison on an H200. The last table is a plan on paper: nobody has run it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from halfstep.data import SyntheticImages
from halfstep.hardware.units import gib_text
from halfstep.jobs.job import Job
from halfstep.jobs.models.vit import Block, ViT
from halfstep.jobs.targets import load_target
from halfstep.planning import Answer, Plan, plan
from halfstep.planning.ranks.hours import Budget, read_record

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "many-gpus.md"
RECORD = ROOT / "benchmarks" / "results" / "compare_vit_l_16_h200_2026-11-15.json"
PRECISIONS = ("fp32", "bf16", "bf16-lean", "bf16-lean,states=8bit")
IMAGENET, EPOCHS = 1_281_167, 300
BATCHES = (896, 1024)
FLEETS = ((64, 1024), (1024, 16_384))  # GPUs, global batch
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


def vit_large() -> str:
    """The smallest number of A100 GPUs by precision and strategy, at two global batches."""
    job = load_target("vit_l_16").job
    parts = []
    for batch in BATCHES:
        result = plan(job, batch, precision=PRECISIONS, gpu="A100 40GB", name="vit_l_16")
        strategies = [answer.strategy for answer in result.entries[0].answers]
        rows = [[e.precision, *map(count, e.answers)] for e in result.entries]
        traffic = [[e.precision, *map(sent, e.answers)] for e in result.entries]
        parts += [
            f"Global batch {batch}, minimum number of GPUs x images on each:",
            markdown(["precision", *strategies], rows),
            "GB that each of them sends per update:",
            markdown(["precision", *strategies], traffic),
        ]
    return "\n\n".join(parts)


def hours() -> str:
    """GPU-hours at the recorded rates, all of the H200 they were measured on."""
    record = read_record(RECORD, "NVIDIA H200", 304_326_632)
    budget = Budget(EPOCHS, IMAGENET)
    rows = []
    for name in ("fp32", "tf32", "bf16", "bf16-lean", "bf16-lean,states=8bit", "bf16-lean,states=8bit,compile=on"):
        rate = record.rates[name].examples_per_second
        rows.append([name, f"{rate:,.0f}", f"{budget.gpu_hours(rate):,.0f}"])
    return markdown(["precision", "images/s, recorded", f"H200 hours, {EPOCHS} epochs"], rows)


def fleet(job: Job, num_gpus: int, batch: int) -> str:
    """One row per precision and strategy on an exact number of GPUs."""
    result: Plan = plan(
        job, batch, precision=("bf16", "bf16-lean", "bf16-lean,states=8bit"), gpu="H100 SXM", gpus=num_gpus,
        strategies=("ddp", "fsdp", "hsdp"), bandwidth=BUS_BANDWIDTH,
    )  # fmt: skip
    rows = [[entry.precision, *_fleet_cells(answer)] for entry in result.entries for answer in entry.exact]
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


def generate(page: str) -> str:
    """The page with new tables between its markers."""
    large = large_job()
    tables = {
        "vit-large": vit_large(),
        "hours": hours(),
        "fleet": "\n\n".join(fleet(large, *item) for item in FLEETS),
    }
    for name, text in tables.items():
        page = put(page, name, text)
    return page


def put(page: str, name: str, text: str) -> str:
    """Replace what is between the two markers of a table."""
    start, end = f"<!-- {name}: written by benchmarks/plan_gpus.py -->", f"<!-- end of {name} -->"
    pattern = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
    if len(pattern.findall(page)) != 1:
        raise SystemExit(f"{PAGE.name} needs exactly one pair of markers {start} and {end}.")
    return pattern.sub(lambda _: f"{start}\n\n{text}\n\n{end}", page)


def main(arguments: list[str]) -> int:
    """Write the page, or compare."""
    page = PAGE.read_text(encoding="utf-8")
    new = generate(page)
    if "--check" in arguments:
        return int(new != page)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
