# float16 autocast without a GradScaler: Lightning's manual_backward and optimizers scale the loss.
import lightning as L
import torch

class GAN(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        opt_g, opt_d = self.optimizers()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.loss(batch)
        opt_g.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(opt_g, gradient_clip_val=0.5)
        opt_g.step()
