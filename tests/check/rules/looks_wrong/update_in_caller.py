# unscale_ and step run in a loop without update(); the caller owns the scaler.
import torch
from torch.cuda.amp.grad_scaler import GradScaler

class Optimizers:
    def step_all(self, grad_scaler: GradScaler):
        for group, optimizer in self.optimizers.items():
            if self.max_norm[group] is not None:
                grad_scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(self.parameters[group], self.max_norm[group])
            if any(p.grad is not None for p in self.parameters[group]):
                grad_scaler.step(optimizer)
