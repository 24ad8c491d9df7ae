# A custom autograd function that needs float32, from PyTorch's AMP examples.
import torch

class MyFloat32Func(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, input):
        ctx.save_for_backward(input)
        return fwd_op(input)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        return bwd_op(grad)

func = MyFloat32Func.apply
with torch.autocast(device_type="cuda", dtype=torch.float16):
    output = func(input)
