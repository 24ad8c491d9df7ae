"""The questions of the quiz; the first three are the lesson's. Each answer is backed by an experiment."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["QUESTIONS", "Question"]


@dataclass(frozen=True)
class Question:
    """A question, its options by letter, the right letter, the reason, and the experiment that shows it."""

    number: int
    text: str
    options: tuple[str, ...]
    answer: str  # the letter of the right option
    reason: str
    experiment: str

    @property
    def letters(self) -> str:
        """The letters of the options."""
        return "abcdefgh"[: len(self.options)]


_ROWS = (
    (
        "What is the main benefit of mixed precision training?",
        (
            "Higher model accuracy",
            "Reduced memory usage and faster computation",
            "Simpler code",
            "Better generalization",
        ),
        "b",
        "Activations are stored in 2 bytes instead of 4, and products are faster where the hardware has 16-bit units.",
        "activation-memory",
    ),
    (
        "When do you need GradScaler?",
        (
            "Always with mixed precision",
            "Only with float16, not bfloat16",
            "Only on older GPUs",
            "Never, autocast handles it",
        ),
        "b",
        "Gradients underflow in fp16, whose range ends near 6e-8. bf16 has fp32's range.",
        "scaler-by-format",
    ),
    (
        "What should you keep in float32 during mixed precision?",
        (
            "All weights",
            "Loss functions and batch norm statistics",
            "Only the optimizer",
            "Nothing, autocast handles everything",
        ),
        "b",
        "Statistics and long sums stop growing in 16 bits, and autocast covers only the losses on its list. (Master weights are fp32 too, but "
        "the weights that compute may be 16-bit.)",
        "batchnorm-statistics",
    ),
    (
        "fp16 autocast without a scaler, and all gradients underflow. What do you see?",
        ("NaN losses", "A loss that stands still", "An error from the optimizer", "A slower run"),
        "b",
        "Gradients of 0 change nothing, so the loss is the same in every step. (With fp16 weights and Adam it would be NaN.)",
        "standing-still",
    ),
    (
        "What is 70000 stored in fp16?",
        ("70000", "65504", "inf", "NaN"),
        "c",
        "65504 is the largest finite value; what rounds above it is inf.",
        "range",
    ),
    (
        "What is 1.002 stored in bf16?",
        ("1.002", "1.00195", "1.0078", "1"),
        "d",
        "The spacing of bf16 at 1 is 1/128, so 1.002 rounds to 1. 1.00195 is what fp16 stores.",
        "spacing",
    ),
    (
        "Ones are added one by one to a bf16 sum, 4096 of them. Where does it end?",
        ("4096", "2048", "256", "inf"),
        "c",
        "At 256 the spacing is 2, and 257 rounds back to 256. 2048 is where fp16 stops.",
        "long-sum",
    ),
    (
        "You forget scaler.update() in torch's loop. What happens?",
        (
            "The scale freezes and nobody notices",
            "The second step() raises an error",
            "Every step is skipped",
            "Nothing",
        ),
        "b",
        "GradScaler raises a RuntimeError: step() has already been called since the last update().",
        "missing-update",
    ),
    (
        "One gradient is inf. What does scaler.step(optimizer) do?",
        (
            "Raises an error",
            "Sets that gradient to 0 and steps",
            "Skips the step; update() then halves the scale",
            "Clips the gradient",
        ),
        "c",
        "Weights stay as they were, and the next step uses half the scale.",
        "skipped-step",
    ),
    (
        "Scale 65536, clip_grad_norm_ with max_norm=1 before unscale_. At which norm is the true gradient clipped?",
        ("1", "65536", "1/65536", "It is not clipped"),
        "c",
        "The scaled gradient is clipped at 1 and then divided by 65536.",
        "clipping-order",
    ),
    (
        "Can clipping protect the weights from an inf gradient?",
        (
            "Yes, it becomes max_norm",
            "No: the norm is inf, finite gradients become 0 and the inf NaN",
            "Yes, if max_norm is small",
            "Only in bf16",
        ),
        "b",
        "The coefficient is max_norm / inf = 0, and inf * 0 is NaN. The scaler's check protects the weights.",
        "skipped-clip",
    ),
    (
        "Bytes per parameter of weights, gradients and Adam's moments: fp32 and autocast bf16?",
        ("16 and 8", "16 and 10", "16 and 16", "12 and 6"),
        "c",
        "Autocast keeps all of them in fp32. Lean presets store 14, or about 8 with 8-bit moments.",
        "bytes-per-parameter",
    ),
    (
        "Which format for a T4, and which for an A100?",
        ("bf16 and bf16", "fp16 and bf16", "bf16 and fp16", "fp32 and fp16"),
        "b",
        "bf16 is native from Ampere on; a T4 emulates it, although is_bf16_supported() is True.",
        "hardware-choice",
    ),
    (
        "Weights of 1 stored in bf16 without a master, Adam with lr=1e-3. What happens to them?",
        ("They train as in fp32", "They train, with noise", "They do not change", "They become NaN"),
        "c",
        "An update of 0.001 is below half the spacing at 1, so every update is rounded away.",
        "lost-updates",
    ),
    (
        "What does validation under mixed precision need?",
        ("autocast and no_grad, no scaler", "autocast and the scaler", "The scaler only", "model.half()"),
        "a",
        "Without a backward pass there is nothing to scale.",
        "validation",
    ),
    (
        "Under autocast, what is the dtype of (error * error).mean() of a 16-bit output?",
        ("fp32: autocast handles losses", "16-bit: it is on no list", "fp64", "It raises an error"),
        "b",
        "F.mse_loss is on the list; multiplication and mean are not. Write output.float() first.",
        "losses-under-autocast",
    ),
    (
        "In which format should gradients of many micro-batches be accumulated?",
        ("The format of the weights", "bf16", "fp16", "fp32"),
        "d",
        "A bf16 sum stops growing once it is 256 to 512 times the next gradient, an fp16 sum 8 times later.",
        "accumulation",
    ),
    (
        "A run shows NaN losses in fp16, because an activation passes 65504. What helps?",
        ("A larger loss scale", "A smaller loss scale", "bf16, or that layer in fp32", "Gradient clipping"),
        "c",
        "The loss scale changes only the backward pass.",
        "overflow-nan",
    ),
    (
        "ViT-L/16, global batch 896, A100 40 GB: 8 GPUs in fp32. How many with autocast alone?",
        ("4", "5", "2", "8"),
        "b",
        "Activations shrink to about 0.56, model state does not. 4 need a lean preset.",
        "eight-to-four",
    ),
    (
        "Your DeepSpeed configuration enables ZeRO and Apex AMP. What do you use instead?",
        ("ZeRO and AMP, they combine", "The fp16 mode, which is like O2", "fp32", "torch.half()"),
        "b",
        "AMP and ZeRO do not combine; DeepSpeed removed Apex AMP in 0.19.8.",
        "zero-and-amp",
    ),
    (
        "In which precision is the convergence of 1-bit Adam verified?",
        ("All of them", "bf16", "fp16", "fp32"),
        "c",
        "The published runs are fp16. Halfstep rejects others unless allow_unverified=True.",
        "one-bit",
    ),
    (
        "`max_grad_norm` in the optimizer block of a DeepSpeed configuration:",
        ("clips in fp16 only", "clips in every mode", "never clips: it raises, or is ignored", "clips in fp32 only"),
        "c",
        "DeepSpeed clips by the top-level gradient_clipping. (Recorded on 0.19.6 and 0.19.8; the experiment runs check and the Engine.)",
        "max-grad-norm",
    ),
    (
        "DeepSpeed's loss scale with its defaults: what does the first overflow do?",
        ("Halves the scale", "Skips the step and leaves the scale", "Stops the run", "Doubles the scale"),
        "b",
        "Its hysteresis is 2: the second overflow halves the scale. (The experiment runs Halfstep's scaler with the same settings.)",
        "scale-defaults",
    ),
)

QUESTIONS: tuple[Question, ...] = tuple(Question(number, *row) for number, row in enumerate(_ROWS, start=1))
