"""The loggers with the real libraries: what a run or a callback writes is read back with the library's own reader."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

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
from halfstep.train.board import Board
from halfstep.train.writer import Histogram
from loggers_program import SKIP, run

PROGRAM = Path(__file__).parents[1] / "loggers_program.py"


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
    with pytest.raises(MissingError, match=f"--logger {name} needs {name}, which is not installed. Run: pip install"):
        parse_logger(name)
    with pytest.raises(MissingError, match=r'pip install "halfstep\['):
        LOGGERS[name]()


@needs("tensorboard")
def test_tensorboard_is_written_by_the_run_itself():
    """`--logger tensorboard` only requires that it is installed; it has no projects."""
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


def logged(library, out, **env):
    """What a run and an outlet have written, and nothing else on standard output."""
    command = [sys.executable, str(PROGRAM), library, str(out)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    result = subprocess.run(command, cwd=out, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout)


@pytest.mark.slow
@needs("wandb")
@pytest.mark.usefixtures("forked")
def test_wandb_has_every_step_of_a_resumed_run(tmp_path):
    """No value is lost where steps go back, because the step is a metric; and an outlet joins the run that is open."""
    rows = logged("wandb", tmp_path, WANDB_MODE="offline", WANDB_SILENT="true")
    steps = [r["halfstep/step"] for r in rows["run"] if "train/loss" in r]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert any("skipped" in r.get("text/events/skip", "") for r in rows["run"])
    histogram = next(r for r in rows["run"] if "exponents/0.weight/bins" in r)
    assert len(histogram["exponents/0.weight/bins"]) == len(histogram["exponents/0.weight/values"]) + 1
    assert [r["halfstep/step"] for r in rows["back"] if "train/loss" in r] == [5, 6, 3]
    assert rows["stays_open"]
    assert [r["events/skip"] for r in rows["outlet"] if "events/skip" in r] == [1]
    assert any("head.weight" in r.get("text/events/skip", "") for r in rows["outlet"])


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
    text = next((tmp_path / "mlruns").rglob("halfstep_messages.txt")).read_text()
    assert "truth" in text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@needs("mlflow")
def test_mlflow_has_every_value_of_many_metrics_and_steps(store):
    """More metrics than MLflow takes in one request, and steps faster than it writes."""
    logger = MlflowLogger("many")
    logger.scalars({f"layer/{i}": i for i in range(1100)}, 0)
    for step in range(1, 6):
        logger.scalars({f"group{step}/{i}": i for i in range(20)}, step)
    logger.close()
    (written,) = store.search_runs([store.get_experiment_by_name("many").experiment_id])
    assert len(written.data.metrics) == 1200
    assert written.data.metrics["layer/1099"] == 1099


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@needs("mlflow")
def test_values_that_mlflow_rejects_in_the_background_are_reported(store):
    """At the end at the latest, in place of silence."""
    from mlflow.exceptions import MlflowException

    logger = MlflowLogger("rejected")
    store.delete_run(logger._run)
    logger.scalars({"train/loss": 1.0}, 4)
    with pytest.raises(MlflowException, match="must be in 'active'"):
        logger.close()


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
    with pytest.raises(SettingError, match="MlflowLogger cannot be opened: .* or train without --logger"):
        run(tmp_path / "run", parse_logger("mlflow"))


@pytest.mark.slow
@needs("trackio")
@pytest.mark.usefixtures("forked")
def test_trackio_has_every_step_of_a_resumed_run(tmp_path):
    """One run of trackio for both parts; an outlet starts a run, or joins the one that is open."""
    rows = logged("trackio", tmp_path, TRACKIO_DIR=str(tmp_path / "trackio"))
    (mine,) = rows["mine"]
    assert sorted(r["step"] for r in mine if "train/loss" in r) == [1, 2, 3, 4, 5, 6]
    assert any(isinstance(v, dict) and v.get("_type") == "trackio.histogram" for r in mine for v in r.values())
    for project in ("alone", "theirs"):
        (events,) = rows[project]
        assert [r["events/skip"] for r in events if "events/skip" in r] == [1]
        assert any("head.weight" in json.dumps(r) for r in events)
    assert [r["step"] for r in rows["alone"][0] if "train/loss" in r] == [5, 6, 3]
    assert any(r.get("own") == 1 for r in rows["theirs"][0])


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


class Scalar(torch.nn.Module):
    """A model that returns its loss, as those of transformers do; a NaN in its data makes every gradient NaN."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(4, 1)

    def forward(self, x, labels):
        return {"loss": F.mse_loss(self.head(x)[:, 0], labels)}


def rows_with_a_nan(num=12, bad=9):
    """Data whose row `bad` has a NaN."""
    x = torch.linspace(-1, 1, 4 * num).reshape(num, 4)
    x[bad] = math.nan
    return [{"x": each, "labels": each.new_tensor(1.0)} for each in x]


@pytest.fixture
def cuda_check(monkeypatch):
    """A variable that Accelerate and Lightning leave set."""
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def skips_in(folder):
    """The steps at which TensorBoard's file has a skip, and the first message."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    (text, *_) = events.Tensors("events/skip/text_summary")
    return [e.step for e in events.Scalars("events/skip")], text.tensor_proto.string_val[0].decode()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the library
@needs("tensorboard")
def test_the_callback_of_transformers_logs_its_events(tmp_path, cuda_check):
    """A NaN in the data of a real Trainer is a skip, with the parameters, in the logger."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from halfstep.integrations.transformers import HalfstepCallback

    logger = TensorBoardLogger(tmp_path / "board")
    arguments = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, max_steps=3, report_to=[], use_cpu=True, train_sampling_strategy="sequential",
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    callback = HalfstepCallback(outlets=[logger])
    transformers.Trainer(Scalar(), arguments, train_dataset=rows_with_a_nan(), callbacks=[callback]).train()
    logger.close()
    steps, message = skips_in(tmp_path / "board")
    assert steps == [3]
    assert "head.weight" in message


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@needs("tensorboard")
def test_the_callback_of_lightning_logs_its_events(tmp_path, cuda_check):
    """The same in a real Trainer of Lightning."""
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    from halfstep.integrations.lightning import HalfstepCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.inner = Scalar()

        def training_step(self, batch, batch_idx):
            return self.inner(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    logger = TensorBoardLogger(tmp_path / "board")
    trainer = lightning.Trainer(
        max_steps=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, callbacks=[HalfstepCallback(outlets=[logger])],
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(rows_with_a_nan(), batch_size=4))
    logger.close()
    steps, message = skips_in(tmp_path / "board")
    assert steps == [3]
    assert "inner.head.weight" in message
