"""A model whose layers are on several devices of one process, in order: for a target that does not fit on one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from litspec.checkpoint import Checkpoint, load_weights
from litspec.errors import InputError
from litspec.model import GPT


def split_layers(bytes_per_layer: Sequence[int], capacities: Sequence[int]) -> list[int]:
    """Assigns layers to devices in order, so that the highest share of used memory is as low as possible.

    Args:
        bytes_per_layer: Bytes of each layer.
        capacities: Free bytes of each device.

    Returns:
        Number of layers of each device, in order; 0 for a device that is not needed.

    Raises:
        InputError: The layers do not fit. The message names both sums.
    """
    n = len(bytes_per_layer)
    before = [0]  # bytes of the first i layers
    for size in bytes_per_layer:
        before.append(before[-1] + size)
    # best[i]: the lowest share of used memory of the devices so far if they hold the first i layers, and how many of
    # these the last device holds.
    best: list[tuple[float, int]] = [(0.0, 0)] + [(float("inf"), 0)] * n
    choices = []
    for capacity in capacities:
        best = [
            min(
                (max(best[i - own][0], (before[i] - before[i - own]) / capacity if own else 0.0), own)
                for own in range(i + 1)
                if own == 0 or capacity > 0
            )
            for i in range(n + 1)
        ]
        choices.append([own for _, own in best])
    if best[n][0] > 1:
        raise InputError(
            f"The model's layers need {before[-1]:,} bytes, which do not fit in order on devices with room for "
            f"{', '.join(f'{max(capacity, 0):,}' for capacity in capacities)}; give more devices, or a lower "
            "precision."
        )
    counts, left = [], n
    for own in reversed(choices):
        counts.append(own[left])
        left -= own[left]
    return counts[::-1]


def split_pair(
    bytes_per_layer: Sequence[int], ends: int, draft: int, capacities: Sequence[int]
) -> tuple[list[int], int | None]:
    """Assigns the layers of a target to devices, with room for embedding, head and draft model.

    Args:
        bytes_per_layer: Bytes of each layer of the target.
        ends: Bytes of embedding and head, which are on the first device.
        draft: Bytes of the draft model, which is on one device; 0 without one.
        capacities: Free bytes of each device.

    Returns:
        Number of layers of each device, and the index of the draft model's device. That is the device with the most
        memory left by the layers if the draft model fits there, else the one that leaves the layers the most room.

    Raises:
        InputError: The pair does not fit.
    """
    room = [capacities[0] - ends, *capacities[1:]]
    if not draft:
        return split_layers(bytes_per_layer, room), None
    try:
        counts = split_layers(bytes_per_layer, room)
    except InputError:
        counts = None
    if counts is not None:
        left = [space - used for space, used in zip(room, layer_sums(bytes_per_layer, counts))]
        roomiest = max(range(len(left)), key=left.__getitem__)
        if draft <= left[roomiest]:
            return counts, roomiest
    fullness, found, error = float("inf"), None, None
    for device in range(len(room)):
        reserved = [space - draft * (i == device) for i, space in enumerate(room)]
        try:
            counts = split_layers(bytes_per_layer, reserved)
        except InputError as e:
            error = e
            continue
        used = layer_sums(bytes_per_layer, counts)
        fullest = max(size / space for size, space in zip(used, reserved) if size)
        if fullest < fullness:
            fullness, found = fullest, (counts, device)
    if found is None:
        raise InputError(
            f"The pair needs {sum(bytes_per_layer) + ends + draft:,} bytes, which do not fit on devices with room for "
            f"{', '.join(f'{capacity:,}' for capacity in capacities)}; give more devices, or a smaller draft model."
        ) from error
    return found


def layer_sums(bytes_per_layer: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Bytes on each device."""
    sums, start = [], 0
    for count in counts:
        sums.append(sum(bytes_per_layer[start : start + count]))
        start += count
    return sums


def load_sequential(
    checkpoint: Checkpoint, devices: Sequence[torch.device], counts: Sequence[int], dtype: torch.dtype
) -> GPT:
    """Loads a model with `counts[i]` layers on `devices[i]`, and embedding, norm and head on the first device.

    A forward copies the rows if the next layer is on another device.
    """
    homes = [device for device, count in zip(devices, counts) for _ in range(count)]

    def home(name: str) -> torch.device:
        return homes[int(name.split(".")[2])] if name.startswith("transformer.h.") else devices[0]

    with torch.device("meta"):
        model = GPT(checkpoint.config)
    load_weights(model, checkpoint, dtype=dtype, device=home)
    return model.eval().requires_grad_(False)
