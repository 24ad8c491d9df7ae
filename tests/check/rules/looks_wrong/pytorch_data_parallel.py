# DataParallel in a single process, from PyTorch's AMP examples.
import torch
from torch import nn

model = MyModel()
dp_model = nn.DataParallel(model)
with torch.autocast(device_type="cuda", dtype=torch.float16):
    output = dp_model(input)
    loss = loss_fn(output)
