# HS170:6 A class that saves and restores receives the optimizer, but never the scaler.
import torch

class Store:
    def save(self, model, optimizer):
        torch.save(optimizer.state_dict(), self.path)

    def load(self, model, optimizer):
        optimizer.load_state_dict(torch.load(self.path))

class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.scaler = torch.amp.GradScaler("cuda")
        self.store = Store()

    def train(self, loader):
        self.store.load(self.model, self.optimizer)
        for x, y in loader:
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = self.model(x, y)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.store.save(self.model, self.optimizer)
