"""The units of the course: objectives, a short text, the experiments that prove it, and where the lesson is imprecise.

The course follows the lesson "Mixed Precision Training" and the tips "FP16 Convergence Tips" for DeepSpeed. `corrections` are
claims of theirs that the experiments do not confirm as written. No torch is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["UNITS", "Unit"]


@dataclass(frozen=True)
class Unit:
    """One unit."""

    name: str
    title: str
    objectives: tuple[str, ...]
    text: tuple[str, ...]  # paragraphs
    experiments: tuple[str, ...]
    corrections: tuple[str, ...] = ()
    see: tuple[str, ...] = ()


_MEMORY = Unit(
    "memory",
    "Memory and speed: what 16 bits save",
    ("Know which memory autocast reduces and which it does not.", "Know when 16-bit compute is faster."),
    (
        "A training step stores weights, gradients and optimizer states (model state), and what the forward pass saves for "
        "backward (activations). Model state depends on the model, activations on model and batch.",
        "Autocast keeps weights in fp32 and runs matrix products in 16 bits, so it reduces activations, and time where the "
        "hardware has units for 16-bit products. That allows larger batches in the same memory.",
    ),
    ("activation-memory", "bytes-per-parameter", "matmul-speed"),
    (
        "The lesson: mixed precision reduces memory usage. Measured: activations only. With Adam the model state stays at 16 bytes per "
        "parameter.",
    ),
    ("halfstep explain memory", "halfstep compare", "docs/plan.md"),
)

_FORMATS = Unit(
    "formats",
    "Number formats: range or precision",
    ("Distinguish fp16 and bf16 by range and spacing.", "Know why long sums need fp32."),
    (
        "A floating-point number has exponent bits, which give its range, and fraction bits, which give its spacing. fp16 has 5 and 10, bf16 8 "
        "and 7, fp32 8 and 23.",
        "fp16 overflows and underflows; bf16 hardly does, but rounds 8 times more coarsely.",
    ),
    ("range", "spacing", "long-sum"),
    (),
    ("halfstep explain formats", "halfstep explain fp16-vs-bf16"),
)

_AUTOCAST = Unit(
    "autocast",
    "autocast and GradScaler: the loop",
    ("Write the loop with autocast and GradScaler.", "Know what the scaler does with an overflow."),
    (
        "autocast chooses the dtype of each operation: products in 16 bits, sensitive operations in fp32. GradScaler multiplies the "
        "loss by a scale, so that gradients computed in fp16 do not underflow, and divides the gradients by it before the step.",
        '    with autocast(device_type="cuda", dtype=torch.float16):\n'
        "        loss = loss_fn(model(x), y)\n"
        "    scaler.scale(loss).backward()\n"
        "    scaler.step(optimizer)  # unscales; skips if a gradient is inf or NaN\n"
        "    scaler.update()  # after an overflow the scale is halved",
        "The loop below is this one on your CPU. `halfstep.Engine` is the same in an order that cannot be wrong.",
    ),
    ("lesson-loop", "skipped-step", "missing-update", "scale-defaults"),
    (
        "The lesson: forgetting scaler.update() freezes the scale factor. Measured: the second scaler.step() raises a RuntimeError.",
    ),
    ("halfstep explain loss-scaling", "docs/engine.md", "docs/scaler.md"),
)

_CHOICE = Unit(
    "choice",
    "fp16 or bf16: by hardware",
    ("Choose a format for a GPU.", "Explain why fp16 needs a scaler and bf16 does not."),
    (
        "Take bf16 where it is native (Ampere and later): no scaler, no skipped steps. Take fp16 on Volta and Turing, with a scaler. "
        "Where neither is native, stay with fp32.",
        "Why a scaler for fp16 only: gradients below 3e-8 are 0 in fp16. The scaler moves them into its range. bf16 reaches as far as "
        "fp32.",
    ),
    ("hardware-choice", "scaler-by-format"),
    (),
    ("halfstep probe", "halfstep explain underflow", "docs/hardware.md"),
)

_FP32 = Unit(
    "stays-in-fp32",
    "What stays in fp32",
    ("Name the operations that need fp32.", "Know which of them autocast covers, and which are yours."),
    (
        "Losses, softmax and sums over many values, batch-norm statistics, accumulated gradients and weight updates lose too much in 16 bits: all "
        "are long sums, or add something small to something large.",
        "Autocast decides by operation, from a list per device. What is on no list runs in the dtype of its input.",
    ),
    ("losses-under-autocast", "sums-under-autocast", "batchnorm-statistics", "accumulation"),
    (
        "The lesson: autocast handles loss functions automatically. Measured on a CPU: those on its list. A loss composed by hand of elementary operations "
        "stays in 16 bits; a CPU's autocast also runs softmax, sums and norms in 16 bits.",
    ),
    ("halfstep explain stays-in-fp32", "halfstep explain accumulation"),
)

_CLIPPING = Unit(
    "clipping",
    "Gradient clipping with a scaler",
    ("Clip in the right order.", "Verify clipping by the size of the update."),
    (
        "After scaler.scale(loss).backward() the gradients are multiplied by the scale. Divide first, then clip:",
        "    scaler.scale(loss).backward()\n"
        "    scaler.unscale_(optimizer)\n"
        "    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)\n"
        "    scaler.step(optimizer)  # knows that it is unscaled\n"
        "    scaler.update()",
        "To verify it, train one step with SGD and lr = 1: the update is then the clipped gradient, and its norm is max_norm.",
    ),
    ("clipping-order", "skipped-clip"),
    (),
    ("halfstep explain clipping", "halfstep explain HS104"),
)

_VALIDATION = Unit(
    "validation",
    "Validation: autocast, no scaler",
    ("Validate under autocast without gradients.", "Know why the scaler has no part in it."),
    (
        "    model.eval()\n"
        '    with torch.no_grad(), autocast(device_type="cuda", dtype=torch.bfloat16):\n'
        "        val_loss = loss_fn(model(x), y)",
        "`engine.evaluate()` is these three lines; with an EMA it evaluates the averaged weights.",
    ),
    ("validation",),
    (),
    ("halfstep explain validation", "docs/engine.md"),
)

_FAILURES = Unit(
    "failures",
    "Failures: what they look like",
    ("Recognize underflow, overflow and lost updates by their symptoms.", "Know when mixed precision does not help."),
    (
        "Three failures look alike from far away. Underflow: gradients are 0, the loss stands still. Overflow: inf, then NaN. Lost "
        "updates: gradients are fine, weights do not move.",
        "A fourth is no failure of numerics: on hardware without 16-bit units, mixed precision is slower than fp32.",
    ),
    ("standing-still", "underflow-nan", "overflow-nan", "lost-updates", "matmul-speed"),
    (
        "The lesson: fp16 without GradScaler gives NaN losses because gradients underflow to zero. Measured: under autocast, zero gradients give a loss that "
        "stands still. The lesson is right for weights that are fp16 themselves, with Adam; otherwise look for an overflow.",
    ),
    ("halfstep explain underflow", "halfstep explain master-weights", "docs/watch.md"),
)

_SCALE = Unit(
    "scale",
    "Scale: 8 GPUs to 4, ZeRO, 1-bit",
    ("Plan how many GPUs a job needs.", "Know DeepSpeed's rules on precision by version."),
    (
        "The lesson's scenario: ViT-Large needs 8 GPUs in fp32 and 4 in mixed precision. `halfstep plan` runs the step on fake tensors and "
        "adds up what each GPU stores. This takes most of the time of this unit: about 15 s of CPU time on an Arm Neoverse-N1.",
        "The tips for DeepSpeed: 1-bit Adam in fp16 only; no AMP with ZeRO; mind max_grad_norm; an optimizer that ZeRO has not tested needs "
        "zero_allow_untested_optimizer. They describe DeepSpeed up to 0.19.6; later releases differ.",
    ),
    ("eight-to-four", "zero-and-amp", "one-bit", "max-grad-norm"),
    (
        "The lesson: mixed precision takes 8 GPUs to 4. Planned for A100 40 GB at a global batch of 896: autocast alone takes 8 to 5, a lean preset "
        "to 4.",
        "The tips: max_grad_norm is silently set to 0.0 in fp32. Recorded on 0.19.6 and 0.19.8: it stops the run with an error, or is ignored "
        "next to your own optimizer object.",
    ),
    ("halfstep explain zero-and-amp", "halfstep explain one-bit", "docs/many-gpus.md", "docs/deepspeed.md"),
)

UNITS: dict[str, Unit] = {
    unit.name: unit
    for unit in (_MEMORY, _FORMATS, _AUTOCAST, _CHOICE, _FP32, _CLIPPING, _VALIDATION, _FAILURES, _SCALE)
}
