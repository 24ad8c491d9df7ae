"""One rank of the tests of sharded checkpoints: prints a JSON line per case, with what was not as it should be.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python tests/saving_program.py FOLDER [CASE ...]
"""

import datetime as dt
import errno
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import sharding_program as sharding
from halfstep.backends.ranks import ProcessRanks
from halfstep.checkpoint.directory import load_checkpoint, open_checkpoint, save_checkpoint
from halfstep.checkpoint.retention import CheckpointFolder
from halfstep.checkpoint.saver import Saver
from halfstep.engine.saved.checkpoint import nonfinite_weights
from halfstep.engine.saved.placing import read_state
from halfstep.errors import HalfstepError
from halfstep.optim.shards import in_files
from sharding_program import LAYOUTS, OPTIMIZERS, alike, build, differences, gradients

CASES = {}
SAVED = [("AdamW", layout) for layout in LAYOUTS[1::2]] + [("NAdam", LAYOUTS[5]), ("SGD", LAYOUTS[8])]


def case(function):
    """Register a case under its name."""
    CASES[function.__name__] = function
    return function


def parts_of(model, optimizer):
    """What an Engine would save, and an EMA that is the doubled weights."""
    names = [name for name, _ in model.named_parameters()]
    engine = {
        "policy": "bf16-lean",
        "names": [names],
        "params": names,
        "optimizers": [in_files(optimizer.state_dict())],
        "ema": {"decay": 0.9, "averages": {n: p.detach().float() * 2 for n, p in model.named_parameters()}},
        "scaler": {"scale": torch.tensor(8.0)},
    }
    own = {"rng": torch.tensor([dist.get_rank()]), "extra": {"position": dist.get_rank()}}
    return {"weights": model.state_dict(), "state": {"engine": engine}, "own": own, "meta": {"policy": "bf16-lean"}}


def load(path, model, optimizer):
    """Load a checkpoint of any number of ranks; returns the opened checkpoint's own part and the read state."""
    with open_checkpoint(path, RANKS) as checkpoint:
        state = read_state({**checkpoint.state["engine"], "model": checkpoint.weights}, model)
        own = {name: checkpoint.state[name] for name in ("rng", "extra")}
        own["rng"] = own["rng"].read().tolist()
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizers"][0])
    return own, state


def trained(name, layout, mesh=None, steps=2):
    """A sharded model after some steps, and its optimizer."""
    dtype, master, states = layout
    model = build(dtype, mesh)
    optimizer = OPTIMIZERS[name](model.parameters(), master=master, states=states)
    for step in range(steps):
        gradients(model, step)
        optimizer.step()
    return model, optimizer


def other(name, layout, mesh=None):
    """New objects with other values."""
    model, optimizer = trained(name, layout, mesh, steps=1)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    return model, optimizer


def whole(model, optimizer):
    """Masters and moments as fp32 tensors, not sharded."""
    tensors = {f"{name} master": optimizer.master_of(param) for name, param in model.named_parameters()}
    moments = optimizer.torch_state_dict()["state"]
    for number, (name, _) in enumerate(model.named_parameters()):
        tensors |= {f"{name} {key}": value for key, value in moments[number].items()}
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in tensors.items()}


def error_of(function):
    """The message of the error that a call raises."""
    try:
        function()
    except HalfstepError as error:
        return str(error)
    return ""


@case
def a_run_resumes_bit_for_bit():
    """In half of the layouts, each with the tensors as one process reads them."""
    wrong = []
    for number, (name, layout) in enumerate(SAVED):
        model, optimizer = trained(name, layout)
        path = SAVER.save(FOLDER / f"{RANKS.num_ranks}-{number}", **parts_of(model, optimizer))
        reference = whole(model, optimizer)
        if RANKS.rank == 0:
            save_checkpoint(FOLDER / f"{RANKS.num_ranks}-{number}-whole", weights=reference, state={}, meta={})
        again, resumed = other(name, layout)
        own, state = load(path, again, resumed)
        wrong += [f"{name} {layout}: {d}" for d in differences(resumed, optimizer)]
        if own != {"rng": [RANKS.rank], "extra": {"position": RANKS.rank}}:
            wrong.append(f"{own}")
        for key, param in model.named_parameters():
            if not alike(state["ema"]["averages"][key], param.detach().float() * 2):
                wrong.append(f"{name} {layout}: EMA of {key}")
        for each in ((model, optimizer), (again, resumed)):
            gradients(each[0], 7)
            each[1].step()
        wrong += [f"{name} {layout}, a step later: {d}" for d in differences(resumed, optimizer)]
    return {"wrong": wrong, "saved": len(SAVED)}


@case
def files_of_other_ranks_are_read():
    """What N ranks have saved is read by another number; moments of 8 bits as they were decoded."""
    wrong, read = [], 0
    for folder in sorted(FOLDER.glob("*-*-whole")):
        num_ranks, number = map(int, folder.name.split("-")[:2])
        name, layout = SAVED[number]
        model, optimizer = other(name, layout)
        own, _ = load(folder.with_name(f"{num_ranks}-{number}"), model, optimizer)
        expected, read = load_checkpoint(folder).weights, read + (num_ranks != RANKS.num_ranks)
        for key, value in whole(model, optimizer).items():
            # Blocks of 8 bits differ between numbers of ranks, so decoded moments are encoded again.
            rounded = layout[2] == "8bit" and "master" not in key and num_ranks != RANKS.num_ranks
            far = (value - expected[key]).abs().max() > (0.05 * expected[key].abs().max() if rounded else 0)
            wrong += [f"{folder.name} {name} {layout}: {key}"] if far else []
        if num_ranks != RANKS.num_ranks and own["extra"] != {"position": 0}:
            wrong.append(f"{own}")
    return {"wrong": wrong, "read": read}


@case
def files_of_one_process_are_read():
    """By every rank just its own part, with whole 8-bit moments too."""
    wrong = []
    for number, layout in enumerate(LAYOUTS[1::2]):
        dtype, master, states = layout
        sharded = build(dtype)
        model = nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 1)).to(dtype)
        model.load_state_dict({k: v.full_tensor() for k, v in sharded.state_dict().items()})
        optimizer = OPTIMIZERS["AdamW"](model.parameters(), master=master, states=states)
        for step in range(2):
            g = torch.Generator().manual_seed(step)
            for param in model.parameters():
                param.grad = torch.randn(param.shape, generator=g).to(param.dtype)
            optimizer.step()
        path = FOLDER / f"one-{number}"
        parts = parts_of(model, optimizer)
        if RANKS.rank == 0:
            Saver().save(path, **parts)
        dist.barrier()
        again, resumed = other("AdamW", layout)
        own, _ = load(path, again, resumed)
        expected = whole(model, optimizer)
        for key, value in whole(again, resumed).items():
            rounded = states == "8bit" and "master" not in key
            far = (value - expected[key]).abs().max() > (0.05 * expected[key].abs().max() if rounded else 0)
            wrong += [f"{layout}: {key}"] if far else []
        wrong += [] if own["extra"] == {"position": 0} else [str(own)]
    return {"wrong": wrong}


@case
def copies_are_written_once():
    """On a mesh that replicates, and for tensors that all ranks have."""
    sizes = {}
    for shape in ((1, RANKS.num_ranks), (RANKS.num_ranks, 1), (2, RANKS.num_ranks // 2)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        model, optimizer = trained("AdamW", LAYOUTS[1], mesh)
        path = SAVER.save(FOLDER / f"mesh-{RANKS.num_ranks}-{shape[0]}", **parts_of(model, optimizer), overwrite=True)
        again, resumed = other("AdamW", LAYOUTS[1], mesh)
        load(path, again, resumed)
        index = json.loads((path / "index.json").read_text())
        elements = 0
        for entry in index["model"].values():
            for piece in entry["slices"]:
                elements += torch.Size(piece["shape"]).numel()
        stored = sum(t.numel() for file in path.glob("model-*") for t in tensors_in(file).values())
        sizes[str(shape)] = [elements, stored, len(differences(resumed, optimizer))]
    return {"sizes": sizes, "elements": sum(p.numel() for p in build().parameters())}


def tensors_in(file):
    """The tensors of a safetensors file."""
    from safetensors.torch import load_file

    return load_file(file)


@case
def other_dimensions_are_sharded():
    """Columns, and both dimensions of a mesh."""
    mesh = init_device_mesh("cpu", (RANKS.num_ranks, 1))
    value = torch.arange(35.0).view(5, 7)
    placed = {
        "columns": distribute_tensor(value, mesh, [Shard(1), Shard(0)]),
        "rows": distribute_tensor(value, mesh, [Shard(0), Shard(0)]),
        "number": torch.tensor(3.0),
        "empty": torch.zeros(0, 3),
    }
    path = SAVER.save(FOLDER / "dimensions", weights=placed, state={"same": placed["rows"]}, own={}, meta={})
    loaded = load_checkpoint(path)
    equal = [loaded.weights[n].equal(value) for n in ("columns", "rows")] + [loaded.state["same"].equal(value)]
    return {"equal": equal, "number": float(loaded.weights["number"]), "empty": list(loaded.weights["empty"].shape)}


@case
def a_rank_that_fails_leaves_the_checkpoint_before():
    """Whichever rank, every rank gets an error, and no partial directory stays; also in the background."""
    root, errors = FOLDER / "failing", []
    model, optimizer = trained("AdamW", LAYOUTS[1])
    SAVER.save(root / "here", **parts_of(model, optimizer))
    before = load_checkpoint(root / "here").weights["0.weight"]
    gradients(model, 5)
    optimizer.step()
    real = os.fsync

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    for wait, rank in ((True, 0), (True, 1), (False, 1)):
        os.fsync = full if rank == RANKS.rank else real
        parts = parts_of(model, optimizer)

        def attempt(parts=parts, wait=wait):
            SAVER.save(root / "here", **parts, overwrite=True, wait=wait)
            SAVER.finish()

        errors.append(error_of(attempt))
        os.fsync = real
        dist.barrier()
    unchanged = before.equal(load_checkpoint(root / "here").weights["0.weight"])
    names = sorted(p.name for p in root.iterdir())
    dist.barrier()
    SAVER.save(root / "here", **parts_of(model, optimizer), overwrite=True)
    changed = not before.equal(load_checkpoint(root / "here").weights["0.weight"])
    return {"errors": errors, "unchanged": unchanged, "names": names, "changed": changed}


@case
def ranks_with_other_states_are_rejected():
    """A tensor that a rank lacks, and a placement that is no box."""
    from torch.distributed.tensor import Partial

    mesh = init_device_mesh("cpu", (RANKS.num_ranks,))
    value = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    missing = {"a": value} if RANKS.rank == 0 else {}
    partial = {"a": DTensor.from_local(torch.ones(4), mesh, [Partial()])}
    errors = [
        error_of(lambda s=state: SAVER.save(FOLDER / "never", weights={}, state=s, own={}, meta={}))
        for state in (missing, partial, {"a": object()} if RANKS.rank else {})
    ]
    alone = error_of(lambda: save_checkpoint(FOLDER / "never", weights={"a": value}, state={}, meta={}))
    return {"errors": errors, "alone": alone, "exists": (FOLDER / "never").exists()}


@case
def damage_is_reported_on_every_rank():
    """Of a file of each rank, altered, truncated and missing; the folder's latest is the one before."""
    messages = []
    model, optimizer = trained("AdamW", LAYOUTS[1])
    for number, damage in enumerate(("altered", "truncated", "missing")):
        path = SAVER.save(FOLDER / f"damaged-{number}", **parts_of(model, optimizer))
        file = path / f"state-00001-of-{RANKS.num_ranks:05d}.safetensors"
        if RANKS.rank == 0:
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.unlink() if damage == "missing" else file.write_bytes(data[:-1] if damage == "truncated" else data)
        dist.barrier()
        messages.append(error_of(lambda p=path: load(p, model, optimizer)))
    return {"messages": messages}


@case
def a_folder_keeps_the_last_and_the_best():
    """With saves in the background, whose contents are those at the time of the call."""
    folder = CheckpointFolder(FOLDER / "folder", keep_last=1, keep_best=1)
    model, optimizer = trained("AdamW", LAYOUTS[3])
    expected = {}
    for step in range(4):
        parts = parts_of(model, optimizer)
        metric = float(-abs(step - 1))
        path = folder.save(step, **parts, metric=metric, saver=SAVER, wait=step == 2)
        expected[path.name] = whole(model, optimizer)["0.weight master"]
        gradients(model, 10 + step)
        optimizer.step()
    SAVER.finish()
    wrong = []
    for entry in folder.checkpoints():
        again, resumed = other("AdamW", LAYOUTS[3])
        load(entry.path, again, resumed)
        if not whole(again, resumed)["0.weight master"].equal(expected[entry.path.name]):
            wrong.append(entry.path.name)
    return {"steps": [e.step for e in folder.checkpoints()], "best": folder.best().name, "wrong": wrong}


@case
def nonfinite_values_of_one_rank_are_seen_by_all():
    """With how many there are, in weights and in masters."""
    model, optimizer = trained("AdamW", (torch.bfloat16, "fp32", "fp32"))
    with torch.no_grad():
        if RANKS.rank == RANKS.num_ranks - 1:
            model[0].weight.to_local()[0, :3] = float("nan")
    parts = parts_of(model, optimizer)
    state = {**parts["state"]["engine"], "model": parts["weights"]}
    return {"bad": nonfinite_weights(state, RANKS)}


def a_rank_that_dies_while_it_writes():
    """The last rank ends without a word; the others get an error, and the checkpoint before stays. Ends the program."""
    model, optimizer = trained("AdamW", LAYOUTS[1])
    SAVER.save(FOLDER / "died", **parts_of(model, optimizer))
    before = load_checkpoint(FOLDER / "died").weights["0.weight"]
    dist.barrier()
    gradients(model, 5)
    optimizer.step()
    if RANKS.rank == RANKS.num_ranks - 1:
        os.fsync = lambda _: os._exit(0)
    parts = parts_of(model, optimizer)
    SAVER.save(FOLDER / "died", **parts, overwrite=True, wait=False)
    error = error_of(SAVER.finish)
    unchanged = before.equal(load_checkpoint(FOLDER / "died").weights["0.weight"])
    names = sorted(p.name for p in FOLDER.iterdir())
    print(json.dumps({"error": error, "unchanged": unchanged, "names": names}), flush=True)
    os._exit(0)


def main():
    """Run every case."""
    if CHOSEN == ["a_rank_that_dies_while_it_writes"]:
        a_rank_that_dies_while_it_writes()
    for name, function in CASES.items():
        if CHOSEN and name not in CHOSEN:
            continue
        print(json.dumps({"case": name, "rank": dist.get_rank(), **function()}), flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    FOLDER, CHOSEN = Path(sys.argv[1]), sys.argv[2:]
    sharding.FOLDER = FOLDER
    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=120))
    RANKS = ProcessRanks()
    SAVER = Saver(RANKS)
    main()
