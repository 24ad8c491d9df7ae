"""HS199 and HS161: float16 models that a Trainer of Lightning trains, and those that a library creates."""

import pytest

from check_scripts import codes

FITTED = """\
import torch
import lightning as L
from project.model import Net
model = Net()
{cast}
trainer = L.Trainer(max_epochs=1, precision={precision})
trainer.fit({model}, train_dataloaders=loader)
{after}
"""
CASE = {"cast": "model.half()", "precision": "'16-mixed'", "model": "model", "after": ""}
MODULE = """\
import torch
import lightning as L
class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(9, 9)
    def training_step(self, x, i):
        return self.net(x).sum()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)
model = Net()
model.half()
L.Trainer(precision={precision}, max_epochs=1).fit(model, loader)
"""


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["HS199:5"]),
        ({"cast": "model = model.to('cuda', torch.float16)"}, ["HS199:5"]),
        ({"cast": "if resume: model.load_state_dict(state); model.half()"}, ["HS199:5"]),
        ({"model": "model=model"}, ["HS199:5"]),
        ({"precision": "'bf16-mixed'"}, []),
        ({"precision": "'32-true'"}, []),
        ({"precision": "cfg.precision"}, []),
        ({"cast": "model.half()\nmodel.float()"}, []),
        ({"cast": "if export: model.half()"}, []),
        ({"cast": "pass", "after": "model.half()\ntrainer.test(model)"}, []),
        ({"cast": "model.teacher.half()"}, []),
    ],
)
def test_a_module_of_another_file(changes, expected):
    """What `fit` gets is cast before, and the scaler of Lightning gets its gradients."""
    assert codes(FITTED.format(**CASE | changes)) == expected


@pytest.mark.parametrize(("precision", "expected"), [("'16-mixed'", ["HS199"]), ("'32-true'", ["HS161"])])
def test_one_finding_for_one_cast(precision, expected):
    """Lightning scales the loss with '16-mixed', so the weights are not trained "without a loss scale"."""
    assert [c.partition(":")[0] for c in codes(MODULE.format(precision=precision))] == expected


@pytest.mark.parametrize(("flag", "expected"), [(", fp16=True", ["HS161:3"]), (", fp16=False", []), ("", [])])
def test_a_library_with_a_flag_for_float16_weights(flag, expected):
    """ruDALL-E's loader casts the weights of its model."""
    text = (
        "import torch\nfrom rudalle import get_rudalle_model\n"
        f"model = get_rudalle_model('Malevich', pretrained=True{flag}, device='cuda')\n"
        "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)\n"
        "for text, mask in loader:\n    optimizer.zero_grad()\n    loss, _ = model(text.half(), mask, return_loss=True)\n"
        "    loss.backward()\n    optimizer.step()\n"
    )
    assert codes(text) == expected
