"""Real clusters on this machine: Slurm with two slurmd, Spark with a Master and two Workers, Ray with two nodes.

`make fleet` installs them. Each has room for one process a node, so that two processes are on two nodes.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final

from benchmarks.acceptance.fleet.installed import NotInstalled, engines_python, program
from benchmarks.acceptance.fleet.namespaces import Machine, Network
from penstock.bench.server_process import ended_by_sigterm
from penstock.core.errors import BenchError
from penstock.core.machine.process_stat import read_stat
from penstock.train.parallel.launch import free_port

READY_S = 90.0
POLL_S = 0.2
NODES = 2
# A network that is for measurements alone: nothing is sent there.
_ELSEWHERE = ("198.18.0.1", 9)
_SLURM_TASK = re.compile(r"-m penstock\.cluster\.slurm_(rank|units)\b")
_RAY_TASKS = ("ray::Rank", "ray::penstock-units")
_STARTED_BY = re.compile(r"penstock\x00train\x00")


class Cluster(ABC):
    """A cluster.

    Args:
        folder: A folder of its own.

    Raises:
        NotInstalled: It is not.

    Attributes:
        on: What `--on` names it by.
        python: The Python that has its packages.
        environment: Variables of commands that use it.
    """

    on: str
    python: Path | str
    environment: Mapping[str, str]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._nodes: list[subprocess.Popen[bytes]] = []

    @abstractmethod
    def start(self) -> None:
        """Start it; `stop` ends what was started, also after an error.

        Raises:
            BenchError: It does not start.
        """

    @abstractmethod
    def start_node(self, index: int) -> "subprocess.Popen[bytes]":
        """Start one of the nodes."""

    @abstractmethod
    def executors(self) -> list[int]:
        """List the engine's processes that hold a rank each, or score units."""

    def is_on(self, pid: int, node: int) -> bool:
        """Return True if a process runs on a node."""
        return pid in descendants(self._nodes[node].pid)

    def start_nodes(self) -> None:
        """Start all nodes."""
        for index in range(NODES):
            self._nodes.append(self.start_node(index))

    def kill_node(self, index: int) -> None:
        """Kill a node and all that it has started, and start it again, as a machine that lost its power."""
        node = self._nodes[index]
        # A node adopts nothing: what it started may have another parent by now.
        for pid in [*descendants(node.pid), node.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node.wait()
        self._nodes[index] = self.start_node(index)

    def stop(self) -> None:
        """End all nodes."""
        for node in self._nodes:
            for pid in [*descendants(node.pid), node.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            node.wait()


@final
class Spark(Cluster):
    """A standalone cluster: a Master and two Workers of one core.

    Args:
        folder: A folder of its own.
        network: Each Worker is on a machine of it, the Master on the first, and the driver outside. By default all
            are on this machine.
    """

    def __init__(self, folder: Path, network: Network | None = None) -> None:
        super().__init__(folder)
        if shutil.which("java") is None:
            raise NotInstalled("Spark needs Java, and there is no 'java' here; 'make fleet' installs it.")
        self.python, here = engines_python("pyspark"), Machine(address=own_address())
        self._network = network or Network(here=here, nodes=(here,) * NODES)
        port = free_port(self._network.here.address)
        self.on = f"spark://{self._network.nodes[0].address}:{port}"
        self.environment = {"SPARK_LOCAL_IP": self._network.here.address}
        home = subprocess.run(
            [self.python, "-c", "import pyspark; print(pyspark.__path__[0])"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        self._home, self._port = Path(home), port
        self._master: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """See `Cluster`."""
        first = self._network.nodes[0]
        options = ["--host", first.address, "--port", self._port, "--webui-port", 0]
        self._master = self._class("master", first, "master.Master", *options)
        self._log("master", "I have been elected leader")
        self.start_nodes()
        for index in range(NODES):
            self._log(f"worker-{index}", "Successfully registered with master")

    def start_node(self, index: int) -> "subprocess.Popen[bytes]":
        """Start a Worker."""
        place = self.folder / f"work-{index}"
        machine = self._network.nodes[index]
        options = ["--host", machine.address, "--cores", 1, "--memory", "1g", "--webui-port", 0, "--work-dir", place]
        return self._class(f"worker-{index}", machine, "worker.Worker", *options, self.on)

    def executors(self) -> list[int]:
        """List the JVMs of executors."""
        found = [pid for node in self._nodes for pid in descendants(node.pid)]
        return [pid for pid in found if "CoarseGrainedExecutorBackend" in command_line(pid)]

    def stop(self) -> None:
        """End the Workers and the Master."""
        super().stop()
        if self._master is not None:
            self._master.kill()
            self._master.wait()

    def _class(self, name: str, machine: Machine, of: str, *options: object) -> "subprocess.Popen[bytes]":
        command = [*machine.prefix, self._home / "bin" / "spark-class", f"org.apache.spark.deploy.{of}", *options]
        environment = {**os.environ, "SPARK_LOCAL_IP": machine.address, "SPARK_HOME": str(self._home)}
        return started(command, self.folder / f"{name}.log", environment)

    def _log(self, name: str, words: str) -> None:
        log = self.folder / f"{name}.log"
        eventually(lambda: words in log.read_text(), f"Spark's {name}")


SLURM_CONF = """\
ClusterName=penstock
SlurmctldHost={host}({address})
SlurmctldPort={ctld}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,batch_sched_delay=1
SlurmdParameters=config_overrides
SlurmdTimeout=15
ReturnToService=2
KillWait=5
MpiDefault=none
NodeName=n0 NodeHostname={host} NodeAddr={address} Port={n0} CPUs=1
NodeName=n1 NodeHostname={host} NodeAddr={address} Port={n1} CPUs=1
PartitionName=all Nodes=n0,n1 Default=YES State=UP
"""


@final
class Slurm(Cluster):
    """A controller and two slurmd of one processor, with an authentication daemon of their own.

    Args:
        folder: A folder of its own.
        unseen: A node, and a folder that is there for all others; the node's machine is `without-{node}` then.
    """

    on = "slurm"

    def __init__(self, folder: Path, unseen: tuple[int, Path] | None = None) -> None:
        super().__init__(folder)
        self._unseen = unseen
        if unseen is not None and subprocess.run(["unshare", "--mount", "--uts", "true"], check=False).returncode:
            raise NotInstalled("a node that does not see a folder needs namespaces, which cannot be made here.")
        needed = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
        if missing := [name for name in needed if program(name) is None]:
            raise NotInstalled(f"Slurm is not installed: there is no {missing[0]!r} here; 'make fleet' installs it.")
        if os.geteuid() != 0:
            raise NotInstalled("Slurm's daemons run as root here; become root.")
        self.python, address = sys.executable, own_address()
        if address.startswith("127."):
            raise NotInstalled("two nodes need an address of this machine other than that of its loopback.")
        conf = folder / "slurm.conf"
        ports = {name: free_port(address) for name in ("ctld", "n0", "n1")}
        conf.write_text(SLURM_CONF.format(host=socket.gethostname(), address=address, folder=folder, **ports))
        (folder / "state").mkdir()
        self.environment = {"SLURM_CONF": str(conf)}
        key = folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        files = {"key-file": key, "socket": "munge.socket", "pid-file": "munge.pid", "seed-file": "munge.seed"}
        options = [f"--{name}={folder / file}" for name, file in files.items()]
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._munge = options

    def start(self) -> None:
        """See `Cluster`."""
        self._daemons.append(self._daemon("munged", "--foreground", "--force", *self._munge))
        eventually((self.folder / "munge.socket").exists, "munged")
        self._daemons.append(self._daemon("slurmctld", "-D"))
        self.start_nodes()
        eventually(lambda: self._said("sinfo", "--noheader", "--format=%T %D") == "idle 2", "Slurm")

    def start_node(self, index: int) -> "subprocess.Popen[bytes]":
        """Start a slurmd."""
        if self._unseen is None or self._unseen[0] != index:
            return self._daemon("slurmd", "-D", "-N", f"n{index}")
        covered = f'hostname without-{index} && mount -t tmpfs none "$0" && exec "$@"'
        prefix = ["unshare", "--mount", "--uts", "sh", "-c", covered, str(self._unseen[1])]
        return self._daemon("slurmd", "-D", "-N", f"n{index}", prefix=prefix)

    def is_on(self, pid: int, node: int) -> bool:
        """See `Cluster`; steps are no children of a slurmd."""
        return f"SLURMD_NODENAME=n{node}\0" in environment_of(pid)

    def executors(self) -> list[int]:
        """List the srun tasks of ranks, and those that score units."""
        found = {pid: command_line(pid) for pid in processes()}
        return [pid for pid, line in found.items() if _SLURM_TASK.search(line) and "srun" not in line]

    def kill_node(self, index: int) -> None:
        """Kill a slurmd with its steps, which are no children of it, and start it again."""
        tasks = [pid for pid in processes() if self.is_on(pid, index)]
        steps = {parent_of(pid) for pid in tasks}
        for pid in [*(step for step in steps if command_line(step).startswith("slurmstepd")), *tasks]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        super().kill_node(index)

    def stop(self) -> None:
        """End the jobs and the daemons."""
        super().stop()
        for daemon in reversed(self._daemons):
            daemon.kill()
            daemon.wait()
        # Steps are no children of a slurmd, and outlive it.
        own = f"SLURM_CONF={self.environment['SLURM_CONF']}\0"
        for pid in processes():
            if own in environment_of(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _daemon(self, name: str, *options: str, prefix: Sequence[str] = ()) -> "subprocess.Popen[bytes]":
        log = self.folder / f"{name}{options[-1] if name == 'slurmd' else ''}.log"
        return started([*prefix, str(program(name)), *options], log, {**os.environ, **self.environment})

    def _said(self, *command: str) -> str:
        environment = {**os.environ, **self.environment}
        said = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=60)
        return " ".join(said.stdout.split())


@final
class Ray(Cluster):
    """A head and one more node, of one CPU each.

    Args:
        folder: A folder of its own.
        node_python: The Python of the nodes; by default that of the engines.
    """

    on = "ray"

    def __init__(self, folder: Path, node_python: Path | None = None) -> None:
        super().__init__(folder)
        self.python, self._address = engines_python("ray"), own_address()
        self._node_python = node_python or self.python
        # Below the ports of Ray's workers.
        self._port = next(port for port in iter(lambda: free_port(self._address), None) if port > 20_000)
        # A node asks for the token that any earlier `ray.init` has left in the home folder.
        self.environment = {"RAY_ADDRESS": f"{self._address}:{self._port}", "RAY_AUTH_MODE": "disabled"}

    def start(self) -> None:
        """See `Cluster`."""
        self.start_nodes()
        count = "import ray; ray.init(log_to_driver=False); assert ray.cluster_resources().get('CPU') == 2"
        eventually(lambda: self._runs(count), "Ray")

    def start_node(self, index: int) -> "subprocess.Popen[bytes]":
        """Start a head, or a node that joins it."""
        where = f"--address={self._address}:{self._port}" if index else f"--port={self._port}"
        options = [f"--node-ip-address={self._address}", "--num-cpus=1", "--num-gpus=0", "--disable-usage-stats"]
        # Its sockets have names of 107 bytes at most.
        own = [] if index else ["--head", "--include-dashboard=false", f"--temp-dir=/tmp/{self.folder.name}"]
        command = [self._node_python, "-m", "ray.scripts.scripts", "start", "--block", where, *own, *options]
        memory = "--object-store-memory=100000000"
        return started([*command, memory], self.folder / f"node-{index}.log", {**os.environ, **self.environment})

    def executors(self) -> list[int]:
        """List the worker processes of ranks, and those that score units."""
        found = [pid for node in self._nodes for pid in descendants(node.pid)]
        return [pid for pid in found if command_line(pid).startswith(_RAY_TASKS)]

    def stop(self) -> None:
        """End the nodes."""
        super().stop()
        shutil.rmtree(f"/tmp/{self.folder.name}", ignore_errors=True)

    def _runs(self, code: str) -> bool:
        environment = {**os.environ, **self.environment}
        return (
            subprocess.run([self.python, "-c", code], check=False, env=environment, capture_output=True).returncode == 0
        )


CLUSTERS: Mapping[str, type[Cluster]] = {"slurm": Slurm, "spark": Spark, "ray": Ray}


@contextmanager
def cluster(name: str, **options: Any) -> Generator[Cluster]:
    """Run a cluster until the block ends, also by SIGTERM: its daemons would outlive this process.

    Args:
        name: slurm, spark or ray.
        options: Further arguments of its class.

    Raises:
        NotInstalled: It is not.
        BenchError: It does not start.
    """
    with ended_by_sigterm(), TemporaryDirectory(prefix=f"penstock-{name}-") as folder:
        found = CLUSTERS[name](Path(folder), **options)
        try:
            found.start()
            yield found
        finally:
            found.stop()


def ranks_of(run: Path) -> list[int]:
    """List the training processes of a run on this machine."""
    wanted = f"{run}\0"
    lines = {pid: Path(f"/proc/{pid}/cmdline") for pid in processes()}
    found: list[int] = []
    for pid, file in lines.items():
        with suppress(OSError):
            text = file.read_text()
            if _STARTED_BY.search(text) and wanted in text and "--device=cpu\0" in text:
                found.append(pid)
    return found


def own_address() -> str:
    """Return the address by which other machines reach this one; that of the loopback where it has no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


def started(command: Sequence[object], log: Path, environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """Start a program that logs into a file."""
    with log.open("ab") as sink:
        return subprocess.Popen(
            list(map(str, command)),
            stdout=sink,
            stderr=sink,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )


def eventually(is_so: Callable[[], bool], what: str) -> None:
    """Wait until something is so.

    Raises:
        BenchError: It is not in time.
    """
    deadline_s = time.monotonic() + READY_S
    while not is_so():
        if time.monotonic() > deadline_s:
            raise BenchError(f"{what} was not ready within {READY_S:g} s.")
        time.sleep(POLL_S)


def processes() -> list[int]:
    """List all processes of this machine."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def descendants(pid: int) -> list[int]:
    """List the processes that a process has started, directly or not."""
    children: dict[int, list[int]] = {}
    for each in processes():
        children.setdefault(parent_of(each), []).append(each)
    found, todo = list[int](), [pid]
    while todo:
        more = children.get(todo.pop(), [])
        found += more
        todo += more
    return found


def command_line(pid: int) -> str:
    """Return a process's command line; empty once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def environment_of(pid: int) -> str:
    """Return the variables of a process, each with a NUL after it; empty once it has ended."""
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:
        return ""


def parent_of(pid: int) -> int:
    """Return the process that has started another one; 0 once that has ended."""
    stat = read_stat(pid)
    return 0 if stat is None else stat.parent
