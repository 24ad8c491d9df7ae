# The scaler state is restored by a loop over named components.
import torch

class Trainer:
    def fit(self, loader):
        self.scaler = torch.amp.GradScaler("cuda")
        for x, y in loader:
            self.optimizer.zero_grad()
            self.scaler.scale(self.net(x, y)).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def save(self, path):
        torch.save({"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}, path)

    def load(self, path):
        kept = torch.load(path)
        self.optimizer.load_state_dict(kept["optimizer"])
        for name, part in self.parts.items():
            part.load_state_dict(kept[name])
