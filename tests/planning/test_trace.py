"""A traced step follows the Engine's set-up: several optimizers, buffers and EMA."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from halfstep.engine.engine import Engine
from halfstep.engine.region import aligned
from halfstep.jobs.job import Job
from halfstep.planning.estimator import Estimator
from halfstep.planning.trace import StepOptions
from halfstep.precision.policy import Policy
from planning_jobs import Block, batches, loss, mlp, small_job

WEIGHTS, BIASES = 16 * 64 + 64 * 4, 64 + 4


def breakdown(job, precision, **options):
    """The categories of memory at the peak of a step."""
    return Estimator(job, Policy.parse(precision), options=StepOptions(**options)).at(4).peak.breakdown


def two_optimizers(model):
    """AdamW for matrices, SGD with momentum for the rest."""
    matrices, rest = ([p for p in model.parameters() if (p.dim() > 1) is wide] for wide in (True, False))
    return [torch.optim.AdamW(matrices, lr=1e-3), torch.optim.SGD(rest, lr=0.1, momentum=0.9)]


class TwoOptimizers(Job):
    """A job with two optimizers, which the Engine accepts and the field `optimizer` of a Job does not yet."""

    def call(self, field, run_context, **values):
        if field == "optimizer":
            return two_optimizers(values["model"])
        return super().call(field, run_context, **values)


def test_several_optimizers_are_planned_as_the_engine_runs_them():
    """A step with several optimizers has the states of all of them, in stock and lean precisions."""
    job = TwoOptimizers(model=mlp, data=batches, loss=loss, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    model = mlp()
    assert len(Engine(model, two_optimizers(model), "bf16-lean").optimizers) == 2
    assert breakdown(job, "fp32")["states"] == 4 * (2 * WEIGHTS + BIASES) + 4 * 2  # with a step count per AdamW tensor
    lean = breakdown(job, "bf16-lean")
    assert lean["master"] == 2 * (WEIGHTS + BIASES)
    assert lean["states"] >= 4 * (2 * WEIGHTS + BIASES)


def test_buffers_are_counted_with_the_copies_for_a_skipped_step():
    """The memory of buffers includes the copies that the Engine restores after a skipped step."""
    job = small_job(model=lambda: nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 4)))
    assert breakdown(job, "fp32")["buffers"] == 2 * (2 * 64 * 4 + 8)


def test_ema_covers_the_parameters_that_optimizers_own():
    """The EMA is fp32 in every precision, and only of parameters that an optimizer updates."""
    for precision in ("fp32", "bf16-lean"):
        assert breakdown(small_job(), precision, ema=True)["average"] == 4 * (WEIGHTS + BIASES)
    frozen = small_job(optimizer=lambda model: torch.optim.AdamW(model[2].parameters(), lr=1e-3))
    assert breakdown(frozen, "fp32", ema=True)["average"] == 4 * (64 * 4 + 4)


@pytest.mark.parametrize("precision", ["bf16", "bf16-lean"])
def test_an_output_layer_of_an_odd_width_is_planned_with_its_copies(monkeypatch, precision):
    """Planned on a CPU, the product is the one of a GPU: the copies are in the plan, and are at most those of weight and result."""
    rows, width = 256, 4001
    job = small_job(
        model=lambda: nn.Linear(16, width, bias=False),
        data=lambda batch_size: iter([torch.randn(rows, 16)]),
        loss=lambda model, batch: model(batch).sum(dtype=torch.float32),
    )
    peaks = []
    for large in (2**60, 1):
        monkeypatch.setattr(aligned, "LARGE", large)
        peaks.append(sum(breakdown(job, precision).values()))
    assert 2 * rows * width <= peaks[1] - peaks[0] <= 2 * (2 * rows + 3 * 16) * (width + 7)


class LogDeterminant(nn.Module):
    """A layer with operations that have no 16-bit kernels, or none for a 16-bit weight and an fp32 input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(16))
        self.token = nn.Parameter(torch.zeros(16))

    def forward(self, x):
        x = x.clone()
        x[torch.arange(2)] = self.token
        return x @ self.weight - torch.slogdet(self.weight)[1] - torch.matrix_exp(self.weight).sum()


def test_models_with_operations_without_16_bit_kernels_are_planned():
    """Every preset plans a model with decompositions, spectral norm and a 16-bit weight written into an fp32 input."""
    spectral = nn.utils.parametrizations.spectral_norm
    job = small_job(model=lambda: nn.Sequential(LogDeterminant(), spectral(nn.Linear(16, 64)), nn.Linear(64, 4)))
    for precision in ("fp32", "bf16", "bf16-lean", "fp16-lean"):
        assert sum(breakdown(job, precision).values()) > 0


BATCH, WIDTH, NUM_BLOCKS = 256, 32, 3
UNIT = BATCH * WIDTH  # elements of a tensor of the residual stream


def saves_products(_context, func, *_args, **_kwargs):
    """A policy of selective checkpointing: products are saved, the rest is computed again."""
    saved = func in {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


class Checkpointed(nn.Module):
    """Blocks between two layers that run as they are, or with their activations recomputed, all or by a policy."""

    def __init__(self, recomputed):
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(NUM_BLOCKS))
        self.recomputed = recomputed

    def forward(self, x):
        x = self.stem(x)
        contexts = {"context_fn": partial(create_selective_checkpoint_contexts, saves_products)}
        for block in self.blocks:
            if self.recomputed is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=False, **(contexts if self.recomputed == "policy" else {}))
        return self.head(x)


def vectors(batch_size):
    """One batch of vectors of the blocks' width, and labels."""
    yield torch.randn(batch_size, WIDTH), torch.randint(4, (batch_size,))


def saved_by_forward(job, precision, **options):
    """The sizes of the activations that a forward pass leaves, in bytes, those of less than one stream tensor left out."""
    ledger = Estimator(job, Policy.parse(precision), options=StepOptions(**options)).trace(BATCH).ledger
    live = {}
    for event in ledger.events:
        if event.phase == "forward":
            live[event.block] = event
            if event.num_bytes is None:
                del live[event.block]
    sizes = [event.num_bytes for event in live.values() if event.category == "activations"]
    return sorted(size for size in sizes if size >= 2 * UNIT)


@pytest.mark.parametrize(
    ("recomputed", "per_block"),
    [
        (None, [1, 1, 4, 4]),  # the block's result, the norm's, the first product, the activation function's
        ("policy", [1, 1, 4]),  # the result, and both products: the policy saves the second too
        ("all", [1]),  # the result, which is the next block's input
    ],
)
def test_checkpointed_blocks_save_what_their_policy_saves(recomputed, per_block):
    """Activations after the forward pass are those of selective checkpointing, each counted once; lean ones are 16-bit."""
    job = small_job(model=lambda: Checkpointed(recomputed), data=vectors)
    expected = sorted([*per_block * NUM_BLOCKS, 1])  # and the first layer's result
    assert saved_by_forward(job, "fp32") == [4 * UNIT * size for size in expected]
    assert saved_by_forward(job, "bf16-lean") == [
        2 * UNIT * size for size in sorted([*expected, 1])
    ]  # and of the batch


def test_recompute_is_planned_as_the_engine_runs_it():
    """With recompute="cheap" a block saves its input and its products; a share of 0.5 saves only inputs of half the blocks."""
    job = small_job(model=lambda: Checkpointed(None), data=vectors)
    stem = 1
    # The second product of a block is not saved: nothing after the sum with the residual needs it.
    assert saved_by_forward(job, "fp32", recompute="cheap") == [
        4 * UNIT * n for n in sorted([stem, *[1, 4] * NUM_BLOCKS])
    ]
    half = [stem, *[1] * 2, *[1, 1, 4, 4] * (NUM_BLOCKS - 2)]
    assert saved_by_forward(job, "fp32", recompute=0.4) == [4 * UNIT * n for n in sorted(half)]


def test_recomputed_blocks_leave_nothing_after_backward():
    """What recompute saved is freed block by block: at the update only the gradients are left, as without recompute."""
    job = small_job(model=lambda: Checkpointed(None), data=vectors)
    estimates = [
        Estimator(job, Policy.parse("bf16-lean"), options=StepOptions(recompute=value)).at(BATCH)
        for value in (None, "cheap", 0.5)
    ]
    assert len({estimate.peak.phases["step"] for estimate in estimates}) == 1
    plain, cheap, half = (estimate.peak_bytes for estimate in estimates)
    assert max(cheap, half) < plain


@pytest.mark.parametrize(("accumulate", "num_bytes"), [(1, 2), (3, 4)])
def test_buckets_are_those_of_the_prepared_model(accumulate, num_bytes):
    """One bucket of ddp with the gradients in the dtype that the Engine gives them, a number for each, and fp32 messages."""
    options = StepOptions(accumulate=accumulate)
    (bucket,) = Estimator(small_job(), Policy.parse("bf16-lean"), options=options).trace(4).buckets
    elements = WEIGHTS + 64 + (8 if num_bytes == 2 else 4) + 4  # the last bias is aligned to 16 bytes
    assert (bucket.message, bucket.gradients) == (4 * elements, num_bytes * elements)
