"""Messages of Halfstep arrive once, wherever logging goes."""

import logging
import subprocess
import sys

import pytest

from halfstep.events import log_info, log_once, log_warning


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
