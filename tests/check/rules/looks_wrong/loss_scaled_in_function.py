# The backward has no visible scale(): the function that computes the loss returns it scaled.
import torch

class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.scaler = torch.amp.GradScaler("cuda")

    def compute_loss(self, x, y):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_fn(self.model(x), y)
        return self.scaler.scale(loss)

    def fit(self, loader):
        for x, y in loader:
            self.optimizer.zero_grad()
            self.compute_loss(x, y).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
