"""Which interface leads to the first of several machines, and what is said where none does."""

import socket

import pytest

from penstock.core.errors import TrainError
from penstock.train.parallel import network_interfaces
from penstock.train.parallel.network_interfaces import interface_towards


def own(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """As if this machine were reached by this address."""
    monkeypatch.setattr(network_interfaces, "_own_address", lambda towards, port: address)


def test_the_interface_is_the_one_with_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = {"lo": ["127.0.0.1", "::1"], "eth0": ["192.0.2.2", "fd00::2"], "eth1": ["10.0.0.2"], "none": []}
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(theirs, 1)))
    monkeypatch.setattr(network_interfaces, "_addresses", theirs.__getitem__)
    for address, name in (("10.0.0.2", "eth1"), ("fd00::2", "eth0")):
        own(monkeypatch, address)
        assert interface_towards("first", 29500) == name
    own(monkeypatch, "10.0.0.3")
    with pytest.raises(
        TrainError, match=r"10\.0\.0\.3, which is the first of no interface; name the interface in GLOO"
    ):
        interface_towards("first", 29500)


def test_the_loopback_has_the_addresses_that_everybody_knows() -> None:
    assert "127.0.0.1" in network_interfaces._addresses("lo")  # pyright: ignore[reportPrivateUsage]
    assert network_interfaces._addresses("no-such-thing") == []  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "localhost"])
def test_an_address_that_is_this_machine_alone_is_refused(address: str) -> None:
    with pytest.raises(TrainError, match=rf"address is {address}, which here is this machine alone \((127\.|::1)"):
        interface_towards(address, 29500)


def test_no_way_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", none)
    sentence = r"no way from this machine to frist, .* \(Name or service not known\); give an address by which all"
    with pytest.raises(TrainError, match=sentence):
        interface_towards("frist", 29500)
