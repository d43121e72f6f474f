"""What runs steps: as they are, or as compiled graphs. No other file knows `torch.compile`.

A step is a function of tensors with fixed shapes: one forward with the choice of tokens, or several drafts in a row.
Nothing in it is read to the host and nothing belongs to one text. So the same function runs in both ways, and a name
says which graph it needs: the rows, the K/V bucket, the sampling settings. On a GPU graphs are recorded as CUDA graphs.
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
    """Runs steps as they are.

    Attributes:
        compiles: Whether steps run as graphs, so that shapes are fixed and few.
        seconds: What building graphs took.
        notify: Called before a graph is built.
    """

    compiles = False

    def __init__(self) -> None:
        self.seconds = 0.0
        self.notify: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        """How many graphs there are."""
        return 0

    def __contains__(self, key: Hashable) -> bool:
        """Whether a step of that name runs without building anything."""
        return True

    def begin_round(self) -> None:
        """Called when the results of the last round are no longer needed."""

    def make_cache(self, model: GPT, max_length: int, *, width: int, batch_size: int = 1) -> KVCache:
        """Keys and values for steps that this runs, see `GPT.make_cache`."""
        return model.make_cache(max_length, width=width, batch_size=batch_size)

    def rows(self, found: Sequence[int]) -> tuple[int, ...]:
        """The numbers of rows to run, of those that have equal bits; the last is the largest."""
        return tuple(found)

    def pieces(self, sizes: Sequence[int], n_layer: int) -> tuple[int, ...]:
        """Numbers of drafts to build steps for, so that proposals of these sizes run in few of them.

        Args:
            sizes: Numbers of proposals, of which every k is a sum, or falls a little short of one.
            n_layer: Layers of a draft.
        """
        return tuple(sizes)

    def split(self, k: int, pieces: Sequence[int]) -> list[int]:
        """Numbers of drafts that run in one step each, to draft at least k tokens."""
        return [k]

    def run(self, key: Hashable, step: Callable[..., Any], *args: Any) -> Any:
        """Returns `step(*args)`."""
        return step(*args)


# A graph takes time to build for each layer in it. Where one draft step has many layers, little can be gained by
# several steps in a graph: the way back to Python between them, some 50 microseconds, is short beside a step.
LAYERS_PER_GRAPH = 16


class CompiledRunner(Runner):
    """Runs steps as graphs, each built when it is first needed.

    Args:
        device: Where they run.

    Raises:
        InputError: Where nothing can be compiled.
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
            # It stays where it is: CUDA graphs need not copy it, and may write to it.
            for tensor in cache.tensors():
                # With a guard, the cache of the first text would become a part of the graph.
                torch._dynamo.mark_static_address(tensor, guard=False)
        return cache

    def rows(self, found: Sequence[int]) -> tuple[int, ...]:
        # Each number would be a graph to build.
        return (found[-1],)

    def pieces(self, sizes: Sequence[int], n_layer: int) -> tuple[int, ...]:
        # The largest equal parts of each that fit.
        most = max(1, LAYERS_PER_GRAPH // n_layer)
        parts = {max(n for n in range(1, size + 1) if size % n == 0 and n <= most) for size in sizes}
        return tuple(sorted(parts, reverse=True))

    def split(self, k: int, pieces: Sequence[int]) -> list[int]:
        # In falling order, and a little more than k where no piece is as small as what is left.
        sizes: list[int] = []
        while k > 0:
            sizes.append(max((piece for piece in pieces if piece <= k), default=min(pieces)))
            k -= sizes[-1]
        return sizes

    def run(self, key: Hashable, step: Callable[..., Any], *args: Any) -> Any:
        """Runs the graph of that name. It is compiled from `step` if there is none yet.

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
    # The coupled sampler's hash uses each number twice, a dozen times over. What is not kept as a tensor in between,
    # the compiler works out anew at each use; with its own limit of 30 operators seven drafts took four times as long.
    options["realize_opcount_threshold"] = 8
    # The key says all that the graph depends on; checking thousands of attributes in each call costs more than a draft.
    if (no_guards := getattr(torch.compiler, "skip_all_guards_unsafe", None)) is not None:
        options["guard_filter_fn"] = no_guards
    # The compiler knows graphs by their code, so functions made by one definition would be tried one after the other.
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
