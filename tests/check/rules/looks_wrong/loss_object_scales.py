# The backward has no visible scale(): the loss object receives the scaler.
import torch

class Processor:
    def __init__(self):
        self.grad_scaler = torch.amp.GradScaler("cuda")

    def train_step(self, model, batch, optimizer, losses):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            losses.calc(model(batch))
        loss_of = losses.backward(self.grad_scaler)
        self.grad_scaler.step(optimizer)
        self.grad_scaler.update()
