"""Quotas of live streams: what is counted together, over how many front-ends, and when a place is free again."""

import random
from collections import Counter
from pathlib import Path

import pytest

from penstock.core.errors import QuotaExceeded, ServeError
from penstock.serve.settings import AccessSettings, ModelSettings, Settings
from penstock.serve.streams.quotas import GRPC_STREAMS, UNKNOWN, StreamClient, StreamQuotas, address_block
from penstock.serve.table.client_counts import ClientCounts, write_counts

MAP = StreamClient("map", "192.0.2.1")
HOME = StreamClient("home", "192.0.2.1")


def refused(quotas: StreamQuotas, client: StreamClient) -> bool:
    try:
        quotas.reject_excess(client)
    except QuotaExceeded:
        return True
    return False


def test_a_key_has_its_own_streams_whatever_its_address() -> None:
    quotas = StreamQuotas(per_key=2, counts=ClientCounts.private())
    quotas.admit(MAP)
    quotas.admit(StreamClient("map", "192.0.2.9"))
    sentence = "The key of 'map' has 2 live streams open, and --max-streams-per-key allows 2; end one of them first."
    with pytest.raises(QuotaExceeded) as error:
        quotas.admit(MAP)
    assert str(error.value) == sentence
    quotas.admit(HOME)
    quotas.leave(MAP)
    quotas.admit(MAP)
    assert refused(quotas, MAP)
    assert not refused(quotas, HOME)


def test_an_address_has_its_own_streams_whatever_its_key() -> None:
    quotas = StreamQuotas(per_address=2, counts=ClientCounts.private())
    quotas.admit(MAP)
    quotas.admit(HOME)
    with pytest.raises(
        QuotaExceeded, match=r"^Address 192\.0\.2\.1 has 2 live streams open, and --max-streams-per-add"
    ):
        quotas.admit(MAP)
    assert not refused(quotas, StreamClient("map", "192.0.2.2"))


def test_both_limits_hold_and_a_refused_stream_counts_for_neither() -> None:
    quotas = StreamQuotas(per_key=3, per_address=1, counts=ClientCounts.private())
    quotas.admit(MAP)
    for _ in range(5):
        with pytest.raises(QuotaExceeded, match="per-address"):
            quotas.admit(HOME)
    quotas.leave(MAP)
    quotas.admit(HOME)
    quotas.admit(StreamClient("home", "192.0.2.2"))
    quotas.admit(StreamClient("home", "192.0.2.3"))
    with pytest.raises(QuotaExceeded, match="per-key"):
        quotas.admit(StreamClient("home", "192.0.2.4"))


def test_a_stream_that_ends_in_the_place_of_another_frees_what_they_share() -> None:
    quotas = StreamQuotas(per_key=1, per_address=1, counts=ClientCounts.private())
    quotas.admit(MAP)
    quotas.reject_excess(MAP, replaced=MAP)
    quotas.admit(StreamClient("home", "192.0.2.2"))
    with pytest.raises(QuotaExceeded, match="'home'"):
        quotas.reject_excess(StreamClient("home", "192.0.2.1"), replaced=MAP)


def test_streams_of_grpc_are_counted_apart() -> None:
    quotas = StreamQuotas(per_address=1, counts=ClientCounts.private())
    quotas.admit(MAP)
    quotas.admit(MAP, GRPC_STREAMS)
    with pytest.raises(QuotaExceeded, match="1 gRPC streams"):
        quotas.admit(MAP, GRPC_STREAMS)
    quotas.leave(MAP, GRPC_STREAMS)
    quotas.admit(MAP, GRPC_STREAMS)


def test_without_limits_nobody_is_counted() -> None:
    quotas = StreamQuotas()
    for _ in range(3):
        quotas.admit(MAP)
    limited = StreamQuotas(1, 1, ClientCounts.private())
    for _ in range(3):
        limited.admit(UNKNOWN)


@pytest.mark.parametrize(
    ("address", "counted"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::1"),
    ],
)
def test_an_ipv6_network_is_one_client(address: str, counted: str) -> None:
    assert address_block(address) == counted


def test_the_counts_of_all_front_ends_are_one(tmp_path: Path) -> None:
    file = tmp_path / "counts"
    write_counts(file, 3)
    fronts = [StreamQuotas(per_key=3, counts=ClientCounts.attached(3, index, file)) for index in range(3)]
    for quotas in fronts:
        quotas.admit(MAP)
    assert all(refused(quotas, MAP) and not refused(quotas, HOME) for quotas in fronts)
    # A front-end dies with its streams; its replacement begins at 0, and the others go on.
    fronts[1] = StreamQuotas(per_key=3, counts=ClientCounts.attached(3, 1, file))
    fronts[1].admit(MAP)
    assert all(refused(quotas, MAP) for quotas in fronts)


def test_a_count_is_never_too_small_and_hardly_ever_too_large() -> None:
    counts, draw = ClientCounts.private(), random.Random(5)
    true: Counter[str] = Counter()
    for _ in range(20_000):
        client = f"Address 10.0.{draw.randrange(4)}.{draw.randrange(256)}"
        if true[client] and draw.random() < 0.4:
            true[client] -= 1
            counts.add(client, -1)
        else:
            true[client] += 1
            counts.add(client, 1)
    assert len(true) > 1_000
    excess = [counts.of(client) - count for client, count in true.items()]
    assert min(excess) == 0
    # By chance of the secret key 0.014 of them are expected to be.
    assert sum(more > 0 for more in excess) < 8


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_streams_per_address": 0}, "--max-streams-per-address is 0; it must be at least 1."),
        ({"max_streams_per_key": -1, "api_keys": Path("keys")}, "--max-streams-per-key is -1; it must be at least 1."),
        ({"max_streams_per_key": 4}, "--max-streams-per-key counts by API key; give --api-keys, or take --max-stre"),
    ],
)
def test_a_limit_that_cannot_hold_is_refused(options: dict[str, int], sentence: str) -> None:
    with pytest.raises(ServeError) as error:
        AccessSettings(**options)  # pyright: ignore[reportArgumentType]
    assert str(error.value).startswith(sentence)


def test_quotas_are_off_by_default() -> None:
    models = ModelSettings(bundles=(Path("bundle"),))
    assert not Settings(models=models).has_stream_quotas
    limited = Settings(models=models, access=AccessSettings(max_streams_per_address=4))
    assert limited.has_stream_quotas
    assert Settings.from_json(limited.to_json()) == limited
