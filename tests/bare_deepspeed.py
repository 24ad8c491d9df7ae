"""Engines of deepspeed.initialize on gloo ranks, without Halfstep, for programs that show DeepSpeed's own behavior."""

import importlib
import os


def start_bare(model, optimizer, config):
    """An engine with this configuration: no clipping and no printed lines unless it asks for them."""
    deepspeed = importlib.import_module("deepspeed")
    comm = importlib.import_module("deepspeed.comm.torch")
    comm.build_shm_op = lambda: None  # needs a C++ compiler, and is not used here
    # It asks oneDNN, which on many CPUs has no fp16 products; the experiments need none.
    importlib.import_module("deepspeed.accelerator").get_accelerator().is_fp16_supported = lambda: True
    os.environ.setdefault("LOCAL_RANK", "0")
    settings = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True}
    settings |= {"steps_per_print": None} | config
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return engine


def forget_autocast():
    """Undo what an engine with torch_autocast leaves behind for every later engine of its process."""
    module = importlib.import_module("deepspeed.runtime.torch_autocast")
    module.TORCH_AUTOCAST_INITIALIZED, module.TORCH_AUTOCAST_DTYPE = False, None


def gathered(engine):
    """A region in which the weights of an engine are whole, at stage 3 too."""
    return importlib.import_module("deepspeed").zero.GatheredParameters(list(engine.module.parameters()))
