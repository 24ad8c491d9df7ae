"""Configurations that the rules reject, compared with DeepSpeed itself where it is installed."""

import importlib.util
import json
import os
import random
import subprocess
import sys

import pytest

from halfstep.check.config.config import read_configs
from halfstep.check.files.source import Settings, Source
from halfstep.check.registry import rules_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="Requires: [deepspeed]"),
]

# Rules whose error DeepSpeed's config reader raises itself; the others fail later or train incorrectly.
AT_START = {"HS201", "HS206", "HS211", "HS212", "HS221", "HS234", "HS237", "HS238", "HS251", "HS256", "HS258"}
PROGRAM = """
import json, logging, sys
from deepspeed.runtime.config import DeepSpeedConfig
logging.disable(logging.CRITICAL)
messages = []
for config in json.load(sys.stdin):
    try:
        DeepSpeedConfig(config)
        messages.append("")
    except BaseException as error:
        messages.append(f"{type(error).__name__}: {error}")
print("\\n" + json.dumps(messages))
"""
VALUES = {
    ("fp16", "enabled"): (True, False),
    ("fp16", "loss_scale"): (0, 128, -1, "dynamic", True),
    ("fp16", "loss_scale_window"): (1000, 0, 1000.0, 10.5),
    ("fp16", "min_loss_scale"): (1, 0, 0.5, 1000),
    ("fp16", "hysteresis"): (2, 1, 1.5),
    ("fp16", "initial_scale_power"): (16, 32, 12.5),
    ("bf16", "enabled"): (True, False, "auto"),
    ("bf16", "loss_scale"): (0,),
    ("zero_optimization", "stage"): (0, 1, 2, 3, "2", 4),
    ("zero_optimization", "offload_optimizer"): (
        {"device": "cpu"},
        {"device": "cpu", "ratio": 0.5},
        {"buffer_size": 3},
    ),
    ("zero_optimization", "offload_param"): ({"device": "cpu"}, {"device": "none", "fast_init": True}, None),
    ("zero_optimization", "stage3_max_live_paramters"): (1,),
    ("communication_data_type",): ("fp16", "bf16", "float16", None),
    ("torch_autocast", "dtype"): ("bf16", "tf32"),
    ("amp", "enabled"): (False,),
    ("sparse_gradients",): (True, False),
    ("train_micro_batch_size_per_gpu",): (8, 3),
}


def deepspeed_errors(configs):
    """The error that DeepSpeed raises for each configuration, or an empty string."""
    environment = {"RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-c", PROGRAM]
    result = subprocess.run(
        command,
        input=json.dumps(configs),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
    )
    return json.loads(result.stdout.splitlines()[-1])


def errors(config):
    source = Source("ds.json", json.dumps(config), "json")
    findings = [
        f
        for c in read_configs(source, Settings(deepspeed=(0, 19, 8)))
        for r in rules_of("config")
        for f in r().check(c)
    ]
    return {f.code for f in findings if f.severity == "error"}


def random_configs(count):
    choose = random.Random(7)
    for _ in range(count):
        config = {"train_batch_size": 8, "zero_optimization": {"stage": choose.choice((0, 1, 2, 3))}}
        for path, values in VALUES.items():
            if choose.random() < 0.12:
                block = config if len(path) == 1 else config.setdefault(path[0], {})
                block[path[-1]] = choose.choice(values)
        yield config


def test_rules_and_deepspeed_reject_the_same_configurations():
    """DeepSpeed rejects every configuration with such an error, and every one it rejects has an error."""
    configs = list(random_configs(400))
    for config, raised in zip(configs, deepspeed_errors(configs), strict=True):
        reported = errors(config)
        assert raised or not reported & AT_START, config
        assert reported or not raised, (config, raised)
