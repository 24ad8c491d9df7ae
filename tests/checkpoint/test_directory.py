import errno
import os
import pickle
import shutil
import sys
import weakref

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings

from halfstep.checkpoint import atomic
from halfstep.checkpoint.atomic import folder_lock
from halfstep.checkpoint.directory import check_weights, load_checkpoint, save_checkpoint
from halfstep.checkpoint.exchange import exchange
from halfstep.checkpoint.files import FILES
from halfstep.errors import HalfstepError, SettingError
from tree_cases import TREES, same

EVERY_FILE = [*FILES, "manifest.json"]


def save(path, weights=None, state=None, overwrite=False, **meta):
    """Save a small checkpoint."""
    weights = weights or {"w": torch.arange(6.0)}
    return save_checkpoint(path, weights=weights, state=state, meta=meta, overwrite=overwrite)


@given(TREES, TREES)
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_a_checkpoint_round_trips(tmp_path_factory, first, second):
    """Weights, state and meta are restored exactly."""
    weights = {"a": torch.randn(2, 3), "b": torch.ones((), dtype=torch.bfloat16), "c": torch.empty(0)}
    path = tmp_path_factory.mktemp("round") / "ckpt"
    save_checkpoint(
        path, weights=weights, state=[first, second], meta={"step": 1, "best": float("inf"), "betas": (0.9, 1)}
    )
    loaded = load_checkpoint(path)
    assert same(loaded.weights, weights)
    assert same(loaded.state, [first, second])
    assert same(loaded.meta, {"step": 1, "best": float("inf"), "betas": (0.9, 1)})
    assert loaded.path == path
    assert "3 tensors, 7 values" in str(loaded)
    shutil.rmtree(path)


def test_a_save_leaves_only_the_five_files(tmp_path):
    """No temporary file or directory remains after a save, and none of the files is a pickle."""
    path = save(tmp_path / "deep" / "er" / "ckpt")
    assert sorted(p.name for p in path.iterdir()) == sorted(EVERY_FILE)
    assert list(path.parent.iterdir()) == [path]
    for file in path.iterdir():
        assert not file.read_bytes().startswith((b"PK", b"\x80"))


def test_pickle_is_neither_written_nor_read(tmp_path, monkeypatch):
    """Saving and loading work without pickle and torch.load."""

    def fail(*_, **__):
        raise AssertionError("pickle was used")

    for module, names in (
        (pickle, ["dump", "dumps", "load", "loads", "Pickler", "Unpickler"]),
        (torch, ["save", "load"]),
    ):
        for name in names:
            monkeypatch.setattr(module, name, fail)
    load_checkpoint(save(tmp_path / "ckpt", state={"x": torch.ones(2)}))


def test_tied_weights_are_stored_once_and_tied_after_loading(tmp_path):
    """Two names of one tensor are one tensor on disk and after loading."""
    shared = torch.randn(3)
    path = save(tmp_path / "ckpt", {"emb": shared, "other": torch.zeros(2), "head": shared, "part": shared[:2]})
    assert set(safetensors.torch.load_file(path / "model.safetensors")) == {"emb", "other", "part"}
    weights = load_checkpoint(path).weights
    assert weights["emb"] is weights["head"]
    assert weights["part"].data_ptr() != weights["emb"].data_ptr()
    assert torch.equal(weights["head"], shared)


def test_a_checkpoint_fits_a_model_with_other_wrappers(tmp_path):
    """Weights are stored under the names they are passed with, and levels of wrappers on either side do not matter."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3))
    wrapped = {f"_orig_mod.module.{name}": value for name, value in model.state_dict().items()}
    loaded = load_checkpoint(save(tmp_path / "ckpt", wrapped))
    assert list(loaded.weights) == list(wrapped)
    model.load_state_dict(check_weights(loaded.weights, model.state_dict()))
    assert list(check_weights(model.state_dict(), wrapped)) == list(wrapped)


def test_no_weight_is_lost_whatever_its_name(tmp_path):
    """Names that differ only in a level called like a wrapper's are different weights."""
    weights = {"a": torch.ones(2), "module.a": torch.zeros(2), "module.module.a": torch.full((2,), 3.0)}
    loaded = load_checkpoint(save(tmp_path / "ckpt", weights)).weights
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], value) for name, value in check_weights(loaded, weights).items())


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": 3}, "is a int, not a tensor"),
        ({"a": torch.ones(2).to_sparse()}, "layout"),
        ({"__metadata__": torch.ones(1)}, "of that name"),
        ({"\ud800": torch.ones(1)}, "of that name"),
        ({"a": torch.ones(1, device="meta")}, "meta tensor"),
    ],
)
def test_weights_that_cannot_be_stored_are_rejected_by_name(tmp_path, weights, message):
    """The error is raised before anything is written."""
    with pytest.raises(SettingError, match=message):
        save(tmp_path / "ckpt", weights)
    assert list(tmp_path.iterdir()) == []


def test_tensors_in_meta_and_objects_in_state_are_rejected(tmp_path):
    """Both raise an error with their path before anything is written."""
    with pytest.raises(SettingError, match=r"meta\.loss is a tensor"):
        save(tmp_path / "ckpt", loss=torch.ones(1))
    with pytest.raises(SettingError, match=r"state\.hook is a .*function"):
        save(tmp_path / "ckpt", state={"hook": lambda: 0})
    assert list(tmp_path.iterdir()) == []


def test_an_existing_path_is_never_overwritten(tmp_path):
    """An empty directory may become a checkpoint; anything else is never overwritten."""
    (tmp_path / "empty").mkdir()
    load_checkpoint(save(tmp_path / "empty"))
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("empty", "file", "link"):
        with pytest.raises(SettingError, match="exists already"):
            save(tmp_path / name)
    assert (tmp_path / "file").read_text() == "mine"


def test_tensors_of_the_state_are_loaded_to_their_device(tmp_path):
    """State tensors that were on the CPU stay there; weights are loaded to the requested device."""
    path = save(tmp_path / "ckpt", state={"rng": torch.get_rng_state()})
    loaded = load_checkpoint(path, device="meta")
    assert loaded.weights["w"].device.type == "meta"
    assert loaded.state["rng"].device.type == "cpu"


@pytest.mark.parametrize("call", range(7))
def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch, call):
    """Whichever sync fails on the full disk, the partial checkpoint is removed and earlier ones are kept."""
    old = save(tmp_path / "old")
    real, calls = os.fsync, []

    def full(handle):
        calls.append(handle)
        if len(calls) > call:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        HalfstepError, match=r"could not be saved: No space left on device. It needs \d+ B and [\d.,]+ \w+ are free"
    ):
        save(tmp_path / "new")
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == [old]
    load_checkpoint(old)


@pytest.mark.skipif(sys.platform == "win32", reason="Requires: [POSIX resource limits]")
def test_a_write_that_the_system_rejects_leaves_nothing_behind(tmp_path):
    """A file-size limit that is hit in the middle of a tensor is reported, and the partial checkpoint removed."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
    try:
        with pytest.raises(HalfstepError, match=r"File too large. It needs 7.63 MiB and"):
            save(tmp_path / "new", {"w": torch.zeros(2 * 10**6)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_reported(tmp_path, monkeypatch):
    """A read-only parent, or a file in its place, is an error that names the folder."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(HalfstepError, match=r"could not be saved: .*the free space is unknown in .*file/sub"):
        save(tmp_path / "file" / "sub" / "ckpt")

    def deny(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("pathlib.Path.mkdir", deny)
    with pytest.raises(HalfstepError, match=r"could not be saved: Permission denied.*write permission"):
        save(tmp_path / "ckpt")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="Requires: [a user other than root]")
def test_a_read_only_parent_is_reported(tmp_path):
    """A parent without write permission is an error that names it."""
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(HalfstepError, match="Permission denied"):
        save(tmp_path / "locked" / "ckpt")


def test_an_interrupt_cleans_up_and_propagates(tmp_path, monkeypatch):
    """Ctrl-C while saving leaves no temporary directory and still raises KeyboardInterrupt."""

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path / "ckpt")
    assert list(tmp_path.iterdir()) == []


def test_a_filesystem_that_cannot_sync_folders_is_accepted(tmp_path, monkeypatch):
    """Some network filesystems cannot sync a directory; the files are synced anyway."""
    real, synced = os.fsync, []

    def picky(handle):
        if os.path.isdir(f"/proc/self/fd/{handle}"):  # noqa: PTH112 - an entry of /proc, not a file
            raise OSError(errno.EINVAL, "Invalid argument")
        synced.append(handle)
        return real(handle)

    monkeypatch.setattr(os, "fsync", picky)
    load_checkpoint(save(tmp_path / "ckpt"))
    assert len(synced) == 5


def test_the_lock_is_shared_by_saves_and_excludes_clean_up(tmp_path, monkeypatch):
    """Several processes may save into one folder; none may clean it up meanwhile."""
    with folder_lock(tmp_path, exclusive=False) as first, folder_lock(tmp_path, exclusive=False) as second:
        assert (first, second) == (True, True)
        with folder_lock(tmp_path, exclusive=True) as alone:
            assert not alone
    with folder_lock(tmp_path, exclusive=True) as alone:
        assert alone
    import fcntl

    def unsupported(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with folder_lock(tmp_path, exclusive=True) as alone, folder_lock(tmp_path, exclusive=False) as saving:
        assert (alone, saving) == (False, True)


def test_weights_that_do_not_fit_are_listed_with_both_shapes():
    """Missing, unexpected and different weights are named, the first few of each."""
    saved = {"a": torch.ones(2), "b": torch.ones(3), **{f"extra{i}": torch.ones(1) for i in range(7)}}
    model = {"module.a": torch.ones(2, 2), "module.b": torch.ones(3).half(), "c": torch.ones(1)}
    with pytest.raises(SettingError) as caught:
        check_weights(saved, model)
    text = str(caught.value)
    assert "1 missing in the checkpoint: c;" in text
    assert "7 not in the model: extra0, extra1, extra2, extra3, extra4 and 2 more;" in text
    assert "2 different: module.a (saved [2] float32, model [2, 2] float32), module.b (saved [3] float32, model" in text


def test_saving_copies_at_most_one_tensor_at_a_time(tmp_path, monkeypatch):
    """The copy of one tensor is freed before the next one is made."""
    real, copies = torch.empty_like, []

    def watched(*args, **kwargs):
        assert not any(copy() is not None for copy in copies)
        made = real(*args, **kwargs)
        copies.append(weakref.ref(made.untyped_storage()))
        return made

    monkeypatch.setattr(torch, "empty_like", watched)
    save(tmp_path / "ckpt", {f"w{i}": torch.ones(8, 8 + i).t() for i in range(4)})
    assert len(copies) == 4


def test_overwriting_replaces_a_checkpoint_and_leaves_nothing_behind(tmp_path):
    """The new checkpoint is there, and neither the old one nor a temporary directory; a second time too."""
    for value in range(3):
        save(tmp_path / "ckpt", {"w": torch.full((2,), float(value))}, overwrite=True)
        assert load_checkpoint(tmp_path / "ckpt").weights["w"].tolist() == [value, value]
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]
    with pytest.raises(SettingError, match="overwrite=True"):
        save(tmp_path / "ckpt")


@pytest.mark.parametrize("moment", ["temporary directory", "parent"])
def test_an_overwritten_checkpoint_is_intact_until_the_new_one_is_complete(tmp_path, monkeypatch, moment):
    """A disk that fails before or after the rename leaves the old checkpoint under its name, and nothing else."""
    save(tmp_path / "ckpt", {"w": torch.zeros(2)})
    sync = atomic._sync

    def fail(folder):
        if (folder == tmp_path) == (moment == "parent"):
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(folder)

    monkeypatch.setattr(atomic, "_sync", fail)
    with pytest.raises(HalfstepError, match="No space left"):
        save(tmp_path / "ckpt", {"w": torch.ones(2)}, overwrite=True)
    assert not load_checkpoint(tmp_path / "ckpt").weights["w"].any()
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]


def test_only_checkpoints_are_overwritten(tmp_path):
    """A file, a link, a directory with other files and a checkpoint with files added to it stay as they are."""
    save(tmp_path / "real")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for name, entry in (("folder", "notes.txt"), ("mixed", "notes.txt")):
        if name == "mixed":
            save(tmp_path / name)
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / entry).write_text("mine")
    for name in ("file", "link", "folder", "mixed"):
        with pytest.raises(SettingError, match="not a checkpoint directory"):
            save(tmp_path / name, overwrite=True)
    assert (tmp_path / "mixed" / "notes.txt").read_text() == (tmp_path / "file").read_text() == "mine"


def test_directories_change_places_without_the_system_call(tmp_path, monkeypatch):
    """Where the operating system cannot exchange two directories at once, renames do, and a failure reverts them."""
    monkeypatch.setattr("halfstep.checkpoint.exchange._exchange_at_once", lambda *_: False)
    for value in range(2):
        save(tmp_path / "ckpt", {"w": torch.full((2,), float(value))}, overwrite=True)
    assert load_checkpoint(tmp_path / "ckpt").weights["w"].tolist() == [1.0, 1.0]
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]
    with pytest.raises(OSError):
        exchange(tmp_path / "absent", tmp_path / "ckpt")
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt"]
