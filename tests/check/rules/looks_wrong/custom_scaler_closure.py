# The step receives a closure, but the scaler may be the project's own class, which accepts one.
import torch
from project.scaler import ClosureGradScaler

class Trainer:
    def setup(self):
        self.scaler = ClosureGradScaler() if self.closures else torch.amp.GradScaler("cuda")

    def step(self, loss):
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer, closure=self.closure)
        self.scaler.update()
