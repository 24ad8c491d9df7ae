"""One rank of inspected loops, raw and of DeepSpeed: every case prints one line of JSON with the formats of each fact.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python tests/inspection_program.py [CASE ...]
"""

import contextlib
import importlib
import logging
import os
import sys
import warnings

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import halfstep
from halfstep.backends import deepspeed_backend
from halfstep.errors import ExpectationError
from rank_cases import case, hashed, run_cases, same, slow_case


def net():
    """The same weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))


def loss_of(model, dtype=torch.float32):
    """A loss in fp32, of a model that takes this dtype."""
    return F.cross_entropy(model(torch.ones(2, 8, dtype=dtype)).float(), torch.tensor([0, 1]))


def report(inspection, **expected):
    """The formats of each fact, and the error of `expect`."""
    facts = inspection.as_dict()["facts"]
    formats = {key: fact["formats"] if fact["observed"] else fact["why"] for key, fact in facts.items()}
    try:
        inspection.expect(**expected)
    except ExpectationError as error:
        return {"formats": formats, "error": str(error), "size": inspection.as_dict()["num_parameters"]}
    return {"formats": formats, "error": "", "size": inspection.as_dict()["num_parameters"]}


def ddp(hook=None):
    """A step of DDP under autocast, and whether the weights after it are those of a step that nobody observed."""
    hashes = []
    for observed in (False, True):
        wrapped = nn.parallel.DistributedDataParallel(net())
        if hook is not None:
            wrapped.register_comm_hook(None, hook)
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1)
        inspection = halfstep.inspect(wrapped, optimizer)

        def step(wrapped=wrapped, optimizer=optimizer):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(wrapped)
            loss.backward()
            optimizer.step()

        if observed:
            with inspection:
                step()
        else:
            step()
        hashes.append(hashed(*wrapped.parameters()))
    correct = {"master": "fp32", "states": "fp32", "compute": "bf16", "reduce": "fp32", "grads": "fp32"}
    return report(inspection, **correct) | {"undisturbed": hashes[0] == hashes[1], "same": same(hashes[1])}


@case
def plain_ddp():
    """DDP with fp32 weights reduces in fp32."""
    return ddp()


@case
def compressed_ddp():
    """A hook of DDP compresses what is reduced to fp16."""
    return ddp(fp16_compress_hook)


def sharded(dtype, policy, *, accumulate=1, observed=True):
    """A step of FSDP2, with sums of whole gradients for `accumulate` above 1; its inspection, and a hash of the weights."""
    model = net().to(dtype)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())
    inspection = halfstep.inspect(model, optimizer)
    with inspection if observed else contextlib.nullcontext():
        for number in range(accumulate):
            model.set_requires_gradient_sync(number == accumulate - 1)
            loss_of(model, dtype).backward()
        optimizer.step()
    return inspection, hashed(*(p.to_local() for p in model.parameters()))


@case
def narrow_fsdp():
    """FSDP2 over bf16 parameters, as `model.to(bfloat16)` before `fully_shard` leaves them."""
    inspection, _ = sharded(torch.bfloat16, MixedPrecisionPolicy(), accumulate=3)
    return report(inspection, weights="bf16", master="fp32", states="fp32", reduce="fp32", accumulate="fp32")


@case
def mixed_fsdp():
    """FSDP2 over fp32 parameters that computes in bf16 and reduces in fp32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    inspection, observed = sharded(torch.float32, policy, accumulate=3)
    _, plain = sharded(torch.float32, policy, accumulate=3, observed=False)
    correct = {"accumulate": "fp32", "reduce": "fp32", "grads": "fp32", "loss": "fp32"}
    outcome = report(inspection, weights="fp32", master="fp32", states="fp32", compute="bf16", **correct)
    return outcome | {"undisturbed": observed == plain, "same": True}


@case
def engine_on_ranks():
    """Halfstep's Engine over two ranks; what ranks agree on is no reduction of gradients."""
    model = net()
    engine = halfstep.Engine(model, torch.optim.AdamW(model.parameters()), "bf16-lean,reduce=bf16", backend="ddp")
    with halfstep.inspect(engine) as inspection:
        with engine.forward():
            loss = loss_of(model)
        engine.backward(loss)
        engine.step()
    engine.close()
    return report(inspection, master="fp32", states="fp32", loss="fp32", compute="bf16", reduce="bf16", step="applied")


def deepspeed(**settings):
    """Two micro-batches of a bare DeepSpeed engine with bf16 weights."""
    library = importlib.import_module("deepspeed")
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # needs a C++ compiler
    os.environ.setdefault("LOCAL_RANK", "0")
    model = net()
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "bf16": {"enabled": True}}
    config |= {"zero_allow_untested_optimizer": True, "steps_per_print": None, "gradient_clipping": 0.0} | settings
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = library.initialize(model=model, optimizer=optimizer, config=config)
    at_once = halfstep.inspect(engine)
    with halfstep.inspect(engine) as inspection:
        for _ in range(2):
            engine.backward(loss_of(engine, torch.bfloat16))
            engine.step()
    return at_once, inspection


CORRECT = {
    "master": "fp32",
    "states": "fp32",
    "accumulate": "fp32",
    "compute": "bf16",
    "loss": "fp32",
    "step": "applied",
}


@slow_case
def deepspeed_in_16_bits():
    """Without grad_accum_dtype the micro-batches are added up in bf16, which is seen before any step."""
    at_once, inspection = deepspeed(zero_optimization={"stage": 1})
    early = report(at_once, accumulate="fp32", master="fp32")
    whole, _ = deepspeed(zero_optimization={"stage": 0})
    return report(inspection, **CORRECT) | {"early": early["error"], "whole": report(whole, master="fp32")["error"]}


@slow_case
def deepspeed_in_fp32():
    """With fp32 accumulation and communication all is as expected, at stages 1, 2 and 3."""
    reports = {}
    for stage in (1, 2, 3):
        types = {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
        _, inspection = deepspeed(zero_optimization={"stage": stage}, **types)
        reports[str(stage)] = report(inspection, **CORRECT)
    return {"stages": reports}


@slow_case
def deepspeed_under_the_engine():
    """Halfstep's Engine over ZeRO stage 2."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    engine = halfstep.Engine(model, optimizer, "bf16-lean", accumulate=2, backend=deepspeed_backend(stage=2))
    with halfstep.inspect(engine) as inspection:
        for _ in range(2):
            with engine.forward():
                loss = loss_of(model)
            engine.backward(loss)
            engine.step()
    engine.close()
    return report(inspection, **CORRECT)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("halfstep").setLevel(logging.ERROR)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    run_cases(sys.argv[1:])
