"""The five practice tasks: what the reader is asked to do."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TASKS", "Task"]


@dataclass(frozen=True)
class Task:
    """One task: its text, and the name of its starter file."""

    number: int
    title: str
    text: tuple[str, ...]
    file: str


TASKS = (
    Task(
        1,
        "Speed and memory with and without mixed precision",
        (
            "Train the same model in fp32 and under autocast, at least two steps each. Time both, read "
            "torch.cuda.max_memory_allocated() in both (reset the peak in between), and print the results.",
            "bf16 needs no scaler; fp16 needs one. On hardware without 16-bit units expect no speed-up: print what you measure.",
        ),
        "practice1_speed_and_memory.py",
    ),
    Task(
        2,
        "Gradient clipping with a scaler",
        (
            "Add clipping at max_norm = 1.0 to an fp16 loop with a GradScaler.",
            "Verify it: with SGD and lr = 1 the norm of the update equals max_norm whenever the gradient is larger.",
        ),
        "practice2_clipping.py",
    ),
    Task(
        3,
        "Skipped steps: monitor and count them",
        (
            "Train in fp16 with a GradScaler, count the steps that it skips, and print the count at the end.",
            "The grader puts inf into gradients: each such step must be skipped, the scale must fall, and your count must be right.",
        ),
        "practice3_skipped_steps.py",
    ),
    Task(
        4,
        "fp16 against bf16: find the unstable layer",
        (
            "Train the same model in fp16 (with a GradScaler) and in bf16. In one format a layer overflows: find out which, and print its "
            "name, as in model.named_modules().",
            "inf spreads: look for the first layer whose output is not finite although its input is.",
        ),
        "practice4_unstable_layer.py",
    ),
    Task(
        5,
        "Explain: why a scaler for fp16, and often none for bf16?",
        (
            "Write your explanation as a string EXPLANATION (or print it, or pass a text file), and predict the outcome of an experiment, which is run "
            "here and compared with it.",
            "What happens to small gradients in fp16, what does the scaler do about it, and why does bf16 not need it?",
        ),
        "practice5_explanation.py",
    ),
)
