"""`halfstep mcp` as an agent meets it: the SDK's own client starts it and talks to it over standard input and output."""

import importlib.util
import json
import os
import subprocess
import sys
import textwrap

import pytest

from halfstep.checkpoint.runlog import RunLog
from halfstep.integrations.mcp import _message

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mcp") is None, reason="mcp is not installed")

MISTAKE = textwrap.dedent(
    """
    import torch

    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        optimizer.zero_grad()
    """
)


def ask(folder, calls, **env):
    """Start the server in `folder`; returns its tools by name, and of each call whether it is an error, and its text."""
    import anyio
    from mcp import Client, StdioServerParameters

    env = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"], **env}
    server = StdioServerParameters(command=sys.executable, args=["-P", "-m", "halfstep", "mcp"], env=env, cwd=folder)

    async def session():
        async with Client(server) as client:
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
            answers = [await client.call_tool(name, arguments) for name, arguments in calls]
            return tools, [(answer.is_error, answer.content[0].text) for answer in answers]

    return anyio.run(session)


def write_run(folder):
    """A run file of two steps and a skip."""
    with RunLog.create(
        folder / "run.jsonl", command=["halfstep", "train"], policy="fp16", truth={"rows": []}, environment={}
    ) as log:
        log.step(micro_batch=1, attempted=1, applied=1, loss=2.5, scale=65536.0, skipped=False)
        log.step(micro_batch=2, attempted=2, applied=1, loss=float("nan"), scale=32768.0, skipped=True)
        log.event("skip", step=2, message="skipped, gradients not finite in head.weight.", advice="Look at the data.")
        log.event("truth", truth={"rows": [["compute", "fp16"]]})


def command(folder, *args, stdin=""):
    """What the command prints."""
    result = subprocess.run(
        [sys.executable, "-m", "halfstep", *args], cwd=folder, input=stdin, capture_output=True, text=True, check=False
    )
    assert result.returncode in {0, 3}, result.stderr
    return json.loads(result.stdout)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_real_client_gets_what_the_commands_print(tmp_path):
    """Each tool returns the JSON of its command, errors are text without a traceback, and what a job prints breaks nothing."""
    (tmp_path / "bad.py").write_text(MISTAKE)
    (tmp_path / "json.py").write_text("raise SystemExit('a file of the user was run')\n")  # shadows a standard module
    (tmp_path / "failing.py").write_text("print('hello')\nraise RuntimeError('no data here')\n")
    write_run(tmp_path)
    tools, answers = ask(
        tmp_path,
        [
            ("check", {"paths": ["bad.py"]}),
            ("check", {"source": MISTAKE, "filename": "agent.py", "select": ["HS101"]}),
            ("check", {}),
            ("check", {"paths": ["missing.py"]}),
            ("explain", {"topic": "HS104"}),
            ("explain", {}),
            ("explain", {"topic": "nonsense"}),
            ("probe", {"gpu": "T4"}),
            ("run_file", {"path": "."}),
            ("run_file", {"path": "nowhere"}),
            ("plan", {"target": "digits", "batch": 8, "precision": ["fp32"], "memory": "16GiB"}),
            ("plan", {"target": "failing.py"}),
            ("plan", {"target": "--verify"}),
        ],
    )
    assert tools.keys() == {"check", "explain", "plan", "probe", "run_file"}
    assert all(tool.description for tool in tools.values())
    assert "imports and runs the code" in tools["plan"].description
    assert not tools["plan"].annotations.read_only_hint
    assert tools["check"].annotations.read_only_hint
    assert not [text for _, text in answers if "Traceback" in text or 'File "' in text]
    (found, source, neither, missing, rule, topics, nonsense, gpu, run, nowhere, planned, failing, flag) = answers
    elsewhere = tmp_path / "elsewhere"  # without the file that shadows a module
    elsewhere.mkdir()
    assert json.loads(found[1]) == [
        finding | {"path": "bad.py"}
        for finding in command(elsewhere, "check", "../bad.py", "--format", "json", "--no-cache")
    ]
    assert [(f["code"], f["path"]) for f in json.loads(source[1])] == [("HS101", "agent.py")]
    assert neither == (True, "Error executing tool check: Pass either paths or source.")
    assert missing[0]
    assert "There is no file or folder 'missing.py'" in missing[1]
    assert json.loads(rule[1]) == command(elsewhere, "explain", "HS104", "--json")
    assert "loss-scaling" in json.loads(topics[1])
    assert nonsense[0]
    assert "Unknown" in nonsense[1]
    assert json.loads(gpu[1]) == command(elsewhere, "probe", "--gpu", "T4", "--json")
    summary = json.loads(run[1])
    assert summary["last_step"]["attempted"] == 2
    assert summary["last_step"]["loss"] == "nan"
    assert summary["event_counts"] == {"skip": 1}
    assert summary["events"][0]["advice"] == "Look at the data."
    assert summary["truth"] == {"rows": [["compute", "fp16"]]}
    assert nowhere[0]
    assert "There is no run file nowhere" in nowhere[1]
    assert not planned[0], planned[1]
    assert json.loads(planned[1])["entries"][0]["precision"] == "fp32"
    assert failing[0]
    assert "no data here" in failing[1]
    assert flag[0]  # a target, not an option


@pytest.mark.slow
def test_check_explain_and_probe_need_no_torch(tmp_path):
    """They work where torch cannot be imported; plan reports that it is missing."""
    (tmp_path / "blocked" / "torch").mkdir(parents=True)
    (tmp_path / "blocked" / "torch" / "__init__.py").write_text("raise ImportError('blocked')\n")
    path = os.pathsep.join(filter(None, [str(tmp_path / "blocked"), os.environ.get("PYTHONPATH", "")]))
    calls = [
        ("check", {"source": MISTAKE}),
        ("explain", {"topic": "loss-scaling"}),
        ("probe", {"gpu": "T4"}),
        ("plan", {"target": "digits"}),
    ]
    _, answers = ask(tmp_path, calls, PYTHONPATH=path)
    assert [is_error for is_error, _ in answers] == [False, False, False, True]
    assert "HS101" in answers[0][1]
    assert "torch" in answers[3][1]


def test_a_traceback_becomes_its_last_line():
    """The error and what was logged before it stay; the frames do not."""
    stderr = (
        'halfstep: a note\nTraceback (most recent call last):\n  File "x.py", line 1, in <module>\n    f()\n'
        "KeyError: 'model'\n"
    )
    assert _message(stderr, 1) == "a note\nKeyError: 'model'"
    assert _message("halfstep: There is no file.\n", 1) == "There is no file."
    assert _message("", 7) == "The command ended with exit code 7 and no message."


def test_without_the_sdk_the_line_that_installs_it_is_printed():
    """An error message and exit code 1."""
    program = "import sys; sys.modules['mcp'] = None; from halfstep.cli import main; main(['mcp'])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert 'pip install "halfstep[mcp]"' in result.stderr
    assert "Traceback" not in result.stderr
