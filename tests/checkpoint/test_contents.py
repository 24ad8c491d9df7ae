"""Checkpoints that several gloo ranks write together and any number of ranks reads."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from halfstep.backends.ranks import ProcessRanks
from halfstep.checkpoint.directory import load_checkpoint, open_checkpoint, read_meta
from halfstep.checkpoint.export import export_weights
from halfstep.checkpoint.files import FILES, read_manifest, render_manifest
from halfstep.checkpoint.retention import CheckpointFolder
from halfstep.checkpoint.saver import Saver
from halfstep.errors import SettingError
from rank_processes import cases_of_ranks

PROGRAM = Path(__file__).parents[1] / "saving_program.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the ranks save."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def ranks(folder):
    """What two ranks printed, by case."""
    lines = cases_of_ranks(PROGRAM, folder)
    return {first["case"]: [first, second] for first, second in zip(*lines, strict=True)}


@pytest.fixture
def sharded(ranks, folder, tmp_path):
    """A copy of a checkpoint of two ranks."""
    return Path(shutil.copytree(folder / "2-1", tmp_path / "copy"))


def test_a_sharded_run_resumes_bit_for_bit(ranks):
    """Weights, masters, moments of every kind, EMA and the random-number state of each rank, and so the next step."""
    for rank in ranks["a_run_resumes_bit_for_bit"]:
        assert rank["wrong"] == []
        assert rank["saved"] == 9


def test_ranks_read_their_part_of_a_checkpoint_of_one_process(ranks):
    """In every kind of layout; 8-bit moments are decoded and encoded again in the blocks of the shards."""
    assert [rank["wrong"] for rank in ranks["files_of_one_process_are_read"]] == [[], []]


@pytest.mark.usefixtures("ranks")
def test_one_process_reads_whole_tensors(folder):
    """The weights, masters and moments of what two ranks have saved, without torch.distributed."""
    for number in range(9):
        reference = load_checkpoint(folder / f"2-{number}-whole").weights
        checkpoint = load_checkpoint(folder / f"2-{number}")
        engine = checkpoint.state["engine"]
        assert checkpoint.num_ranks == 2
        assert float(engine["scaler"]["scale"]) == 8
        assert checkpoint.state["extra"] == {"position": 0}
        for index, name in enumerate(engine["names"][0]):
            entry, weight = engine["optimizers"][0]["state"][index], checkpoint.weights[name]
            assert torch.equal(engine["ema"]["averages"][name], weight.float() * 2)
            for key, value in entry.items():
                if f"{name} {key}" in reference:
                    assert torch.equal(value.float(), reference[f"{name} {key}"]), (number, name, key)


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("ema", [False, True])
def test_export_writes_one_file_of_masters(folder, tmp_path, ema):
    """From slices: the fp32 masters, joined from split ones, or the EMA."""
    out = export_weights(folder / "2-2", tmp_path / "masters.safetensors", ema=ema)
    exported, reference = load_file(out), load_checkpoint(folder / "2-2-whole").weights
    weights = load_checkpoint(folder / "2-2").weights
    assert set(exported) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    for name, value in exported.items():
        assert torch.equal(value, weights[name].float() * 2 if ema else reference[f"{name} master"])


def test_replicated_tensors_are_written_once(ranks):
    """On HSDP's meshes, every element is in the files exactly once, and the run resumes bit for bit."""
    for rank in ranks["copies_are_written_once"]:
        assert set(map(tuple, rank["sizes"].values())) == {(rank["elements"], rank["elements"], 0)}


def test_any_dimension_may_be_sharded(ranks):
    """Columns and rows come back whole, and so do a number and an empty tensor."""
    for rank in ranks["other_dimensions_are_sharded"]:
        assert (rank["equal"], rank["number"], rank["empty"]) == ([True] * 3, 3.0, [0, 3])


def test_a_failing_rank_is_an_error_on_every_rank(ranks):
    """With the rank and the reason; the checkpoint before is whole, nothing else is left, and the next save works."""
    both = ranks["a_rank_that_fails_leaves_the_checkpoint_before"]
    for rank in both:
        assert (rank["unchanged"], rank["names"], rank["changed"]) == (True, ["here"], True)
        assert all("No space left on device" in error for error in rank["errors"])
    assert ["so this one stopped as well: rank 0: " in rank["errors"][0] for rank in both] == [False, True]
    assert ["so this one stopped as well: rank 1: " in rank["errors"][2] for rank in both] == [True, False]


def test_ranks_with_different_states_are_rejected_on_every_rank(ranks):
    """A missing slice, a placement that is no box, a value that cannot be stored; and a DTensor saved by one rank alone."""
    for rank in ranks["ranks_with_other_states_are_rejected"]:
        missing, partial, foreign = rank["errors"]
        assert "do not have the same state, so it was not saved: of a they have 2 of 4 elements" in missing
        assert "is placed as P(sum) over ranks" in partial
        assert "state.a is a builtins.object" in foreign
        assert "saved by one rank alone" in rank["alone"]
        assert not rank["exists"]


def test_damage_to_any_file_is_reported_by_name_on_every_rank(ranks):
    """Each rank verifies a share of the files, and all of them hear of it."""
    for rank in ranks["damage_is_reported_on_every_rank"]:
        for message, damage in zip(rank["messages"], ("was altered", "is truncated", "is missing"), strict=True):
            assert f"state-00001-of-00002.safetensors {damage}" in message


def test_retention_works_with_ranks_in_the_background(ranks):
    """The last and the best are kept, each with the values it had when it was saved."""
    for rank in ranks["a_folder_keeps_the_last_and_the_best"]:
        assert (rank["steps"], rank["best"], rank["wrong"]) == ([1, 3], "step-00000001", [])


def test_non_finite_values_on_one_rank_are_found_by_all(ranks):
    """So that all ranks decide the same."""
    for rank in ranks["nonfinite_values_of_one_rank_are_seen_by_all"]:
        assert rank["bad"] == {"0.weight": "3 of 264"}


def test_only_the_needed_slices_are_read(sharded):
    """A part of a tensor is read from the file of the rank that has it, and from no other."""
    with open_checkpoint(sharded) as checkpoint:
        stored = checkpoint.weights["0.weight"]
        files = [file for file, _ in stored.slices]
        boxes = [box for _, box in stored.slices]
        assert files == [f"model-0000{rank}-of-00002.safetensors" for rank in range(2)]
        assert [box.shape[0] for box in boxes] == [17, 16]
        part = stored.read(boxes[1])
        assert [file for file in stored.files._readers if file.startswith("model")] == [files[1]]
        assert part.equal(stored.read()[17:])


def test_every_file_of_a_sharded_checkpoint_is_verified(sharded):
    """Missing, truncated and altered files are rejected by name; the sizes also where only the meta is read."""
    names = sorted(read_manifest(sharded))
    assert len(names) == 3 + 2 * 4
    for name in [*names, "manifest.json"]:
        data = (sharded / name).read_bytes()
        (sharded / name).write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
        with pytest.raises(SettingError, match=f"{name} was altered"):
            load_checkpoint(sharded)
        (sharded / name).write_bytes(data[:-1])
        with pytest.raises(SettingError, match=rf"{name} (is truncated|was altered or truncated)"):
            read_meta(sharded)
        (sharded / name).unlink()
        with pytest.raises(SettingError, match=f"{name} is missing"):
            load_checkpoint(sharded)
        (sharded / name).write_bytes(data)
    load_checkpoint(sharded)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index["model"]["0.weight"]["slices"].pop(), "does not have slices for all of '0.weight'"),
        (lambda index: index["model"]["0.weight"].pop("shape"), "does not have the layout"),
        (lambda index: index["model"]["0.weight"].update(dtype="float64"), "and the index has torch.float64"),
        (lambda index: index["model"]["0.weight"].update(dtype="nn"), "does not have the layout"),
        (lambda index: index.pop("state"), "does not have the layout"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_rejected(sharded, change, message):
    """Although the manifest is that of the changed index."""
    import hashlib

    index = json.loads((sharded / "index.json").read_bytes())
    change(index)
    data = json.dumps(index).encode()
    (sharded / "index.json").write_bytes(data)
    files = read_manifest(sharded) | {"index.json": {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}}
    (sharded / "manifest.json").write_bytes(render_manifest(files))
    with pytest.raises(SettingError, match=message):
        load_checkpoint(sharded)


def test_a_manifest_without_a_rank_is_rejected(sharded):
    """Three of four files of a rank are not a checkpoint."""
    files = dict(read_manifest(sharded))
    del files["model-00001-of-00002.safetensors"]
    (sharded / "manifest.json").write_bytes(render_manifest(files))
    with pytest.raises(SettingError, match="lists the files"):
        load_checkpoint(sharded)


def test_a_folder_scans_sharded_checkpoints(folder, ranks):
    """In a process without ranks, as a resumed run does."""
    saved = CheckpointFolder(folder / "folder").checkpoints()
    assert [(entry.step, entry.metric) for entry in saved] == [(1, 0.0), (3, -2.0)]


def test_one_rank_alone_writes_whole_tensors(tmp_path):
    """Sharded over one rank, a tensor is whole, and the checkpoint is that of one process."""
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        placed = distribute_tensor(torch.arange(6.0), init_device_mesh("cpu", (1,)), [Shard(0)])
        saver = Saver(ProcessRanks())
        path = saver.save(
            tmp_path / "a", weights={"w": placed}, state={"t": placed * 2}, own={"n": 1}, meta={}, wait=False
        )
        saver.finish()
    finally:
        dist.destroy_process_group()
    loaded = load_checkpoint(path)
    assert loaded.num_ranks == 1
    assert set(read_manifest(path)) == set(FILES)
    assert loaded.weights["w"].tolist() == list(range(6))
    assert loaded.state["t"].tolist() == list(range(0, 12, 2))
    assert loaded.state["n"] == 1


@pytest.mark.slow
def test_four_ranks_read_what_two_have_saved_and_the_other_way_round(folder, ranks):
    """Weights, masters and moments, also in the other direction, and with HSDP on a mesh of 2 by 2."""
    four = cases_of_ranks(PROGRAM, folder / ".", "a_run_resumes_bit_for_bit", "files_of_other_ranks_are_read", "copies_are_written_once", ranks=4)  # fmt: skip
    assert [[line["wrong"] for line in rank[:2]] for rank in four] == [[[], []]] * 4
    assert [rank[1]["read"] for rank in four] == [9] * 4
    for rank in four:
        assert set(map(tuple, rank[2]["sizes"].values())) == {(331, 331, 0)}
    two = cases_of_ranks(PROGRAM, folder, "files_of_other_ranks_are_read")
    assert [(rank[0]["wrong"], rank[0]["read"]) for rank in two] == [([], 9)] * 2


@pytest.mark.slow
def test_a_rank_that_dies_leaves_the_checkpoint_before(tmp_path):
    """The other rank gets an error and does not wait for ever."""
    (alive,), dead = cases_of_ranks(PROGRAM, tmp_path, "a_rank_that_dies_while_it_writes")
    assert dead == []
    assert "lost contact with the other ranks. Rank 1 did not send its part" in alive["error"]
    assert alive["unchanged"]
    assert alive["names"] == ["died"]
