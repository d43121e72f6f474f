"""Files that grow by whole lines, and what it takes for them to last."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from litspec.errors import InputError, printable

# A link beside the out file leads to somebody's file, and a pipe makes whoever opens it wait.
SAFELY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
# What a lock file holds. It is empty where its process ended before it had written its name.
LOCK = re.compile(rb"(process \d+ on \S{0,255})?\0*")


class LineFile:
    """A file that grows by whole lines.

    Args:
        path: Made where it does not exist.
        size: What lies behind so many bytes is cut off.
        new: Refuse, by FileExistsError, a file that exists.

    Raises:
        InputError: Here and in all methods, when the disk is full or the file cannot be written, is a link or no file,
            or has been removed or changed by somebody else meanwhile.
    """

    def __init__(self, path: Path, size: int = 0, *, new: bool = False) -> None:
        self.path = path
        with writing(path):
            existed = path.exists()
            self._file = open_own(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_EXCL if new else 0))
            self._size = size
            if os.fstat(self._file).st_size != size:
                os.ftruncate(self._file, size)
                os.fsync(self._file)  # what was cut off must not come back among what is written now
            if not existed:
                sync_folder(path.parent)

    def append(self, line: bytes) -> None:
        """Writes a line whole or, as far as that can be helped, not at all."""
        self.check()
        with writing(self.path):
            try:
                rest = memoryview(line)
                while rest:
                    rest = rest[os.write(self._file, rest) :]
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._file, self._size)
                raise
        self._size += len(line)

    def sync(self) -> None:
        """Returns when all of it is on the disk."""
        with writing(self.path):
            os.fsync(self._file)
        self.check()

    def check(self) -> None:
        """Raises InputError where the file has gone from its place or holds what this object did not write."""
        there = os.fstat(self._file)
        try:
            in_place = os.path.samestat(there, os.lstat(self.path))
        except OSError:
            in_place = False
        if not in_place:
            raise InputError(
                f"{str(self.path)!r} was removed or replaced while the job wrote it, so the texts that it held are "
                "lost; run the same command again to make them anew."
            )
        if there.st_size != self._size:
            raise InputError(
                f"{str(self.path)!r} was changed by somebody else while the job wrote it ({there.st_size:,} bytes, "
                f"{self._size:,} were written); see to it that nobody else writes it and run the same command again."
            )

    def close(self) -> None:
        os.close(self._file)


def open_own(path: Path, flags: int) -> int:
    """Opens a file of the job's: never through a link, and never anything but a plain file.

    Raises:
        OSError: As `os.open`.
        InputError: It is a link, a folder, a pipe or a device.
    """
    try:
        file = os.open(path, flags | SAFELY, 0o666)
    except OSError:
        _check_plain(path)
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        _check_plain(path)
    return file


def _check_plain(path: Path) -> None:
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe"}
        raise InputError(
            f"{str(path)!r} is {kinds.get(stat.S_IFMT(mode), 'no plain file')}, which no job makes or follows; move it "
            "away, or give another out_file."
        )


def read_own(path: Path) -> bytes:
    """All of a file of the job's.

    Raises:
        FileNotFoundError: There is none.
        InputError: It cannot be read or is no plain file.
    """
    with reading(path), os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
        return file.read()


def whole_lines(path: Path, position: int = 0) -> Iterator[bytes]:
    """The lines from a byte on, up to the first that was not written to its end; none where there is no file.

    A machine that stopped may leave zeros where a line was to be, which JSON has none of.

    Raises:
        InputError: The file cannot be read or is no plain file.
    """
    with suppress(FileNotFoundError), reading(path), os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
        file.seek(position)
        for line in file:
            if not line.endswith(b"\n") or b"\0" in line:
                return
            yield line


def begins_with(path: Path, beginning: bytes) -> bool:
    """Whether a file begins so, as far as it was written; also where there is none, or none of it came to the disk.

    Raises:
        InputError: The file cannot be read or is no plain file.
    """
    with suppress(FileNotFoundError), reading(path), os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
        written = file.read(len(beginning)).split(b"\0")[0]
        return beginning.startswith(written)
    return True


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file so that, whatever happens, there is all of it or nothing.

    Until then it has a name that nobody can have put there before.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    made = False
    try:
        file = LineFile(temporary, new=True)
        made = True
        try:
            file.append(content)
            file.sync()
        finally:
            file.close()
        with writing(path):
            os.replace(temporary, path)
            sync_folder(path.parent)
    except InputError:
        if made:
            temporary.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder last, on file systems that have a call for it."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EPERM):
            raise
    finally:
        os.close(file)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Makes a sentence of what a disk refuses."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        _refuse_full(path, error)
        raise InputError(f"{str(path)!r} cannot be written: {error.strerror or error}.") from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Makes a sentence of what a disk does not give, except that there is no such file."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        _refuse_full(path, error)
        raise InputError(f"{str(path)!r} cannot be read: {error.strerror or error}.") from error


def _refuse_full(path: Path, error: OSError) -> None:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        raise InputError(
            f"The disk has no room for more of {str(path)!r}; free some and run the same command again: all whole "
            "lines are kept."
        ) from error


@contextmanager
def locked(path: Path, out: Path) -> Iterator[None]:
    """Holds a lock on a file made for it. The system lets go of it when this process ends, however it does.

    Raises:
        InputError: When another process holds it, and so writes `out`; when there is a file that no job made.
    """
    while True:
        with writing(path):
            lock = open_own(path, os.O_RDWR | os.O_CREAT)
        if not LOCK.fullmatch(os.read(lock, 600)):
            os.close(lock)
            raise InputError(
                f"{str(path)!r}, where a job on {str(out)!r} has its lock, is a file that no job wrote; give another "
                "out_file, or move it away."
            )
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(lock, 200, 0).decode(errors="replace").strip("\0") or "another process"
            os.close(lock)
            raise InputError(
                f"{str(out)!r} is being written by {owner}; wait until that has ended, or give another out_file."
            ) from None
        except OSError as error:
            why = error.strerror or error
            log(f"{str(path)!r} cannot be locked ({why}): see to it that no other job writes {str(out)!r}.")
        # Whoever held it before us has removed the file, perhaps between our two calls.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.lstat(path)):
                break
        os.close(lock)
    try:
        with suppress(OSError):  # a courtesy to whom it is refused
            os.ftruncate(lock, 0)
            os.lseek(lock, 0, os.SEEK_SET)
            os.write(lock, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        with suppress(OSError):  # somebody may have put another file there
            if os.path.samestat(os.fstat(lock), os.lstat(path)):
                os.unlink(path)
        os.close(lock)


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# Characters that some readers take for the end of a line, and those that a terminal obeys; JSON escapes the first 32.
_ESCAPED = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), 0x2028, 0x2029)}


def as_line(text: str) -> bytes:
    """A line of JSON, in which control characters and all that may end a line are escaped."""
    return (text.translate(_ESCAPED) + "\n").encode()


def load_line(line: bytes) -> dict[str, Any]:
    """The object of a line, {} where it is none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def digest(*parts: bytes | str) -> str:
    """A hash of all parts together, 32 hexadecimal digits."""
    hashed = hashlib.blake2b(digest_size=16)
    for part in parts:
        part = part.encode() if isinstance(part, str) else part
        hashed.update(len(part).to_bytes(8, "big"))
        hashed.update(part)
    return hashed.hexdigest()


def log(text: str) -> None:
    """Says something to the person who started the job."""
    print(printable(text), file=sys.stderr, flush=True)
