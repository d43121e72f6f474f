"""No import cycles, and only one file uses the compiler."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import litspec

ROOT = Path(litspec.__file__).parent


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in ROOT.rglob("*.py")}


def imports_when_loaded(nodes: list[ast.stmt]) -> Iterator[str]:
    """The imports of a module at load time: not within functions, not for type checkers."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from imports_when_loaded(node.body + node.orelse)
        elif isinstance(node, ast.Try):
            yield from imports_when_loaded(node.body)


def graph(modules: dict[str, str]) -> dict[str, set[str]]:
    return {
        name: {found for found in imports_when_loaded(ast.parse(source).body) if found in modules and found != name}
        for name, source in modules.items()
    }


def test_there_are_no_import_cycles() -> None:
    sources = {name: path.read_text(encoding="utf-8") for name, path in MODULES.items()}
    assert len(sources) > 40 and "litspec.engine.target" in graph(sources)["litspec.engine.engine"]
    TopologicalSorter(graph(sources)).prepare()


def test_a_cycle_would_be_detected() -> None:
    with pytest.raises(CycleError):
        TopologicalSorter(graph({"a": "import b", "b": "if True:\n    from c import d", "c": "import a"})).prepare()
    TopologicalSorter(graph({"a": "import b", "b": "def f():\n    import a"})).prepare()


def test_only_one_file_uses_torch_compile() -> None:
    words = ("torch.compile", "torch._dynamo", "torch._inductor")
    knowing = {path.name for path in MODULES.values() if any(word in path.read_text() for word in words)}
    # config.py has the help of the flag.
    assert knowing == {"runner.py", "config.py"}


@pytest.mark.slow
def test_every_module_can_be_imported_first() -> None:
    # In new interpreters, since a cycle fails only for some orders of import.
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)"
    first = ["litspec.engine.speculate", "litspec.drafters"]
    for name in first:
        subprocess.run([sys.executable, "-c", code, name], check=True, timeout=120)
