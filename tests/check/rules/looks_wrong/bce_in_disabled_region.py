# BCELoss runs inside an autocast region that is disabled by default.
import torch

class Loss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bce = torch.nn.BCELoss()

    def forward(self, probabilities, labels, autocast=False):
        with torch.amp.autocast("cuda", enabled=autocast):
            return self.bce(probabilities, labels)
