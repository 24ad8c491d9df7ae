# Each micro-batch's loss is over the features of the whole window, so it is not divided.
import torch


def train(model, loader, optimizer, args):
    batches, cached = [], []
    for batch in loader:
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
            cached.append(model(batch))
        batches.append(batch)
        if len(batches) < args.accum_steps:
            continue
        optimizer.zero_grad()
        for j in range(args.accum_steps):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                features = torch.cat(cached[:j] + [model(batches[j])] + cached[j + 1 :])
                loss = contrastive(features)
            loss.backward()
        optimizer.step()
        batches, cached = [], []
