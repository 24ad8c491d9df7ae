"""Lightning's Trainer in a lean preset, clipped, with a fused optimizer and a Watch: the lines marked `# halfstep` are the change."""

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from halfstep.integrations.lightning import HalfstepCallback, HalfstepPrecision  # halfstep


class Classifier(lightning.LightningModule):
    """Which of four quarters a point is in."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4))
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """The loss of a batch."""
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """A stock optimizer, which the plugin adopts."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


torch.manual_seed(0)
points = torch.randn(512, 2)
quarters = (points[:, 0] > 0).long() * 2 + (points[:, 1] > 0).long()
loader = DataLoader(TensorDataset(points, quarters), 64, shuffle=True)
module = Classifier()
trainer = lightning.Trainer(
    max_epochs=8,
    gradient_clip_val=1.0,
    plugins=[HalfstepPrecision("bf16-lean")],  # halfstep
    callbacks=[HalfstepCallback()],  # halfstep
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(module, loader)
print(f"loss {module.losses[0]:.2f} -> {module.losses[-1]:.2f}")
assert module.losses[-1] < module.losses[0] / 3
