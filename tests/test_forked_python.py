"""A forked program behaves as one with its own interpreter: what it reads, prints, starts and ends with."""

import json
import os
import signal
import subprocess
import sys

import pytest

from forked_python import PYTHON, programs

FACTS = """
import json, os, sys
print(json.dumps([sys.argv, __name__, __file__, sys.path[0], os.getcwd(), os.environ["WORD"], sys.stdin.read(), sys.flags.optimize]))
os.write(int(sys.argv[1]), b"by number")
"""
ENDS = {
    "return": "pass",
    "number": "raise SystemExit(7)",
    "message": "raise SystemExit('no')",
    "exception": "raise ValueError('no')",
    "interrupt": "raise KeyboardInterrupt",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "at exit": "import atexit; atexit.register(print, 'last')",
    "threads": "import threading, time; threading.Thread(target=lambda: (time.sleep(.1), print('late'))).start()",
}


def run(python, *arguments, **options):
    return subprocess.run([str(python), *map(str, arguments)], capture_output=True, text=True, check=False, **options)


@pytest.mark.parametrize("module", [False, True])
def test_a_program_has_its_arguments_files_folder_and_variables(module, tmp_path):
    """As a file and as a module, with stdin and a pipe that it gets by number."""
    (tmp_path / "facts.py").write_text(FACTS)
    outputs = []
    for python in (PYTHON, programs() / "python"):
        reader, writer = os.pipe()
        words = ["-m", "facts"] if module else ["facts.py"]
        variables = os.environ | {"WORD": "here", "OMP_NUM_THREADS": "1"}
        done = run(python, *words, writer, "--x", cwd=tmp_path, env=variables, input="text", pass_fds=[writer])
        os.close(writer)
        with os.fdopen(reader) as pipe:
            assert pipe.read() == "by number", done.stderr
        facts = json.loads(done.stdout)
        facts[0][1] = ""  # the number of the pipe
        outputs.append(facts)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("name", ENDS)
def test_a_program_ends_as_python_ends_it(name, tmp_path):
    """The same exit code or signal, the same stdout and the same last line of stderr."""
    program = tmp_path / "program.py"
    program.write_text(ENDS[name])
    real, forked = (run(python, program) for python in (PYTHON, programs() / "python"))
    assert (forked.returncode, forked.stdout) == (real.returncode, real.stdout)
    assert forked.stderr.splitlines()[-1:] == real.stderr.splitlines()[-1:]


@pytest.fixture
def heard_interrupts():
    """Programs that are started hear Ctrl-C also where the tests run in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard_interrupts")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_reaches_the_program(number, tmp_path):
    """Sent to the process that was started, which ends by it; the program does not outlive it."""
    program = tmp_path / "waits.py"
    program.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n")
    command = [str(programs() / "python"), str(program)]
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=variables) as process:
        assert int(process.stdout.readline()) != process.pid
        process.send_signal(number)
        assert process.stdout.read() == b""  # at its end, which the program's is: nobody else has the pipe
    assert process.returncode == -number


def test_a_program_that_needs_its_own_interpreter_gets_it(tmp_path):
    """Options of Python, and variables that torch reads when it is imported."""
    code = "import os; print(os.getppid())"
    (tmp_path / "parent.py").write_text(code)
    own = [
        run(programs() / "python", "-c", code),
        run(programs() / "python", tmp_path / "parent.py", env=os.environ | {"OMP_NUM_THREADS": "3"}),
    ]
    assert [int(done.stdout) for done in own] == [os.getpid()] * 2
    forked = run(programs() / "python", tmp_path / "parent.py", env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert int(forked.stdout) != os.getpid()


@pytest.mark.usefixtures("forked")
def test_what_a_program_starts_is_forked_too(tmp_path):
    """`sys.executable` is the same in the program, and torch's launcher uses it."""
    (tmp_path / "shows.py").write_text("import sys; print(sys.executable)")
    done = run(sys.executable, tmp_path / "shows.py")
    assert done.stdout.strip() == sys.executable == str(programs() / "python")
