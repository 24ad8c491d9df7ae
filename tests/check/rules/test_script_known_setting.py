"""A setting of which the file shows the one value, in a test for another value."""

from check_scripts import reported

SCRIPT = """\
import torch

config = {config}
dtype = {{"bfloat16": torch.bfloat16, "float16": torch.float16}}[config["dtype"]]
scaler = torch.amp.GradScaler("cuda", enabled=config["dtype"] == "float16")
for x, y in loader:
    with torch.autocast("cuda", dtype={dtype}):
        loss = model(x, y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""


def test_a_region_and_a_scaler_that_one_setting_decides_agree():
    """With `config["dtype"]` "bfloat16" in the file the region is bfloat16 because of it, and the scaler is off."""
    assert "HS120" not in reported(SCRIPT.format(config='dict(dtype="bfloat16")', dtype="dtype"))
    assert "HS120" in reported(SCRIPT.format(config="load_config()", dtype="torch.bfloat16"))
