# autocast as a decorator of forward, from PyTorch's AMP examples.
import torch

class MyModel(torch.nn.Module):
    @torch.autocast("cuda")
    def forward(self, input):
        return self.layers(input)

class MyOther(torch.nn.Module):
    def forward(self, input):
        with torch.autocast(device_type="cuda"):
            return self.layers(input)
