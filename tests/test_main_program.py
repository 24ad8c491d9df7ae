"""The program itself: Ctrl-C ends it with one line and exit code 130, from its first import on; it ends at once."""

import subprocess
import sys

import pytest

import halfstep.__main__ as module

# A finder that receives Ctrl-C when a module is looked up, as a reader does who presses it during the imports.
PROGRAM = """
import os, runpy, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores it

class Presses:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            try:
                os.kill(os.getpid(), signal.SIGINT)
                for _ in range(1000): pass  # the handler runs between two instructions
            except KeyboardInterrupt:
                {reaction}

sys.meta_path.insert(0, Presses())
sys.argv = ["halfstep", "probe"]
runpy.run_module("halfstep", run_name="__main__", alter_sys=True)
"""


def run_program(module, reaction):
    code = PROGRAM.format(module=module, reaction=reaction)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("module", ["click", "halfstep.cli.probe"])
@pytest.mark.parametrize("reaction", ["raise", "raise SystemError('initialization failed')"])
def test_an_interrupted_import_is_one_line(module, reaction):
    """Exit code 130, also where code of the import replaced the interrupt by an exception of its own."""
    done = run_program(module, reaction)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "halfstep: interrupted.\n")


def test_an_error_without_an_interrupt_is_not_called_one():
    """What fails on its own keeps its type."""
    code = "import sys; sys.modules['click'] = None; from halfstep.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ModuleNotFoundError" in done.stderr


def test_the_exit_code_is_130_where_python_would_end_by_the_signal(tmp_path):
    """`python -m` ends by SIGINT once C code has run a string that was interrupted, as torch's import does."""
    (tmp_path / "program.py").write_text(
        "import ctypes\n"
        "import halfstep.cli\n"
        "from halfstep.__main__ import main\n"
        "run = ctypes.pythonapi.PyRun_String\n"
        "run.restype, run.argtypes = ctypes.py_object, [ctypes.c_char_p, ctypes.c_int, ctypes.py_object, ctypes.py_object]\n"
        "halfstep.cli.main = lambda: run(b'raise KeyboardInterrupt', 257, {}, {})\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-m", "program"], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (130, "halfstep: interrupted.\n")


@pytest.mark.parametrize(("loaded", "codes"), [({}, [3]), ({"torch": None}, [])])
def test_python_is_not_shut_down_step_by_step_unless_torch_is_loaded(monkeypatch, loaded, codes):
    """The process ends at once with the code of the command; what torch started is ended by Python."""
    exits = []
    monkeypatch.setattr(module, "_endings", [3])
    monkeypatch.setattr(module.os, "_exit", exits.append)
    monkeypatch.setattr(module.sys, "modules", loaded)
    module._exit()
    assert exits == codes


def test_a_stream_that_cannot_be_written_is_left_to_python(monkeypatch):
    """Python reports it and exits with its own code."""

    class Full:
        def flush(self):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_endings", [0])
    monkeypatch.setattr(module.os, "_exit", lambda code: pytest.fail("the output is lost"))
    monkeypatch.setattr(module.sys, "modules", {})
    monkeypatch.setattr(module.sys, "stdout", Full())
    module._exit()
