"""Messages of Halfstep arrive once, wherever logging goes."""

import logging
import subprocess
import sys

from halfstep.events import log_info, log_warning


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
