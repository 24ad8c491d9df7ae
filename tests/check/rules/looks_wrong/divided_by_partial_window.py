# The loss is divided by the size of the current window, under a name other than the number of steps.
import torch

class Trainer:
    def setup(self):
        self.scaler = torch.amp.GradScaler("cuda")

    def run(self):
        for i, batch in enumerate(self.loader):
            window = min(self.accum_steps, self.num_batches - i // self.accum_steps * self.accum_steps)
            self.back(self.model(batch), window)
            if (i + 1) % self.accum_steps == 0:
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad()

    def back(self, total, window):
        scaled = total / window
        self.scaler.scale(scaled).backward()
