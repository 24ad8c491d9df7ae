"""`halfstep rehearse` as a command: text, JSON, page, exit codes, mistakes."""

import json
from pathlib import Path

import pytest

from halfstep.cli import main

JOBS = Path(__file__).resolve().parents[1] / "rehearsal_jobs.py"


def run(capsys, *args):
    with pytest.raises(SystemExit) as exit_:
        main(["rehearse", *map(str, args)])
    out, err = capsys.readouterr()
    return exit_.value.code, out, err


def test_a_healthy_job_exits_with_0(capsys):
    """The proposal is plain fp16, and what was not observed is stated; at most 80 columns."""
    code, out, _ = run(capsys, f"{JOBS}:mlp", "--steps", 1, "--batch", 16)
    assert code == 0
    assert "no overflow or underflow predicted" in out
    assert "--precision 'fp16" in out
    assert "were not observed" in out.replace("\n  ", " ")
    assert max(map(len, out.splitlines())) <= 80


def test_predicted_trouble_exits_with_3_and_writes_the_page(capsys, tmp_path):
    """The layer is in the text and in the page, which has a heat map and no script."""
    page = tmp_path / "page.html"
    code, out, _ = run(capsys, f"{JOBS}:residual", "--steps", 1, "--batch", 16, "--html", page)
    assert code == 3
    assert "overflow   activation           blocks.1.fc2" in out
    assert "keep_fp32=blocks.1.fc2" in out
    assert max(map(len, out.replace(str(page), "page.html").splitlines())) <= 80
    html = page.read_text()
    assert "keep_fp32=blocks.1.fc2" in html
    assert "Heat map of the exponents of activations" in html
    assert "it overflows" in html
    assert "<script" not in html


def test_json_is_one_document(capsys):
    """Nothing but JSON on standard output; a policy without trouble exits with 0."""
    code, out, _ = run(
        capsys,
        f"{JOBS}:residual",
        "-p",
        "fp16,keep_fp32=blocks.1.fc2",
        "--steps",
        1,
        "--batch",
        16,
        "--json",
        "--set",
        "seed=1",
    )
    assert code == 0
    assert json.loads(out)["proposal"]["keep_fp32"] == ["blocks.1.fc2"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("nothing.py",), "The job file nothing.py does not exist"),
        (("-p", "fp61"), "Unknown precision 'fp61'"),
        (("-p", "fp32"), "fp16 and bf16 compute"),
        (("--steps", "0"), "steps=0"),
        (("--out", "x"), "--out has no effect without --confirm"),
        (("--html", "."), "cannot be written"),
        (("--set", "sed=1"), "Unknown setting 'sed'"),
    ],
)
def test_a_mistake_is_one_message(capsys, args, message):
    """Exit code 1 and no traceback."""
    code, out, err = run(capsys, *args)
    assert (code, out) == (1, "")
    assert err.startswith("halfstep: ")
    assert message in err


@pytest.mark.slow
def test_confirm_compares_the_proposal_with_fp16_and_fp32(capsys, tmp_path):
    """Plain fp16 skips every step and the proposal none; the comparison is in the JSON."""
    code, out, _ = run(
        capsys, f"{JOBS}:residual", "--steps", 2, "--batch", 16, "--confirm", "--out", tmp_path / "run", "--json"
    )
    assert code == 3
    data = json.loads(out)
    assert data["proposal"]["policy"] in json.dumps(data["comparison"])
    assert "blocks.1.fc2 overflowed in the forward pass" in json.dumps(data["comparison"])
    assert (tmp_path / "run" / "comparison.json").exists()
