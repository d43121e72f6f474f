"""Rendezvous: how ranks start and find each other. Every wait has a timeout and a message."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment, LightningEnvironment

from litspec import lifeline
from litspec.errors import InputError, printable
from litspec.lifeline import env_int
from litspec.placement.heartbeat import LOST_SECONDS, LostRank

MEETING_SECONDS = 60.0  # includes the time in which a rank imports its libraries
SILENT_SECONDS = 5.0  # after this a message says what the rank is waiting for
LEAVING_SECONDS = 15.0  # time for started ranks to end by themselves after rank 0
POLL_SECONDS = 0.05


class Meeting:
    """The rendezvous of the ranks of a run.

    Args:
        environment: Fabric's description of the launcher.
        local: Number of ranks per machine.
        nodes: Number of machines.

    Attributes:
        rank: Rank of this process.
        ranks: Number of ranks.
        children: The processes that this one has started, by rank.

    Raises:
        InputError: The environment variables are incomplete or wrong.
    """

    def __init__(self, environment: ClusterEnvironment, local: int, nodes: int) -> None:
        self.ranks = local * nodes
        self.children: dict[int, subprocess.Popen[bytes]] = {}
        self._local = local
        self._starts = isinstance(environment, LightningEnvironment) and "LOCAL_RANK" not in os.environ
        if isinstance(environment, LightningEnvironment):
            node = env_int("NODE_RANK", env_int("GROUP_RANK", 0))
            self._check_described(nodes, node)
            self.rank = node * local + env_int("LOCAL_RANK", 0)
            self._host, self._port = os.environ.get("MASTER_ADDR", "127.0.0.1"), env_int("MASTER_PORT", 0)
        else:
            self.rank = environment.global_rank()
            self._host, self._port = environment.main_address, environment.main_port
        if self.rank >= self.ranks:
            raise InputError(
                f"The environment says that this is rank {self.rank}, but there are {self.ranks} ranks, counted from 0."
            )
        try:
            socket.getaddrinfo(self._host, self._port)
        except (OSError, UnicodeError) as error:
            raise InputError(
                f"MASTER_ADDR is {self._host!r}, which is not the address of a machine ({error}); give the address of "
                "the machine with rank 0."
            ) from error

    def _check_described(self, nodes: int, node: int) -> None:
        """Checks the environment variables that are needed without a launcher known to Fabric."""
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if "LOCAL_RANK" in os.environ and missing:
            raise InputError(
                f"LOCAL_RANK is {os.environ['LOCAL_RANK']!r} in the environment, as if a launcher had started this "
                f"process, but then {' and '.join(missing)} must be set too; unset LOCAL_RANK, or start with torchrun."
            )
        if nodes > 1 and (missing or "NODE_RANK" not in os.environ):
            raise InputError(
                f"num_nodes = {nodes} needs MASTER_ADDR, MASTER_PORT and NODE_RANK in the environment of each machine, "
                "as torchrun, `fabric run` and SLURM set them; use one of these."
            )
        if node >= nodes:
            raise InputError(f"NODE_RANK must be below num_nodes = {nodes}, as it counts from 0, got {node}")

    def hold(self) -> dist.Store:
        """Starts the ranks of this machine if no launcher has, and waits until all ranks have connected.

        Returns:
            A store that all ranks share.

        Raises:
            InputError: The port is in use, or a rank did not connect within `MEETING_SECONDS`.
            LostRank: A rank that this process started has ended.
        """
        until = time.monotonic() + MEETING_SECONDS
        waiting = threading.Timer(SILENT_SECONDS, self._say_waiting)
        waiting.daemon = True
        waiting.start()
        try:
            store = self._store()
            if self._starts:
                self._start(store)
            name = f"litspec/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
            ours = dist.PrefixStore(name, store)
            ours.add(f"here/{self.rank}", 1)
            while missing := [rank for rank in range(self.ranks) if not ours.add(f"here/{rank}", 0)]:
                if ended := [
                    rank for rank in missing if rank in self.children and self.children[rank].poll() is not None
                ]:
                    code = self.children[ended[0]].returncode
                    raise LostRank(
                        f"Rank {ended[0]} of {self.ranks} ended with exit code {code} before all ranks had connected."
                    )
                if time.monotonic() > until:
                    raise InputError(f"{self._waited()}: {self._named(missing)} of {self.ranks} did not connect.")
                time.sleep(POLL_SECONDS)
            store.set_timeout(timedelta(seconds=LOST_SECONDS))
            return ours
        except dist.DistError as error:
            raise InputError(f"{self._waited()}: {' '.join(str(error).split())[:200]}.") from error
        except RuntimeError as error:
            if isinstance(error, LostRank):
                raise
            raise InputError(f"{self._waited()}: {' '.join(str(error).split())[:200]}.") from error
        finally:
            waiting.cancel()

    def _store(self) -> dist.TCPStore:
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun keeps the store itself
        host = self.rank == 0 and not agent
        if not host and not self._port:
            raise InputError("MASTER_PORT is not set in the environment; give the port of rank 0.")
        if not host:
            self._reach()
        # The process group finds the same store again by its port, which multi_tenant allows.
        options: dict[str, Any] = dict(
            timeout=timedelta(seconds=MEETING_SECONDS), wait_for_workers=False, multi_tenant=True
        )
        try:
            return dist.TCPStore(self._host, self._port, None, host, **options)
        except RuntimeError as error:
            if host:
                raise InputError(
                    f"Rank 0 cannot open port {self._port} for the other ranks ({' '.join(str(error).split())[:160]}); "
                    "unset MASTER_PORT, or give a free one."
                ) from error
            raise

    def _reach(self) -> None:
        """Waits until rank 0 listens at its port. The store itself would retry for longer and print warnings."""
        until = time.monotonic() + MEETING_SECONDS
        while True:
            try:
                socket.create_connection((self._host, self._port), max(0.1, until - time.monotonic())).close()
                return
            except OSError as error:
                if time.monotonic() > until:
                    raise InputError(f"{self._waited()}: no process answers there ({error}).") from error
            time.sleep(4 * POLL_SECONDS)

    def _start(self, store: dist.TCPStore) -> None:
        """Runs this command once more for each other rank of this machine."""
        import __main__

        if __main__.__spec__ is None:
            command = [sys.executable, os.path.abspath(sys.argv[0]), *sys.argv[1:]]
        else:
            command = [sys.executable, "-m", __main__.__spec__.name.removesuffix(".__main__"), *sys.argv[1:]]
        os.environ |= {
            "MASTER_ADDR": self._host,
            "MASTER_PORT": str(store.port),
            "NODE_RANK": os.environ.get("NODE_RANK", "0"),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_RANK": "0",
        }
        self._port = store.port
        mine, theirs = os.pipe()[::-1]
        atexit.register(self._end, mine)
        for local in range(1, self._local):
            env = os.environ | {"LOCAL_RANK": str(local), lifeline.NAME: lifeline.describe(theirs)}
            self.children[self.rank + local] = subprocess.Popen(command, env=env, pass_fds=[theirs])
        os.close(theirs)

    def _end(self, descriptor: int) -> None:
        """Waits for the processes that this one has started, and kills those that do not end in time."""
        until = time.monotonic() + LEAVING_SECONDS
        for child in self.children.values():
            try:
                child.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        os.close(descriptor)

    def _named(self, ranks: list[int]) -> str:
        return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"

    def _place(self) -> str:
        return f"{self._host}:{self._port}"

    def _waited(self) -> str:
        return f"Rank {self.rank} waited up to {MEETING_SECONDS:.0f} s at {self._place()} for the other ranks"

    def _say_waiting(self) -> None:
        text = (
            f"Rank {self.rank} is waiting for all {self.ranks} ranks at {self._place()}, for up to "
            f"{MEETING_SECONDS:.0f} s."
        )
        print(printable(text), file=sys.stderr, flush=True)
