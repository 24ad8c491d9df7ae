"""Wrong scripts are fixed, checked again and run: on the CPU, with an active scaler, next to their wrong form."""

import pytest

from fix_runs import fix_text, run, same_with_and_without_scaling
from halfstep.check.registry import all_rules
from wrong_scripts import WRONG

SEVERITIES = {rule.code: rule.severity for rule in all_rules()}


@pytest.mark.parametrize(("codes", "text"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_a_fixed_script_runs_and_is_cured(codes, text):
    """`--fix` cures what it promises, causes no finding, and the script runs; one that it cannot cure still runs."""
    done = fix_text(text)
    assert codes <= set(done.applied)
    assert not codes & set(done.after)
    new = [code for code in done.after if done.after.count(code) > done.before.count(code)]
    assert [code for code in new if SEVERITIES[code] != "advice"] == []
    run(done.text)
    if codes & {"HS101", "HS102", "HS104"}:
        assert same_with_and_without_scaling(done.text)


@pytest.mark.parametrize("text", [text for name, _, text in WRONG], ids=[row[0] for row in WRONG])
def test_unsafe_fixes_do_not_break_these_scripts_either(text):
    """With `--unsafe-fixes` the scripts run as well."""
    done = fix_text(text, unsafe=True)
    if done.applied:
        run(done.text)


@pytest.mark.parametrize(
    "text",
    [text for name, codes, text in WRONG if codes & {"HS102", "HS104"} or not codes],
    ids=[name for name, codes, _ in WRONG if codes & {"HS102", "HS104"} or not codes],
)
def test_a_script_without_a_fix_is_left_with_its_finding(text):
    """The finding stays where no fix is offered: nothing is silenced."""
    done = fix_text(text)
    assert set(done.before) - set(done.applied) == set(done.after)
