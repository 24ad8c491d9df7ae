"""Trains three small tasks in several precisions and tests whether each ends where torch AMP ends, within seed noise.

    python benchmarks/bench_training.py [--tasks digits chars gpt2] [--rows TEXT ...] [--seeds 3] [--jobs 6] [--quick] [--out FILE.md]

Tasks: `digits`, the built-in job; `chars`, a pre-norm GPT of this file on the characters of this source tree; `gpt2`,
transformers' GPT-2 code with random weights on the same characters. For one seed, every row starts from the same weights,
sees the same batches in the same order, and is validated on the same data. Rows are Halfstep's presets, torch AMP as its
documentation writes it, and plain bf16 weights without a master for contrast.

The final loss is the mean of the validation loss after each of the last steps. Two intervals of its difference from torch AMP
(of the same 16-bit format) are printed, both Student's t at 95 %:

    seed noise   two samples: what the difference of two means of so many runs would be if only their seeds differed, from the
                 pooled spread over seeds. A difference inside it is "within" seed noise; this is the verdict.
    paired       of the differences seed by seed. It is narrower, because runs of one seed share weights and batches, and it
                 shows an effect of the precision that is smaller than the noise of seeds.

Runs are small and bound by launches, so on a GPU several share it (`--jobs`). `--quick` checks the program, not a precision.
"""

import argparse
import dataclasses
import hashlib
import json
import logging
import math
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from halfstep.comparison.estimate import from_values, student_t
from halfstep.engine.engine import Engine
from halfstep.hardware.environment import environment
from halfstep.jobs.builtin import DIGITS_BATCH, DIGITS_DECAY, DIGITS_EPOCHS, DIGITS_LR, digits_job
from halfstep.jobs.data.digits import NUM_TRAIN, DigitsLoader

ROOT = Path(__file__).resolve().parents[1]
AMP = {"torch AMP bf16": torch.bfloat16, "torch AMP fp16": torch.float16}
PURE = "pure bf16"
ROWS = ("fp32", *AMP, "bf16", "fp16", "bf16-lean", "fp16-lean", "bf16-lean,states=8bit", PURE)
MAX_NORM = 1.0
NUM_SYMBOLS = 128  # ASCII; other characters become "?"
BLOCK, VALIDATION_EVERY = 2048, 16  # every sixteenth block of the text is for validation


@dataclass(frozen=True)
class Size:
    """How much is trained and validated."""

    steps: dict[str, int]
    tail: int  # last steps after which the validation loss is computed
    batch: int  # sequences
    context: int
    width: int
    depth: int
    num_validation: int  # batches


FULL = Size({"digits": DIGITS_EPOCHS * (NUM_TRAIN // DIGITS_BATCH), "chars": 400, "gpt2": 400}, 10, 32, 128, 256, 4, 4)
QUICK = Size({"digits": 3, "chars": 3, "gpt2": 3}, 2, 2, 16, 32, 1, 1)


@dataclass(frozen=True)
class Task:
    """A model, its data and its optimizer's settings."""

    build: Callable[[], nn.Module]
    batches: Callable[[int, int, str], list]  # steps, seed, device
    validation: Callable[[str], list]  # device
    logits: Callable[[nn.Module, torch.Tensor], torch.Tensor]
    lr: float
    decay: float


@dataclass(frozen=True)
class Difference:
    """The mean difference of a row's final losses from its baseline's, with the half-widths of both intervals."""

    mean: float
    noise: float
    paired: float

    @property
    def verdict(self):
        """Whether the difference is within what other seeds would give."""
        return "within" if abs(self.mean) <= self.noise else "worse" if self.mean > 0 else "better"


def compare_losses(mine, base):
    """The difference of two rows whose losses are listed seed by seed."""
    gaps = from_values([a - b for a, b in zip(mine, base, strict=True)])
    spread = math.sqrt((statistics.variance(mine) + statistics.variance(base)) / 2)
    noise = student_t(2 * len(mine) - 2) * spread * math.sqrt(2 / len(mine))
    return Difference(gaps.value, noise, (gaps.high - gaps.low) / 2)


# --- tasks --------------------------------------------------------------------------------------------------------


class TransformerBlock(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        """Causal attention, then the MLP."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class CharacterGPT(nn.Module):
    """A pre-norm GPT with learned positions."""

    def __init__(self, width, depth, context):
        super().__init__()
        self.symbols, self.positions = nn.Embedding(NUM_SYMBOLS, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, max(1, width // 64)) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, NUM_SYMBOLS, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x):
        """Logits of every position."""
        h = self.symbols(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def gpt2(size):
    """transformers' GPT-2 with random weights, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=NUM_SYMBOLS,
        n_positions=size.context,
        n_embd=size.width,
        n_layer=size.depth,
        n_head=max(1, size.width // 64),
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def read_corpus():
    """The characters of this source tree as (training, validation) tensors, and a fingerprint."""
    paths = sorted(path for pattern in ("docs/*.md", "src/**/*.py", "tests/**/*.py") for path in ROOT.glob(pattern))
    text = b"".join(path.read_text(encoding="utf-8").encode("ascii", "replace") for path in paths)
    symbols = torch.frombuffer(bytearray(text[: len(text) // BLOCK * BLOCK]), dtype=torch.uint8).long().view(-1, BLOCK)
    held_out = torch.arange(len(symbols)) % VALIDATION_EVERY == VALIDATION_EVERY - 1
    return symbols[~held_out].flatten(), symbols[held_out].flatten(), hashlib.sha256(text).hexdigest()[:12]


def windows(text, starts, context):
    """(inputs, targets) for the sequences that start there."""
    rows = text[starts[:, None] + torch.arange(context + 1, device=text.device)]
    return rows[:, :-1], rows[:, 1:]


def text_task(build, size, logits):
    """Next-character prediction."""

    def batches(steps, seed, device):
        text = read_corpus()[0].to(device)
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(text) - size.context, (steps, size.batch), generator=generator).to(device)
        return [windows(text, row, size.context) for row in starts]

    def validation(device):
        text = read_corpus()[1].to(device)
        count = size.num_validation * size.batch
        starts = torch.linspace(0, len(text) - size.context - 1, count).long().to(device)
        return [windows(text, row, size.context) for row in starts.view(size.num_validation, -1)]

    return Task(build, batches, validation, logits, lr=1e-3, decay=0.1)


def digits_task(size):
    """The built-in job `digits`, with its model, data and settings."""

    def batches(steps, seed, device):
        rows, epoch = [], 0
        while len(rows) < steps:
            rows += list(DigitsLoader("train", DIGITS_BATCH, seed=seed, epoch=epoch, device=device))
            epoch += 1
        return rows[:steps]

    def validation(device):
        return list(DigitsLoader("val", DIGITS_BATCH, device=device))[: 2 * size.num_validation]

    return Task(digits_job().model, batches, validation, lambda m, x: m(x), DIGITS_LR, DIGITS_DECAY)


def make_task(name, size):
    """A task by name."""
    if name == "digits":
        return digits_task(size)
    if name == "chars":
        return text_task(lambda: CharacterGPT(size.width, size.depth, size.context), size, lambda model, x: model(x))
    return text_task(lambda: gpt2(size), size, lambda model, x: model(x).logits)


TASKS = ("digits", "chars", "gpt2")


# --- loops --------------------------------------------------------------------------------------------------------


class EngineLoop:
    """Halfstep's Engine."""

    def __init__(self, model, optimizer, scheduler, precision):
        self.engine = Engine(model, optimizer, precision, scheduler=scheduler, max_norm=MAX_NORM)
        self.results = []

    def step(self, loss_of):
        """One training step."""
        with self.engine.forward():
            loss = loss_of()
        self.engine.backward(loss)
        self.results.append(self.engine.step())
        return loss.detach()

    def validate(self, losses_of):
        """The losses of `losses_of` in the row's precision."""
        with self.engine.evaluate():
            return losses_of()

    def num_skipped(self):
        """Steps that overflowed."""
        return sum(result.skipped for result in self.results)

    def close(self):
        """Hand the model back."""
        self.engine.close()


class AmpLoop:
    """torch.autocast and GradScaler as in torch's documentation; a skipped step does not advance the schedule."""

    def __init__(self, model, optimizer, scheduler, dtype, device):
        self.model, self.optimizer, self.scheduler, self.dtype, self.device = model, optimizer, scheduler, dtype, device
        self.scaler = torch.amp.GradScaler(device, enabled=dtype is torch.float16)
        self.skipped = 0

    def region(self):
        """The block that computes in 16 bits."""
        return torch.autocast(self.device, dtype=self.dtype)

    def step(self, loss_of):
        """One training step."""
        with self.region():
            loss = loss_of()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.scaler.get_scale() < before:
            self.skipped += 1
        else:
            self.scheduler.step()
        return loss.detach()

    def validate(self, losses_of):
        """The losses of `losses_of` in the row's precision."""
        with torch.no_grad(), self.region():
            return losses_of()

    def num_skipped(self):
        """Steps that overflowed."""
        return self.skipped

    def close(self):
        """Nothing to undo."""


class PureLoop(AmpLoop):
    """bf16 weights, moments and updates, without a master and without autocast."""

    def __init__(self, model, optimizer, scheduler, device):
        super().__init__(model, optimizer, scheduler, torch.bfloat16, device)

    def region(self):
        """Nothing is cast: the model is bf16."""
        return torch.autocast(self.device, enabled=False)


def make_loop(row, model, task, steps, device):
    """The loop of a row around a model in fp32."""
    if row == PURE:
        model.to(torch.bfloat16)
    fused = {} if row in ROWS and row not in (*AMP, PURE) else {"fused": True}  # the Engine chooses for itself
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr, weight_decay=task.decay, **fused)
    warmup = max(1, steps // 10)

    def factor(step):
        done = min(1.0, max(0, step - warmup) / max(1, steps - warmup))
        return min(1.0, (step + 1) / warmup) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    if row in AMP:
        return AmpLoop(model, optimizer, scheduler, AMP[row], device)
    return (
        PureLoop(model, optimizer, scheduler, device) if row == PURE else EngineLoop(model, optimizer, scheduler, row)
    )


def train(name, row, seed, size, device):
    """One run: its final validation and training loss, skipped steps, fingerprints and seconds."""
    torch.manual_seed(seed)
    task, steps = make_task(name, size), size.steps[name]
    model = task.build().to(device)
    start_weights = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())).hexdigest()
    batches, held_out = task.batches(steps, seed, device), task.validation(device)
    loop = make_loop(row, model, task, steps, device)

    def loss_of(batch):
        x, y = batch
        logits = task.logits(model, x.to(torch.bfloat16) if row == PURE and x.is_floating_point() else x)
        logits = logits.float() if row == PURE else logits  # in bf16 the loss itself would have 8 bits
        return F.cross_entropy(logits.flatten(0, -2), y.flatten())

    start = time.perf_counter()
    train_losses, losses = [], []
    for number, batch in enumerate(batches):
        train_losses.append(loop.step(lambda batch=batch: loss_of(batch)))
        if number >= steps - size.tail:
            losses.append(torch.stack(loop.validate(lambda: [loss_of(b).float() for b in held_out])).mean())
    final, training = (
        torch.stack(values).float().mean().item() for values in (losses, train_losses[-max(1, steps // 10) :])
    )
    seconds = time.perf_counter() - start
    skipped = loop.num_skipped()
    loop.close()
    return {
        "task": name, "row": row, "seed": seed, "loss": final, "train_loss": training, "skipped": skipped, "seconds": seconds,
        "weights": start_weights[:12], "parameters": sum(p.numel() for p in model.parameters()),
    }  # fmt: skip


def run_one(work):
    """One run, or the reason why it failed."""
    name, row, seed, *_ = work
    try:
        return train(*work)
    except Exception as error:  # the other runs continue
        reason = (str(error).strip().splitlines() or [""])[0]
        return {"task": name, "row": row, "seed": seed, "failed": f"{type(error).__name__}: {reason}"}


def prepare_process():
    """Settings of a process that trains nothing else."""
    torch.set_num_threads(1)
    logging.getLogger("halfstep").setLevel(logging.WARNING)  # a truth table for each run


def run_all(works, jobs):
    """All runs, in this process or in several."""
    if jobs == 1:
        return [run_one(work) for work in works]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=prepare_process) as pool:
        return list(pool.map(run_one, works))


# --- report -------------------------------------------------------------------------------------------------------


def baseline_of(row):
    """The torch AMP row that a row is compared with, or None for that row itself."""
    base = "torch AMP fp16" if row.startswith("fp16") else "torch AMP bf16"
    return None if row in AMP else base


def summarize(runs):
    """One dictionary per task and row: losses by seed, their mean, and the difference from torch AMP with its verdict."""
    cases = {}
    for run in runs:
        cases.setdefault((run["task"], run["row"]), []).append(run)
    summary = []
    for (task, row), group in cases.items():
        failed = [run["failed"] for run in group if "failed" in run]
        case = {"task": task, "row": row}
        if failed:
            summary.append(case | {"failed": f"{len(failed)} of {len(group)} runs: {failed[0]}"})
            continue
        losses, training = ([run[key] for run in group] for key in ("loss", "train_loss"))
        base = cases.get((task, baseline_of(row)), [])
        case |= {
            "losses": losses,
            "mean": statistics.fmean(losses),
            "train_mean": statistics.fmean(training),
            "skipped": sum(run["skipped"] for run in group),
            "seconds": statistics.fmean(run["seconds"] for run in group),
        }
        if not all(map(math.isfinite, losses)):
            case["verdict"] = "not finite"
        elif len(losses) > 1 and base and not any("failed" in run for run in base):
            pairs = {"": ("loss", losses), "train_": ("train_loss", training)}
            for prefix, (key, mine) in pairs.items():
                difference = compare_losses(mine, [run[key] for run in base])
                values = dataclasses.asdict(difference) | {"verdict": difference.verdict}
                case |= {f"{prefix}{'gap' if name == 'mean' else name}": value for name, value in values.items()}
        summary.append(case)
    return summary


def mismatches(runs):
    """Tasks and seeds whose rows did not start from the same weights; pure bf16 is fingerprinted before it is rounded."""
    weights = {}
    for run in runs:
        if "weights" in run:
            weights.setdefault((run["task"], run["seed"]), set()).add(run["weights"])
    return [f"{task}, seed {seed}" for (task, seed), digests in weights.items() if len(digests) > 1]


def show(case):
    """One line of the table."""
    if "failed" in case:
        return f"| {case['task']} | {case['row']} | failed: {case['failed']} | | | | | | | |"
    losses = ", ".join(f"{loss:.4f}" for loss in case["losses"])
    gaps = ["", "", "", case.get("verdict", "")]
    if "gap" in case:
        low, high = case["gap"] - case["paired"], case["gap"] + case["paired"]
        gaps[:3] = [f"{case['gap']:+.4f}", f"+-{case['noise']:.4f}", f"{low:+.4f} to {high:+.4f}"]
    train_loss = f"{case['train_mean']:.4f}"
    if "train_gap" in case:
        train_loss += f" ({case['train_gap']:+.4f}, {case['train_verdict']})"
    cells = [case["task"], case["row"], losses, f"{case['mean']:.4f}", *gaps, train_loss, case["skipped"]]
    return "| " + " | ".join(map(str, cells)) + " |"


def report(summary, runs, size, args, seconds):
    """The record as markdown."""
    tested = [case for case in summary if "gap" in case and case["row"] not in (PURE, "fp32")]
    counts = {word: sum(case["verdict"] == word for case in tested) for word in ("within", "better", "worse")}
    parameters = {run["task"]: run["parameters"] for run in runs if "parameters" in run}
    tasks = "; ".join(f"{task}: {count:,} parameters, {size.steps[task]} steps" for task, count in parameters.items())
    lines = [
        "# Training loss by precision", "", f"{environment()}", "",
        f"{tasks}. AdamW, clip {MAX_NORM}, {args.seeds} seeds on {args.device}; characters of this tree ({read_corpus()[2]}). "
        f"Loss: validation loss, mean over the last {size.tail} steps; gap: mean difference from torch AMP of the same 16-bit format. "
        "Seed noise: the gap that runs which differ only in their seeds would stay within (two-sample Student's t, 95 %); paired interval: of "
        f"the gap, seed by seed (95 %). Training loss: mean over the last tenth of the steps. All runs took {seconds:.0f} s, {args.jobs} at a time.", "",
        "| task | precision | loss by seed | mean | gap | seed noise | paired interval | verdict | training loss (gap, verdict) | skipped |",
        "|---|---|---|---|---|---|---|---|---|---|", *map(show, summary), "",
        f"Of {len(tested)} tests of Halfstep's 16-bit rows {counts['within']} are within seed noise, {counts['better']} better and {counts['worse']} worse; "
        f"at 95 % about {0.05 * len(tested):.1f} of them would be outside by chance alone.",
    ]  # fmt: skip
    different = mismatches(runs)
    lines += [f"Rows did not start from the same weights: {', '.join(different)}."] if different else []
    return "\n".join(lines)


def main(argv=None):
    """Train everything, print the record and write it; returns 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument(
        "--rows", nargs="+", metavar="TEXT", help="only the rows whose name contains one of these texts, and torch AMP"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, help="processes at a time; default 6 on a GPU, 1 on a CPU")
    parser.add_argument("--quick", action="store_true", help="a few steps of tiny models")
    parser.add_argument("--out", help="FILE.md; the data is written to FILE.json")
    args = parser.parse_args(argv)
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.jobs = args.jobs or (6 if args.device == "cuda" else 1)
    size = QUICK if args.quick else FULL
    rows = [row for row in ROWS if not args.rows or row in AMP or any(text in row for text in args.rows)]
    start = time.perf_counter()
    works = [
        (task, row, seed, size, args.device)
        for task in reversed(args.tasks)
        for row in rows
        for seed in range(args.seeds)
    ]
    runs = sorted(run_all(works, args.jobs), key=lambda run: args.tasks.index(run["task"]))
    summary = summarize(runs)
    text = report(summary, runs, size, args, time.perf_counter() - start)
    print(text)
    if args.out:
        Path(args.out).write_text(text + "\n", encoding="utf-8")
        data = {"environment": environment(), "size": dataclasses.asdict(size), "summary": summary, "runs": runs}
        Path(args.out).with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return int(any("failed" in run for run in runs))


if __name__ == "__main__":
    prepare_process()
    sys.exit(main())
