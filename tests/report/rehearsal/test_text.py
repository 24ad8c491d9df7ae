"""A rehearsal as text and as the values of its page."""

import dataclasses

import pytest

import rehearsal_jobs as jobs
from halfstep.rehearsal import rehearse
from halfstep.rehearsal.proposal import Proposal, Risk, Trouble
from halfstep.report.rehearsal.page import page_values
from halfstep.report.rehearsal.text import as_text


@pytest.fixture(scope="module")
def rehearsal():
    return rehearse(jobs.mlp, steps=1, batch=16)


def test_long_names_and_lists_fit_80_columns(rehearsal):
    """Names are shortened at their beginning, lists end with a count, reasons wrap."""
    name = "model.encoder.layers.11.attention.output.projection.dense"
    troubles = tuple(
        Trouble(f"{name}{i}", "activation gradient", "underflow", "linear", 1e-9, 0.5, name) for i in range(20)
    )
    proposal = Proposal("bf16", (), None, tuple(f"keep {t.module} in fp32. {t}" for t in troubles))
    text = as_text(
        dataclasses.replace(
            rehearsal, troubles=troubles, proposal=proposal, risks=(Risk(name, "activation", 1.25),) * 7
        )
    )
    assert max(map(len, text.splitlines())) <= 80
    assert "20 tensors out of range" in text
    assert "and 8 more (--json lists all)" in text
    assert "2^1.2 below the limit" in text
    assert "and 12 more reasons" in text


def test_every_row_is_in_the_page(rehearsal):
    """A heat map per kind, and all rows with their errors in six formats."""
    values = page_values(rehearsal)
    assert {m["kind"] for m in values["heat"]} == {r.kind for r in rehearsal.rows}
    errors = values["tables"][-1]
    assert len(errors.rows) == len(rehearsal.rows)
    assert errors.heads[-6:] == ("fp16", "bf16", "e4m3", "e5m2", "mxfp8", "nvfp4")
    assert "not observed" in values["observed"]
