"""The quickstart notebook runs from top to bottom, and a browser renders completions correctly."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter
from nbformat import NotebookNode
from pages import Page

from litspec.engine.sequence import Block
from litspec.report import Piece, make_stats, to_html

NOTEBOOK = Path(__file__).parent.parent / "scripts" / "quickstart.ipynb"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# What a <pre> of each completion holds, read in the page itself.
PROBE = """
<script>
const texts = [...document.querySelectorAll("pre.litspec-text")].map((pre) => ({
    text: pre.textContent,
    pieces: [...pre.children].map((span) => [span.textContent, getComputedStyle(span).backgroundColor]),
    color: getComputedStyle(pre).color,
    around: getComputedStyle(pre.parentElement.parentElement).color,
    height: pre.getBoundingClientRect().height,
    numbers: pre.nextElementSibling.innerText,
}));
const probe = document.createElement("div");
probe.id = "probe";
probe.setAttribute("data-texts", JSON.stringify(texts));
document.body.append(probe);
</script>
"""


@pytest.fixture(scope="module")
def executed() -> NotebookNode:
    """The notebook after a run, with one more cell that tells what its completion holds."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    truth = "import json; print(json.dumps({'text': out.text, 'pieces': out.pieces, 'summary': out.stats.summary()}))"
    notebook.cells.append(nbformat.v4.new_code_cell(truth, id="truth"))
    NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=600,
        startup_timeout=300,
        coalesce_streams=True,
        resources={"metadata": {"path": str(NOTEBOOK.parent)}},
    ).execute()
    return notebook


def export(notebook: NotebookNode, theme: str = "light") -> str:
    """As `jupyter nbconvert --to html` does, but without the scripts that it would load from elsewhere."""
    exporter = HTMLExporter(theme=theme, mathjax_url="", require_js_url="", jquery_url="", mermaid_js_url="")
    return exporter.from_notebook_node(notebook)[0]


def outputs(notebook: NotebookNode, cell_id: str) -> list[NotebookNode]:
    return next(cell for cell in notebook.cells if cell.id == cell_id).outputs


class Probe(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[dict[str, Any]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if dict(attrs).get("id") == "probe":
            self.texts = json.loads(dict(attrs)["data-texts"])


def rendered(page: str, folder: Path) -> list[dict[str, Any]]:
    """The completions on a page as rendered by headless Chromium."""
    path = folder / "page.html"
    path.write_text(page + PROBE, encoding="utf-8")
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += " --disable-component-update --disable-sync --disable-dev-shm-usage"
    command = [
        CHROMIUM,
        *flags.split(),
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={folder / 'profile'}",
    ]
    done = subprocess.run([*command, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return Probe(done.stdout).texts


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed.")


def test_the_committed_outputs_hold_no_error_and_no_path() -> None:
    # A code host shows them, so they are committed: `jupyter nbconvert --to notebook --execute --inplace`.
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        for output in cell.get("outputs", []):
            assert output.output_type != "error" and output.get("name") != "stderr"
            shown = json.dumps({kind: data for kind, data in output.get("data", {}).items() if kind != "image/png"})
            assert not re.search(r"/(home|root|tmp|work|Users)/", shown + output.get("text", "")), cell.id


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom_and_shows_texts_and_a_plot(executed: NotebookNode) -> None:
    for cell_id in ("generate", "lookup", "own"):
        assert outputs(executed, cell_id)[-1].data["text/html"].count("litspec-completion") == 1
    assert [list(output.data) for output in outputs(executed, "plot")] == [
        ["text/plain", "image/png"]
    ]  # once, not twice
    shown, numbers = outputs(executed, "stream")  # one display, however many pieces came
    assert len(shown.data["text/plain"].split()) > 20
    assert numbers.text.startswith("stop: ") and "tokens/s" in numbers.text
    said = outputs(executed, "same")[-1].text
    assert re.findall(r"(\w+): the same \d+ tokens", said) == ["greedy", "coupled"]
    assert "passes all checks" in outputs(executed, "check")[-1].text


@pytest.mark.slow
def test_the_committed_outputs_are_of_the_kinds_that_a_run_gives(executed: NotebookNode) -> None:
    def kinds(notebook: NotebookNode) -> dict[str, list[tuple[str, list[str]]]]:
        code = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.id != "truth"]
        return {cell.id: [(each.output_type, sorted(each.get("data", {}))) for each in cell.outputs] for cell in code}

    assert kinds(nbformat.read(NOTEBOOK, as_version=4)) == kinds(executed)


@pytest.mark.slow
def test_the_exported_page_holds_the_tinted_tokens(executed: NotebookNode) -> None:
    page, truth = Page(export(executed)), json.loads(outputs(executed, "truth")[-1].text)
    assert len(page.texts) == 3
    assert [text for text, _ in page.texts[0]] == [text for text, _ in truth["pieces"]]
    origins = {(tint, drafted) for (_, tint), (_, drafted) in zip(page.texts[0], truth["pieces"])}
    assert len(origins) == len(dict(origins)) == 2  # two tints, and each means one origin
    assert "drafted and accepted" in page.rest and "tokens per round" in page.rest


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_browser_renders_the_exported_page(executed: NotebookNode, theme: str, tmp_path: Path) -> None:
    truth = json.loads(outputs(executed, "truth")[-1].text)
    first, *others = rendered(export(executed, theme), tmp_path)
    assert len(others) == 2
    assert first["text"] == truth["text"]
    assert [text for text, _ in first["pieces"]] == [text for text, _ in truth["pieces"]]
    assert len({tint for _, tint in first["pieces"]}) == 2
    assert all(text["height"] > 0 for text in (first, *others))
    assert first["color"] == first["around"]  # the theme's own colour for text
    channels = [int(channel) for channel in re.findall(r"\d+", first["color"])[:3]]
    assert max(channels) < 100 if theme == "light" else min(channels) > 155
    assert "tokens per round" in first["numbers"]


@needs_chromium
def test_a_browser_shows_any_text_as_it_is_and_runs_nothing_in_it(tmp_path: Path) -> None:
    pieces = [
        Piece("\n\n<script>document.title = 'run'</script><img src=x onerror=\"document.body.remove()\">", True),
        Piece("</pre></div>&amp;&lt;", False),
        Piece("  two  spaces\ta tab \r\n a return\r", True),
        Piece("駱馬🦙e\u0301👩‍👩‍👧 نعم $x^2$ ", False),
    ]
    blocks = [Block([1], [False], 0, 0, 0, None), Block([2, 3, 4], [True, True, False], 1, 3, 2, "stop")]
    stats = make_stats(blocks, prefill_seconds=0.1, decode_seconds=0.5)
    page = '<!doctype html><meta charset="utf-8"><body>' + to_html(pieces, [True, False, True, False], stats, "stop")
    (shown,) = rendered(page, tmp_path)
    assert [text for text, _ in shown["pieces"]] == [piece.text for piece in pieces]
    assert shown["text"] == "".join(piece.text for piece in pieces)
    lines = sum(piece.text.count("\n") for piece in pieces) + 1
    assert shown["height"] >= lines * 16  # line feeds are lines
