"""`halfstep plan` at the command line."""

import json

import pytest
from click.testing import CliRunner

from halfstep.cli import cli

FIELDS = {"precision", "batch", "peak_bytes", "breakdown", "fits", "min_gpus"}


def run(*args):
    """The command, in this process."""
    return CliRunner().invoke(cli, ["plan", *args])


def test_digits_is_planned_by_default():
    """Without a target the embedded job is planned, and the table has its causes."""
    result = run("--memory", "8GiB", "-p", "fp32", "-p", "bf16")
    assert result.exit_code == 0, result.output
    assert "Plan for digits, batch 64" in result.output
    for word in ("activations", "workspaces", "fewest GPUs", "What is uncertain"):
        assert word in result.output


def test_json_has_the_promised_fields():
    """Each entry has precision, batch, peak_bytes, breakdown, fits and min_gpus, and the causes add up."""
    result = run("--memory", "8GiB", "-p", "bf16-lean", "--batch", "32", "--json")
    data = json.loads(result.stdout)
    (entry,) = data["entries"]
    assert entry.keys() >= FIELDS
    assert entry["batch"] == 32
    assert entry["fits"] is True
    assert entry["min_gpus"] == 1
    assert sum(entry["breakdown"].values()) == entry["peak_bytes"]


def test_html_page_is_written(tmp_path):
    """--html writes one page without scripts or links to elsewhere."""
    page = tmp_path / "plan.html"
    assert run("--memory", "8GiB", "-p", "fp32", "--html", str(page)).exit_code == 0
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert "<script" not in text
    assert "http" not in text


def test_find_with_a_memory_size():
    """--find answers for a memory size without a GPU, and says that no trial was made."""
    result = run("--find", "--memory", "2GiB", "-p", "fp32")
    assert result.exit_code == 0, result.output
    assert "no trial was made" in result.output


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--gpus", "none"), "--gpus"),
        (("--gpus", "\N{SUPERSCRIPT TWO}"), "--gpus"),
        (("--html", "no/such/folder/plan.html"), "folder that exists"),
        (("--html", "."), "folder that exists"),
        (("--find", "--batch", "8"), "--find looks for the batch itself"),
        (("--find", "--gpu", "A100"), "leave out --gpu"),
        (("--memory", "lots"), "is no size"),
        (("--gpu", "A1000000"), "A1000000"),
    ],
)
def test_bad_settings_are_explained(args, said):
    """What cannot work together is refused with the way out."""
    result = run(*args)
    assert result.exit_code == 1
    assert said in str(result.exception)


def test_find_shows_what_it_found_where_a_usual_precision_cannot_be(tmp_path):
    """An optimizer without a lean form still gets its answer in bf16."""
    (tmp_path / "job.py").write_text(
        "import torch, halfstep\n"
        "job = halfstep.Job(model=lambda: torch.nn.Linear(4, 2), data=lambda batch_size: [torch.ones(batch_size, 4)],\n"
        "    loss=lambda model, batch: model(batch).sum(), optimizer=lambda params: torch.optim.RMSprop(params))\n"
    )
    result = run(str(tmp_path / "job.py"), "--find", "--memory", "2GiB")
    assert result.exit_code == 0, result.output
    assert "Largest micro-batch in bf16:" in result.output
    assert "bf16-lean:" not in result.output
