"""Tiny models for `unseen_faults.py`: architectures and habits of code that the autopsy was not written with.

`FIRST` was used while faults of the autopsy were fixed; `SECOND` was kept aside and run afterwards.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = dict[str, Any]


@dataclass(frozen=True)
class Unseen:
    """How to build one, draw a batch and compute its loss; and where the floating-point tensors of a batch enter."""

    build: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], Batch]
    loss: Callable[[nn.Module, Batch], Any]
    entries: dict[str, tuple[str | None, ...]] = field(default_factory=dict)  # any of the modules


def _configured(name: str, head: str, **sizes: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{name}Config")(**sizes)
    return getattr(transformers, head)(config)


def _text(g: torch.Generator) -> Batch:
    ids = torch.randint(3, 13, (2, 5), generator=g)
    return {"input_ids": ids, "labels": ids}


def _inside(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch).loss


# --- used first -----------------------------------------------------------------------------------------------------


def _mamba() -> nn.Module:
    sizes = {"vocab_size": 13, "hidden_size": 8, "state_size": 4, "num_hidden_layers": 2, "time_step_rank": 2}
    return _configured("Mamba", "MambaForCausalLM", **sizes, pad_token_id=0, bos_token_id=0, eos_token_id=0)


def _mae() -> nn.Module:
    encoder = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    decoder = {f"decoder_{name}": value for name, value in encoder.items()}
    return _configured("ViTMAE", "ViTMAEForPreTraining", **encoder, **decoder, image_size=16, patch_size=4)


def _clip() -> nn.Module:
    part = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    text = {**part, "vocab_size": 13, "max_position_embeddings": 8, "eos_token_id": 2, "bos_token_id": 1}
    vision = {**part, "image_size": 16, "patch_size": 8}
    return _configured("CLIP", "CLIPModel", text_config=text, vision_config=vision, projection_dim=8)


def _pairs(g: torch.Generator) -> Batch:
    ids = torch.randint(3, 13, (3, 5), generator=g)
    ids[:, -1] = 2
    return {"input_ids": ids, "pixel_values": torch.randn(3, 3, 16, 16, generator=g), "return_loss": True}


def _albert() -> nn.Module:
    """One layer that is called three times, between modules that others own."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
    return _configured("Albert", "AlbertForMaskedLM", **sizes, vocab_size=13, embedding_size=8)


class _Translator(nn.Module):
    """torch's own Transformer, with float masks that the loop makes."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Linear(5, 8), nn.Embedding(13, 8)
        self.transformer = nn.Transformer(8, 2, 1, 1, 16, dropout=0.1, batch_first=True, norm_first=True)
        self.head = nn.Linear(8, 13)

    def forward(self, pair: tuple[Tensor, Tensor], mask: Tensor, bias: Tensor) -> Tensor:
        x, ids = pair
        out = self.transformer(self.source(x), self.target(ids), src_mask=bias, tgt_mask=mask)
        return self.head(out)


def _translation(g: torch.Generator) -> Batch:
    return {
        "x": torch.randn(2, 6, 5, generator=g),
        "ids": torch.randint(13, (2, 4), generator=g),
        "mask": torch.full((4, 4), -torch.inf).triu(1),
        "bias": torch.randn(6, 6, generator=g),
        "smooth": torch.rand(2, 4, 13, generator=g).softmax(-1),
    }


def _translate(model: nn.Module, batch: Batch) -> Tensor:
    logits = model((batch["x"], batch["ids"]), batch["mask"], batch["bias"])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["smooth"].flatten(0, 1))


class _UNet(nn.Module):
    """Skips by concatenation, group norm, up by convolution and by interpolation; a time that is embedded by sines."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(4, width), nn.SiLU(), nn.Linear(width, width))
        self.enter, self.down = nn.Conv2d(2, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.middle = nn.ModuleDict({"norm": nn.GroupNorm(2, 2 * width), "conv": nn.Conv2d(2 * width, 2 * width, 1)})
        self.up, self.leave = nn.ConvTranspose2d(2 * width, width, 2, 2), nn.Conv2d(3 * width, 2, 1)
        self.wide = nn.Conv2d(2 * width, width, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angles = t[:, None] * torch.tensor([1.0, 10.0])
        shift = self.time(torch.cat([angles.sin(), angles.cos()], 1))[:, :, None, None]
        top = F.silu(self.enter(x)) + shift
        low = self.down(top)
        low = low + self.middle["conv"](F.silu(self.middle["norm"](low)))
        resized = F.interpolate(self.wide(low), scale_factor=2.0, mode="bilinear")
        return self.leave(torch.cat([top, self.up(low), resized], 1))


def _noisy(g: torch.Generator) -> Batch:
    x, noise = torch.randn(2, 2, 8, 8, generator=g), torch.randn(2, 2, 8, 8, generator=g)
    return {"x": x, "noise": noise, "t": torch.rand(2, generator=g), "weight": torch.rand(2, 1, 1, 1, generator=g)}


def _denoise(model: nn.Module, batch: Batch) -> Tensor:
    return ((model(batch["x"], batch["t"]).float() - batch["noise"]).square() * batch["weight"]).mean()


class _Shared(nn.Module):
    """Nested lists with one block in several places, a layer that is called three times, a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU())
        self.stages = nn.ModuleList([nn.ModuleList([block, nn.Linear(8, 8)]), nn.ModuleList([block, nn.Linear(8, 8)])])
        self.again, self.drop = nn.Linear(8, 8), nn.Dropout(0.2)

    def forward(self, ids: Tensor, *, gain: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids) * gain
        for first, second in self.stages:
            x = x + second(self.drop(first(x)))
        for _ in range(3):
            x = x + torch.tanh(self.again(x))
        return {"logits": F.linear(x, self.embed.weight), "hidden": x}


def _gained(g: torch.Generator) -> Batch:
    return {"ids": torch.randint(11, (3, 5), generator=g), "gain": torch.rand((), generator=g) + 0.5}


def _shared_loss(model: nn.Module, batch: Batch) -> Tensor:
    out = model(batch["ids"], gain=batch["gain"])
    return F.cross_entropy(out["logits"].flatten(0, 1), batch["ids"].flatten()) + 1e-3 * out["hidden"].pow(2).mean()


class _Functional(nn.Module):
    """No submodule at all: parameters in a dict, einsum and functions."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"enter": (6, 8), "q": (8, 8), "k": (8, 8), "v": (8, 8), "leave": (8, 3)}
        self.p = nn.ParameterDict({n: nn.Parameter(torch.randn(s) * 0.3) for n, s in shapes.items()})
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.p["enter"]
        q, k, v = (torch.einsum("btd,de->bte", x, self.p[n]) for n in "qkv")
        x = x + F.scaled_dot_product_attention(q, k, v)
        x = F.layer_norm(F.dropout(x, 0.1, self.training), (8,), self.gain)
        return (F.softplus(x) @ self.p["leave"]).mean(1)


def _rows(g: torch.Generator) -> Batch:
    return {"x": torch.randn(4, 5, 6, generator=g), "y": torch.rand(4, 3, generator=g)}


def _bce(model: nn.Module, batch: Batch) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch["x"]).float(), batch["y"])


# --- kept aside -----------------------------------------------------------------------------------------------------


def _gemma() -> nn.Module:
    """Soft-capped logits, sliding windows, norms around everything."""
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 8,
    }
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    more = {"num_key_value_heads": 1, "max_position_embeddings": 16, "use_cache": False, "sliding_window": 4}
    return _configured("Gemma2", "Gemma2ForCausalLM", **sizes, **special, **more, vocab_size=13)


def _bart() -> nn.Module:
    sizes = {
        f"{p}_{n}": v
        for p in ("encoder", "decoder")
        for n, v in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 24))
    }
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 2}
    more = {"vocab_size": 13, "d_model": 16, "max_position_embeddings": 16, "use_cache": False}
    return _configured("Bart", "BartForConditionalGeneration", **sizes, **special, **more)


def _swin() -> nn.Module:
    sizes = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
    return _configured("Swin", "SwinForImageClassification", **sizes, num_labels=4)


def _soft_images(g: torch.Generator) -> Batch:
    return {"pixel_values": torch.randn(3, 3, 16, 16, generator=g), "soft": torch.rand(3, 4, generator=g).softmax(-1)}


def _distill(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(pixel_values=batch["pixel_values"]).logits.float()
    return F.kl_div(logits.log_softmax(-1), batch["soft"], reduction="batchmean")


@dataclass
class _Detections:
    logits: Tensor
    boxes: Tensor


class _Detector(nn.Module):
    """DETR's shape: a small backbone, learned queries, a decoder, and a dataclass as output."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.queries = nn.Parameter(torch.randn(3, 8))
        layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)
        self.classes, self.boxes = nn.Linear(8, 4), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, images: Tensor) -> _Detections:
        memory = self.backbone(images).flatten(2).transpose(1, 2)
        x = self.decoder(self.queries.expand(len(images), -1, -1), memory)
        return _Detections(self.classes(x), self.boxes(x).sigmoid())


def _scenes(g: torch.Generator) -> Batch:
    targets = [
        {"labels": torch.randint(4, (3,), generator=g), "boxes": torch.rand(3, 4, generator=g)} for _ in range(2)
    ]
    return {"images": torch.randn(2, 3, 8, 8, generator=g), "targets": targets}


def _detect(model: nn.Module, batch: Batch) -> list[Tensor]:
    out = model(batch["images"])
    labels = torch.stack([t["labels"] for t in batch["targets"]])
    boxes = torch.stack([t["boxes"] for t in batch["targets"]])
    return [F.cross_entropy(out.logits.transpose(1, 2), labels), F.l1_loss(out.boxes.float(), boxes)]


class _Codebook(nn.Module):
    """A vector quantizer whose codes are buffers, averaged in the forward, with a counter of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(6, 8))
        self.register_buffer("sizes", torch.ones(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        wide = x.float()
        nearest = torch.cdist(wide, self.codes).argmin(-1)
        if self.training:
            with torch.no_grad():
                self.calls += 1
                chosen = F.one_hot(nearest, 6).float()
                self.sizes.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                self.codes = self.codes.lerp(chosen.t() @ wide / (chosen.sum(0)[:, None] + 1), 0.1)
        quantized = F.embedding(nearest, self.codes)
        return x + (quantized - wide).detach().to(x.dtype), (wide - quantized.detach()).square().mean()


class _Quantizer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.book, self.decode = nn.Linear(6, 8), _Codebook(), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code, commitment = self.book(torch.tanh(self.encode(x.flatten(0, 1))))
        return self.decode(code).view(x.shape), commitment


def _reconstruct(model: nn.Module, batch: Batch) -> Tensor:
    out, commitment = model(batch["x"])
    return F.smooth_l1_loss(out.float(), batch["x"]) + 0.25 * commitment + 0.0 * batch["y"].sum()


class _Rounded(torch.autograd.Function):
    """Rounds; the gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor) -> Tensor:
        """To multiples of `step`."""
        ctx.save_for_backward(x, step)
        return (x / step).round() * step

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Straight through, and for the step as LSQ does it."""
        x, step = ctx.saved_tensors
        return gradient, (gradient * ((x / step).round() - x / step)).sum().view_as(step)


class _Rounding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return _Rounded.apply(x, self.step)


class _Aware(nn.Module):
    """Quantization-aware: custom functions between the layers; a recurrent part with normalized weights."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.utils.parametrizations.weight_norm(nn.Linear(6, 8))
        self.round, self.cell = _Rounding(), nn.GRUCell(8, 8)
        self.leave = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(len(x), 8)
        for now in x.unbind(1):
            state = self.cell(self.round(F.relu(self.enter(now))), state)
        return self.leave(state)


class _Field(nn.Module):
    """A field and its derivative, which the loss takes through the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.Softplus(), nn.Linear(8, 1))

    def forward(self, at: Tensor) -> Tensor:
        return self.net(at)


def _points(g: torch.Generator) -> Batch:
    return {"at": torch.rand(5, 2, generator=g), "source": torch.randn(5, 1, generator=g)}


def _residual(model: nn.Module, batch: Batch) -> Tensor:
    at = batch["at"].detach().requires_grad_()
    value = model(at)
    slope = torch.autograd.grad(value.sum(), at, create_graph=True)[0]
    return (slope.float().sum(1, keepdim=True) - batch["source"]).square().mean() + value.float().square().mean()


class _Ensemble(nn.Module):
    """Four members, stacked and called with vmap, and a frozen teacher inside the model."""

    def __init__(self) -> None:
        super().__init__()
        member = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
        self.member, self.teacher = member, copy.deepcopy(member).requires_grad_(requires_grad=False)
        shapes = {n.replace(".", "_"): p.shape for n, p in member.named_parameters()}
        self.offsets = nn.ParameterDict({n: nn.Parameter(0.1 * torch.randn(4, *s)) for n, s in shapes.items()})

    def forward(self, x: Tensor) -> Tensor:
        base = dict(self.member.named_parameters())

        def one(offsets: dict[str, Tensor], x: Tensor) -> Tensor:
            weights = {n: p + offsets[n.replace(".", "_")] for n, p in base.items()}
            return torch.func.functional_call(self.member, weights, (x,))

        outs = torch.func.vmap(one, in_dims=(0, None))(dict(self.offsets), x.mean(1))
        with torch.no_grad():
            target = self.teacher(x.mean(1))
        return outs.mean(0) + 0.1 * target


FIRST: dict[str, Unseen] = {
    "mamba": Unseen(_mamba, _text, _inside),
    "vit-mae": Unseen(
        _mae,
        lambda g: {"pixel_values": torch.randn(2, 3, 16, 16, generator=g)},
        _inside,
        {"pixel_values": ("vit.embeddings.patch_embeddings.projection", "")},
    ),
    "clip": Unseen(_clip, _pairs, _inside, {"pixel_values": ("vision_model.embeddings.patch_embedding",)}),
    "albert": Unseen(_albert, _text, _inside),
    "transformer": Unseen(
        _Translator,
        _translation,
        _translate,
        {
            "x": ("source",),
            "mask": ("transformer.decoder.layers.0.self_attn",),
            "bias": ("transformer.encoder.layers.0.self_attn",),
            "smooth": (None,),
        },
    ),
    "unet": Unseen(_UNet, _noisy, _denoise, {"x": ("enter",), "t": ("",), "noise": (None,), "weight": (None,)}),
    "shared": Unseen(_Shared, _gained, _shared_loss, {"gain": ("",)}),
    "functional": Unseen(_Functional, _rows, _bce, {"x": ("",), "y": (None,)}),
}
SECOND: dict[str, Unseen] = {
    "gemma2": Unseen(_gemma, _text, _inside),
    "bart": Unseen(_bart, _text, _inside),
    "swin": Unseen(
        _swin,
        _soft_images,
        _distill,
        {"pixel_values": ("swin.embeddings.patch_embeddings.projection",), "soft": (None,)},
    ),
    "detector": Unseen(_Detector, _scenes, _detect, {"images": ("backbone.0",), "targets.1.boxes": (None,)}),
    "quantizer": Unseen(_Quantizer, _rows, _reconstruct, {"x": ("encode",), "y": (None,)}),
    "aware": Unseen(_Aware, _rows, _bce, {"x": ("enter",), "y": (None,)}),
    "field": Unseen(_Field, _points, _residual, {"at": ("net.0",), "source": (None,)}),
    "ensemble": Unseen(_Ensemble, _rows, _bce, {"x": ("",), "y": (None,)}),
}
