"""Test hosts: network namespaces with a name, a folder and a scratch folder of their own, which don't see each other's
files. They share the machine's libraries and checkpoints, as installed on each, and a store if they can reach it."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@dataclass
class Host:
    """A network namespace, a folder and a scratch folder.

    hidden: folders that it does not see, such as the other's
    names: host name -> address, its /etc/hosts
    """

    name: str
    folder: Path
    scratch: str
    store: str  # the endpoint
    hostname: str
    hidden: list[Path] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    mounts: dict[Path, Path] = field(default_factory=dict)  # where -> a folder of this machine
    environment: dict[str, str] = field(default_factory=dict)

    def start(self, command: Sequence[str | Path], log: Path | None = None) -> subprocess.Popen:
        """A process there, the leader of a process group; what it says goes to `log`, else to pipes."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        environment |= {"AWS_ENDPOINT_URL": self.store, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}
        environment |= {"AWS_DEFAULT_REGION": "us-east-1", "TMPDIR": self.scratch, "NO_PROXY": "*"}
        environment |= {"HOME": str(self.folder), "OMP_NUM_THREADS": "1", **self.environment}
        steps = [f"mount --bind {folder} {place}" for place, folder in self.mounts.items()]
        steps += [f"mount -t tmpfs tmpfs {path}" for path in self.hidden]
        hosts, switch = self.folder / "hosts", self.folder / "nsswitch.conf"
        rows = {"localhost": "127.0.0.1", **self.names}
        hosts.write_text("".join(f"{address} {name}\n" for name, address in rows.items()))
        switch.write_text("hosts: files\n")  # nobody answers for other names
        steps += [f"hostname {self.hostname}", f"mount --bind {hosts} /etc/hosts"]
        steps += [f"mount --bind {switch} /etc/nsswitch.conf"]
        inside = ["sh", "-ec", "; ".join([*steps, 'exec "$@"']), "sh", *map(str, command)]
        out, errors = (log.open("w"), subprocess.STDOUT) if log else (subprocess.PIPE, subprocess.PIPE)
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, "unshare", "-m", "-u", *inside],
            cwd=ROOT,
            env=environment,
            stdout=out,
            stderr=errors,
            text=True,
            start_new_session=True,
        )

    def run(self, program: str, *arguments: str) -> dict:
        """A command of latentpress; its report."""
        config = str(self.folder / "pipeline.yaml")
        command = [sys.executable, "-m", "stages.cli", program, "--config", config, "--json", *arguments]
        process = self.start(command)
        said, errors = process.communicate()
        assert process.returncode == 0, said + errors
        return json.loads(said)

    def processes(self) -> list[int]:
        found = subprocess.run(["ip", "netns", "pids", self.name], check=True, capture_output=True, text=True)
        return [int(number) for number in found.stdout.split()]

    def lose(self) -> None:
        """As if its power failed: its cable is cut, so that nobody is told, and all of its processes are killed."""
        with suppress(subprocess.CalledProcessError):
            ip("-n", self.name, "link", "set", f"{self.name}b", "down")
        for number in self.processes():
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)


@contextmanager
def network(name: str, address: str, bridge: str) -> Iterator[None]:
    """A namespace with one cable to a bridge."""
    try:
        ip("netns", "add", name)
        ip("link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b", "netns", name)
        ip("link", "set", f"{name}a", "master", bridge, "up")
        for arguments in (("addr", "add", f"{address}/24", "dev", f"{name}b"), ("link", "set", f"{name}b", "up")):
            ip("-n", name, *arguments)
        ip("-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for arguments in (("link", "del", f"{name}a"), ("netns", "del", name)):
            with suppress(subprocess.CalledProcessError):
                ip(*arguments)


@contextmanager
def switch(name: str, address: str) -> Iterator[None]:
    """A bridge that has an address here."""
    try:
        ip("link", "add", name, "type", "bridge")
        ip("addr", "add", f"{address}/24", "dev", name)
        ip("link", "set", name, "up")
        yield
    finally:
        with suppress(subprocess.CalledProcessError):
            ip("link", "del", name)


@contextmanager
def hosts_of(folders: Mapping[str, Path]) -> Iterator[tuple[list[Host], str]]:
    """A host for each name and folder, in one network, in which they resolve each other's names; and the address of
    this machine there."""
    made: list[Host] = []
    prefix, here = f"lp{os.getpid() % 100_000}", "10.213.0.1"
    with ExitStack() as stack:
        try:
            stack.enter_context(switch(f"{prefix}s", here))
            for number, (hostname, folder) in enumerate(folders.items(), 1):
                address = f"10.213.0.{number + 1}"
                stack.enter_context(network(f"{prefix}{number}", address, f"{prefix}s"))
                scratch = tempfile.TemporaryDirectory(prefix="lp", dir="/tmp")  # for sockets: a short path
                host = Host(f"{prefix}{number}", folder, stack.enter_context(scratch), "", hostname)
                made.append(host)
                for other in made:
                    other.names[hostname] = address
                    host.names |= other.names
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces: {error}")
        for host in made:
            host.hidden += [other.folder for other in made if other is not host]
        try:
            yield made, here
        finally:
            for host in made:
                for process in host.processes():
                    with suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
