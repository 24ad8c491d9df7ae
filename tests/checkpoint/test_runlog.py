import errno
import json
import math
import os
import platform
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.checkpoint.runlog import RunLog, environment, read_runlog
from halfstep.errors import HalfstepError, SettingError


def start(path, **extra):
    """Start a run file."""
    return RunLog.create(
        path,
        command=["halfstep", "train"],
        policy="bf16",
        truth={"params": "fp32"},
        environment={"python": "3"},
        **extra,
    )


def steps(log, *numbers, attempt=0):
    """Write one line per step, each applied, with one micro-batch each."""
    for n in numbers:
        log.step(micro_batch=n, attempted=n, applied=n, loss=1 / n, attempt=attempt)


def same(a, b):
    """Equal, with NaN equal to NaN and numbers of the same type."""
    if isinstance(a, float) and isinstance(b, float):
        return (math.isnan(a) and math.isnan(b)) or struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


TEXT = st.text(st.characters(), max_size=10) | st.sampled_from(
    ["nan", "inf", "-inf", "'nan", "''-inf", "\n", "\u2028", "\ud800"]
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXT
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(TEXT, v, max_size=3), max_leaves=8)
FIELDS = st.dictionaries(TEXT.filter(lambda name: name not in {"kind", "event", "time", "self"}), VALUES, max_size=4)


@given(FIELDS, FIELDS)
@settings(deadline=None)
def test_every_value_round_trips(tmp_path_factory, first, second):
    """Numbers, infinities, NaN and any text are restored from the file, which is ASCII with one line per record."""
    path = tmp_path_factory.mktemp("log") / "run.jsonl"
    names = {"micro_batch", "attempted", "applied"}
    with start(path) as log:
        log.step(micro_batch=1, attempted=1, applied=0, values=first)
        log.event("note", **{k: v for k, v in second.items() if k not in names})
    raw = path.read_bytes()
    raw.decode("ascii")
    assert raw.count(b"\n") == 3
    run = read_runlog(path)
    assert same(run.records[0]["values"], first)
    for name, value in second.items():
        assert name in names or same(run.events[0][name], value)


def test_the_first_line_describes_the_run(tmp_path):
    """The first line has schema, id, command, policy, truth table, environment and all other fields passed."""
    log = start(tmp_path / "deep" / "run.jsonl", run_id="r1", seed=3)
    header = json.loads(log.path.read_text())
    assert header.pop("time") > 1.7e9
    assert header == {
        "kind": "run",
        "schema": 1,
        "run": "r1",
        "command": ["halfstep", "train"],
        "policy": "bf16",
        "truth": {"params": "fp32"},
        "environment": {"python": "3"},
        "seed": 3,
    }
    log.close()
    assert read_runlog(log.path).header["seed"] == 3
    assert str(read_runlog(log.path)) == "run r1: 0 step records, 0 events, 0 resumes"


def test_lines_are_readable_before_the_file_is_closed(tmp_path):
    """A concurrent reader sees every record immediately."""
    log = start(tmp_path / "run.jsonl")
    steps(log, 1, 2)
    assert len(read_runlog(log.path).records) == 2
    log.close()
    log.close()
    with pytest.raises(SettingError, match="is closed"):
        log.event("late")


def test_events_carry_the_counts_of_the_last_step(tmp_path):
    """An event has the counts of the last step, so its position in the run is known."""
    with start(tmp_path / "run.jsonl") as log:
        log.event("started")
        log.step(micro_batch=8, attempted=2, applied=1)
        log.event("overflow", layer="head", value=math.inf)
    first, second = read_runlog(log.path).events
    assert "attempted" not in first
    assert (second["event"], second["micro_batch"], second["attempted"], second["applied"]) == ("overflow", 8, 2, 1)
    assert second["value"] == math.inf


def test_a_resume_replaces_repeated_work(tmp_path):
    """Over several resumes, records and events after the checkpoint are dropped and those before it are kept."""
    path = tmp_path / "run.jsonl"
    with start(path) as log:
        steps(log, 1, 2, 3, 4, 5)
        log.event("overflow")
    with RunLog(path) as log:
        log.event("restarted")
        log.resume(attempted=3, applied=3, checkpoint="step-00000003")
        steps(log, 4, 5, 6, attempt=1)
    with RunLog(path) as log:
        log.resume(attempted=5, applied=5, micro_batch=5)
        steps(log, 6, attempt=2)
    run = read_runlog(path)
    assert [r["attempted"] for r in run.records] == [1, 2, 3, 4, 5, 6]
    assert [r["attempt"] for r in run.records] == [0, 0, 0, 1, 1, 2]
    assert [e["event"] for e in run.events] == ["restarted"]
    assert [r["attempted"] for r in run.resumes] == [3, 5]
    assert run.num_replaced == 4
    assert not run.torn


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), max_size=5))
@settings(deadline=None, max_examples=50)
def test_after_any_resumes_each_step_appears_once(tmp_path_factory, attempts):
    """Whatever is lost and repeated, readers see every step once, from the last attempt."""
    path = tmp_path_factory.mktemp("log") / "run.jsonl"
    expected, done = {}, 0
    log = start(path)
    for attempt, (count, back) in enumerate(attempts):
        steps(log, *range(done + 1, done + count + 1), attempt=attempt)
        expected |= dict.fromkeys(range(done + 1, done + count + 1), attempt)
        done = max(0, done + count - back)
        expected = {n: a for n, a in expected.items() if n <= done}
        log.close()
        log = RunLog(path)
        log.resume(attempted=done, applied=done)
    log.close()
    assert {r["attempted"]: r["attempt"] for r in read_runlog(path).records} == expected
    assert len(read_runlog(path).records) == len(expected)


def test_micro_batches_beyond_the_checkpoint_are_replaced_too(tmp_path):
    """With accumulation, lines of an unfinished window are dropped by their micro-batch."""
    with start(tmp_path / "run.jsonl") as log:
        for micro in range(1, 7):
            log.step(micro_batch=micro, attempted=micro // 4, applied=micro // 4)
        log.resume(attempted=1, applied=1, micro_batch=4)
    assert [r["micro_batch"] for r in read_runlog(log.path).records] == [1, 2, 3, 4]


def test_continuing_requires_a_resume(tmp_path):
    """Steps cannot be appended to an earlier attempt without a resume record."""
    with start(tmp_path / "run.jsonl") as log:
        steps(log, 1)
    log = RunLog(log.path)
    with pytest.raises(SettingError, match=r"call resume\(attempted=..., applied=...\) before step"):
        steps(log, 2)
    log.resume(attempted=1, applied=1)
    steps(log, 2)
    log.close()


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_a_crash_at_any_byte_loses_at_most_the_last_line(tmp_path_factory, data):
    """Truncated anywhere after its first line, the file can be read and continued without corruption."""
    path = tmp_path_factory.mktemp("log") / "run.jsonl"
    with start(path) as log:
        steps(log, 1, 2, 3)
    raw = path.read_bytes()
    first = raw.index(b"\n")
    cut = first + data.draw(st.integers(0, 10**6)) % (len(raw) - first + 1)  # the length depends on the timestamps
    junk = data.draw(st.sampled_from([b"", b"\x00\x00", b"\xff", b"[1]"])) if cut > first else b""
    path.write_bytes(raw[:cut] + junk)
    ended = raw[:cut].count(b"\n") + (raw[cut : cut + 1] == b"\n" and not junk)  # a complete line may lack its newline
    run = read_runlog(path)
    assert len(run.records) == ended - 1
    with RunLog(path) as log:
        log.resume(attempted=len(run.records), applied=len(run.records))
        steps(log, len(run.records) + 1)
    again = read_runlog(path)
    assert len(again.records) == len(run.records) + 1
    assert not again.torn
    assert all(json.loads(line) for line in path.read_bytes().splitlines())


def test_a_torn_last_line_is_reported(tmp_path):
    """The reader ignores an incomplete last line and sets `torn`."""
    with start(tmp_path / "run.jsonl") as log:
        steps(log, 1, 2)
    log.path.write_bytes(log.path.read_bytes()[:-5])
    run = read_runlog(log.path)
    assert run.torn
    assert len(run.records) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{oops}", "line 3: not a JSON object"),
        (b"[1]", "line 3: not a JSON object"),
        (b"", "line 3: not a JSON object"),
        (b"\xff\xfe", "line 3: not UTF-8"),
        (b'{"kind":"step","loss":NaN}', "line 3: not a JSON object"),
        (b'{"kind":"stop"}', "line 3: unknown kind 'stop'"),
        (b'{"kind":"run"}', "line 3: unknown kind"),
        (b'{"kind":"resume","attempted":1}', "line 3: applied is None, not a count"),
        (b'{"kind":"event","attempted":"x"}', "line 3: attempted is 'x', not a count"),
        (b"[" * 5000, "line 3: not a JSON object"),
    ],
)
def test_a_bad_line_in_the_middle_is_rejected_by_number(tmp_path, line, message):
    """Damage raises an error with the line number and advice."""
    with start(tmp_path / "run.jsonl") as log:
        steps(log, 1, 2)
    lines = log.path.read_bytes().split(b"\n")
    lines.insert(2, line)
    log.path.write_bytes(b"\n".join(lines))
    with pytest.raises(SettingError, match=rf"{message}.*(restore it|delete that line)"):
        read_runlog(log.path)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "no complete first line"),
        (b'{"kind":"ru', "no complete first line"),
        (b"hello\n", "line 1: not a JSON object"),
        (b"\x80\x02\n", "line 1: not UTF-8"),
        (b'{"a":1}\n', "line 1: not the first line of a Halfstep run file"),
        (b'{"kind":"run","schema":2,"run":"x"}\n', "line 1: schema 2, but this Halfstep reads at most 1; upgrade"),
        (b'{"kind":"run","schema":"nan","run":"x"}\n', "line 1: not the first line"),
    ],
)
def test_other_files_are_rejected(tmp_path, raw, message):
    """Empty, foreign and newer files each raise their own error, in the reader and in the writer."""
    path = tmp_path / "run.jsonl"
    path.write_bytes(raw)
    for use in (read_runlog, RunLog):
        with pytest.raises(SettingError, match=message):
            use(path)
    assert path.read_bytes() == raw


def test_unusable_paths_are_reported(tmp_path):
    """A missing file, a directory and a file in place of a folder raise errors with the path."""
    with pytest.raises(SettingError, match=r"nothing cannot be read: No such file"):
        read_runlog(tmp_path / "nothing")
    with pytest.raises(SettingError, match="cannot be read: Is a directory"):
        read_runlog(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(SettingError, match="cannot be written"):
        start(tmp_path / "file" / "run.jsonl")


def test_an_existing_run_is_never_overwritten(tmp_path):
    """`create` accepts only a new or an empty file."""
    path = tmp_path / "run.jsonl"
    path.touch()
    start(path).close()
    before = path.read_bytes()
    with pytest.raises(SettingError, match="exists already"):
        start(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda log: log.step(micro_batch=1, attempted=1, applied=2), "applied=2 is more than attempted=1"),
        (lambda log: log.step(micro_batch=1.5, attempted=1, applied=1), "micro_batch=1.5 is not a count"),
        (lambda log: log.step(micro_batch=1, attempted=True, applied=0), "attempted=True is not a count"),
        (lambda log: log.resume(attempted=-1, applied=0), "attempted=-1 is not a count"),
        (lambda log: log.step(micro_batch=1, attempted=1, applied=1, time=3), "field 'time' is reserved"),
        (lambda log: log.event("x", attempted=3), "field 'attempted' is reserved"),
        (lambda log: log.event("x", value={"a": [object()]}), r"event\.value\.a\[0\] is a object"),
        (lambda log: log.event("x", value={1: 2}), r"event\.value is a dict"),
        (lambda log: log.event("x", value=1j), "is a complex"),
    ],
)
def test_values_that_cannot_be_stored_are_rejected(tmp_path, call, message):
    """Invalid counts and values raise an error that names them, and nothing is written."""
    with start(tmp_path / "run.jsonl") as log:
        before = log.path.read_bytes()
        with pytest.raises(SettingError, match=message):
            call(log)
        assert log.path.read_bytes() == before


def test_a_value_that_contains_itself_is_rejected(tmp_path):
    """A cycle raises an error instead of overflowing the stack."""
    loop = []
    loop.append(loop)
    with start(tmp_path / "run.jsonl") as log, pytest.raises(SettingError, match="contains itself"):
        log.event("x", loop=loop)


def test_numpy_numbers_are_stored_as_numbers(tmp_path):
    """NumPy scalars, the usual type of metrics, need no conversion."""
    with start(tmp_path / "run.jsonl") as log:
        log.step(
            micro_batch=np.int64(1), attempted=1, applied=1, loss=np.float32(0.5), norm=np.float64("nan"), n=np.int32(3)
        )
    record = read_runlog(log.path).records[0]
    assert (record["loss"], record["n"], record["micro_batch"]) == (0.5, 3, 1)
    assert math.isnan(record["norm"])


def test_a_full_disk_leaves_complete_lines(tmp_path, monkeypatch):
    """A partially written line is removed again, and the error gives the reason."""
    log = start(tmp_path / "run.jsonl")
    steps(log, 1)
    before = log.path.read_bytes()
    real, calls = os.write, []

    def full(handle, data):
        calls.append(data)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, data[:10])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(HalfstepError, match=r"could not be written to .*: No space left on device"):
        steps(log, 2)
    monkeypatch.undo()
    assert log.path.read_bytes() == before
    steps(log, 2)
    log.close()
    assert len(read_runlog(log.path).records) == 2


def test_a_killed_run_keeps_every_line_it_wrote(tmp_path):
    """SIGKILL loses no recorded line."""
    program = (
        "import os, signal, sys; from halfstep.checkpoint.runlog import RunLog\n"
        "log = RunLog.create(sys.argv[1], command='x', policy='fp32', truth={}, environment={})\n"
        "[log.step(micro_batch=i, attempted=i, applied=i) for i in range(1, 101)]\n"
        "assert 'torch' not in sys.modules\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "run.jsonl"], check=False)
    assert done.returncode == -9
    assert len(read_runlog(tmp_path / "run.jsonl").records) == 100


def test_the_environment_has_versions_and_machine_but_no_user_host_or_path(monkeypatch):
    """The environment has what is needed to compare runs and nothing that identifies a person or a machine."""
    import torch

    versions = environment()
    text = json.dumps(versions)
    assert versions["python"] == platform.python_version()
    assert versions["torch"] == torch.__version__
    assert versions["halfstep"]
    assert str(Path.home()) not in text
    assert len(platform.node()) < 4 or platform.node() not in text
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: f"GPU {i}")
    assert environment()["gpus"] == ["GPU 0", "GPU 1"]
    assert environment()["cpu"]


def test_the_environment_does_not_load_torch(monkeypatch):
    """Versions of packages that are not loaded come from their metadata."""
    monkeypatch.delitem(sys.modules, "torch")
    versions = environment()
    assert "torch" not in sys.modules
    assert versions["gpus"] == []
    assert versions["torch"].split("+")[0]
    monkeypatch.setattr("importlib.metadata.version", _missing)
    assert environment()["torch"] is None


def _missing(name):
    import importlib.metadata

    raise importlib.metadata.PackageNotFoundError(name)
