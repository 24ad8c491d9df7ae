"""One rank of a DistributedDataParallel run under the Engine; prints how often gradients crossed ranks."""

import torch
import torch.distributed as dist
from torch import nn

import halfstep

NUM_WINDOWS, ACCUMULATE = 2, 4


def main() -> None:
    """Train two windows and compare the weights of all ranks."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    wrapped, num_reductions = nn.parallel.DistributedDataParallel(model), 0

    def count(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        nonlocal num_reductions
        num_reductions += 1
        reduced = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return reduced.get_future().then(lambda future: future.value()[0])

    wrapped.register_comm_hook(None, count)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with halfstep.Engine(wrapped, optimizer, "fp32", accumulate=ACCUMULATE) as engine:
        context = engine.backend.context()
        generator = torch.Generator().manual_seed(context.rank)
        for _ in range(NUM_WINDOWS * ACCUMULATE):
            with engine.forward():
                loss = wrapped(torch.randn(2, 8, generator=generator)).pow(2).mean()
            engine.backward(loss)
            engine.step()
    weights = [torch.empty_like(model.weight) for _ in range(context.world_size)]
    dist.all_gather(weights, model.weight.detach())
    same = "same" if all(torch.equal(weights[0], other) for other in weights) else "different"
    print(
        f"rank {context.rank} of {context.world_size}: {num_reductions} reductions in {NUM_WINDOWS} windows, {same} weights"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
