"""Files that grow by whole lines, and what it takes for them to last."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from litspec.errors import InputError


class LineFile:
    """A file that grows by whole lines.

    Args:
        path: Made where it does not exist.
        size: What lies behind so many bytes is cut off.
        new: Refuse, by FileExistsError, a file that exists.

    Raises:
        InputError: Here and in all methods, when the disk is full or the file cannot be written.
    """

    def __init__(self, path: Path, size: int = 0, *, new: bool = False) -> None:
        self.path = path
        with writing(path):
            existed = path.exists()
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_EXCL if new else 0), 0o666)
            self._size = size
            if os.fstat(self._file).st_size != size:
                os.ftruncate(self._file, size)
                os.fsync(self._file)  # what was cut off must not come back among what is written now
            if not existed:
                sync_folder(path.parent)

    def append(self, line: bytes) -> None:
        """Writes a line whole or, as far as that can be helped, not at all."""
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

    def close(self) -> None:
        os.close(self._file)


def whole_lines(path: Path, position: int = 0) -> Iterator[bytes]:
    """The lines from a byte on, up to the first that was not written to its end.

    A machine that stopped may leave zeros where a line was to be, which JSON has none of.
    """
    with suppress(FileNotFoundError), open(path, "rb") as file:
        file.seek(position)
        for line in file:
            if not line.endswith(b"\n") or b"\0" in line:
                return
            yield line


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file so that, whatever happens, there is all of it or nothing."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        file = LineFile(temporary)
        try:
            file.append(content)
            file.sync()
        finally:
            file.close()
        with writing(path):
            os.replace(temporary, path)
            sync_folder(path.parent)
    except InputError:
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
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise InputError(
                f"The disk has no room for more of {str(path)!r}; free some and run the same command again: all whole "
                "lines are kept."
            ) from error
        raise InputError(f"{str(path)!r} cannot be written: {error.strerror or error}.") from error


@contextmanager
def locked(path: Path, out: Path) -> Iterator[None]:
    """Holds a lock on a file made for it. The system lets go of it when this process ends, however it does.

    Raises:
        InputError: When another process holds it, and so writes `out`.
    """
    while True:
        with writing(path):
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(lock, 200).decode(errors="replace") or "another process"
            os.close(lock)
            raise InputError(
                f"{str(out)!r} is being written by {owner}; wait until that has ended, or give another out_file."
            ) from None
        except OSError as error:
            why = error.strerror or error
            log(f"{str(path)!r} cannot be locked ({why}): see to it that no other job writes {str(out)!r}.")
        # Whoever held it before us has removed the file, perhaps between our two calls.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(path)):
                break
        os.close(lock)
    try:
        with suppress(OSError):  # a courtesy to whom it is refused
            os.ftruncate(lock, 0)
            os.write(lock, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(lock)


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def as_line(text: str) -> bytes:
    """A line of JSON, in which characters that some readers take for the end of a line are escaped."""
    return (text.replace("\x85", "\\u0085").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029") + "\n").encode()


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
    print(text, file=sys.stderr, flush=True)
