"""Cases that ranks run: a registry, what ranks compare with each other, and the loop that prints one line of JSON per case."""

import datetime as dt
import hashlib
import json
import time

import torch
import torch.distributed as dist

CASES, SLOW = {}, {}


def case(function):
    """Register a case under its name."""
    CASES[function.__name__] = function
    return function


def slow_case(function):
    """Register a case that runs only where it is named, or with `slow`."""
    SLOW[function.__name__] = function
    return function


def hashed(*tensors):
    """A hash of these tensors' bits, equal on two ranks only if every bit is."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def everything(engine):
    """A hash of every number that an Engine trains: weights, buffers, masters, moments, EMA, loss scale."""
    tensors, pending = [], [engine.state_dict()]
    while pending:
        value = pending.pop()
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, dict):
            pending += [value[key] for key in sorted(value, key=str) if key != "truth"]
        elif isinstance(value, list | tuple):
            pending += value
    return hashed(*tensors)


def same(text):
    """Whether a text is the same on every rank."""
    texts = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return len(set(texts)) == 1


def run_cases(names):
    """Run these cases; `slow` stands for all slow ones, and none for all others."""
    chosen = SLOW if names == ["slow"] else {n: (CASES | SLOW)[n] for n in names} if names else CASES
    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=300))
    for name, function in chosen.items():
        started = time.perf_counter()
        report = {"case": name, "rank": dist.get_rank(), **function()}
        print(json.dumps(report | {"seconds": time.perf_counter() - started}), flush=True)
    dist.destroy_process_group()
