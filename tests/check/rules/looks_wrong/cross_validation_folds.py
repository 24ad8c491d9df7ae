# A scaler is created per fold, along with a new model and optimizer.
import torch

class Fold:
    def __init__(self, index):
        self.model = Net().cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def fit(self, loader):
        scaler = torch.amp.GradScaler("cuda")
        for epoch in range(10):
            for x, y in loader:
                self.optimizer.zero_grad()
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = self.model(x, y)
                scaler.scale(loss).backward()
                scaler.step(self.optimizer)
                scaler.update()

if __name__ == "__main__":
    for index in range(5):
        fold = Fold(index)
        fold.fit(loaders[index])
