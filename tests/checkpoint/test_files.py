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
    """A small checkpoint."""
    return save_checkpoint(path, weights=weights or {"w": torch.arange(6.0)}, state=state, meta=meta)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A checkpoint with something in every file; tests put back what they change."""
    state = {"optimizer": {0: {"m": torch.randn(5)}}, "rng": (1, torch.get_rng_state()[:16])}
    return save(tmp_path_factory.mktemp("whole") / "ckpt", {"a.weight": torch.randn(4, 3)}, state, step=3)


@pytest.fixture
def damaged(whole):
    """The checkpoint, whose files are put back after the test."""
    before = {name: (whole / name).read_bytes() for name in EVERY_FILE}
    yield whole, before
    for name, data in before.items():
        (whole / name).write_bytes(data)


@given(st.data())
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_flipped_bit_anywhere_is_refused(damaged, data):
    """No single wrong bit in any file gets through, and the error names the file."""
    path, before = damaged
    name = data.draw(st.sampled_from(EVERY_FILE))
    position = data.draw(st.integers(0, len(before[name]) * 8 - 1))
    raw = bytearray(before[name])
    raw[position // 8] ^= 1 << position % 8
    (path / name).write_bytes(raw)
    with pytest.raises(SettingError, match=f"{name} was altered"):
        load_checkpoint(path)
    (path / name).write_bytes(before[name])


def test_every_byte_of_the_manifest_counts(damaged):
    """The manifest protects itself as well as the others."""
    path, before = damaged
    for position in range(len(before["manifest.json"])):
        raw = bytearray(before["manifest.json"])
        raw[position] ^= 1 << position * 5 % 8
        (path / "manifest.json").write_bytes(raw)
        with pytest.raises(SettingError, match=r"manifest.json was altered"):
            load_checkpoint(path)


@given(st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_truncated_file_is_refused(damaged, data):
    """A file cut anywhere is refused by name."""
    path, before = damaged
    name = data.draw(st.sampled_from(EVERY_FILE))
    (path / name).write_bytes(before[name][: data.draw(st.integers(0, len(before[name]) - 1))])
    with pytest.raises(SettingError, match=f"{name} (is truncated: it has|was altered or truncated)"):
        load_checkpoint(path)
    (path / name).write_bytes(before[name])


@pytest.mark.parametrize("name", EVERY_FILE)
def test_a_missing_or_grown_file_is_refused(damaged, name):
    """Every file is needed, and none may have more than was saved."""
    path, before = damaged
    (path / name).write_bytes(before[name] + b"\n")
    with pytest.raises(SettingError, match=f"{name} (has grown|was altered)"):
        load_checkpoint(path)
    (path / name).unlink()
    with pytest.raises(SettingError, match=rf"{name} is missing: the checkpoint is incomplete\. Copy"):
        load_checkpoint(path)


def test_reading_only_the_meta_checks_what_it_reads(damaged):
    """`read_meta` finds missing bytes anywhere and altered ones in meta.json, without reading tensors."""
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
    """Change files of a checkpoint and make the manifest agree, as other software might."""
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
def test_well_signed_nonsense_is_refused(damaged, name, text):
    """Files that agree with their manifest but not with the format end in a clear error."""
    path, _ = damaged
    forge(path, lambda p: (p / name).write_text(text))
    with pytest.raises(SettingError, match="Halfstep"):
        load_checkpoint(path)


def test_a_newer_version_says_to_upgrade(damaged, monkeypatch):
    """A checkpoint of a later format is told from a damaged one."""
    path, _ = damaged
    monkeypatch.setattr("halfstep.checkpoint.files.VERSION", 7)
    forge(path, lambda _: None)
    monkeypatch.undo()
    with pytest.raises(SettingError, match="format version 7, and this Halfstep reads up to 1; upgrade"):
        load_checkpoint(path)


def test_a_manifest_of_another_format_or_list_is_refused(damaged, monkeypatch):
    """A valid checksum alone does not make a checkpoint."""
    path, _ = damaged
    (path / "manifest.json").write_bytes(render_manifest({"../../evil": {"bytes": 1, "sha256": ""}}))
    with pytest.raises(SettingError, match="lists the files"):
        load_checkpoint(path)
    monkeypatch.setattr("halfstep.checkpoint.files.FORMAT", "other-format")
    forge(path, lambda _: None)
    monkeypatch.undo()
    with pytest.raises(SettingError, match="of the format 'other-format'"):
        load_checkpoint(path)


def test_a_missing_path_is_said(tmp_path):
    """The first thing to check is the path."""
    with pytest.raises(SettingError, match="There is no checkpoint at"):
        load_checkpoint(tmp_path / "nothing")


def test_pickles_are_recognised_and_never_opened(tmp_path):
    """A file of torch.save, a bare pickle and folders of them are refused by what they are."""
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


def test_other_things_are_refused_with_the_way_out(tmp_path, whole):
    """Files, folders and manifests of others each get their own advice."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "manifest.json").write_text(json.dumps({"name": "an app"}))
    (tmp_path / "notes.txt").write_text("hello")
    safetensors.torch.save_file({"a": torch.ones(1)}, tmp_path / "weights.safetensors")
    cases = {
        tmp_path / "empty": "has no manifest.json. It holds nothing",
        tmp_path / "foreign": "written by something else",
        tmp_path / "notes.txt": "a checkpoint is a directory",
        tmp_path / "weights.safetensors": "safetensors.torch.load_file",
        whole / "model.safetensors": f"give the directory {whole}",
        whole.parent: f"is a folder of checkpoints, not one: give one of them, such as {whole}",
    }
    for path, advice in cases.items():
        with pytest.raises(SettingError) as caught:
            load_checkpoint(path)
        assert advice in str(caught.value)


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
def test_a_file_that_cannot_be_read_is_said(whole, monkeypatch, name):
    """A permission or disk error is not a traceback."""
    real = Path.open

    def refuse(self, *args, **kwargs):
        if self.name == name:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(SettingError, match=f"{name} cannot be read: Permission denied"):
        load_checkpoint(whole)


def test_random_order_of_damage_never_hands_out_half_a_checkpoint(damaged):
    """Several faults at once still end in one clear error."""
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
