"""Task 5: the reader's explanation, compared with an experiment that runs here.

The predictions are compared with the outcome of the experiment. Of the explanation it is checked that the three facts which the
experiment shows are in it, in any common wording, and that it claims nothing that the formats contradict. No text is understood here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from halfstep.learning.experiment import Proof, run_experiment
from halfstep.learning.practice.loop import run_row
from halfstep.learning.practice.record import Row, Run

__all__ = ["explanation_rows"]

_FEWEST_WORDS = 15
_FP16, _BF16 = r"\b(?:fp16|float16|half(?: precision)?)\b", r"\b(?:bf16|bfloat16)\b"
_SAME = r"(?:(?!\bfp16|\bfloat16|bf16|bfloat16|fp32|float32)[^.;])*"  # in the same sentence, about the same format
# Predictions of the starter -> the start of the experiment's reading.
_PREDICTIONS = {
    "FP32_LOSS_FALLS": "fp32: loss",
    "FP16_LOSS_FALLS": "fp16, no scaler: loss",
    "FP16_WITH_SCALER_LOSS_FALLS": "fp16 + GradScaler: loss",
    "BF16_LOSS_FALLS": "bf16, no scaler: loss",
}
_FALLS = 2.0  # the loss is at least halved
_ZERO = r"(?:0|zero|zeros|nothing)"
_UNDERFLOW = re.compile(
    rf"underflow|flush\w*|vanish\w*|rounded? (?:down )?to {_ZERO}|(?:become|becomes|turn\w*|go(?:es)?|are|is|lost) (?:in)?(?:to )?(?:exactly )?{_ZERO}\b|too small"
    r"|(?:below|smaller than|under) (?:the )?(?:smallest|minimum|min|lowest|2\*\*|2\^|6e-|3e-|5\.96e|2\.98e)",
    re.IGNORECASE,
)
_SCALES = re.compile(
    r"multipl\w*|scal(?:es|ed|ing|e)\b (?:up )?(?:the |its |our )?(?:loss|gradient)|loss[- ]scal\w*|larger|shifts?|moves?|lifts?|raises?",
    re.IGNORECASE,
)
_DIVIDES = re.compile(
    r"divid\w*|unscal\w*|scal\w+ (?:them |it |the gradients )?(?:back|down)|undo\w*|undone|invers\w*|remov\w* the (?:scale|factor)",
    re.IGNORECASE,
)
_RANGE = re.compile(r"exponent|\brange\b|8[- ]bit exp|as (?:small|wide) (?:as|values)", re.IGNORECASE)
# Claims that the formats contradict, by sentence: what is claimed -> the truth.
_WRONG = (
    (rf"{_BF16}{_SAME}\b(?:more|higher|better|greater|finer) (?:\w+ )?(?:precis\w+|accura\w+|mantissa|fraction|resolution)",
     "bf16 is the coarser format: 7 fraction bits, fp16 has 10"),
    (rf"{_FP16}{_SAME}\b(?:same|larger|wider|bigger|full|more)\b (?:\w+ )?range",
     "fp16 has the narrow range: up to 65504, and down to 6e-8"),
    (rf"{_BF16}{_SAME}\b(?:smaller|narrower|narrow|limited|less) (?:\w+ )?range", "bf16 has the range of fp32"),
    (r"(?:scaler|scaling)[^.;]*\b(?:faster|speeds? up|saves? memory|less memory)", "the scaler saves neither time nor memory"),
    (rf"{_BF16}{_SAME}\b(?:needs|requires|must have) (?:a |the )?(?:grad)?scal", "bf16 gradients do not underflow here without one"),
)  # fmt: skip


def explanation_rows(path: Path, text: str, runs: Sequence[Run]) -> tuple[Row, ...]:
    """The rows of task 5; without a run, the file itself is the explanation."""
    rows: list[Row] = []
    explanation, predictions = text, {}
    if runs:
        run = runs[0]
        rows.append(run_row(run))
        explanation = next((v for k, v in run.variables.items() if "EXPLANATION" in k), "") or run.output
        predictions = {name: run.variables[name] for name in _PREDICTIONS if name in run.variables}
    elif path.suffix == ".py":
        rows.append(Row("code", "the file is valid Python, or a text file", "it is neither", False,
                        "Correct the syntax error, or pass the explanation as a .txt or .md file."))  # fmt: skip
        return tuple(rows)
    proof = run_experiment("scaler-by-format")
    rows += _prediction_rows(predictions, proof)
    words = len(explanation.split())
    enough = words >= _FEWEST_WORDS
    rows.append(Row("explanation", f"at least {_FEWEST_WORDS} words", str(words), enough,
                    "" if enough else "Write the explanation as a string EXPLANATION, or print it."))  # fmt: skip
    if enough:
        rows += _claim_rows(explanation, proof)
    return tuple(rows)


def _prediction_rows(predictions: dict[str, str], proof: Proof) -> list[Row]:
    rows = []
    for name, answer in predictions.items():
        reading = next(r for r in proof.readings if r.label.startswith(_PREDICTIONS[name]))
        first, last = (float(value) for value in str(reading).split(" -> "))
        truth = "yes" if first / last > _FALLS else "no"
        right = answer.strip().casefold() in {truth, truth[0]}
        label = name.casefold().replace("_", "-")
        if not answer.strip():
            rows.append(Row(label, "a prediction: yes or no", "none", False, "Predict before you read the outcome."))
            continue
        measured = f"the loss went {reading}: {truth}"
        rows.append(Row(label, f"your prediction: {answer.strip()}", measured, right,
                        "" if right else f"Predict yes or no; here it was {truth}. halfstep learn choice shows the experiment."))  # fmt: skip
    return rows


def _claim_rows(text: str, proof: Proof) -> list[Row]:
    zero = {r.label.partition(":")[0]: str(r) for r in proof.readings if "gradients that are 0" in r.label}
    rows = [
        _claim("underflow", "small gradients underflow to 0 in fp16", _UNDERFLOW, text, f"gradients that are 0 in fp16: {zero['fp16, no scaler']}",
               "Explain what happens to gradients that are too small for fp16."),
        _claim("scaling", "the scaler multiplies the loss, and so the gradients", _SCALES, text, f"gradients that are 0 with a scaler: {zero['fp16 + GradScaler']}",
               "Explain what the scaler does before backward."),
        _claim("unscaling", "they are divided by the scale before the step", _DIVIDES, text, "the loss falls as in fp32 with a scaler",
               "Explain what the scaler does between backward and the update."),
        _claim("range", "bf16 has the exponent range of fp32", _RANGE, text, f"gradients that are 0 in bf16: {zero['bf16, no scaler']}",
               "Explain by which property bf16 keeps small gradients."),
    ]  # fmt: skip
    wrong = [truth for pattern, truth in _WRONG if _is_claimed(pattern, text)]
    rows.append(Row("contradictions", "nothing that the formats contradict", "; ".join(wrong) or "nothing", not wrong,
                    "Correct that sentence; halfstep learn formats shows the numbers." if wrong else ""))  # fmt: skip
    return rows


def _claim(name: str, expected: str, pattern: re.Pattern[str], text: str, shown: str, to_do: str) -> Row:
    stated = pattern.search(text) is not None
    return Row(
        name, f"stated: {expected}", f"{'stated' if stated else 'not stated'}; {shown}", stated, "" if stated else to_do
    )


def _is_claimed(pattern: str, text: str) -> bool:
    for sentence in re.split(r"(?<=[.;!?])\s+|\n\n", text):
        match = re.search(pattern, " ".join(sentence.split()), re.IGNORECASE)
        if match and not re.search(
            r"\b(?:not|no|never|less|lower|than|unlike|n't)\b|n't", match.group(), re.IGNORECASE
        ):
            return True
    return False
