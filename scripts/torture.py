"""What kills, hostile files and odd lines do to litspec: random, seeded, bounded; prints a table, exits 1 for a fault.

    python scripts/torture.py --kills 50 --mutations 500

Kills: a job is killed (SIGKILL, to any of its ranks) at random moments and resumed until so many kills have struck; its
file must then be that of an undisturbed job. Mutations: each file that is read is damaged at random, and the command
must end with 0, 1 or 2, a sentence and no traceback. They run in processes that are forked from one which has imported
everything, so that a mutation costs a fraction of a second. Lines: prompts that are no prompts get an error each. Full
disk: where the system lets it, a job runs on a tmpfs that is too small, and is resumed on one with room.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HANG_SECONDS = 60.0
START_SECONDS = 120.0  # imports on a machine that is busy do not count as a hang
DEMO = Path(__file__).resolve().parent.parent / "litspec" / "demo"
JOB = ["--max_new_tokens", "24", "--seed", "3", "--accelerator", "cpu"]
ALLOWED = (0, 1, 2, 130, 143)


@dataclass
class Row:
    """One line of the table."""

    name: str
    tried: int = 0
    survived: int = 0
    tracebacks: int = 0
    hangs: int = 0
    wrong_exits: int = 0
    left: int = 0
    faults: list[str] = field(default_factory=list)

    def note(self, what: str, code: int | None, said: str) -> None:
        """Counts one try by its exit code (None: it hung) and what it said."""
        self.tried += 1
        before = len(self.faults)
        if "Traceback (most recent call last)" in said:
            self.tracebacks += 1
            self.faults.append(f"{what}: {' | '.join(said.strip().splitlines()[-1:])}")
        if code is None:
            self.hangs += 1
            self.faults.append(f"{what}: hung")
        elif code not in ALLOWED:
            self.wrong_exits += 1
            self.faults.append(f"{what}: exit {code}: {said[-300:]!r}")
        self.survived += len(self.faults) == before


# --- kills ------------------------------------------------------------------------------------------------------------


def command(folder: Path, out: str, ranks: int) -> list[str]:
    """The command of a job in a folder."""
    words = [sys.executable, "-m", "litspec", "generate", "--prompts_file", str(folder / "in.jsonl")]
    words += ["--out_file", str(folder / out), *JOB]
    return words + (["--devices", str(ranks), "--placement", "replicate"] if ranks > 1 else [])


def run(words: list[str], seconds: float) -> tuple[int | None, str]:
    """Runs a command in a session of its own; its exit code (None: it took too long) and what it said."""
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
    try:
        said = process.communicate(timeout=seconds)[1]
        return process.returncode, said.decode(errors="replace")
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[1].decode(errors="replace")


def members(session: int) -> list[int]:
    """The processes of a session that are alive."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = entry.read_text().rsplit(")", 1)[1].split()
            if int(fields[3]) == session and fields[0] not in "ZX":
                found.append(int(entry.parent.name))
    return found


def kills(folder: Path, ranks: int, number: int, chance: random.Random) -> Row:
    """Kills a job at random moments, from its first second to its last."""
    row = Row(f"kills, {ranks} rank{'s' * (ranks > 1)}")
    began = time.monotonic()
    code, said = run(command(folder, f"whole-{ranks}.jsonl", ranks), START_SECONDS + HANG_SECONDS)
    seconds = time.monotonic() - began
    if code != 0:
        row.note("the undisturbed job", code if code is None else 99, said)
        return row
    expected = (folder / f"whole-{ranks}.jsonl").read_bytes()
    out, turn = folder / f"killed-{ranks}-0.jsonl", 0
    while row.tried < number:
        process = subprocess.Popen(
            command(folder, out.name, ranks), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(chance.uniform(0, seconds))
        ended = process.poll() is not None
        victims = [] if ended else sorted(members(process.pid))
        victim = chance.choice(victims) if victims else process.pid
        if not ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        try:
            said = process.communicate(timeout=HANG_SECONDS)[1].decode(errors="replace")
            code: int | None = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, code = process.communicate()[1].decode(errors="replace"), None
        until = time.monotonic() + HANG_SECONDS
        while (left := members(process.pid)) and time.monotonic() < until:
            time.sleep(0.1)
        for pid in left:
            row.left += 1
            row.faults.append(f"process {pid} was left")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        content = out.read_bytes() if out.exists() else b""
        if not expected.startswith(content[: content.rfind(b"\n") + 1]):
            row.faults.append(f"{out.name}: a text was lost or changed")
            row.survived -= 1
        if not ended:
            # The one that was killed has no say in its exit code; one that lost a rank ends with 2.
            killed = victim == process.pid and code == -signal.SIGKILL
            row.note(f"kill {row.tried}", 2 if killed else code, said)
        elif code != 0:
            row.note(f"run {turn}", code, said)
        if ended:
            if content != expected:
                row.faults.append(f"{out.name}: the finished file is another")
                row.survived -= 1
            turn += 1
            out = folder / f"killed-{ranks}-{turn}.jsonl"
    code, said = run(command(folder, out.name, 1), START_SECONDS + HANG_SECONDS)
    if code != 0 or out.read_bytes() != expected:
        row.faults.append(f"{out.name}: resumed with exit {code}, {said[-300:]!r}")
        row.survived -= 1
    return row


# --- mutations and odd lines ------------------------------------------------------------------------------------------


def mutated(content: bytes, chance: random.Random) -> bytes:
    """A file with some damage: flipped, cut, filled, doubled, nested, or with numbers that no one would write."""
    spoiled = bytearray(content)
    kind = chance.randrange(8)
    at = chance.randrange(len(content) + 1)
    if kind == 0 and content:
        for _ in range(chance.randint(1, 8)):
            spoiled[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    elif kind == 1:
        del spoiled[at:]
    elif kind == 2:
        spoiled[at : at + 64] = bytes(64)
    elif kind == 3:
        spoiled[at:at] = chance.choice([b"[" * 5000, b"{" * 3000, b"\xff\xfe", b"\x1b]0;x\x07", b"\xc2\x9b2J"])
    elif kind == 4:
        digits = [i for i, byte in enumerate(content[:65536]) if 48 <= byte < 58]
        if digits:
            i = chance.choice(digits)
            spoiled[i : i + 1] = chance.choice(
                [b"-1", b"0", b"4294967295", b"1e999", b"99999999999999", b"null", b'"x"']
            )
    elif kind == 5:
        spoiled[at:at] = content[max(0, at - 200) : at]
    elif kind == 6:
        spoiled = bytearray(chance.randbytes(chance.randrange(2000)))
    else:
        lines = content.split(b"\n")
        chance.shuffle(lines)
        spoiled = bytearray(b"\n".join(lines))
    return bytes(spoiled)


def forked(action: Callable[[], int], seconds: float = HANG_SECONDS) -> tuple[int | None, str]:
    """Runs an action in a child; its exit code (None: it took too long) and what it said."""
    with tempfile.TemporaryFile() as said:
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                os.setsid()
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
                sys.stdout, sys.stderr = io.TextIOWrapper(io.FileIO(1, "w")), io.TextIOWrapper(io.FileIO(2, "w"))
                code = action()
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else 98
            except BaseException:
                traceback.print_exc()
            finally:
                with contextlib.suppress(Exception):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(code)
        until = time.monotonic() + seconds
        code: int | None = None
        try:
            while code is None and time.monotonic() < until:
                done, status = os.waitpid(pid, os.WNOHANG)
                code = os.waitstatus_to_exitcode(status) if done else None
                time.sleep(0.005)
        finally:
            if code is None:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        said.seek(0)
        return code, said.read().decode(errors="replace")


def litspec(*words: str) -> Callable[[], int]:
    """The command as an action; it never returns, it exits."""

    def action() -> int:
        from litspec.__main__ import main

        main(list(words))

    return action


def mutations(folder: Path, number: int, chance: random.Random) -> list[Row]:
    """Damages each file that is read, so many times in all, and runs the command."""
    pair = folder / "pair"
    for name in ("target", "draft"):
        shutil.copytree(DEMO / name, pair / name)
    (pair / "target" / "prompt_style.yaml").write_text("class_path: litgpt.prompts.Default\n")
    load = ["--checkpoint_dir", str(pair / "target"), "--draft_dir", str(pair / "draft"), "--accelerator", "cpu"]
    prompts = folder / "some.jsonl"
    prompts.write_text("".join(json.dumps({"id": i, "prompt": f"It was {i}"}) + "\n" for i in range(3)))
    out = folder / "some-out.jsonl"
    words = ["generate", "--prompts_file", str(prompts), "--out_file", str(out), "--max_new_tokens", "3", *load]
    code, said = forked(litspec(*words))
    if code != 0:
        raise SystemExit(f"The undisturbed job ended with {code}: {said}")
    kept = {path: path.read_bytes() for path in folder.glob("some-out.jsonl*")}
    files = sorted(path for path in pair.rglob("*") if path.is_file() and path.suffix in (".json", ".yaml", ".pth"))
    files += [prompts, *sorted(kept)]
    rows = []
    for i, path in enumerate(files):
        name = str(path.relative_to(pair)) if pair in path.parents else path.name
        row = Row(f"mutations, {name}")
        content = kept[path] if path in kept else path.read_bytes()
        for _ in range(number * (i + 1) // len(files) - number * i // len(files)):
            for beside in folder.glob("some-out.jsonl*"):
                beside.unlink()
            if path in kept:
                for beside, whole in kept.items():
                    beside.write_bytes(whole)
            path.write_bytes(mutated(content, chance))
            row.note(row.name, *forked(litspec(*words)))
        path.write_bytes(content)
        rows.append(row)
        print(f"{row.name}: {row.survived} of {row.tried}", file=sys.stderr, flush=True)
    return rows


def odd_line(chance: random.Random) -> bytes:
    """A line that may be no prompt."""
    odd: list[Any] = [None, -1, 2**63, 1e308, "", "\x1b[2J", "\x9b", [], {}, [[]], True, "x" * 5000, "\u2028"]
    names = [
        "id",
        "prompt",
        "max_new_tokens",
        "min_new_tokens",
        "temperature",
        "top_k",
        "top_p",
        "seed",
        "stop",
        "what",
    ]
    line: dict[str, Any] = {"prompt": "It was", "max_new_tokens": 2}
    for _ in range(chance.randint(0, 3)):
        line[chance.choice(names)] = chance.choice(odd)
    text = json.dumps(line).encode()
    nested = b'{"prompt": ' + b"[" * (depth := chance.randint(100, 5000)) + b"]" * depth + b"}"
    return chance.choice([text, text, text, mutated(text, chance).replace(b"\n", b" "), nested])


def lines(folder: Path, number: int, chance: random.Random) -> Row:
    """A job of odd lines: each has a line in the out file, a text or an error."""
    row = Row("odd lines")
    for begin in range(0, number, 100):
        path, out = folder / f"odd-{begin}.jsonl", folder / f"odd-{begin}-out.jsonl"
        found = [odd_line(chance) for _ in range(min(100, number - begin))]
        path.write_bytes(b"\n".join(found) + b"\n")
        words = ["generate", "--prompts_file", str(path), "--out_file", str(out), "--max_new_tokens", "2"]
        code, said = forked(litspec(*words, "--accelerator", "cpu"), 2 * HANG_SECONDS)
        row.note(path.name, code, said)
        row.tried += len(found) - 1
        wanted = sum(bool(line.strip()) for line in found)
        if out.exists() and out.read_bytes().count(b"\n") == wanted:
            row.survived += len(found) - 1
        else:
            row.faults.append(f"{path.name}: exit {code}, not {wanted} lines: {said[-300:]!r}")
    return row


# --- full disk --------------------------------------------------------------------------------------------------------


def full_disk(folder: Path, number: int, chance: random.Random) -> Row | None:
    """Jobs on file systems that fill; None where none can be mounted."""
    row = Row("full tmpfs")
    place = folder / "small"
    place.mkdir()
    for _ in range(number):
        size = f"size={chance.randint(1, 8) * 4}k"
        if subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", place], capture_output=True).returncode:
            return None
        try:
            words = ["generate", "--prompts_file", str(folder / "in.jsonl"), "--out_file", str(place / "out.jsonl")]
            action = litspec(*words, *JOB)
            code, said = forked(action)
            row.note("full disk", 99 if code == 1 else code, said)
            subprocess.run(["mount", "-o", "remount,size=4m", place], check=True)
            code, said = forked(action)
            if code != 0 or (place / "out.jsonl").read_bytes() != (folder / "whole-1.jsonl").read_bytes():
                row.faults.append(f"resumed with exit {code}: {said[-300:]!r}")
                row.survived -= 1
        finally:
            subprocess.run(["umount", place], check=True)
    return row


# --- the table --------------------------------------------------------------------------------------------------------


def table(rows: list[Row]) -> str:
    """All rows in Markdown."""
    names = ("tried", "survived", "tracebacks", "hangs", "wrong exits", "processes left")
    text = [f"| | {' | '.join(names)} |", f"|---{'|---:' * len(names)}|"]
    for row in rows:
        values = (row.tried, row.survived, row.tracebacks, row.hangs, row.wrong_exits, row.left)
        text.append(f"| {row.name} | {' | '.join(f'{value:,}' for value in values)} |")
    return "\n".join(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=50, help="half of them with two ranks")
    parser.add_argument("--mutations", type=int, default=500, help="over all files that are read")
    parser.add_argument("--lines", type=int, default=500)
    parser.add_argument("--full_disks", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=24, help="of the jobs that are killed")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    chance = random.Random(given.seed)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    began = time.monotonic()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompts = [{"prompt": f"Chapter {i}", "max_new_tokens": chance.randint(8, 48)} for i in range(given.prompts)]
        (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in prompts))
        for ranks, number in ((1, given.kills - given.kills // 2), (2, given.kills // 2)):
            if number:
                rows.append(kills(folder, ranks, number, chance))
        import torch

        torch.set_num_threads(1)
        if given.mutations:
            rows += mutations(folder, given.mutations, chance)
        if given.lines:
            rows.append(lines(folder, given.lines, chance))
        if given.full_disks and (folder / "whole-1.jsonl").exists():
            row = full_disk(folder, given.full_disks, chance)
            rows += [row] if row is not None else []
            if row is None:
                print("No tmpfs could be mounted, so no disk was filled.", file=sys.stderr)
    print(table(rows))
    for row in rows:
        for fault in row.faults:
            print(f"{row.name}: {fault}", file=sys.stderr)
    print(f"seed {given.seed}, {time.monotonic() - began:.0f} s", file=sys.stderr)
    return int(any(row.faults for row in rows))


if __name__ == "__main__":
    sys.exit(main())
