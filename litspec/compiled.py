"""Steps of target and draft as compiled graphs (`torch.compile`), each built once, before the first token of a text.

A graph is one forward, or several drafts in a row, with the choice of tokens inside: fixed shapes, nothing read to the
host, nothing in it that belongs to one text. Which graph is needed follows from the rows, the K/V bucket and the
sampling settings, and these name it. On a GPU graphs are recorded as CUDA graphs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from importlib.util import find_spec
from types import FunctionType
from typing import Any

import torch

from litspec.errors import InputError
from litspec.model import KVCache


def split(k: int, pieces: Sequence[int]) -> list[int]:
    """Pieces that sum up to k, in falling order, or to a little more where no piece is as small as what is left."""
    sizes = []
    while k > 0:
        sizes.append(max((piece for piece in pieces if piece <= k), default=min(pieces)))
        k -= sizes[-1]
    return sizes


class Graphs:
    """Compiled functions by what is fixed in them.

    Attributes:
        seconds: What building them took.
        notify: Called before a graph is built.

    Raises:
        InputError: Where nothing can be compiled.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = 0.0
        self.notify: Callable[[], None] = lambda: None
        self._graphs: dict[Hashable, Callable[..., Any]] = {}
        _check_compiler(device)

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def begin_round(self) -> None:
        """Lets CUDA graphs write over what those of the last round returned."""
        if self.device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()

    def adopt(self, cache: KVCache) -> None:
        """Tells the compiler that a cache stays where it is: CUDA graphs need not copy it, and may write to it."""
        if self.device.type == "cuda":
            for tensor in cache.tensors():
                # With a guard, the cache of the first text would become a part of the graph.
                torch._dynamo.mark_static_address(tensor, guard=False)

    def call(self, key: Hashable, make: Callable[[], Callable[..., Any]], *args: Any) -> Any:
        """Runs the graph of that name; `make` returns the function that it is built from where there is none yet.

        Raises:
            InputError: The compiler failed.
        """
        if key in self._graphs:
            return self._graphs[key](*args)
        self.notify()
        began = time.perf_counter()
        graph = _compile(make(), self.device)
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
