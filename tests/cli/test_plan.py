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
    """Without a target the embedded job is planned, and the table has its categories."""
    result = run("--memory", "8GiB", "-p", "fp32", "-p", "bf16")
    assert result.exit_code == 0, result.output
    assert "Plan for digits, batch 64" in result.output
    for word in ("activations", "workspaces", "min GPUs", "Uncertainty"):
        assert word in result.output


def test_json_has_the_promised_fields():
    """Each entry has precision, batch, peak_bytes, breakdown, fits and min_gpus, and the categories add up."""
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
    """--find answers for a memory size without a GPU, and reports that nothing was tried."""
    result = run("--find", "--memory", "2GiB", "-p", "fp32")
    assert result.exit_code == 0, result.output
    assert "predicted only, not tried" in result.output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--gpus", "none"), "--gpus"),
        (("--gpus", "\N{SUPERSCRIPT TWO}"), "--gpus"),
        (("--html", "no/such/folder/plan.html"), "existing directory"),
        (("--html", "."), "existing directory"),
        (("--find", "--batch", "8"), "--find determines the batch size itself"),
        (("--find", "--gpu", "A100"), "remove --gpu"),
        (("--find", "--epochs", "3", "--bandwidth", "5"), "remove --epochs, --bandwidth"),
        (("--find", "--gpus", "8"), "one --strategy and --gpus N"),
        (("--find", "--strategy", "fsdp", "--strategy", "ddp", "--gpus", "8"), "one --strategy"),
        (("--rate", "5"), "without --epochs"),
        (("--record", "x.json"), "without --epochs"),
        (("--price", "5"), "without --epochs"),
        (("--epochs", "5"), "never guessed"),
        (("--epochs", "5", "--rate", "5", "--record", "x.json"), "either"),
        (("--strategy", "fsd", "--memory", "8GiB"), "fsdp"),
        (("--memory", "lots"), "lots"),
        (("--gpu", "A1000000"), "A1000000"),
    ],
)
def test_bad_settings_are_explained(args, message):
    """Options that cannot be used raise an error that explains the alternative."""
    result = run(*args)
    assert result.exit_code == 1
    assert message in str(result.exception)


def test_find_skips_a_default_precision_that_does_not_apply(tmp_path):
    """An optimizer whose masters contradict the lean preset still gets its answer in bf16."""
    (tmp_path / "job.py").write_text(
        "import torch, halfstep\n"
        "job = halfstep.Job(model=lambda: torch.nn.Linear(4, 2), data=lambda batch_size: [torch.ones(batch_size, 4)],\n"
        "    loss=lambda model, batch: model(batch).sum(), optimizer=lambda params: halfstep.optim.AdamW(params, master='fp32'))\n"
    )
    result = run(str(tmp_path / "job.py"), "--find", "--memory", "2GiB")
    assert result.exit_code == 0, result.output
    assert "Largest micro-batch in bf16:" in result.output
    assert "bf16-lean:" not in result.output


def test_gpu_hours_of_given_rates():
    """--epochs with --rate prints hours and cost of the planned precisions, and marks those without a rate."""
    words = ("--memory", "8GiB", "-p", "fp32", "-p", "bf16", "--epochs", "90", "--rate", "bf16=2", "--price", "3")
    result = run(*words, "--examples", "7200")
    assert result.exit_code == 0, result.output
    assert "GPU-hours for 90 epochs of 7,200 examples" in result.output
    (line,) = [line for line in result.output.splitlines() if "--rate" in line]
    assert line.split()[:3] == ["bf16", "2.0", "90.0"]
    assert "270.00" in line
    assert "no rate" in result.output
    data = json.loads(run(*words, "--json").stdout)["hours"]  # with the digits' own number of examples
    assert data["precisions"]["bf16"]["gpu_hours"] == pytest.approx(90 * data["examples"] / 2 / 3600)
    assert data["precisions"].keys() == {"bf16"}


def test_find_on_several_gpus():
    """--find with a strategy and a number of GPUs predicts the micro-batch of each."""
    result = run("--find", "--memory", "2GiB", "-p", "fp32", "--strategy", "fsdp", "--gpus", "4")
    assert result.exit_code == 0, result.output
    assert "on each of 4 GPUs with fsdp" in result.output


def test_html_page_has_the_tables_of_several_gpus(tmp_path):
    """Communication and hours are on the page as well."""
    page = tmp_path / "plan.html"
    words = ("--memory", "8GiB", "-p", "fp32", "--gpus", "4", "--epochs", "1", "--rate", "5", "--html", str(page))
    assert run(*words).exit_code == 0
    text = page.read_text()
    assert "Communication, predicted" in text
    assert "On all 4 GPUs" in text
    assert "GPU-hours" in text
