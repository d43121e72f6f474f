"""Files that grow by whole lines, atomic and durable writes, locks."""

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

# Opening must not follow a link to another user's file, nor block on a pipe.
SAFELY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
# The content of a lock file. It is empty if its process ended before writing its name.
LOCK = re.compile(rb"(process \d+ on \S{0,255})?\0*")


class LineFile:
    """A file that grows by whole lines.

    Args:
        path: The file; created if it does not exist.
        size: Bytes to keep. The rest of the file is cut off.
        new: Raise FileExistsError if the file exists.

    Raises:
        InputError: The disk is full; the file cannot be written, is a link or not a regular file; or another process
            has removed or changed it. All methods raise it too.
    """

    def __init__(self, path: Path, size: int = 0, *, new: bool = False) -> None:
        self.path = path
        with writing(path):
            existed = path.exists()
            self._file = open_own(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_EXCL if new else 0))
            self._size = size
            if os.fstat(self._file).st_size != size:
                os.ftruncate(self._file, size)
                os.fsync(self._file)  # the removed part must not reappear after a power failure
            if not existed:
                sync_folder(path.parent)

    def append(self, line: bytes) -> None:
        """Writes a whole line. After an error the file is cut back to its last whole line, if the disk allows."""
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
        """Flushes the file to disk."""
        with writing(self.path):
            os.fsync(self._file)
        self.check()

    def check(self) -> None:
        """Raises InputError if the file was removed, replaced, or changed by another process."""
        there = os.fstat(self._file)
        try:
            in_place = os.path.samestat(there, os.lstat(self.path))
        except OSError:
            in_place = False
        if not in_place:
            raise InputError(
                f"{str(self.path)!r} was removed or replaced while the job was writing it, so its texts are lost; run "
                "the same command again to regenerate them."
            )
        if there.st_size != self._size:
            raise InputError(
                f"{str(self.path)!r} was changed by another process while the job was writing it (it has "
                f"{there.st_size:,} bytes, the job wrote {self._size:,}); make sure that no other process writes to it "
                "and run the same command again."
            )

    def close(self) -> None:
        os.close(self._file)


def open_own(path: Path, flags: int) -> int:
    """Opens a file of the job. Links are not followed, and only a regular file is opened.

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
            f"{str(path)!r} is {kinds.get(stat.S_IFMT(mode), 'a device or a socket')}, not a regular file, so a job "
            "cannot use it; move it away, or give another out_file."
        )


def read_own(path: Path) -> bytes:
    """Reads a file of the job.

    Raises:
        FileNotFoundError: The file does not exist.
        InputError: It cannot be read or is not a regular file.
    """
    with reading(path), os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
        return file.read()


def whole_lines(path: Path, position: int = 0) -> Iterator[bytes]:
    """The lines from a byte position on, up to the first incomplete one. Yields nothing if the file does not exist.

    After a power failure a file may hold zero bytes in place of a line. A line of JSON never contains them.

    Raises:
        InputError: The file cannot be read or is not a regular file.
    """
    with suppress(FileNotFoundError), reading(path), os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
        file.seek(position)
        for line in file:
            if not line.endswith(b"\n") or b"\0" in line:
                return
            yield line


def begins_with(path: Path, beginning: bytes) -> bool:
    """Whether a file, perhaps written in part, begins with these bytes. True also if it is missing or empty.

    Raises:
        InputError: The file cannot be read or is not a regular file.
    """
    with suppress(FileNotFoundError), reading(path), os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
        written = file.read(len(beginning)).split(b"\0")[0]
        return beginning.startswith(written)
    return True


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file atomically: after an interruption it is complete or absent.

    The temporary file has a random name, so no other process can have created it before.
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
    """Flushes the names of a folder's files to disk, on file systems that support it."""
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
    """Turns an OSError of writing into an InputError."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        _refuse_full(path, error)
        raise InputError(f"{str(path)!r} cannot be written: {error.strerror or error}.") from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns an OSError of reading into an InputError, except FileNotFoundError."""
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
            f"The disk has no room for more of {str(path)!r}; free some space and run the same command again: all "
            "complete lines are kept."
        ) from error


@contextmanager
def locked(path: Path, out: Path) -> Iterator[None]:
    """Holds a lock on a lock file. The system releases it when this process ends, for any reason.

    Args:
        path: The lock file.
        out: The file that the lock protects, for error messages.

    Raises:
        InputError: Another process holds the lock, or the lock file was not written by a job.
    """
    while True:
        with writing(path):
            lock = open_own(path, os.O_RDWR | os.O_CREAT)
        if not LOCK.fullmatch(os.read(lock, 600)):
            os.close(lock)
            raise InputError(
                f"{str(path)!r} should be the lock file of {str(out)!r}, but was not written by a job; give another "
                "out_file, or move it away."
            )
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(lock, 200, 0).decode(errors="replace").strip("\0") or "another process"
            os.close(lock)
            raise InputError(
                f"{str(out)!r} is being written by {owner}; wait until it has ended, or give another out_file."
            ) from None
        except OSError as error:
            why = error.strerror or error
            log(f"{str(path)!r} cannot be locked ({why}): make sure that no other job writes {str(out)!r}.")
        # The previous owner removes the file, perhaps between opening and locking it here.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.lstat(path)):
                break
        os.close(lock)
    try:
        with suppress(OSError):  # only for the error message of other processes
            os.ftruncate(lock, 0)
            os.lseek(lock, 0, os.SEEK_SET)
            os.write(lock, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        with suppress(OSError):  # the file may have been replaced
            if os.path.samestat(os.fstat(lock), os.lstat(path)):
                os.unlink(path)
        os.close(lock)


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# Characters that some readers treat as the end of a line, and control characters. JSON itself escapes the first 32.
_ESCAPED = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), 0x2028, 0x2029)}


def as_line(text: str) -> bytes:
    """Encodes a line of JSON. Control characters and line separators are escaped."""
    return (text.translate(_ESCAPED) + "\n").encode()


def load_line(line: bytes) -> dict[str, Any]:
    """The JSON object of a line; {} if the line is not a JSON object."""
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
    """Prints a message for the user to stderr."""
    print(printable(text), file=sys.stderr, flush=True)
