"""One rank of small experiments, each on bare DeepSpeed and under the Engine: every case prints one line of JSON.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python tests/deepspeed_faults_program.py FOLDER [CASE ...]

Both sides get the same configuration. The loss is a factor times the sum of a weight, so the factor is the gradient, and SGD
with a rate of 1 shows what was applied.
"""

import gc
import importlib
import logging
import math
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import halfstep
from bare_deepspeed import forget_autocast, gathered, start_bare
from halfstep.backends import deepspeed_backend
from halfstep.check.deepspeed import merge_deepspeed
from halfstep.errors import HalfstepError
from rank_cases import case, run_cases

FOLDER = Path(sys.argv[1])
ON = {"enabled": True}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "float16"}}


class One(nn.Module):
    """A weight whose gradient is the factor of its loss; `two` adds a second one, with the same gradient."""

    def __init__(self, *, two=False):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(8))
        self.v = nn.Parameter(torch.zeros(8)) if two else None

    def forward(self):
        total = self.w.float().sum()
        return total if self.v is None else total + self.v.float().sum()


def sgd(model):
    """The rate of 1 applies gradients as they are."""
    return torch.optim.SGD(model.parameters(), 1.0)


def zero(stage, **config):
    """A configuration of a stage."""
    return {"zero_optimization": {"stage": stage}, "gradient_clipping": 0.0} | config


def fp16(**settings):
    """An fp16 block whose scale starts at 16, and reacts to every overflow, unless told otherwise."""
    return {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1, **settings}}


def bare(config, *, model=None, optimizer=sgd):
    """DeepSpeed with this configuration."""
    model = model or One()
    return start_bare(model, optimizer(model), config)


def ours(config, *, model=None, optimizer=sgd):
    """The Engine with the same configuration."""
    model = model or One()
    merged = merge_deepspeed(config, optimizer="torch.optim.SGD", driver="halfstep", world_size=dist.get_world_size())
    settings = {"accumulate": merged.accumulate, "max_norm": merged.max_norm, "backend": deepspeed_backend(merged)}
    return halfstep.Engine(model, optimizer(model), merged.policy, **settings)


def rejection(config):
    """The error with which Halfstep rejects a configuration; empty where it does not."""
    try:
        ours(config).close()
    except HalfstepError as error:
        return str(error)
    return ""


def weight(engine, name="w"):
    """The first element of a weight: the model's, or under the Engine the master's."""
    if isinstance(engine, halfstep.Engine):
        master = engine.masters()[name]
        return float(getattr(master, "full_tensor", lambda: master)().detach()[0])
    with gathered(engine):
        return float(getattr(engine.module, name).detach()[0])


def scale_of(engine):
    """DeepSpeed's loss scale, under any of its optimizers; 1 where it has none."""
    return float(getattr(engine.optimizer, "loss_scale", None) or 1.0)


def train_bare(engine, factors):
    """Per step the applied gradient and the scale after it."""
    applied, scales = [], []
    for factor in factors:
        before = weight(engine)
        engine.backward(engine() * factor)
        engine.step()
        applied.append(before - weight(engine))
        scales.append(scale_of(engine))
    return {"applied": applied, "scales": scales, "skipped": int(engine.skipped_steps)}


def train_ours(engine, factors):
    """Per step the applied gradient and the scale after it; a hard stop ends it."""
    applied, scales, skips, norms = [], [], 0, []
    for factor in factors:
        before = weight(engine)
        with engine.forward():
            loss = engine.model() * factor
        engine.backward(loss)
        result = engine.step()
        skips += bool(result.skipped)
        norms.append(result.grad_norm)
        applied.append(before - weight(engine))
        scales.append(engine.scaler.get_scale())
    return {"applied": applied, "scales": scales, "skipped": skips, "norms": norms}


def both(config, factors):
    """The same losses on both sides."""
    engine = bare(config)
    theirs = train_bare(engine, factors)
    engine.destroy()
    forget_autocast()
    with ours(config) as engine:
        return {"bare": theirs, "halfstep": train_ours(engine, factors)}


def failure(work):
    """The class and text of the error that this raises; empty where it does not."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# --- the loss scale ---------------------------------------------------------------------------------------------------


@case
def endless_hysteresis():
    """D05: a gradient of 8192 overflows at a scale of 16 and not at 4; a hysteresis of 0 never gets there."""
    config, factors = zero(1, **fp16(hysteresis=0)), [8192.0] * 8
    engine = bare(config)
    theirs = train_bare(engine, factors)
    engine.destroy()
    return {"bare": theirs, "rejection": rejection(config), "one": both(zero(1, **fp16()), factors)}


@case
def scale_below_minimum():
    """D06: a scale of 16 with a minimum of 1024, and two overflows."""
    config = zero(1, **fp16(min_loss_scale=1024))
    engine = bare(config)
    first = train_bare(engine, [math.inf])
    error = failure(lambda: train_bare(engine, [math.inf]))
    engine.destroy()
    return {"scales": first["scales"], "error": error, "rejection": rejection(config)}


@case
def large_first_scale():
    """D07: the steps that a first scale of 2^32 loses, with gradients of 1."""
    return both(zero(2, **fp16(initial_scale_power=32)), [1.0] * 20)


@case
def ignored_hysteresis():
    """D08: three overflows with a hysteresis of 4, without ZeRO and with it."""
    runs = {str(stage): both(zero(stage, **fp16(hysteresis=4)), [math.inf] * 3) for stage in (0, 1)}
    return {"runs": runs}


@case
def overflows_at_the_minimum():
    """D09 and D10: gradients that are never finite."""
    results = {}
    for stage in (0, 1):
        config = zero(stage, **fp16(initial_scale_power=1))
        engine = bare(config)
        theirs = failure(lambda engine=engine: train_bare(engine, [math.inf] * 20))
        results[f"bare {stage}"] = [theirs, int(engine.skipped_steps), scale_of(engine)]
        engine.destroy()
        with ours(config) as engine:
            results[f"halfstep {stage}"] = failure(lambda engine=engine: train_ours(engine, [math.inf] * 120))
            results[f"scale {stage}"] = engine.scaler.get_scale()
    return {"results": results}


@case
def backward_without_the_engine():
    """D13 and D14: a bare loss.backward() with a static scale of 128, and with a dynamic one."""
    results = {}
    for name, settings in {"static": {"loss_scale": 128}, "dynamic": {}}.items():
        config = zero(1, **fp16(**settings))
        engine = bare(config)

        def step(engine=engine):
            engine().backward()
            engine.step()

        results[f"bare {name}"] = [failure(step), -weight(engine)]
        engine.destroy()
        with ours(config) as engine:

            def own_step(engine=engine):
                with engine.forward():
                    loss = engine.model()
                loss.backward()
                engine.step()

            results[f"halfstep {name}"] = [failure(own_step), -weight(engine)]
    return {"results": results}


@case
def replaced_scale():
    """D15: a scale of 2 set from outside, where DeepSpeed's own is 16; stage 0 has no other way to use it than engine.backward."""
    applied = {}
    for stage in (0, 1):
        engine = bare(zero(stage, **fp16()))
        engine.optimizer.override_loss_scale(2.0)
        applied[f"reported {stage}"] = scale_of(engine)
        applied[f"bare {stage}"] = train_bare(engine, [1.0])["applied"][0]
        engine.destroy()
    engine = bare(zero(0, **fp16()))
    direct = failure(lambda: engine.optimizer.backward(engine()))
    engine.destroy()
    with ours(zero(0, **fp16())) as engine:
        engine.scaler.load_state_dict(engine.scaler.state_dict() | {"scale": 2.0})
        applied["reported halfstep"] = engine.scaler.get_scale()
        applied["halfstep"] = train_ours(engine, [1.0])["applied"][0]
    return {"applied": applied, "direct": direct}


@case
def reported_norm():
    """D17: the norm that stage 0 reports with a static scale of 128, and that of the update; the true norm is sqrt(8)."""
    norms, config = {}, zero(0, **fp16(loss_scale=128))
    engine = bare(config)
    applied = train_bare(engine, [1.0])["applied"][0]
    norms["bare"] = [float(engine.get_global_grad_norm()), applied * math.sqrt(8)]
    engine.destroy()
    with ours(config) as engine:
        result = train_ours(engine, [1.0])
        norms["halfstep"] = [result["norms"][0], result["applied"][0] * math.sqrt(8)]
    return {"norms": norms}


@case
def cpu_without_fp16_products():
    """A CPU for which oneDNN has no fp16 products: DeepSpeed does not start there, although torch computes in fp16."""
    accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
    config = zero(1, **fp16())
    accelerator.is_fp16_supported = lambda: False
    with ours(config) as engine:
        applied = train_ours(engine, [1.0])["applied"]
    kept = accelerator.is_fp16_supported()
    model, deepspeed = One(), importlib.import_module("deepspeed")
    settings = config | {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True}
    error = failure(lambda: deepspeed.initialize(model=model, optimizer=sgd(model), config=settings))
    return {"applied": applied, "error": error, "kept": kept}


# --- mixture of experts -----------------------------------------------------------------------------------------------


def fused_sgd(groups):
    """SGD as a FusedAdam, which selects DeepSpeed's fused wrapper without its compiled kernel."""
    base = importlib.import_module("deepspeed.ops.adam").FusedAdam

    class FusedSgd(base):
        def __init__(self, params):
            torch.optim.Optimizer.__init__(self, params, {"lr": 1.0})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(p.grad)

    return FusedSgd(groups)


class Routed(nn.Module):
    """A dense weight, and one expert on each rank, whose gradients are 1, and 3 on rank 0 or 4 on rank 1."""

    def __init__(self):
        super().__init__()
        layer = importlib.import_module("deepspeed.moe.layer")
        size = dist.get_world_size()
        self.dense = nn.Parameter(torch.zeros(1))
        self.moe = layer.MoE(1, nn.Linear(1, 1, bias=False), num_experts=size, ep_size=size)
        for p in self.moe.deepspeed_moe.gate.parameters():
            p.requires_grad_(requires_grad=False)

    def forward(self):
        (expert,) = self.moe.deepspeed_moe.experts.deepspeed_experts
        return self.dense.float().sum() + (3.0 + dist.get_rank()) * expert.weight.float().sum()


def routed_groups(model):
    """The experts in a group of their own, as DeepSpeed asks for."""
    experts = [p for p in model.parameters() if not getattr(p, "allreduce", True)]
    name = experts[0].group_name
    return [{"params": [model.dense], "name": "dense"}, {"params": experts, "moe": True, "name": name}]


@case
def expert_norms():
    """D18 to D20: the update of all ranks after clipping to 1, which has a norm of 1 if the norm was right."""
    sizes, norms = {}, {}
    runs = {
        "unfused bf16": (zero(0, bf16=ON), lambda m: torch.optim.SGD(routed_groups(m), 1.0)),
        "fp32": (zero(0), lambda m: torch.optim.SGD(routed_groups(m), 1.0)),
        "fused bf16": (zero(0, bf16=ON), lambda m: fused_sgd(routed_groups(m))),
    }
    for name, (config, optimizer) in runs.items():
        model = Routed()
        engine = bare(config | {"gradient_clipping": 1.0}, model=model, optimizer=optimizer)
        expert = model.moe.deepspeed_moe.experts.deepspeed_experts[0].weight
        before = [model.dense.detach().float().clone(), expert.detach().float().clone()]
        engine.backward(engine())
        engine.step()
        moved = [b - p.detach().float() for b, p in zip(before, (model.dense, expert), strict=True)]
        squares = moved[1].square().sum()
        dist.all_reduce(squares)
        sizes[name] = float((moved[0].square().sum() + squares).sqrt())
        norms[name] = None if engine.get_global_grad_norm() is None else float(engine.get_global_grad_norm())
        engine.destroy()
    messages = {}
    for backend in ("ddp", "fsdp", "deepspeed"):
        model = Routed()
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        messages[backend] = failure(lambda m=model, o=optimizer, b=backend: halfstep.Engine(m, o, "fp32", backend=b))
    return {"sizes": sizes, "norms": norms, "messages": messages}


# --- overflows without a scale ----------------------------------------------------------------------------------------


class Lines(logging.Handler):
    """The lines that a logger writes while it is attached."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


@case
def overflows_without_scaling():
    """D21 to D25: a NaN loss, all-zero gradients, then a gradient of 1: what was applied, counted and logged."""
    fp32_sums = {"data_types": {"grad_accum_dtype": "fp32"}}
    runs = {
        "D21": (zero(0, bf16=ON), lambda m: fused_sgd(m.parameters())),
        "D22": (zero(3, bf16=ON | {"check_grad_overflow": True}), sgd),
        "D23": (zero(1, bf16=ON, **fp32_sums), sgd),
        "D24 1": (zero(1, bf16=ON), sgd),
        "D24 2": (zero(2, bf16=ON), sgd),
        "D25": (zero(0), sgd),
    }
    results, factors = {}, [math.nan, 0.0, 1.0]
    logger = logging.getLogger("DeepSpeed")
    for name, (config, optimizer) in runs.items():
        handler = Lines()
        engine = bare(config, optimizer=optimizer)
        level = logger.level
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
        result = train_bare(engine, factors)
        logger.removeHandler(handler)
        logger.setLevel(level)
        engine.destroy()
        with ours(config) as own:
            own_result = train_ours(own, factors)
        results[name] = {
            "bare": [None if math.isnan(a) else a for a in result["applied"]],
            "skipped": result["skipped"],
            "class": type(engine.optimizer).__name__,
            "logged": any("overflow" in line.lower() for line in handler.lines),
            "halfstep": own_result["applied"],
            "halfstep skipped": own_result["skipped"],
        }
    return {"results": results}


# --- sums and reductions ----------------------------------------------------------------------------------------------


@case
def sixteen_bit_sums_of_fp32():
    """D37 and D39: fp32 gradients of 256 and 63 times 1, summed in bf16; and bf16 gradients of 70000 summed in fp16."""
    results, factors = {}, [256.0] + [1.0] * 63
    for stage in (1, 2, 3):
        config = zero(stage, data_types={"grad_accum_dtype": "bf16"}, gradient_accumulation_steps=64)
        engine = bare(config)
        train_bare(engine, factors)
        results[f"D37 {stage}"] = [-weight(engine), rejection(config)]
        engine.destroy()
        config = zero(stage, bf16=ON, data_types={"grad_accum_dtype": "fp16"}, gradient_accumulation_steps=2)
        outcome = []

        def run(config=config, outcome=outcome):
            engine = bare(config)
            train_bare(engine, [2.0**18, 2.0**18])
            outcome += [-weight(engine), int(engine.skipped_steps)]
            engine.destroy()

        results[f"D39 {stage}"] = [failure(run), *outcome, rejection(config)]
    return {"results": results, "true": sum(factors) / 64}


@case
def another_optimizer_class():
    """D38: bf16 at stage 1 with fp32 sums is another class, without a loss scaler, and with other files."""
    classes, files, rows = {}, {}, {}
    for stage in (1, 2):
        config = zero(stage, bf16=ON, data_types={"grad_accum_dtype": "fp32"})
        engine = bare(config)
        classes[str(stage)] = [type(engine.optimizer).__name__, hasattr(engine.optimizer, "loss_scaler")]
        train_bare(engine, [1.0])
        path = FOLDER / f"class{stage}"
        engine.save_checkpoint(str(path))
        saved = torch.load(next(path.rglob("*_zero_pp_rank_0_*optim_states.pt")), weights_only=False)
        files[str(stage)] = sorted(saved["optimizer_state_dict"])
        engine.destroy()
        with ours(config) as own:
            train_ours(own, [1.0])
            own.save(FOLDER / f"own{stage}")
            rows[str(stage)] = dict(own.truth().rows)["backend"]
        with ours(zero(3 - stage, bf16=ON)) as own:
            own.load(FOLDER / f"own{stage}")
            rows[f"{stage} to {3 - stage}"] = -weight(own)
    return {"classes": classes, "files": files, "rows": rows}


@case
def reductions():
    """D40: gradients of 256 on one rank and 1 on the other; D41: 2^17, and 2^-30, through fp16."""
    mine, results = ([256.0], [1.0])[dist.get_rank()], {}
    for stage in (1, 2, 3):
        config = zero(stage, bf16=ON, data_types={"grad_accum_dtype": "fp32"})
        results[f"D40 {stage}"] = []
        for wide in ({}, {"communication_data_type": "fp32"}):
            engine = bare(config | wide)
            train_bare(engine, mine)
            results[f"D40 {stage}"].append(-master(engine))
            engine.destroy()
        with ours(config) as own:
            results[f"D40 {stage}"].append(train_ours(own, mine)["applied"][0])
        config = zero(stage, bf16=ON, communication_data_type="fp16")
        values = []
        for factor in (2.0**17, 2.0**-30):
            engine = bare(config)
            train_bare(engine, [factor])
            values += [-master(engine), int(engine.skipped_steps)]
            engine.destroy()
        with ours(zero(stage, bf16=ON)) as own:
            own_values = train_ours(own, [2.0**17])["applied"]
        with ours(zero(stage, bf16=ON)) as own:
            own_values += train_ours(own, [2.0**-30])["applied"]
        results[f"D41 {stage}"] = [values, own_values, rejection(config)]
    return {"results": results}


def master(engine):
    """The first element of the fp32 master, as ZeRO returns it."""
    function = importlib.import_module("deepspeed.utils").safe_get_full_fp32_param
    return float(function(engine.module.w)[0])


# --- autocast ---------------------------------------------------------------------------------------------------------


@case
def autocast_without_a_dtype():
    """D61: no dtype in the block is no gradient scaler, at any stage, whatever the device runs."""
    scalers, config = {}, {"torch_autocast": ON}
    for stage in (0, 2, 3):
        for name, block in {"none": config, "float16": AUTOCAST}.items():
            engine = bare(zero(stage, **block))
            own = engine.torch_autocast_z0_gradscaler if stage == 0 else engine.optimizer.torch_autocast_gradscaler
            scalers[f"{name} {stage}"] = own is not None
            engine.destroy()
            forget_autocast()
    return {
        "scalers": scalers,
        "cuda": str(torch.get_autocast_dtype("cuda")),
        "rejection": rejection(zero(2, **config)),
    }


def two_groups(model):
    """A group for each weight."""
    return torch.optim.SGD([{"params": [model.w]}, {"params": [model.v]}], 1.0)


@case
def autocast_groups():
    """D64: two groups with the same gradients; the scale grows after every third update of its counter."""
    config = zero(2, **AUTOCAST)
    engine = bare(config, model=One(two=True), optimizer=two_groups)
    engine.optimizer.torch_autocast_gradscaler.set_growth_interval(3)
    applied, factor = [], 2.0**-10
    for _ in range(3):
        before = weight(engine), weight(engine, "v")
        engine.backward(engine() * factor)
        engine.step()
        applied.append([(before[0] - weight(engine)) / factor, (before[1] - weight(engine, "v")) / factor])
    scale = engine.optimizer.torch_autocast_gradscaler.get_scale()
    engine.destroy()
    forget_autocast()
    own = []
    scaler = halfstep.LossScaler(init_scale=2.0**4, growth_interval=1, semantics="torch", hysteresis=1)
    model = One(two=True)
    with halfstep.Engine(model, two_groups(model), "fp16", backend=deepspeed_backend(stage=2), scaler=scaler) as engine:
        for _ in range(3):
            before = weight(engine), weight(engine, "v")
            with engine.forward():
                loss = model() * factor
            engine.backward(loss)
            engine.step()
            own.append([(before[0] - weight(engine)) / factor, (before[1] - weight(engine, "v")) / factor])
        own_scale = engine.scaler.get_scale()
    return {"bare": applied, "scale": scale, "halfstep": own, "halfstep scale": own_scale}


@case
def autocast_resume():
    """D65: the scale before a save and after a load, at stage 0, whose scaler reacts to overflows, and at stage 2."""
    scales = {}
    for stage in (0, 2):
        config = zero(stage, **AUTOCAST)
        pair = []
        for resumed in (False, True):
            engine = bare(config)
            scaler = engine.torch_autocast_z0_gradscaler if stage == 0 else engine.optimizer.torch_autocast_gradscaler
            path = str(FOLDER / f"autocast{stage}")
            if resumed:
                engine.load_checkpoint(path)
            else:
                scaler.set_growth_interval(1)
                train_bare(engine, [math.inf if stage == 0 else 2.0**-10])
                engine.save_checkpoint(path)
            pair.append(float(scaler.get_scale()))
            engine.destroy()
            forget_autocast()
        scales[f"bare {stage}"] = pair
        pair = []
        for resumed in (False, True):
            with ours(config) as engine:
                if resumed:
                    engine.load(FOLDER / f"own-autocast{stage}")
                else:
                    train_ours(engine, [math.inf, math.inf])
                    engine.save(FOLDER / f"own-autocast{stage}")
                pair.append(engine.scaler.get_scale())
        scales[f"halfstep {stage}"] = pair
    return {"scales": scales}


@case
def two_scalers():
    """D66: a gradient of 2^-10, in the fp16 mode with a scale of 256, and fp16 autocast as well."""
    config = zero(2, **fp16(initial_scale_power=8), **AUTOCAST)
    engine = bare(config)
    applied = train_bare(engine, [2.0**-10])["applied"][0] / 2.0**-10
    norm = float(engine.get_global_grad_norm()) / (math.sqrt(8) * 2.0**-10)
    engine.destroy()
    forget_autocast()
    return {"applied": applied, "norm": norm, "rejection": rejection(config)}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    gc.freeze()  # BF16_Optimizer collects garbage when it is built, a second each time with all that is imported
    logging.getLogger("halfstep").setLevel(logging.ERROR)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    run_cases(sys.argv[2:])
