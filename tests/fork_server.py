"""Forks Python programs from one interpreter that has imported torch: importing it costs seconds, and most programs need it.

    python fork_server.py SOCKET [MODULE ...]

The modules are imported as well. `fork_client.py` connects once for each program and sends its arguments, variables, folder and
open files; forked_python.py starts both. The server ends with its stdin.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path

HIGH = 512  # received files wait above the numbers that a program has them at
POLL_SECONDS = 0.02
MOST_FILES = 64  # of a program
END_SECONDS = 2.0  # for programs whose clients have ended


def receive(connection):
    """The request, and its files by the number that the program has them at."""
    data, descriptors, _, _ = socket.recv_fds(connection, 16, MOST_FILES)
    size = int(data)
    with connection.makefile("rb", buffering=0) as stream:
        text = b""
        while len(text) < size:
            text += stream.read(size - len(text))
    request = json.loads(text)
    return request, dict(zip(request["files"], descriptors, strict=True))


def adopt(request, files):
    """Make this process what the client's would be: files, signals, folder, variables and arguments."""
    os.setsid()  # the client forwards signals; those of its terminal would arrive twice
    waiting = {number: os.dup2(descriptor, HIGH + number) for number, descriptor in files.items()}
    for descriptor in files.values():
        os.close(descriptor)
    for number, descriptor in waiting.items():
        os.dup2(descriptor, number)
        os.close(descriptor)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        ordinary = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in request["ignored"] else ordinary)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["variables"])
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    sys.executable = request["executable"]  # what this program starts is forked, too
    if "-u" in request["options"] or os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)


def become(request):
    """Run the program as `python ...` does."""
    module, (name, *_) = request["module"], request["arguments"]
    sys.argv = request["arguments"]
    first = [request["folder"] if module else str(Path(name).resolve().parent)]
    added = [os.path.abspath(part) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]  # noqa: PTH100
    sys.path[:] = [
        *([] if "-P" in request["options"] else first),
        *added,
        *(part for part in sys.path[1:] if part not in added),
    ]
    if module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return
    path = os.path.abspath(name)  # noqa: PTH100 - Path.resolve() would follow links
    code = compile(Path(path).read_bytes(), path, "exec")
    main = vars(sys.modules["__main__"])
    kept = {key: value for key, value in main.items() if key.startswith("__")}
    main.clear()
    main.update(kept, __doc__=None, __file__=path)
    exec(code, main)


def watch(connection, pid):
    """Report the exit of the program to its client; a client that is gone was killed, and so is the program."""
    connection.sendall(b"%d\n" % pid)
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with contextlib.suppress(OSError):
                connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
            os._exit(0)
        if select.select([connection], [], [], POLL_SECONDS)[0]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
                os.kill(pid, signal.SIGKILL)
            os._exit(0)


def reap(seconds=0.0):
    """Wait for processes that have ended, or are about to: their processor time counts only then."""
    end = time.monotonic() + seconds
    with contextlib.suppress(ChildProcessError):  # none is left
        while os.waitpid(-1, os.WNOHANG)[0] or time.monotonic() < end:
            time.sleep(0.001)


def serve(path):
    """The request of the program that this process is to become; the server itself returns None at its end."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            reap(END_SECONDS)
            return None
        reap()
        connection, _ = listener.accept()
        if os.fork():
            connection.close()
            continue
        listener.close()
        request, files = receive(connection)
        pid = os.fork()
        if pid == 0:
            connection.close()
            adopt(request, files)
            return request
        for descriptor in files.values():
            os.close(descriptor)
        watch(connection, pid)


def run(request):
    """The exit code of a program; what Python prints for an exception that it does not catch is printed."""
    try:
        become(request)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def main(path, *imports):
    """Serve until stdin ends, or in a forked process run a program."""
    for name in imports:
        importlib.import_module(name)
    gc.freeze()  # a collection writes to every object, and so copies the memory that is shared
    request = serve(path)
    code = 0 if request is None else run(request)
    # As forked processes of multiprocessing end: to finalize all that was imported takes a second.
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads it
            stream.flush()
    os._exit(code & 255)


if __name__ == "__main__":
    # As a module of its own: a program takes the place of this one, and its names.
    importlib.import_module("fork_server").main(*sys.argv[1:])
