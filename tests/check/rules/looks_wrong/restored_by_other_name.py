# The scaler state is restored through a variable with a different name.
import torch

class Trainer:
    def fit(self, loader):
        self.scaler = torch.amp.GradScaler("cuda")
        for x, y in loader:
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = self.net(x, y)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def save(self, path):
        torch.save({"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}, path)

    def load(self, path):
        kept = torch.load(path)
        self.optimizer.load_state_dict(kept["optimizer"])
        scaling = self.scaler if self.scaler is not None else self.other
        if scaling is not None and kept.get("scaler") is not None:
            scaling.load_state_dict(kept["scaler"])
