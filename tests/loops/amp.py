"""What the plain loops use: torch.autocast and torch.amp.GradScaler, with the settings that the converted ones have.

CPU autocast differs from CUDA's in one respect that matters here: it leaves softmax, sums and norms in 16 bits, where
CUDA's runs them in fp32, and so does the Engine on every device. So the plain loops cast logits and predictions to
fp32 before they compute a loss, and the models write `softmax(..., dtype=torch.float32)`: what CUDA autocast does
anyway.
"""

import torch

PRESETS = ("fp32", "bf16", "fp16", "bf16-lean", "fp16-lean")
TOLERANCES = {"fp32": 1e-3, "bf16": 1e-3, "fp16": 1e-3, "bf16-lean": 2e-2, "fp16-lean": 2e-2}

_SCALE = {"init_scale": 2.0**8, "growth_interval": 8}  # grows twice in 20 steps; no loop here overflows at 2**10


def precision_of(preset):
    """A preset for the Engine, under fp16 with the settings of `Amp.scaler`."""
    settings = ";".join(f"{key}={value}" for key, value in {"semantics": "torch", **_SCALE}.items())
    return f"{preset},loss_scale=dynamic({settings})" if preset.startswith("fp16") else preset


class Amp:
    """Plain torch AMP for a preset; the lean ones are compared with AMP of their compute format."""

    def __init__(self, preset):
        self.dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(preset.removesuffix("-lean"))

    def autocast(self):
        """The context of a forward."""
        return torch.autocast("cpu", dtype=self.dtype or torch.bfloat16, enabled=self.dtype is not None)

    def scaler(self):
        """A gradient scaler, disabled except under fp16."""
        return torch.amp.GradScaler("cpu", enabled=self.dtype is torch.float16, **_SCALE)
