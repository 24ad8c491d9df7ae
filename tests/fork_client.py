"""Stands for `python` in tests: has a program forked by `fork_server.py`, and behaves as that program's process.

    SOCKET PYTHON EXECUTABLE REPEATED [OPTION ...] -m MODULE [ARGUMENT ...]
    SOCKET PYTHON EXECUTABLE REPEATED [OPTION ...] PROGRAM.py [ARGUMENT ...]

EXECUTABLE is the name that this was started as. Started by forked_python.py with an interpreter that imports nothing else. With
other options, or with variables that are read while Python or torch starts, the real PYTHON runs instead; REPEATED is JSON of
the values that the server has started with.
"""

import json
import os
import signal
import socket
import sys

OPTIONS = ("-u", "-P")
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def parse(words):
    """Options, whether a module is run, and its name or the program's with the arguments; None if Python must read them."""
    options = []
    while words and words[0] in OPTIONS:
        options.append(words.pop(0))
    if words[:1] == ["-m"] and len(words) > 1:
        return options, True, words[1:]
    if words and not words[0].startswith("-"):
        return options, False, words
    return None


def open_files(excluded):
    """The numbers of this process's open files."""
    numbers = []
    for name in os.listdir("/dev/fd"):  # noqa: PTH208 - this program imports no more than it needs
        try:
            os.fstat(int(name))
        except OSError:  # the listing itself
            continue
        numbers.append(int(name))
    return sorted(set(numbers) - {excluded})


def request(server, executable, options, module, words):
    """Send what the program needs."""
    files = open_files(server.fileno())
    ignored = [int(number) for number in FORWARDED if signal.getsignal(number) == signal.SIG_IGN]
    text = json.dumps(
        {
            "executable": executable,
            "options": options,
            "module": module,
            "arguments": words,
            "variables": dict(os.environ),
            "folder": os.getcwd(),  # noqa: PTH109
            "files": files,
            "ignored": ignored,
        }
    ).encode()
    socket.send_fds(server, [b"%-16d" % len(text)], files)
    server.sendall(text)
    return files, ignored


def main():
    """Wait for the program, forward signals to it, and end as it ends."""
    path, python, executable, repeated, *words = sys.argv[1:]
    parsed = parse(list(words))
    if parsed is None or any(os.environ.get(name) != value for name, value in json.loads(repeated).items()):
        os.execv(python, [python, *words])
    pids, early = [], []

    def forward(number, _):
        if pids:
            os.kill(pids[0], number)
        else:
            early.append(number)

    server = socket.socket(socket.AF_UNIX)
    server.connect(path)
    files, ignored = request(server, executable, *parsed)
    for number in set(FORWARDED) - set(ignored):
        signal.signal(number, forward)
    answers = server.makefile("rb")
    pids.append(int(answers.readline()))
    for number in early:
        os.kill(pids[0], number)
    for number in files:  # only the program has them now
        os.close(number)
    code = int(answers.readline() or 1)
    if code < 0:
        if code not in {-signal.SIGKILL, -signal.SIGSTOP}:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
