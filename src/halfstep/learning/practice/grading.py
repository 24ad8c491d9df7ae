"""The grade of a practice: the runs that a task needs, and the rows that follow from them."""

from __future__ import annotations

import ast
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from halfstep.check import check_path
from halfstep.check.finding import Finding
from halfstep.errors import SettingError
from halfstep.hardware.units import count_text
from halfstep.learning.practice.explanation import explanation_rows
from halfstep.learning.practice.launch import measure
from halfstep.learning.practice.loop import LOOP_RULES, check_row, loop_rows, run_row
from halfstep.learning.practice.printed import named_layer, prints_count
from halfstep.learning.practice.record import Grade, Row, Run, RunSpec, Step
from halfstep.learning.practice.speed import speed_rows
from halfstep.learning.practice.tasks import TASKS

__all__ = ["EXPLAIN", "SECONDS", "grade_practice", "judge", "read_script", "run_specs"]

SECONDS = 60.0  # for each run of a script
_LARGE_NORM = 1000.0  # gradients are enlarged to it if the script's own never reach max_norm
_SMALL_SCALE = 128.0  # above 1, and small enough that steps are not skipped at the start
_NEAR = 0.02  # relative
# Libraries that own the loop and its precision, and turn fp16 off or into bf16 where they see no GPU.
_OWNERS = {
    "accelerate": "Accelerate",
    "lightning": "Lightning",
    "pytorch_lightning": "Lightning",
    "transformers": "the Trainer",
}


def grade_practice(number: int, path: Path, seconds: float = SECONDS) -> Grade:
    """Grade a script (or for task 5 a text) by `halfstep check` and by what it does in a run on the CPU."""
    start = time.perf_counter()
    text = read_script(path)
    runs = measure(run_specs(number, path), seconds) if _is_python(path, text) else []
    grade = judge(number, path, text, runs)
    return Grade(grade.number, grade.title, grade.rows, grade.findings, time.perf_counter() - start)


def read_script(path: Path) -> str:
    """The text of a file; one that cannot be read is an error."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SettingError(f"{path} is not text (byte {error.start}). Pass a Python file.") from error
    except OSError as error:
        raise SettingError(f"{path} cannot be read: {error.strerror or error}.") from error


def _is_python(path: Path, text: str) -> bool:
    """Whether there is something to run."""
    try:
        tree = ast.parse(text, filename=str(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant) for node in tree.body)


def run_specs(number: int, path: Path) -> list[RunSpec]:
    """The runs that a task is graded by."""
    script = str(path)
    return {
        1: [RunSpec(script), RunSpec(script, operators=False)],
        2: [
            RunSpec(script, bf16_supported=False),
            RunSpec(script, boost=_LARGE_NORM, max_init_scale=_SMALL_SCALE, bf16_supported=False),
        ],
        3: [
            RunSpec(script, bf16_supported=False),
            RunSpec(script, inject=(1,), bf16_supported=False),
            RunSpec(script, inject=(0, 2, 4), bf16_supported=False),
        ],
        4: [RunSpec(script, layers=True)],
        5: [RunSpec(script)],
    }[number]


def judge(number: int, path: Path, text: str, runs: Sequence[Run]) -> Grade:
    """The grade that follows from the script and its runs."""
    task = TASKS[number - 1]
    if not text.strip() or (not runs and number != EXPLAIN and _parses(text)):
        row = Row(
            "code",
            "the file has a training script",
            "it has no code",
            False,
            f"Start from: halfstep learn practice {number}",
        )
        return Grade(number, task.title, (row,))
    if number == EXPLAIN:
        return Grade(number, task.title, explanation_rows(path, text, runs))
    findings = check_path(path)
    if not runs:
        syntax = next((f for f in findings if f.code == "HS004"), None)
        measured = f"line {syntax.line}: {syntax.message}" if syntax else "it cannot be parsed"
        row = Row("code", "the file is valid Python", measured, False, "Correct the syntax error.")
        return Grade(number, task.title, (row,), findings)
    rows = _JUDGES[number](runs, findings)
    if (
        not runs[0].fine and not runs[0].backwards
    ):  # it ended before it trained, or was killed with what it had measured
        rows = [row for row in rows if row.name in {"run", "check"}]
    return Grade(number, task.title, _with_library_hint(rows, text), findings)


def _with_library_hint(rows: Sequence[Row], text: str) -> tuple[Row, ...]:
    """The rows; of a script in which a library owns the loop, what that library does on a CPU is the advice."""
    owner = next((library for library in sorted(_imports(text)) if library in _OWNERS), None)
    if owner is None:
        return tuple(rows)
    hint = f"The grader runs on the CPU, where {_OWNERS[owner]} does not train in fp16 with a scaler: write the loop yourself, as in the starter file."
    return tuple(
        replace(row, to_do=hint) if not row.passed and row.name in {"autocast", "scaled-loss"} else row for row in rows
    )


def _imports(text: str) -> set[str]:
    """The top packages that a script imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


EXPLAIN = 5


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


# Task 2.


def _clipping(runs: Sequence[Run], findings: Sequence[Finding]) -> list[Row]:
    run, enlarged = runs
    rows = [run_row(run), check_row(findings, LOOP_RULES)]
    shared = loop_rows(run, ("fp16", "bf16"), scaler=True)
    # The row on the gradient has the mistake of clipping scaled gradients; here the next row has it.
    rows += [
        row for row in shared if row.name != "gradient" or (not row.passed and "instead of optimizer.step" in row.to_do)
    ]
    if all(row.passed for row in rows if row.name in {"autocast", "scaled-loss", "gradient"}):
        row = _clip_row(run, enlarged)
        if run.fine or row.passed or "no step was applied" not in row.measured:
            rows.append(row)
    return rows


def _clip_row(run: Run, enlarged: Run) -> Row:
    expected = "a gradient above max_norm (1.0) is clipped to it"
    for observed in (run, enlarged):
        steps = [(s, _limit(s)) for s in observed.steps if s.applied and s.true_norm and s.received_norm is not None]
        # A loop that clips scaled gradients at max_norm times the scale is right too: what counts is the size of the update.
        steps = [(s, 1.0 if abs(_size(s, "received") - 1) <= _NEAR else limit) for s, limit in steps]
        large = [(s, limit) for s, limit in steps if _size(s, "true") > limit * (1 + _NEAR)]
        if not large:
            continue
        if (row := _clipped_by_value([s for s, _ in large], expected)) is not None:
            return row
        wrong = [(s, limit) for s, limit in large if abs(_size(s, "received") - limit) > limit * _NEAR]
        if not wrong:
            s, limit = large[0]
            what = "norm of the update" if s.from_update else "norm of the applied gradient"
            note = " (gradients enlarged by the grader)" if observed is enlarged else ""
            return Row(
                "clipping", expected, f"{what} {s.received_norm:.4g}, true gradient {s.true_norm:.4g}{note}", True
            )
        s, limit = wrong[0]
        return _wrong_clip(observed, s, limit, expected)
    to_do = "Let the loop take at least one step that is not skipped."
    return Row("clipping", expected, "no step was applied whose gradient is known", False, to_do)


def _clipped_by_value(steps: Sequence[Step], expected: str) -> Row | None:
    """The row of a loop that limits elements and leaves a norm above max_norm."""
    for step in steps:
        norm = step.received_norm or 0.0
        if step.clip and step.clip.kind == "value" and norm > step.clip.limit * (1 + _NEAR):
            measured = f"{norm:.4g}: clip_grad_value_ limits each element to {step.clip.limit:g}, not the norm"
            return Row(
                "clipping", expected, measured, False, "Clip with clip_grad_norm_(model.parameters(), max_norm=1.0)."
            )
    return None


def _wrong_clip(run: Run, step: Step, limit: float, expected: str) -> Row:
    backward = run.backward_of(step)
    scale = backward.scale if backward else 1.0
    size, true = _size(step, "received"), _size(step, "true")
    if scale > 1 and abs(size * scale - limit) <= limit * _NEAR:
        measured = f"{size:.3g}, which is {limit:g} / {scale:g}: the scaled gradient was clipped"
        return Row("clipping", expected, measured, False, "Call scaler.unscale_(optimizer) before clip_grad_norm_.")
    if abs(size - true) <= true * _NEAR:
        to_do = "Call clip_grad_norm_(model.parameters(), max_norm=1.0) after scaler.unscale_(optimizer) and before scaler.step."
        return Row("clipping", expected, f"{size:.4g}: the gradient was not clipped", False, to_do)
    to_do = "Clip all parameters of the optimizer by their common norm, after unscale_ and before step."
    return Row("clipping", expected, f"{size:.4g}, true gradient {true:.4g}", False, to_do)


def _limit(step: Step) -> float:
    return step.clip.limit if step.clip else 1.0


def _size(step: Step, which: str) -> float:
    kind = "max" if step.clip and step.clip.kind == "value" else "norm"
    return float(getattr(step, f"{which}_{kind}") or 0.0)


# Task 3.


def _skipped_steps(runs: Sequence[Run], findings: Sequence[Finding]) -> list[Row]:
    plain, injected = runs[0], runs[1:]
    failed = next((run for run in runs if not run.fine), plain)
    rows = [run_row(failed), check_row(findings, LOOP_RULES), *loop_rows(plain, ("fp16", "bf16"), scaler=True)]
    if not failed.fine or not any(b.injected for run in injected for b in run.backwards):
        return rows
    scaled = all(row.passed for row in rows if row.name == "scaled-loss")
    rows += [_skip_row(injected), _count_row(runs)]
    if scaled and any(s.via_scaler for run in injected for s in run.steps):
        rows.insert(-1, _scale_row(injected))
    return rows


def _skip_row(injected: Sequence[Run]) -> Row:
    num = sum(b.injected for run in injected for b in run.backwards)
    hurt = [s for run in injected for s in run.steps if s.applied and (b := run.backward_of(s)) and not b.finite]
    broken = [s for run in injected for s in run.steps if not s.finite_weights]
    fine = not hurt and not broken
    measured = f"{num} injected, all skipped" if fine else f"{num} injected, {len(hurt)} applied to the weights"
    to_do = "Call scaler.step(optimizer), which skips such a step, instead of optimizer.step()."
    return Row("skip", "a step with an inf gradient is skipped", measured, fine, "" if fine else to_do)


def _scale_row(injected: Sequence[Run]) -> Row:
    falls = []
    for run in injected:
        scales = [s.scale_after for s in run.steps if s.scale_after is not None]
        first = next((b.scale for b in run.backwards if b.scaled), None)
        falls.append(first is not None and any(scale < first for scale in scales))
    fine = any(falls)
    to_do = "Call scaler.update() also after a step that was skipped: it lowers the scale."
    return Row(
        "scale", "the scale falls after an overflow", "it falls" if fine else "it does not", fine, "" if fine else to_do
    )


def _count_row(runs: Sequence[Run]) -> Row:
    counts = [(run.output, run.num_skipped) for run in runs]
    fine = prints_count(counts)
    truth = ", ".join(str(count) for _, count in counts)
    expected = "the printed count is the number of skipped steps"
    measured = f"{truth} skipped in three runs, {'each printed' if fine else 'not printed as such'}"
    to_do = "Compare scaler.get_scale() before and after update(): it is lower if the step was skipped. Print the count at the end."
    return Row("count", expected, measured, fine, "" if fine else to_do)


# Task 4.


def _unstable_layer(runs: Sequence[Run], findings: Sequence[Finding]) -> list[Row]:
    (run,) = runs
    rows = [run_row(run), check_row(findings, LOOP_RULES - {"HS123"})]
    for name in ("fp16", "bf16"):
        num = sum(b.compute == name for b in run.backwards)
        to_do = f"Train the model under autocast with dtype=torch.{'float16' if name == 'fp16' else 'bfloat16'}."
        rows.append(
            Row(
                name,
                f"the model trains in {name}",
                count_text(num, "backward pass", "backward passes"),
                num > 0,
                "" if num else to_do,
            )
        )
    if not all(row.passed for row in rows[2:]):
        return rows
    by_format = {name: [s for s in run.steps if run.compute_of(s) == name] for name in ("fp16", "bf16")}
    scaled = any(b.scaled for b in run.backwards if b.compute == "fp16")
    to_do = "Create a GradScaler for fp16: without it, fp16 fails for another reason than its range of activations."
    rows.append(
        Row(
            "scaled-loss",
            "fp16 trains with a GradScaler",
            "it does" if scaled else "no loss was scaled",
            scaled,
            "" if scaled else to_do,
        )
    )
    shared = loop_rows(run, ("fp16", "bf16"), scaler=False)
    rows += [
        row
        for row in shared
        if row.name in {"weights", "backward", "update"} or (row.name == "gradient" and not row.passed)
    ]
    if all(by_format.values()):
        same = bool({s.model for s in by_format["fp16"]} & {s.model for s in by_format["bf16"]})
        rows.append(Row("model", "the same model in both formats", "the same parameter shapes" if same else "different parameter shapes",
                        same, "" if same else "Train the same model in both formats."))  # fmt: skip
    rows.append(_layer_row(run))
    return rows


def _layer_row(run: Run) -> Row:
    expected = "the layer that overflows is named"
    bf16 = {name for layer in run.layers if layer.compute == "bf16" for name in layer.names}
    layers = [layer for layer in run.layers if layer.compute == "fp16" and not set(layer.names) & bf16]
    if not layers:
        measured = "no layer gave inf in fp16 and finite values in bf16"
        return Row("layer", expected, measured, False, "Use the model of the starter file: halfstep learn practice 4")
    names = {name for layer in layers for name in layer.names}
    names |= {name.rpartition(".")[2] for name in names if not name.rpartition(".")[2].isdecimal()}
    printed = named_layer(run.output, names, run.all_layers)
    truth = layers[0].names[0]
    if printed in names:
        return Row("layer", expected, f"{truth} overflows in fp16, and {printed} is printed", True)
    measured = (
        f"{printed} is printed, but {printed} only passes inf on"
        if printed
        else "no layer is printed as the unstable one"
    )
    to_do = (
        "Print the name of the first layer whose output is not finite although its input is (register_forward_hook)."
    )
    return Row("layer", expected, measured, False, to_do)


_JUDGES: dict[int, Callable[[Sequence[Run], Sequence[Finding]], list[Row]]] = {
    1: speed_rows,
    2: _clipping,
    3: _skipped_steps,
    4: _unstable_layer,
}
