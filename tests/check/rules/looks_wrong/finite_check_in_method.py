# A method steps only for finite gradients, and update() runs every time; this is not gradient accumulation.
import torch

class Trainer:
    def setup(self):
        self.scaler = torch.amp.GradScaler("cuda")

    def train_step(self, loss):
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        do_step = torch.isfinite(norm)
        if do_step:
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
