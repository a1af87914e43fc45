"""Network namespaces that stand for machines: each has an address of its own, and its loopback reaches itself alone.

    this machine, .1 -- bridge -- .2, namespace 0
                              \\-- .3, namespace 1

Only the network is divided: the machines share the file system, the processes and the clock.
"""

import os
import secrets
import shutil
import subprocess
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from benchmarks.acceptance.fleet.installed import NotInstalled
from penstock.core.errors import BenchError

COUNT = 2
# A network for measurements alone: nothing else has these addresses.
_NET = "198.19"


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A namespace.

    Args:
        address: Its address.
        prefix: What starts a command in it.
    """

    address: str
    prefix: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """The machines of a network.

    Args:
        here: This machine, outside of the namespaces.
        nodes: The namespaces.
    """

    here: Machine
    nodes: tuple[Machine, ...]


@contextmanager
def namespaces() -> Generator[Network]:
    """Make namespaces on a bridge, until the context ends. It needs root, and a kernel that lets it.

    Raises:
        NotInstalled: They cannot be made here; with the error.
        BenchError: They cannot be removed.
    """
    if shutil.which("ip") is None:
        raise NotInstalled("network namespaces need the program 'ip' of iproute2; 'make fleet' installs it.")
    if os.geteuid() != 0:
        raise NotInstalled("network namespaces are made by root; become root.")
    name, part = f"ps{secrets.token_hex(3)}", secrets.randbelow(256)
    with ExitStack() as made:
        _ip("link", "add", name, "type", "bridge")
        made.callback(_remove, "link", "delete", name)
        _ip("address", "add", f"{_NET}.{part}.1/24", "dev", name)
        _ip("link", "set", name, "up")
        nodes = tuple(_namespace(made, name, number, f"{_NET}.{part}.{number + 2}") for number in range(COUNT))
        yield Network(here=Machine(address=f"{_NET}.{part}.1"), nodes=nodes)


def _namespace(made: ExitStack, bridge: str, number: int, address: str) -> Machine:
    name, link = f"{bridge}-{number}", f"{bridge}v{number}"
    _ip("netns", "add", name)
    # Its end of the link goes with it, and so the other end.
    made.callback(_remove, "netns", "delete", name)
    _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
    _ip("link", "set", link, "master", bridge, "up")
    _ip("-netns", name, "address", "add", f"{address}/24", "dev", "eth0")
    for each in ("lo", "eth0"):
        _ip("-netns", name, "link", "set", each, "up")
    return Machine(address=address, prefix=("ip", "netns", "exec", name))


def _ip(*arguments: str) -> None:
    if why := _failure_of(arguments):
        raise NotInstalled(f"network namespaces cannot be made here ({why}).")


def _remove(*arguments: str) -> None:
    # They were made, so that a test must not be skipped for it.
    if why := _failure_of(arguments):
        raise BenchError(f"a network namespace or its bridge is left here ({why}); remove it.")


def _failure_of(arguments: Sequence[str]) -> str:
    said = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    return f"'ip {' '.join(arguments)}': {' '.join(said.stderr.split())}" if said.returncode else ""
