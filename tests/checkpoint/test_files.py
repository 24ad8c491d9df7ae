import errno
import json
import pickle
import random
import zipfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halfstep.checkpoint.directory import load_checkpoint, read_meta, save_checkpoint
from halfstep.checkpoint.files import FILES, render_manifest
from halfstep.errors import SettingError

EVERY_FILE = [*FILES, "manifest.json"]


def save(path, weights=None, state=None, **meta):
    """Save a small checkpoint."""
    return save_checkpoint(path, weights=weights or {"w": torch.arange(6.0)}, state=state, meta=meta)


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    """A checkpoint with something in every file; tests restore what they change."""
    state = {"optimizer": {0: {"m": torch.randn(5)}}, "rng": (1, torch.get_rng_state()[:16])}
    return save(tmp_path_factory.mktemp("intact") / "ckpt", {"a.weight": torch.randn(4, 3)}, state, step=3)


@pytest.fixture
def damaged(intact):
    """The checkpoint, whose files are restored after the test."""
    before = {name: (intact / name).read_bytes() for name in EVERY_FILE}
    yield intact, before
    for name, data in before.items():
        (intact / name).write_bytes(data)


@given(st.data())
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_flipped_bit_anywhere_is_rejected(damaged, data):
    """A single wrong bit in any file raises an error that names the file."""
    path, before = damaged
    name = data.draw(st.sampled_from(EVERY_FILE))
    position = data.draw(st.integers(0, len(before[name]) * 8 - 1))
    raw = bytearray(before[name])
    raw[position // 8] ^= 1 << position % 8
    (path / name).write_bytes(raw)
    with pytest.raises(SettingError, match=f"{name} was altered"):
        load_checkpoint(path)
    (path / name).write_bytes(before[name])


def test_every_byte_of_the_manifest_is_checked(damaged):
    """The manifest's checksum covers the manifest itself."""
    path, before = damaged
    for position in range(len(before["manifest.json"])):
        raw = bytearray(before["manifest.json"])
        raw[position] ^= 1 << position * 5 % 8
        (path / "manifest.json").write_bytes(raw)
        with pytest.raises(SettingError, match=r"manifest.json was altered"):
            load_checkpoint(path)


@given(st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_truncated_file_is_rejected(damaged, data):
    """A file truncated anywhere raises an error that names it."""
    path, before = damaged
    name = data.draw(st.sampled_from(EVERY_FILE))
    (path / name).write_bytes(before[name][: data.draw(st.integers(0, len(before[name]) - 1))])
    with pytest.raises(SettingError, match=f"{name} (is truncated: it has|was altered or truncated)"):
        load_checkpoint(path)
    (path / name).write_bytes(before[name])


@pytest.mark.parametrize("name", EVERY_FILE)
def test_a_missing_or_grown_file_is_rejected(damaged, name):
    """Every file is required, and none may be longer than it was saved."""
    path, before = damaged
    (path / name).write_bytes(before[name] + b"\n")
    with pytest.raises(SettingError, match=f"{name} (has grown|was altered)"):
        load_checkpoint(path)
    (path / name).unlink()
    with pytest.raises(SettingError, match=rf"{name} is missing: the checkpoint is incomplete\. Copy"):
        load_checkpoint(path)


def test_reading_only_the_meta_checks_what_it_reads(damaged):
    """`read_meta` detects missing bytes anywhere and altered ones in meta.json, without reading tensors."""
    path, before = damaged
    assert read_meta(path) == {"step": 3}
    (path / "meta.json").write_bytes(before["meta.json"].replace(b"3", b"4"))
    with pytest.raises(SettingError, match=r"meta.json was altered"):
        read_meta(path)
    (path / "meta.json").write_bytes(before["meta.json"])
    (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(SettingError, match=r"model.safetensors is truncated: it has 0 bytes"):
        read_meta(path)


def forge(path, change):
    """Change files of a checkpoint and write a matching manifest, as other software might."""
    import hashlib

    change(path)
    described = {
        n: {"bytes": (path / n).stat().st_size, "sha256": hashlib.sha256((path / n).read_bytes()).hexdigest()}
        for n in FILES
    }
    (path / "manifest.json").write_bytes(render_manifest(described))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("state.json", "[1"),
        ("state.json", "{}"),
        ("state.json", "[]"),
        ("state.json", '{"state": {"$tensor": "no"}}'),
        ("state.json", '{"state": {"$bytes": "x"}}'),
        ("state.json", '{"state": {"$new": 1}}'),
        ("meta.json", '{"meta": {}}'),
        ("meta.json", '{"aliases": {"a": "b"}, "meta": {}}'),
        ("meta.json", '{"aliases": {}, "meta": {"$tensor": "w"}}'),
        ("model.safetensors", "short"),
    ],
)
def test_invalid_contents_with_a_valid_manifest_are_rejected(damaged, name, text):
    """Files that match their manifest but not the format raise a clear error."""
    path, _ = damaged
    forge(path, lambda p: (p / name).write_text(text))
    with pytest.raises(SettingError, match="Halfstep"):
        load_checkpoint(path)


def test_a_newer_version_says_to_upgrade(damaged, monkeypatch):
    """A checkpoint of a newer format is distinguished from a damaged one."""
    path, _ = damaged
    monkeypatch.setattr("halfstep.checkpoint.files.VERSION", 7)
    forge(path, lambda _: None)
    monkeypatch.undo()
    with pytest.raises(SettingError, match="format version 7, but this Halfstep reads at most 2; upgrade"):
        load_checkpoint(path)


def test_a_manifest_of_another_format_or_list_is_rejected(damaged, monkeypatch):
    """A manifest with a valid checksum but another format or list of files is not a checkpoint."""
    path, _ = damaged
    (path / "manifest.json").write_bytes(render_manifest({"../../evil": {"bytes": 1, "sha256": ""}}))
    with pytest.raises(SettingError, match="lists the files"):
        load_checkpoint(path)
    monkeypatch.setattr("halfstep.checkpoint.files.FORMAT", "other-format")
    forge(path, lambda _: None)
    monkeypatch.undo()
    with pytest.raises(SettingError, match="has the format 'other-format'"):
        load_checkpoint(path)


def test_a_missing_path_is_reported(tmp_path):
    """A path that does not exist raises an error with the path."""
    with pytest.raises(SettingError, match="There is no checkpoint at"):
        load_checkpoint(tmp_path / "nothing")


def test_pickles_are_recognized_and_never_opened(tmp_path):
    """A file of torch.save, a bare pickle and folders of them raise an error that identifies them as pickles."""
    torch.save({"a": torch.ones(1)}, tmp_path / "model.weights")
    (tmp_path / "bare").write_bytes(pickle.dumps([1]))
    (tmp_path / "old.pt").write_bytes(b"anything")
    for name in ("pytorch_model.bin", ".metadata"):
        (tmp_path / f"dir{name}").mkdir()
        (tmp_path / f"dir{name}" / name).write_bytes(b"x")
    for name in ("model.weights", "bare", "old.pt", "dirpytorch_model.bin", "dir.metadata"):
        with pytest.raises(SettingError, match=r"looks like a pickle.*never opens one.*weights_only=True"):
            load_checkpoint(tmp_path / name)
    assert zipfile.is_zipfile(tmp_path / "model.weights")


def test_other_paths_are_rejected_with_advice(tmp_path, intact):
    """Foreign files, folders and manifests each get their own advice."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "manifest.json").write_text(json.dumps({"name": "an app"}))
    (tmp_path / "notes.txt").write_text("hello")
    safetensors.torch.save_file({"a": torch.ones(1)}, tmp_path / "weights.safetensors")
    cases = {
        tmp_path / "empty": "has no manifest.json. It contains nothing",
        tmp_path / "foreign": "written by something else",
        tmp_path / "notes.txt": "a checkpoint is a directory",
        tmp_path / "weights.safetensors": "safetensors.torch.load_file",
        intact / "model.safetensors": f"pass its directory, {intact}",
        intact.parent: f"is a folder of checkpoints; pass one of them, such as {intact}",
    }
    for path, advice in cases.items():
        with pytest.raises(SettingError) as caught:
            load_checkpoint(path)
        assert advice in str(caught.value)


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
def test_a_file_that_cannot_be_read_is_reported(intact, monkeypatch, name):
    """A permission or disk error raises a SettingError that names the file."""
    real = Path.open

    def deny(self, *args, **kwargs):
        if self.name == name:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", deny)
    with pytest.raises(SettingError, match=f"{name} cannot be read: Permission denied"):
        load_checkpoint(intact)


def test_several_damaged_files_never_load(damaged):
    """Several damaged files at once still raise a clear error."""
    path, before = damaged
    rng = random.Random(0)
    for _ in range(30):
        for name in rng.sample(EVERY_FILE, 2):
            cut = rng.randrange(len(before[name]))
            (path / name).write_bytes(before[name][:cut] + bytes([before[name][cut] ^ 255]) + before[name][cut + 1 :])
        with pytest.raises(SettingError):
            load_checkpoint(path)
        for name, data in before.items():
            (path / name).write_bytes(data)
