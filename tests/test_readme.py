"""The README files: their code runs, their commands have flags that exist, and their links lead somewhere."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from urllib.parse import unquote

import pytest

from litspec.__main__ import COMMANDS, build_parser
from litspec.demo import DEMO_DRAFT, DEMO_TARGET
from litspec.flags import joined

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [
    README,
    ROOT / ".github" / "CONTRIBUTING.md",
    *sorted(path for top in ("litspec", "config_hub", "scripts", "tests") for path in (ROOT / top).rglob("README.md")),
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page: Path, language: str) -> list[str]:
    return [code for found, code in FENCE.findall(page.read_text(encoding="utf-8")) if found == language]


def prose(text: str) -> str:
    """The text without its blocks of code."""
    return FENCE.sub("", text)


def commands(text: str) -> list[list[str]]:
    """Every command of litspec and of `scripts` in blocks and in line, as a list of words."""
    lines = [
        line
        for language, code in FENCE.findall(text)
        if language == "bash"
        for line in code.replace("\\\n", " ").splitlines()
    ]
    # In line a command may go on in the next line of the page.
    # A command's name alone is not a call.
    lines += [
        line
        for code in re.findall(r"`([^`]+)`", prose(text))
        if (line := " ".join(code.split())).count(" ") > 1 or line.startswith("python ")
    ]
    found = []
    for line in lines:
        line = line.replace('"..."', "text").replace("$R", "0")
        pattern = rf"(?:^|&& |-m |srun .*?|\) )litspec\)? ((?:{'|'.join(COMMANDS)})\b.*)$"
        if match := re.search(pattern, line):
            found.append(["litspec", *shlex.split(match.group(1), comments=True)])
        elif match := re.search(r"(?:^|&& )python (?:litspec/)?(scripts/\w+\.py.*)$", line):
            found.append(shlex.split(match.group(1), comments=True))
    return found


def parse(command: list[str]) -> None:
    """Raises SystemExit for flags that litspec does not have."""
    # A path may begin with the clone's folder; `...` stands for flags shown before.
    words = [re.sub(r"^(litspec/)?config_hub/", f"{ROOT}/config_hub/", word) for word in command[1:] if word != "..."]
    build_parser().parse_args(joined(words, COMMANDS[words[0]]))


def flags_of_script(path: Path) -> set[str]:
    """What `main` takes as arguments where jsonargparse's CLI calls it, and what is added to a parser by name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name == "main":
            found |= {f"--{arg.arg}" for arg in (*node.args.args, *node.args.kwonlyargs)}
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            value = node.args[0].value
            if isinstance(value, str) and value.startswith("--"):
                found.add(value)
    return found


def check_script(command: list[str]) -> None:
    own, _, passed_on = " ".join(command).partition(" -- ")
    path = ROOT / command[0]
    assert path.is_file(), command[0]
    flags = {word.partition("=")[0] for word in own.split() if word.startswith("--")}
    assert not (missing := flags - flags_of_script(path)), f"{command[0]} has no {missing}"
    if passed_on:
        parse(["litspec", "generate", *passed_on.split()])


def slugs(page: Path) -> set[str]:
    """The anchors that a code host gives to the headings of a page."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ (.*)$", prose(page.read_text(encoding="utf-8")), flags=re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
        if found[slug]:
            found[f"{slug}-{found[slug]}"] = 0
    return set(found)


def links(page: Path) -> list[str]:
    text = re.sub(r"`[^`]*`", "code", prose(page.read_text(encoding="utf-8")))
    return re.findall(r"\]\(([^)\s]+)\)", text)


def broken(page: Path) -> list[str]:
    """Relative links of a page that lead nowhere."""
    found = []
    for link in links(page):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and (target.suffix != ".md" or anchor not in slugs(target))):
            found.append(link)
    return found


def test_the_first_page_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 220


def test_the_pages_are_found() -> None:
    assert {str(page.parent.relative_to(ROOT)) for page in PAGES} >= {
        ".",
        "config_hub",
        "litspec/drafters",
        "litspec/jobs",
        "litspec/model",
        "litspec/placement",
        "litspec/training",
        "scripts",
        "tests",
    }


def test_the_first_page_leads_to_all_others() -> None:
    linked = {(README.parent / link.partition("#")[0]).resolve() for link in links(README) if "://" not in link}
    assert not set(PAGES) - linked - {README}


@EVERY_PAGE
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A `b`, c\n\n```\n# no heading\n```\n\n## A b c\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md) [a](other.md#a-b-c) [`a`](other.md#a-b-c-1) [b](none.md) [c](other.md#no-heading) ![d](d.png) "
        "[e](#nothing) [f](https://example.com) `x[0](none)`\n"
    )
    assert broken(page) == ["none.md", "other.md#no-heading", "d.png", "#nothing"]


@EVERY_PAGE
def test_every_command_parses(page: Path) -> None:
    for command in commands(page.read_text(encoding="utf-8")):
        try:
            parse(command) if command[0] == "litspec" else check_script(command)
        except SystemExit as error:
            if error.code == 0:  # --help
                continue
            pytest.fail(f"This does not parse: {shlex.join(command)}")


def test_commands_are_found() -> None:
    found = [command for page in PAGES for command in commands(page.read_text(encoding="utf-8"))]
    assert {command[1] for command in found if command[0] == "litspec"} == set(COMMANDS)
    assert {command[0] for command in found if command[0] != "litspec"} >= {
        "scripts/bench_peers.py",
        "scripts/studio_job.py",
        "scripts/torture.py",
        "scripts/train_demo_pair.py",
    }


def test_a_flag_that_does_not_exist_is_found() -> None:
    script, job, command = commands(
        "`litspec bench\n--promt hi`\n```bash\nx && python scripts/bench_growth.py --plott x.png\n"
        "python litspec/scripts/studio_job.py --name a --machine L4 -- \\\n    --promptsfile in.jsonl\n```\n"
    )
    with pytest.raises(SystemExit):
        parse(command)
    with pytest.raises(AssertionError, match="--plott"):
        check_script(script)
    with pytest.raises(SystemExit):
        check_script(job)


@pytest.mark.slow
@EVERY_PAGE
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page in their order, on the embedded pair where they name a folder of checkpoints."""
    codes = blocks(page, "python")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    # What the page shows as lines of a prompts file is the file that its code reads.
    prompts = [code for code in blocks(page, "json") if '"prompt"' in code and '"text"' not in code]
    (tmp_path / "prompts.jsonl").write_text("".join(prompts))
    names: dict = {}
    for code in codes:
        code = re.sub(
            r'(draft_dir=)?"checkpoints/[^"]*"',
            lambda match: f"draft_dir={str(DEMO_DRAFT)!r}" if match.group(1) else repr(str(DEMO_TARGET)),
            code,
        )
        exec(code, names)  # check_drafter in it raises for violations of the protocol
    if page.parent.name == "drafters":
        out = names["out"]
        plain = names["plain"].generate(out.prompt, max_new_tokens=len(out.token_ids), temperature=0.0)
        assert out.token_ids == plain.token_ids
        assert out.stats.accepted > 0, "the page's own drafter should show a gain"
    if page.parent.name == "jobs":
        assert names["exit_code"] == 0
    if page == README:
        assert len(names["out"].pieces) > 0 and len(codes) >= 4
