"""Runners of steps: eager, or as compiled graphs. Only this file uses `torch.compile`.

A step is a function of tensors with fixed shapes: one forward with the choice of tokens, or several drafts in a row.
It reads nothing to the host and depends on no single text, so the same function runs eagerly and compiled. A key
identifies the graph: the rows, the K/V bucket, the sampling settings. On a GPU, graphs are recorded as CUDA graphs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from importlib.util import find_spec
from types import FunctionType
from typing import Any

import torch

from litspec.errors import InputError
from litspec.model import GPT, KVCache


class Runner:
    """Runs steps eagerly.

    Attributes:
        compiles: Whether steps run as graphs, which need few and fixed shapes.
        seconds: Time spent on building graphs.
        notify: Called before a graph is built.
    """

    compiles = False

    def __init__(self) -> None:
        self.seconds = 0.0
        self.notify: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        """Number of graphs built."""
        return 0

    def __contains__(self, key: Hashable) -> bool:
        """Whether the step with this key runs without building a graph."""
        return True

    def begin_round(self) -> None:
        """Called when the results of the last round are no longer needed."""

    def make_cache(self, model: GPT, max_length: int, *, width: int, batch_size: int = 1) -> KVCache:
        """A K/V cache for the steps of this runner, see `GPT.make_cache`."""
        return model.make_cache(max_length, width=width, batch_size=batch_size)

    def rows(self, found: Sequence[int]) -> tuple[int, ...]:
        """The row counts to use, out of those with equal bits; the last is the largest."""
        return tuple(found)

    def pieces(self, sizes: Sequence[int], n_layer: int) -> tuple[int, ...]:
        """Drafts per step, for the steps to build, so that proposals of these lengths need few steps.

        Args:
            sizes: Proposal lengths. Every k is a sum of them, or slightly less than one.
            n_layer: Layers of a draft.
        """
        return tuple(sizes)

    def split(self, k: int, pieces: Sequence[int]) -> list[int]:
        """Drafts per step, for each step of a proposal of at least k tokens."""
        return [k]

    def run(self, key: Hashable, step: Callable[..., Any], *args: Any) -> Any:
        """Returns `step(*args)`."""
        return step(*args)


# The time to build a graph grows with its layers. If one draft has many layers, several drafts in one graph gain
# little: the return to Python between them takes about 50 microseconds, much less than the draft.
LAYERS_PER_GRAPH = 16


class CompiledRunner(Runner):
    """Runs steps as graphs, each built when it is first needed.

    Args:
        device: The device that the steps run on.

    Raises:
        InputError: Compiling is not possible here.
    """

    compiles = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self._graphs: dict[Hashable, Callable[..., Any]] = {}
        _check_compiler(device)

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def begin_round(self) -> None:
        if self.device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()

    def make_cache(self, model: GPT, max_length: int, *, width: int, batch_size: int = 1) -> KVCache:
        model.fix_shapes()
        cache = model.make_cache(max_length, width=width, batch_size=batch_size, powers_of_two=True)
        if self.device.type == "cuda":
            # The cache keeps its address, so CUDA graphs can write to it without copying.
            for tensor in cache.tensors():
                # With a guard, the first cache would become part of the graph.
                torch._dynamo.mark_static_address(tensor, guard=False)
        return cache

    def rows(self, found: Sequence[int]) -> tuple[int, ...]:
        # Each row count would need its own graph.
        return (found[-1],)

    def pieces(self, sizes: Sequence[int], n_layer: int) -> tuple[int, ...]:
        # For each size, the largest divisor within the limit of layers.
        most = max(1, LAYERS_PER_GRAPH // n_layer)
        parts = {max(n for n in range(1, size + 1) if size % n == 0 and n <= most) for size in sizes}
        return tuple(sorted(parts, reverse=True))

    def split(self, k: int, pieces: Sequence[int]) -> list[int]:
        # In falling order. The total exceeds k slightly if the smallest piece is larger than the rest.
        sizes: list[int] = []
        while k > 0:
            sizes.append(max((piece for piece in pieces if piece <= k), default=min(pieces)))
            k -= sizes[-1]
        return sizes

    def run(self, key: Hashable, step: Callable[..., Any], *args: Any) -> Any:
        """Runs the graph with this key. It is compiled from `step` if there is none yet.

        Raises:
            InputError: The compiler failed.
        """
        if key in self._graphs:
            return self._graphs[key](*args)
        self.notify()
        began = time.perf_counter()
        graph = _compile(step, self.device)
        try:
            result = graph(*args)
        except Exception as error:
            reason = getattr(error, "inner_exception", error)
            message = " ".join(str(reason).split())[:300]
            raise InputError(f"compile failed ({type(reason).__name__}: {message}); load without compile.") from error
        self.seconds += time.perf_counter() - began
        self._graphs[key] = graph
        return result


def _compile(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    options: dict[str, Any] = {"triton.cudagraphs": True} if device.type == "cuda" else {"cpp_wrapper": True}
    # The coupled sampler's hash has a dozen rounds that use each value twice. The compiler recomputes values that are
    # not stored as tensors. With its default limit of 30 operators, seven drafts took four times as long.
    options["realize_opcount_threshold"] = 8
    # The key covers all that the graph depends on. Guards check thousands of attributes per call, which costs more
    # than a draft.
    if (no_guards := getattr(torch.compiler, "skip_all_guards_unsafe", None)) is not None:
        options["guard_filter_fn"] = no_guards
    # The compiler caches graphs by code object. A copy keeps it from searching the graphs of all other keys.
    code = function.__code__.replace()
    own = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    return torch.compile(own, fullgraph=True, dynamic=False, options=options)


def _check_compiler(device: torch.device) -> None:
    if device.type == "cuda":
        if find_spec("triton") is None:
            raise InputError("compile needs triton on a GPU, which is not installed; load without compile.")
        return
    if device.type != "cpu":
        raise InputError(f"compile works on a CPU and on CUDA devices, got {str(device)!r}; load without compile.")
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, RuntimeError, OSError) as error:
        raise InputError(
            "compile needs a C++ compiler on a CPU, and none was found; install g++ or load without compile."
        ) from error
