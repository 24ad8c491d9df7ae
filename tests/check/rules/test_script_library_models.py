"""HS161: models that a library creates with float16 weights because an argument asks for it."""

import pytest

from check_scripts import reported

LOOP = """\
import torch
import open_clip
from rudalle import get_rudalle_model
model = {model}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for x, y in loader:
    optimizer.zero_grad()
    loss, _ = model.forward(x, y, return_loss=True)
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("model", "is_half"),
    [
        ("get_rudalle_model('Malevich', pretrained=True, fp16=True, device='cuda')", True),
        ("get_rudalle_model('Malevich', True, True)", True),
        ("get_rudalle_model('Malevich', fp16=False)", False),
        ("get_rudalle_model('Malevich')", False),
        ("open_clip.create_model('ViT-B-32', precision='fp16')", True),
        ("open_clip.create_model('ViT-B-32', precision='amp')", False),
    ],
)
def test_an_argument_decides(model, is_half):
    """The call names no dtype, and the library casts the model it returns."""
    assert ("HS161" in reported(LOOP.format(model=model))) is is_half
