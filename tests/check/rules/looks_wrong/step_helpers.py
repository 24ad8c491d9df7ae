# backward, clip and step are methods called in the right order from another method.
import torch

class Trainer:
    def __init__(self, model, args):
        self.model = model
        self.args = args
        self.optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
        self.scaler = torch.amp.GradScaler("cuda", enabled=args.amp)

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def clip(self):
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)

    def step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def fit(self, loader):
        for i, batch in enumerate(loader):
            with torch.autocast("cuda", dtype=torch.float16, enabled=self.args.amp):
                loss = self.model(batch) / self.args.accum
            self.backward(loss)
            if (i + 1) % self.args.accum == 0:
                self.clip()
                self.step()
