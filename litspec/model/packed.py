"""Linear layers for few rows on a CPU: weights are packed once, when loading.

A product of a few rows reads each weight once and should take as long as one row does. PyTorch's general product does
not: in float32 five rows cost twice what one costs, eight three times (2 cores; vocabulary 49,152 x 576: 4.4, 9.9 and
14.7 ms; packed 4.3, 4.9 and 5.8), and in bfloat16 it packs the weights again in each call.

Packed float32 layers also give the same bits for two rows and more, which the general product does not: of a model that
the caches do not hold, all are packed (layers of 576 x 576 to 576 x 1536, one thread: 2 rows 1.36 times one row of the
general product, 5 rows 1.20, 8 rows 1.41; general product 1.57, 1.49, 1.53).

Where the whole model stays in the caches, layers too small for that have their float32 weights stored by columns (192 x
320 and alike, 4 rows 0.99 of one row of the general product, 8 rows 1.16; packed 2 rows 1.22, 8 rows 1.54). From memory
columns are slower (25 million parameters: 1.15), as they are for one row.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Least elements of a layer, and least rows of a forward, for which packing was measured to be faster.
GAINS = {torch.float32: (2**18, 2), torch.bfloat16: (2**19, 1)}
# Most bytes of a model, and least rows of a forward, for which weights by columns were measured to be faster.
COLUMNS = (2**25, 5)
# Above this many bytes every float32 layer of a model is packed: an unpacked one would limit the equal row counts.
LARGE = 2**25


class PackedLinear(nn.Module):
    """A linear layer whose weights oneDNN has laid out in blocks; not to be trained, cast or moved.

    A row's result does not depend on its place among the rows, as that of the unpacked layer does not.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """`(..., in)` to `(..., out)`."""
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def pack(model: nn.Module, rows: int, *, blocks: bool = True) -> None:
    """Packs the layers of a model that become faster, one by one and in place. The old weights are freed.

    Args:
        model: A loaded model. On other devices than a CPU, and without oneDNN, nothing is packed.
        rows: Number of rows of its forwards.
        blocks: Whether a `PackedLinear` may take the place of a layer.
    """
    most_bytes, fewest_rows = COLUMNS
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    if rows >= fewest_rows and size <= most_bytes:
        for layer in model.modules():
            if type(layer) is nn.Linear and layer.weight.is_cpu and layer.weight.dtype is torch.float32:
                # The same matrix, with another memory layout.
                columns = layer.weight.detach().t().contiguous().t()
                layer.weight = nn.Parameter(columns, requires_grad=layer.weight.requires_grad)
    if not (blocks and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return
    # Names, not layers: a reference would keep the replaced weights alive.
    names = [
        name
        for name, layer in model.named_modules()
        if type(layer) is nn.Linear and _gains(layer.weight, rows, every=size > LARGE)
    ]
    for name in names:
        parent, _, own = name.rpartition(".")
        parent = model.get_submodule(parent)
        setattr(parent, own, PackedLinear(getattr(parent, own)))


def slows_one_row(model: nn.Module) -> bool:
    """Whether weights were packed in a way that slows down a forward of one row."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear | PackedLinear)]
    return any(
        layer.weight.dtype is torch.float32 and (isinstance(layer, PackedLinear) or not layer.weight.is_contiguous())
        for layer in layers
    )


def _gains(weight: Tensor, rows: int, every: bool) -> bool:
    if not weight.is_cpu or weight.dtype not in GAINS:
        return False
    if weight.dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    size, fewest_rows = GAINS[weight.dtype]
    return rows >= fewest_rows and (weight.numel() >= size or (every and weight.dtype is torch.float32))
