"""Where DeepSpeed stores what a rank steps: fragments of parameters in flat fp32 tensors.

ZeRO flattens the parameters of a group and gives each rank one stretch of the result, so a rank steps a fragment of a
parameter, all of it, or nothing of it. Each stage stores this differently, and the classes here are the only code
that knows how:

    stage 1, 2           a flat tensor per group of the optimizer; gradients in `averaged_gradients`, a list that tiles it
    stage 1 with bf16    BF16_Optimizer: the same flat tensors, and whole fp32 gradients on every rank
    stage 3              a flat tensor per sub-group; each parameter is divided into equal parts over the ranks

`averaged_gradients` is what the optimizer will be given, so Halfstep reads and divides it there. With `offload_optimizer`
the flat tensors and their states are on the CPU, and DeepSpeed copies the sums of a window into `flat.grad` when it closes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.backends.parts import Parts

__all__ = ["Fragment", "Partition", "numel_of", "partition_of", "shape_of"]


@dataclass(frozen=True)
class Fragment:
    """The part of a parameter that this rank steps."""

    start: int  # in the flattened parameter
    numel: int
    flat: int  # the index of the flat tensor that it is in
    offset: int  # in that tensor

    def of(self, flat: Tensor) -> Tensor:
        """This part of a flat tensor, which shares its memory."""
        return flat.narrow(0, self.offset, self.numel)


class Partition(ABC):
    """What one rank stores of a model under a DeepSpeed engine; `params` are the trained ones by name."""

    flats: list[Tensor]  # the fp32 values that the optimizer steps
    groups: dict[str, int]  # the flat tensor of each parameter, also of those without a fragment here

    def __init__(self, engine: Any, params: Mapping[str, Tensor]) -> None:
        self.engine, self.zero = engine, engine.optimizer
        self.params = dict(params)
        self.fragments: dict[str, Fragment] = {}
        zero = self.zero
        self.is_offloaded = bool(getattr(zero, "cpu_offload", False) or getattr(zero, "offload_optimizer", False))
        self.device = torch.device(engine.device)  # of messages, and of whole tensors
        self.is_closed = False  # whether the gradients of a window are reduced and not dropped yet

    @abstractmethod
    def gradient(self, name: str) -> Tensor:
        """The gradient of a fragment, as the optimizer will be given it; after `close_window`."""

    @abstractmethod
    def pending(self) -> list[Tensor]:
        """Gradients of an open window that are not in `param.grad`."""

    @abstractmethod
    def clear(self) -> None:
        """Clear DeepSpeed's gradients, as it does after an overflow."""

    def drop(self) -> None:
        """Forget the gradients of a window."""
        self.is_closed = False
        self.clear()

    def close_window(self) -> None:
        """Reduce what no backward has reduced."""
        self.engine.set_gradient_accumulation_boundary(True)
        if self.engine.zero_optimization_partition_gradients():
            self.zero.finalize_gradient_accumulation_boundary()
        else:
            self.engine.allreduce_gradients()
        self.engine.set_gradient_accumulation_boundary(False)
        if self.is_offloaded and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # DeepSpeed copies to the CPU without waiting
        self.is_closed = True

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of this rank's fragments by name."""
        return {name: self.gradient(name) for name in self.fragments}

    def parts(self) -> Parts:
        """The masters of this rank's fragments, which share their memory."""
        nothing = self.flats[0].new_empty(0)
        own = {name: fragment.of(self.flats[fragment.flat]) for name, fragment in self.fragments.items()}
        numels = {name: numel_of(param) for name, param in self.params.items()}
        return Parts({name: own.get(name, nothing) for name in self.params}, numels)

    def offloaded(self, name: str) -> Tensor:
        """The gradient of a fragment on the CPU."""
        fragment = self.fragments[name]
        grad = self.flats[fragment.flat].grad
        assert grad is not None
        return fragment.of(grad)

    def clear_offloaded(self) -> None:
        """Clear the gradients on the CPU: DeepSpeed keeps them, and would apply those of an unused parameter again."""
        if self.is_offloaded:
            self.zero.reset_cpu_buffers()
            torch._foreach_zero_([flat.grad for flat in self.flats if flat.grad is not None])

    def relink(self) -> None:
        """The states of the flat tensors are new: DeepSpeed's own views of them are made again by its next step."""
        if hasattr(self.zero, "_hp_optimizer_states_linked"):
            self.zero._hp_optimizer_states_linked = False  # noqa: SLF001 - there is no other way

    @torch.no_grad()
    def whole(self, name: str, flats: Sequence[Tensor]) -> Tensor:
        """A parameter's values out of flat tensors, from all ranks, which call it together."""
        param = self.params[name]
        like = flats[self.groups[name]]
        values = torch.zeros(numel_of(param), dtype=like.dtype, device=self.device)
        fragment = self.fragments.get(name)
        if fragment is not None:
            values[fragment.start : fragment.start + fragment.numel] = fragment.of(like)
        # Sums of bits, to which one rank contributes: a sum of numbers would turn -0 into 0.
        bits = values.view(torch.int32 if values.element_size() == 4 else torch.uint8)
        dist.all_reduce(bits)
        return values.view(shape_of(param))

    @torch.no_grad()
    def put(self, name: str, flats: Sequence[Tensor], whole: Tensor) -> None:
        """Write this rank's part of a parameter's values into flat tensors."""
        fragment = self.fragments.get(name)
        if fragment is not None:
            part = whole.detach().reshape(-1)[fragment.start : fragment.start + fragment.numel]
            fragment.of(flats[fragment.flat]).copy_(part)


class _Flattened(Partition):
    """Stages 1 and 2, whose optimizers link each parameter to its fragment."""

    def __init__(self, engine: Any, params: Mapping[str, Tensor], groups: Iterable[Sequence[Tensor]]) -> None:
        super().__init__(engine, params)
        names = {id(p): name for name, p in params.items()}
        self.groups = {names[id(p)]: index for index, group in enumerate(groups) for p in group if id(p) in names}
        for name, param in params.items():
            link: Any = getattr(param, "_hp_mapping", None)
            if link is not None:
                here, there = link.lp_fragment_address, link.hp_fragment_address
                self.fragments[name] = Fragment(here.start, here.numel, link.param_group_index, there.start)


class _Stage1And2(_Flattened):
    """DeepSpeedZeroOptimizer."""

    def __init__(self, engine: Any, params: Mapping[str, Tensor]) -> None:
        super().__init__(engine, params, engine.optimizer.bit16_groups)
        self.flats = list(engine.optimizer.single_partition_of_fp32_groups)

    def gradients(self) -> dict[str, Tensor]:
        """The tiles of each flat tensor, by the offset at which they start."""
        if self.is_offloaded:
            return {name: self.offloaded(name) for name in self.fragments}
        tiles: dict[tuple[int, int], Tensor] = {}
        for index, pieces in self.zero.averaged_gradients.items():
            offset = 0
            for piece in pieces or ():
                tiles[index, offset] = piece.view(-1)
                offset += piece.numel()
        return {name: tiles[f.flat, f.offset].narrow(0, 0, f.numel) for name, f in self.fragments.items()}

    def gradient(self, name: str) -> Tensor:
        """One of `gradients`."""
        return self.gradients()[name]

    def pending(self) -> list[Tensor]:
        """Whole fp32 sums (stage 1), sums of fragments (stage 2), or the flat tensors that they are in."""
        sums = [p.grad_accum for p in self.params.values() if getattr(p, "grad_accum", None) is not None]  # type: ignore[attr-defined]
        pieces = [piece for tiles in self.zero.all_grad_tensors.values() for piece in tiles or ()]
        flats = [getattr(tiles, "flat_partition", None) for tiles in self.zero.averaged_gradients.values()]
        copies = self.zero.accumulated_grads_in_cpu.values() if self.is_offloaded else ()
        return [*sums, *pieces, *copies, *(flat for flat in flats if flat is not None)]

    def clear(self) -> None:
        """As DeepSpeed does after an overflow."""
        self.zero.zero_grad(set_to_none=True)
        self.zero._release_preflattened_grad_buffers()  # noqa: SLF001 - as its own step does
        for index in list(self.zero.averaged_gradients):
            self.zero.averaged_gradients[index] = self.zero.all_grad_tensors[index] = None
        self.clear_offloaded()
        if self.is_offloaded:
            if self.zero.accumulated_grads_in_cpu:
                torch._foreach_zero_(list(self.zero.accumulated_grads_in_cpu.values()))
            self.zero.micro_step_id, self.zero._offload_accumulated_param_ids = -1, set()  # noqa: SLF001 - as in its step


class _Bf16Stage1(_Flattened):
    """BF16_Optimizer, which DeepSpeed chooses for bf16 weights with fp32 sums at stage 1."""

    def __init__(self, engine: Any, params: Mapping[str, Tensor]) -> None:
        super().__init__(engine, params, engine.optimizer.bf16_groups)
        self.flats = list(engine.optimizer.fp32_groups_flat_partition)

    def gradient(self, name: str) -> Tensor:
        """Out of this rank's stretch of the whole gradients."""
        fragment = self.fragments[name]
        return fragment.of(self.zero.fp32_groups_gradient_flat_partition[fragment.flat])

    def pending(self) -> list[Tensor]:
        """The whole gradients."""
        return list(self.zero.fp32_groups_gradients_flat)

    def clear(self) -> None:
        """As DeepSpeed does after an overflow."""
        self.zero.clear_hp_grads()
        self.zero.clear_lp_grads()


class _Stage3(Partition):
    """DeepSpeedZeroOptimizer_Stage3."""

    def __init__(self, engine: Any, params: Mapping[str, Tensor]) -> None:
        super().__init__(engine, params)
        zero, rank = self.zero, dist.get_rank()
        self.flats = list(zero.fp32_partitioned_groups_flat)
        self._buffers: list[Tensor] = []  # of gradients, once the window is closed: the step forgets its list of them
        names = {id(p): name for name, p in params.items()}
        self.groups, self._places = {}, {}
        for index, group in enumerate(zero.fp16_groups):
            for place, param in enumerate(group):
                name = names[id(param)]
                self.groups[name], self._places[name] = index, place
                size = param.partition_numel()
                _, offset, _ = zero.grad_position[zero.get_param_id(param)]
                numel = min(size, param.ds_numel - rank * size)
                if numel > 0:  # the last ranks may have padding only
                    self.fragments[name] = Fragment(rank * size, numel, index, offset)

    def close_window(self) -> None:
        """Every backward has reduced and added up its gradients."""
        super().close_window()
        self._buffers = self.pending()

    def gradient(self, name: str) -> Tensor:
        """Out of the buffer of this parameter, without its padding."""
        if self.is_offloaded:
            return self.offloaded(name)
        fragment = self.fragments[name]
        buffer: Tensor = self.zero.averaged_gradients[fragment.flat][self._places[name]]
        return buffer.view(-1).narrow(0, 0, fragment.numel)

    def pending(self) -> list[Tensor]:
        """The buffers of all parameters."""
        if self.is_offloaded:
            return list(self.zero._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition.values())  # noqa: SLF001
        return [buffer for group in self.zero.averaged_gradients.values() for buffer in group or ()]

    def clear(self) -> None:
        """As DeepSpeed does after an overflow; and clear the buffers.

        DeepSpeed keeps them, and a parameter that the next window does not use would be given its old gradient again.
        """
        buffers, self._buffers = self._buffers or self.pending(), []
        if buffers:
            torch._foreach_zero_(buffers)
        self.zero.zero_grad(set_to_none=True)
        self.zero.averaged_gradients = {}
        self.clear_offloaded()
        self.zero._offload_boundary_param_ids = set()  # noqa: SLF001 - as in its step


_CLASSES: dict[str, type[_Stage1And2 | _Bf16Stage1 | _Stage3]] = {
    "DeepSpeedZeroOptimizer": _Stage1And2,
    "BF16_Optimizer": _Bf16Stage1,
    "DeepSpeedZeroOptimizer_Stage3": _Stage3,
}


def partition_of(engine: Any, params: Mapping[str, Tensor]) -> Partition | None:
    """What this rank stores under a DeepSpeed engine; None for an optimizer that does not partition."""
    known = _CLASSES.get(type(engine.optimizer).__name__)
    return None if known is None else known(engine, params)


def numel_of(param: Any) -> int:
    """The number of elements of a parameter, which may be partitioned away at stage 3."""
    return int(getattr(param, "ds_numel", param.numel()))


def shape_of(param: Any) -> torch.Size:
    """The shape of a parameter, which may be partitioned away at stage 3."""
    return torch.Size(getattr(param, "ds_shape", param.shape))
