"""Facts about a model that are found by running it on a few samples."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from equipoise.equilibrium import WarmStart, layers
from equipoise.errors import EquipoiseError
from equipoise.parameter_space import ParameterSpace
from equipoise.representations.points import HEAD, ForwardHook, RepresentationPoint, submodule_of
from equipoise.settings import nearest
from equipoise.torch_device import forked_random, random_state
from equipoise.training.replica import Replica


@dataclass(frozen=True)
class ModelProbe:
    """Facts about a model, found by running it once."""

    output: Tensor
    "its outputs for the samples"
    rows: int
    "rows per sample in the linear layers: one, or one per position"
    unseeded: bool
    "whether it draws from torch's global random stream"
    buffer_names: tuple[str, ...]
    "names of the buffers that training changes (BatchNorm statistics); each client has its own, constants are shared"
    fixed_point_shapes: dict[str, tuple[torch.Size, torch.dtype]]
    "shape and number format of what is saved per sample with a client's state, if a layer's warm start needs it"
    smallest_batch: int
    "smallest number of samples in a training step: 2 if BatchNorm has only one value per channel for a single sample"


def probe_model(replica: Replica, constants: nn.Module, x: Tensor) -> ModelProbe:
    """Run a replica once in training mode and once in eval mode.

    Args:
        replica: a fresh copy of the model.
        constants: the model itself, whose buffers have not changed.
        x: a few inputs.
    """
    replica.seed(0)
    rows = 1

    def count_rows(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        nonlocal rows
        rows = max(rows, output.shape[:-1].numel() // len(x))

    for layer in replica.module.modules():
        if type(layer) is nn.Linear:
            layer.register_forward_hook(count_rows)
    device = x.device
    with forked_random(device), torch.no_grad():
        before = random_state(device)
        try:
            warm = WarmStart(replica.module, len(x))
            with warm.at(torch.arange(len(x))):
                replica.module.train()(x)
            shapes = {k: (t.shape[1:], t.dtype) for k, t in warm.tensors("client").items()}
            moved = dict(replica.module.named_buffers())
            output: Tensor = replica.module.eval()(x)
        except EquipoiseError:
            raise
        except Exception as error:
            whole = "" if x.is_floating_point() else f"; they are of type {str(x.dtype).removeprefix('torch.')}, so if "
            whole += "they are not symbols, convert them: x.astype('float32')" if whole else ""
            raise EquipoiseError(
                f"the model does not take inputs of shape {tuple(x.shape[1:])}: {error}{whole}"
            ) from None
        if not isinstance(output, Tensor) or output.ndim == 0:
            kind = f"the shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
            raise EquipoiseError(
                f"the model returns {kind} for {len(x)} samples; it must return one tensor with a row per sample; wrap "
                "it in a module that does"
            )
        # Random numbers from an unknown source can be seeded only if clients are trained one at a time.
        unseeded = not all(map(torch.equal, before, random_state(device)))
    still, statistics = dict(constants.named_buffers()), _batch_statistics(constants)
    buffer_names = tuple(n for n, b in moved.items() if n in statistics or not torch.equal(b, still[n]))
    return ModelProbe(output, rows, unseeded, buffer_names, shapes, _smallest_batch(replica, x))


def _batch_statistics(module: nn.Module) -> set[str]:
    """Return the names of the buffers of BatchNorm, which samples that are all zero would not move."""
    layers = ((n, m) for n, m in module.named_modules() if isinstance(m, nn.modules.batchnorm._NormBase))
    return {f"{name}.{b}" if name else b for name, layer in layers for b, _ in layer.named_buffers()}


def _smallest_batch(replica: Replica, x: Tensor) -> int:
    """Return 2 if the model cannot train on a single sample, else 1."""
    if not any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in replica.module.modules()):
        return 1
    try:
        with forked_random(x.device), torch.no_grad():
            replica.module.train()(x[:1])
    except ValueError:
        return 2
    return 1


def find_point(
    module: nn.Module, space: ParameterSpace, w0: Tensor, x: Tensor, head: str | None, name: str
) -> RepresentationPoint:
    """Find the representation point after the submodule `name`, or before the head.

    Which parameters lead there is found by autograd.

    Args:
        module: the model.
        space: the layout of its parameters.
        w0: their values.
        x: a few inputs.
        head: name of the submodule that is the head.
        name: name of a submodule, also by `within_head`; HEAD or OUTPUT.
    """
    module = copy.deepcopy(module).eval()
    if name.startswith(HEAD) and head is None:
        raise EquipoiseError("representations are the inputs of the model's head; name the submodule that is the head")
    place = submodule_of(name, head)
    if name != HEAD and place not in (names := dict(module.named_modules())):
        raise EquipoiseError(f"the model has no submodule {place!r}{nearest(place, filter(None, names))}")
    if any(place.startswith(f"{layer}.") for layer, _ in layers(module)):
        raise EquipoiseError(f"{name!r} lies within an equilibrium layer; name the layer as a whole")
    parameters = {k: t.detach().clone().requires_grad_() for k, t in space.views(w0).items()}
    hook = ForwardHook(module, (name,), head)
    with forked_random(x.device), torch.enable_grad():
        functional_call(module, parameters, (x,))
        if hook.silent():
            raise EquipoiseError(f"the model never calls its submodule {name!r}, so it has no output")
        (h,) = hook.take()
        given = list(parameters.values())
        found = torch.autograd.grad(h.sum(), given, allow_unused=True) if h.requires_grad else (None,) * len(given)
    reach = torch.zeros(space.size, dtype=torch.bool, device=w0.device)
    for entry, gradient in zip(space.entries, found, strict=True):
        reach[entry.offset : entry.end] = gradient is not None
    return RepresentationPoint(name, h.shape[1], reach)
