"""The loggers with the real libraries: what a run or a callback writes is read back with the library's own reader."""

import importlib.util
import json
import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from halfstep.errors import MissingError, SettingError
from halfstep.integrations.loggers import (
    LOGGERS,
    MlflowLogger,
    TensorBoardLogger,
    TrackioLogger,
    WandbLogger,
    parse_logger,
)
from halfstep.jobs.job import Job
from halfstep.train import TrainConfig, train
from halfstep.train.board import Board
from halfstep.train.writer import Histogram
from halfstep.watching.events import Event

SKIP = Event("skip", 3, "skipped, gradients not finite in head.weight.", {"consecutive": 1})


class Memory:
    """A writer that remembers."""

    def __init__(self, info=None):
        self.info, self.points, self.texts, self.closed = info, [], [], False

    def scalars(self, values, step):
        self.points += [(tag, step, value) for tag, value in values.items()]

    def histogram(self, tag, histogram, step):
        assert len(histogram.edges) == len(histogram.counts) + 1
        self.points.append((tag, step, histogram))

    def text(self, tag, text, step):
        self.texts.append((tag, step, text))

    def close(self):
        self.closed = True


class Broken(Memory):
    """A writer whose server does not answer after the first values."""

    def scalars(self, values, step):
        if self.points:
            raise ConnectionError("no route to host.")
        super().scalars(values, step)


def small_job(bad=None):
    """Six steps of a small model, one of them with a NaN."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(48, 6, generator=g), torch.randint(0, 3, (48,), generator=g)
    if bad is not None:
        x[8 * bad, 2] = math.nan
    return Job(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)),
        data=lambda batch_size: list(zip(x.split(batch_size), y.split(batch_size), strict=True)),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
    )


def run(out, *writers, bad=None, steps=6, resume=False, precision="fp16"):
    config = TrainConfig(batch=8, steps=steps, watch=2, device="cpu")
    return train(small_job(bad), config, precision=precision, out=out, writers=writers, resume=resume)


def needs(library):
    return pytest.mark.skipif(importlib.util.find_spec(library) is None, reason=f"{library} is not installed")


def test_a_writer_gets_the_numbers_events_and_truth_of_a_run(tmp_path):
    """Losses at every step, distributions, the message of a skipped step and the truth table, and it is closed."""
    opened = []
    run(tmp_path, lambda info: opened.append(Memory(info)) or opened[-1], bad=3)
    (writer,) = opened
    assert writer.info.out == tmp_path
    assert writer.info.config["batch"] == 8
    assert writer.info.policy == "fp16"
    assert [step for tag, step, _ in writer.points if tag == "train/loss"] == [1, 2, 3, 4, 5, 6]
    assert ("events/skip", 4, 1) in writer.points
    assert any(isinstance(value, Histogram) for _, _, value in writer.points)
    texts = {tag: text for tag, _, text in writer.texts}
    assert "step 4" in texts["events/skip"]
    assert "fp16" in texts["truth"]
    assert writer.closed


def test_a_writer_that_fails_costs_a_warning_and_not_the_run(tmp_path, caplog):
    """The run continues, the other writer gets everything, and the failed one is not called again."""
    opened = [Broken(), Memory()]
    outcome = run(tmp_path, *[lambda info, each=each: each for each in opened])
    assert outcome.steps == 6
    assert [step for tag, step, _ in opened[1].points if tag == "train/loss"] == [1, 2, 3, 4, 5, 6]
    assert not opened[0].closed
    assert opened[1].closed
    (warning,) = [r.getMessage() for r in caplog.records if "no route to host" in r.getMessage()]
    assert "Broken failed" in warning


def test_an_unknown_logger_is_rejected_with_the_known_ones():
    """The message has the nearest name."""
    with pytest.raises(SettingError, match="Unknown logger 'wandbb'. Did you mean 'wandb'?"):
        parse_logger("wandbb")


@pytest.mark.parametrize("name", LOGGERS)
def test_a_missing_library_is_named_with_the_line_that_installs_it(name, monkeypatch):
    """Before anything is trained, and in the constructor."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda each, *rest: None if each == name else find(each, *rest))
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(MissingError, match=f"--log {name} needs {name}, which is not installed. Run: pip install"):
        parse_logger(name)
    with pytest.raises(MissingError, match=r'pip install "halfstep\['):
        LOGGERS[name]()


@needs("tensorboard")
def test_tensorboard_is_written_by_the_run_itself():
    """`--log tensorboard` only requires that it is installed; it has no projects."""
    assert parse_logger("tensorboard") is None
    with pytest.raises(SettingError, match="TensorBoard has no projects"):
        parse_logger("tensorboard:mine")


@needs("tensorboard")
def test_only_rank_0_writes(tmp_path, monkeypatch):
    """An outlet of another rank opens nothing."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    logger = TensorBoardLogger(tmp_path / "board")
    logger(SKIP)
    logger.close()
    assert not (tmp_path / "board").exists()


@needs("tensorboard")
def test_tensorboard_as_an_outlet(tmp_path):
    """Counts and messages of events are in its file."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path)
    logger(SKIP)
    logger.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("events/skip")] == [(3, 1.0)]
    (text,) = events.Tensors("events/skip/text_summary")
    assert b"head.weight" in text.tensor_proto.string_val[0]


def wandb_rows(folder):
    """The history of an offline run of W&B, in order."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    rows = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        store = DataStore()
        store.open_for_scan(str(file))
        while (data := store.scan_data()) is not None:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
    return rows


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """W&B offline and silent."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the library
@needs("wandb")
def test_wandb_keeps_every_step_of_a_resumed_run(offline, tmp_path):
    """A run that repeats steps after a resume loses no value: the step is a metric."""
    out = tmp_path / "run"
    run(out, parse_logger("wandb:mine"), steps=4, bad=1)
    # A longer run resumes from its checkpoint; writing an earlier step must not be dropped.
    run(out, parse_logger("wandb:mine"), steps=6, bad=1, resume=True)
    rows = wandb_rows(out)
    assert [r["halfstep/step"] for r in rows if "train/loss" in r] == [1, 2, 3, 4, 5, 6]
    assert any("skipped" in r.get("text/events/skip", "") for r in rows)
    assert any(isinstance(v, dict) and v["_type"] == "histogram" for r in rows for v in r.values())
    logger = WandbLogger("mine")
    for step in (5, 6, 3):
        logger.scalars({"train/loss": float(step)}, step)
    logger.close()
    assert [r["halfstep/step"] for r in wandb_rows(tmp_path)] == [5, 6, 3]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@needs("wandb")
def test_wandb_as_an_outlet_joins_the_run_that_is_open(offline):
    """The events of a callback go into the Trainer's own run, which stays open."""
    import wandb

    own = wandb.init(project="theirs")
    logger = WandbLogger()
    logger(SKIP)
    logger.close()
    assert wandb.run is own
    own.finish()
    rows = wandb_rows(offline)
    assert [r["events/skip"] for r in rows if "events/skip" in r] == [1]
    assert any("head.weight" in r.get("text/events/skip", "") for r in rows)


@pytest.fixture
def store(monkeypatch, tmp_path):
    """MLflow in a folder."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    yield mlflow.MlflowClient()
    mlflow.set_tracking_uri(None)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@needs("mlflow")
def test_mlflow_has_the_metrics_parameters_and_messages_of_a_resumed_run(store, tmp_path):
    """One run of MLflow for a run that was resumed, finished, with its settings."""
    run(tmp_path / "run", parse_logger("mlflow:mine"), steps=4, bad=1)
    run(tmp_path / "run", parse_logger("mlflow:mine"), steps=6, bad=1, resume=True)
    (written,) = store.search_runs([store.get_experiment_by_name("mine").experiment_id])
    assert written.info.status == "FINISHED"
    assert written.data.params["precision"] == "fp16"
    history = store.get_metric_history(written.info.run_id, "train/loss")
    assert sorted(m.step for m in history) == [1, 2, 3, 4, 5, 6]
    text = next((tmp_path / "mlruns").rglob("halfstep.txt")).read_text()
    assert "truth" in text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@needs("mlflow")
def test_mlflow_as_an_outlet(store):
    """Joins the active run; without one it starts a run, which fails where it is closed by an exception."""
    import mlflow

    logger = MlflowLogger()
    with mlflow.start_run() as active:
        logger(SKIP)
        logger.close()
        assert mlflow.active_run().info.run_id == active.info.run_id
    assert [m.step for m in store.get_metric_history(active.info.run_id, "events/skip")] == [3]
    alone = MlflowLogger("alone")
    with pytest.raises(RuntimeError, match="the run died"):
        try:
            alone(SKIP)
            raise RuntimeError("the run died")
        finally:
            alone.close()
    (written,) = store.search_runs([store.get_experiment_by_name("alone").experiment_id])
    assert written.info.status == "FAILED"
    assert written.data.metrics["events/skip"] == 1.0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@needs("mlflow")
def test_a_store_that_cannot_be_opened_ends_the_run_before_it_starts(store, tmp_path):
    """The library's own message, and what to do."""
    import mlflow

    mlflow.set_tracking_uri("nonsense://nowhere")
    with pytest.raises(SettingError, match="MlflowLogger cannot be opened: .* or train without --log"):
        run(tmp_path / "run", parse_logger("mlflow"))


TRACKIO = """
import sys
sys.path.insert(0, "tests/integrations")
from pathlib import Path
from test_loggers import SKIP, run
from halfstep.integrations.loggers import TrackioLogger, parse_logger
out = Path(sys.argv[1])
run(out, parse_logger("trackio:mine"), steps=4, bad=1)
run(out, parse_logger("trackio:mine"), steps=6, bad=1, resume=True)
logger = TrackioLogger("other")
logger(SKIP)
logger.close()
print("ready")
from trackio.sqlite_storage import SQLiteStorage
import json
names = SQLiteStorage.get_runs("mine")
print(json.dumps([SQLiteStorage.get_logs("mine", name) for name in names]))
print(json.dumps([SQLiteStorage.get_logs("other", name) for name in SQLiteStorage.get_runs("other")]))
"""


@pytest.mark.slow
@needs("trackio")
def test_trackio_has_every_step_of_a_resumed_run_and_leaves_stdout_alone(tmp_path):
    """One run of trackio; what the library prints goes to stderr, so that --json stays JSON."""
    import os

    env = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "OMP_NUM_THREADS": "1"}
    root = __file__.rpartition("/tests/")[0]
    result = subprocess.run(
        [sys.executable, "-c", TRACKIO, str(tmp_path / "run")], cwd=root, env=env, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    ready, mine, other = result.stdout.splitlines()
    assert ready == "ready"
    (rows,) = json.loads(mine)
    assert sorted(r["step"] for r in rows if "train/loss" in r) == [1, 2, 3, 4, 5, 6]
    (events,) = json.loads(other)
    assert [r["events/skip"] for r in events if "events/skip" in r] == [1]
    assert any("head.weight" in json.dumps(r) for r in events)


def test_every_logger_is_a_writer_and_an_outlet():
    """Each has the methods that a run and a callback call."""
    for logger in (MlflowLogger, TensorBoardLogger, TrackioLogger, WandbLogger):
        assert logger in LOGGERS.values()
        assert all(hasattr(logger, name) for name in ("__call__", "scalars", "histogram", "text", "close"))


def test_the_board_counts_events_for_all_writers():
    """Two writers get the same curve."""
    writers = [Memory(), Memory()]
    board = Board(writers)
    board.event(SKIP)
    board.event(SKIP)
    assert writers[0].points == writers[1].points == [("events/skip", 3, 1), ("events/skip", 3, 2)]
