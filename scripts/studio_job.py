"""Submit `litspec generate` as a job of a Lightning Studio.

Everything after `--` is passed to `litspec generate` as it stands:

    python scripts/studio_job.py --name answers-1 --machine L4 --dry_run -- \\
        --config litspec/config_hub/generate/llama-3.1-8b.yaml --prompts_file prompts.jsonl --out_file answers.jsonl

The job runs in a copy of the Studio, from its home folder, so relative paths are relative to that folder; files that it
writes there appear under /teamspace/jobs/NAME. `--dry_run` prints what would be submitted and touches no network.
"""

from __future__ import annotations

import difflib
import inspect
import json
import os
import posixpath
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from litspec.errors import InputError

STUDIO_HOME = "/teamspace/studios/this_studio"
JOB_FILES = "/teamspace/jobs"


class RefusedError(RuntimeError):
    """The job was described well, but it could not be submitted."""


def build_parser() -> ArgumentParser:
    """The script's own flags, those before `--`."""
    parser = ArgumentParser(
        prog="studio_job.py",
        usage="%(prog)s --name NAME --machine MACHINE [flags] -- FLAGS OF litspec generate",
        description=__doc__.partition("\n")[0],
    )
    add = parser.add_argument
    add("--name", type=str, required=True, help="name of the job, not yet taken in its teamspace")
    add("--machine", type=str, required=True, help="machine to run on, as Lightning names it: L4, L40S, H100_X_4, ...")
    add("--studio", type=str | None, help="name of the Studio whose files the job gets; default: the one this runs in")
    add("--teamspace", type=str | None, help="teamspace of the Studio, as NAME or OWNER/NAME; default: the current one")
    add("--org", type=str | None, help="organization that owns the teamspace, where --teamspace is a bare name")
    add("--user", type=str | None, help="user who owns the teamspace, where --teamspace is a bare name")
    switch: dict[str, Any] = {"type": bool, "nargs": "?", "const": True, "default": False}
    add("--interruptible", **switch, help="take a cheaper machine that may be withdrawn at any time")
    add(
        "--resume_from",
        type=str | None,
        help="name of an earlier job whose unfinished --out_file this one goes on with",
    )
    add("--dry_run", **switch, help="print the arguments of `Job.run` as JSON and submit nothing")
    return parser


def find_flag(flags: Sequence[str], name: str) -> str | None:
    """The last value of `--name VALUE` or `--name=VALUE` among `flags`, or None."""
    value = None
    for flag, following in zip(flags, [*flags[1:], None]):
        if flag == f"--{name}":
            value = following
        elif flag.startswith(f"--{name}="):
            value = flag.partition("=")[2]
    return value


def path_in_home(out_file: str) -> str | None:
    """`out_file` relative to the Studio's home, or None where it lies outside."""
    path = posixpath.normpath(posixpath.join(STUDIO_HOME, out_file))
    return path[len(STUDIO_HOME) + 1 :] if path.startswith(STUDIO_HOME + "/") else None


def build_command(flags: Sequence[str], resume_from: str | None = None) -> str:
    """The shell line that the job runs.

    A job cannot write to the Studio that it was copied from, so going on with an earlier job means to fetch first what
    that job left: the answers so far and the files beside them, whose names begin with the same letters.

    Raises:
        InputError: If there are no flags, or `resume_from` has no file to go on with.
    """
    if not flags:
        raise InputError(
            "Nothing stands after `--`: expected the flags of `litspec generate`, such as -- --prompt TEXT."
        )
    command = shlex.join(["litspec", "generate", *flags])
    if resume_from is None:
        return command
    out_file = find_flag(flags, "out_file")
    if out_file is None:
        raise InputError(f"--resume_from {resume_from} needs the --out_file of that job among the flags after `--`.")
    path = path_in_home(out_file)
    if path is None:
        raise InputError(
            f"--resume_from {resume_from} fetches files from that job's home, but --out_file {out_file} lies outside:"
            " such a file outlives the job, so submit the same flags without --resume_from."
        )
    folder = posixpath.dirname(path) or "."
    fetch = f"cp {shlex.quote(posixpath.join(JOB_FILES, resume_from, path))}* {shlex.quote(folder)}/"
    return " && ".join(([] if folder == "." else [shlex.join(["mkdir", "-p", folder])]) + [fetch, command])


def check_flags(flags: Sequence[str], interruptible: bool) -> list[str]:
    """Sentences about flags that are legal, but that a job will probably regret."""
    out_file = find_flag(flags, "out_file")
    warnings = []
    if out_file is None and find_flag(flags, "prompts_file") is not None:
        warnings.append(
            "--prompts_file without --out_file: litspec generate refuses it, so the job would fail at once; add"
            " --out_file answers.jsonl, from which it also resumes."
        )
    elif out_file is None and interruptible:
        warnings.append("--interruptible without --prompts_file and --out_file: what an interruption cuts off is lost.")
    elif out_file is not None and path_in_home(out_file) is None and not out_file.startswith("/teamspace/"):
        warnings.append(
            f"--out_file {out_file} lies outside of the Studio's home, where nothing is kept after the job;"
            " a relative path is kept."
        )
    return warnings


def find_machine(name: str, machine_type: type) -> str:
    """The slug by which Lightning's backend knows the machine called `name`.

    `Job.run` passes a string on as it is, and the backend takes slugs, so a name such as "L4" must be translated first.

    Args:
        name: A machine's name in any case, or its slug.
        machine_type: `lightning_sdk.Machine`, whose attributes are the machines.

    Raises:
        InputError: If there is none of that name; the sentence names the closest.
    """
    slugs = {key: machine.slug for key, machine in vars(machine_type).items() if isinstance(machine, machine_type)}
    if name in slugs.values():
        return name
    if name.upper() in slugs:
        return slugs[name.upper()]
    close = difflib.get_close_matches(name.upper(), slugs, n=4, cutoff=0.4) or sorted(slugs)
    raise InputError(f"--machine {name} is none that lightning-sdk knows; it knows {', '.join(close)}.")


def job_arguments(settings: Namespace, flags: Sequence[str], job_type: type, machine_type: type) -> dict[str, Any]:
    """The keyword arguments for `Job.run`, nothing in them that was not asked for.

    Raises:
        InputError: If a setting is wrong, or the installed lightning-sdk has no such argument.
    """
    if not settings.name.strip():
        raise InputError("--name is empty: expected a name that is not yet taken in the teamspace.")
    if settings.org and settings.user:
        raise InputError(
            f"--org {settings.org} and --user {settings.user} exclude each other: a teamspace has one owner."
        )
    asked = {name: settings[name] for name in ("studio", "teamspace", "org", "user") if settings[name] is not None}
    arguments = {
        "name": settings.name,
        "machine": find_machine(settings.machine, machine_type),
        "command": build_command(flags, settings.resume_from),
        **asked,
        "interruptible": settings.interruptible,
    }
    try:
        inspect.signature(job_type.run).bind(**arguments)
    except TypeError as error:
        raise InputError(
            f"The installed lightning-sdk does not take these arguments ({error}): `pip install -U lightning-sdk`."
        ) from error
    return arguments


def import_sdk() -> tuple[type, type]:
    """`Job` and `Machine` of lightning-sdk.

    Raises:
        InputError: If it is not installed.
    """
    try:
        from lightning_sdk import Job, Machine
    except ModuleNotFoundError as error:
        raise InputError(
            f"A Studio job needs lightning-sdk ({error}): `pip install 'litspec[studio]'` installs it."
        ) from error
    return Job, Machine


def run(settings: Namespace, flags: Sequence[str]) -> None:
    """Submit the job, or print what would be submitted.

    Raises:
        InputError: If a setting cannot be used.
        RefusedError: If the sdk could not submit the job.
    """
    if settings.dry_run:
        # Importing the sdk asks a package index for its newest version, unless it is told not to.
        os.environ.setdefault("LIGHTNING_DISABLE_VERSION_CHECK", "1")
    job_type, machine_type = import_sdk()
    arguments = job_arguments(settings, flags, job_type, machine_type)
    for warning in check_flags(flags, settings.interruptible):
        print(f"warning: {warning}", file=sys.stderr)
    if settings.dry_run:
        print(json.dumps(arguments, indent=2, ensure_ascii=False))
        return
    try:
        job = job_type.run(**arguments)
    except Exception as error:  # whatever the sdk and the network under it raise: no login, no such Studio, no access
        reason = str(error).partition("\n")[0].strip() or type(error).__name__
        raise RefusedError(f"Lightning did not take the job: {reason}") from error
    print(job.link)
    print(f"Submitted as {job.name}; what it writes appears under {JOB_FILES}/{job.name}.", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 submitted or printed, 2 a setting that cannot be used, 1 Lightning did not take the job."""
    argv = list(sys.argv[1:] if argv is None else argv)
    border = argv.index("--") if "--" in argv else len(argv)
    settings = build_parser().parse_args(argv[:border])
    try:
        run(settings, argv[border + 1 :])
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RefusedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
