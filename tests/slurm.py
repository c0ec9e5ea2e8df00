"""A Slurm cluster of one node on this machine, for tests: its own munge, its own ports, everything in one folder.

Debian's packages slurmctld, slurmd, slurm-client and munge, installed by whoever runs the test.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MinJobAge=3600
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=low Nodes={host} Default=YES MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime=0
PartitionName=grace Nodes={host} MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime=300
PartitionName=high Nodes={host} MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
"""


def is_installed() -> bool:
    return all(shutil.which(name, path=search_path()) for name in PROGRAMS)


def search_path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin"


class Cluster:
    """Runs Slurm's commands. environment: of jobs, too."""

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        self.environment, self.folder = environment, folder

    def call(self, *words: str | Path) -> str:
        done = subprocess.run(
            list(map(str, words)), env=self.environment, cwd=self.folder, text=True, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def states(self, job: str) -> list[str]:
        """The states of a job, or of each task of an array."""
        shown = self.call("scontrol", "--oneliner", "show", "job", job)
        return [word.removeprefix("JobState=") for word in shown.split() if word.startswith("JobState=")]

    def wait(self, jobs: Sequence[str], states: Sequence[str] = ENDED) -> list[str]:
        """Wait until every task of these jobs is in one of these states; they are returned."""
        while True:
            found = [state for job in jobs for state in self.states(job)]
            if all(state in states for state in found):
                return found
            time.sleep(0.5)

    def wait_for_line(self, text: str) -> None:
        """Wait until a job has printed this."""
        while text not in self.logs():
            time.sleep(0.5)

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("slurm-*.log")))


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def run_cluster(folder: Path, path: str) -> Iterator[Cluster]:
    """A cluster with everything in `folder`; jobs find programs on `path`."""
    import pwd

    host, user = socket.gethostname().partition(".")[0], pwd.getpwuid(os.getuid()).pw_name
    for name in ("munge", "state", "spool", "jobs"):
        (folder / name).mkdir(parents=True)
    (folder / "munge").chmod(0o755)
    (folder / "munge" / "key").write_bytes(os.urandom(1024))
    (folder / "munge" / "key").chmod(0o400)
    ports = {"controller_port": _free_port(), "node_port": _free_port()}
    configuration = folder / "slurm.conf"
    configuration.write_text(CONFIGURATION.format(folder=folder, host=host, user=user, **ports))
    environment = {**os.environ, "SLURM_CONF": str(configuration), "PATH": f"{path}:{search_path()}"}
    places = [f"--{name}={folder}/munge/{name}" for name in ("socket", "pid-file", "log-file", "seed-file")]
    commands = (
        ["munged", "--foreground", "--force", f"--key-file={folder}/munge/key", *places],
        ["slurmctld", "-D", "-f", configuration],
        ["slurmd", "-D", "-f", configuration],
    )
    started = []
    with open(folder / "daemons.log", "wb") as log:
        try:
            for command in commands:
                started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
                if command[0] == "munged":
                    while not (folder / "munge" / "socket").exists():
                        assert started[-1].poll() is None, (folder / "daemons.log").read_text()
                        time.sleep(0.1)
            cluster = Cluster(environment, folder / "jobs")
            while (
                "idle"
                not in subprocess.run(
                    ["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True, check=False
                ).stdout
            ):
                assert all(process.poll() is None for process in started), (folder / "daemons.log").read_text()
                time.sleep(0.3)
            yield cluster
        finally:
            for process in reversed(started):
                process.send_signal(signal.SIGTERM)
            for process in reversed(started):
                process.wait()
