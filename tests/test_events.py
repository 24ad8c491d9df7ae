"""Messages of Halfstep arrive once, wherever logging goes."""

import io
import logging
import subprocess
import sys

import pytest

from halfstep.events import fold, log_info, log_once, log_warning, message_text, terminal_width


def test_said_things_reach_a_configured_log(caplog):
    """Where logging is set up, say and warn arrive there at their levels."""
    with caplog.at_level(logging.INFO, logger="halfstep"):
        log_info("chosen")
        log_warning("dropped")
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [("INFO", "chosen"), ("WARNING", "dropped")]


def test_said_things_reach_stderr_where_nobody_set_up_logging():
    """Without logging a message goes to stderr; with logging set up it does not appear twice."""
    plain = "from halfstep.events import log_info; log_info('chosen')"
    configured = f"import logging; logging.basicConfig(level='INFO'); {plain}"
    for code in (plain, configured):
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert run.stderr.count("chosen") == 1


def test_what_a_setup_reports_is_logged_once_per_process(caplog):
    """The same content is logged once, other content and warnings always, and a suppressed message is not used up."""
    with caplog.at_level(logging.WARNING, logger="halfstep"):
        log_once("chosen")
    with caplog.at_level(logging.INFO, logger="halfstep"):
        for message in ("chosen", "chosen", "chosen otherwise"):
            log_once(message)
        for _ in range(2):
            log_warning("dropped")
    assert [r.getMessage() for r in caplog.records] == ["chosen", "chosen otherwise", "dropped", "dropped"]


@pytest.mark.parametrize("order", ["set first", "set after import"])
def test_a_level_that_the_program_set_stays(order):
    """A level set before or after `import halfstep` is not reset when the logger is first used."""
    lines = ["import logging; logging.getLogger('halfstep').setLevel('ERROR')", "import halfstep"]
    code = "\n".join([*(lines if order == "set first" else lines[::-1]), "halfstep.HalfstepError"])
    code += "\nfrom halfstep.events import log_info, log_warning, logger\nlog_info('chosen'); log_warning('dropped')"
    code += "\nassert logger.level == logging.ERROR"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stderr == ""


def test_a_handler_on_the_logger_itself_replaces_stderr():
    """A program that attaches its own handler to the logger reads every message once."""
    code = "import logging, sys; logging.getLogger('halfstep').addHandler(logging.StreamHandler(sys.stdout))\n"
    code += "from halfstep.events import log_info; log_info('chosen')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (run.stdout, run.stderr) == ("chosen\n", "")


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self):
        return True


def test_a_message_is_folded_at_words_on_a_terminal(monkeypatch):
    """No line is wider than the terminal, and the rows of a table continue below their second column."""
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys, "stderr", Terminal())
    text = message_text(
        "truth table of the run, "
        + "word " * 12
        + "\n  compute        fp32 in 12 of 12 products on this small processor"
    )
    lines = text.splitlines()
    assert max(map(len, lines)) <= 60
    assert lines[0].startswith("halfstep: truth table")
    assert lines[1].startswith("  word")
    assert lines[-1] == " " * 17 + "processor"
    assert text.endswith("\n")


def test_a_message_is_one_line_in_a_file(monkeypatch):
    """A log that is searched by line is not folded, whatever COLUMNS is."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert terminal_width(sys.stderr) is None
    assert message_text("word " * 30 + "end") == "halfstep: " + "word " * 30 + "end\n"


def test_folding_keeps_commands_whole():
    """Neither an option nor a path is broken at its hyphens, even if it is wider than the terminal."""
    path = "/data/a-very-long-name/of-a-directory/with-many-parts"
    assert fold(f"pass --write-baseline {path}", 40, 2) == f"pass --write-baseline\n  {path}"
    assert fold("", 40, 2, "halfstep: ") == "halfstep: "
