"""Who may ask: the file of API keys, what each key may do, and what a browser of another site is told."""

import asyncio
import hmac
import io
import logging
from pathlib import Path
from typing import Any, final

import orjson
import pytest

from penstock.core.errors import Forbidden, InvalidInput, ServeError, Unauthorized
from penstock.serve.exchange.access import Access, Keys
from penstock.serve.exchange.request import Head, Request
from penstock.serve.exchange.response import Response, internal_error
from penstock.serve.http import routes
from penstock.serve.observe.logs import JsonFormatter
from penstock.serve.registry.model_registry import ModelRegistry
from tests.support.routes import routes_of

ANNA, BEN = "anna-0123456789abcdef", "ben-0123456789abcdef"
SITE = "https://site.example"


def written(folder: Path, text: str) -> Path:
    file = folder / "keys"
    file.write_text(text)
    return file


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys.read(written(tmp_path, f"# who may ask\n\nanna {ANNA} admin\n  ben\t{BEN}  \n"))


@final
class _Unspeakable(InvalidInput):
    """An error of which no response can be made."""

    def __str__(self) -> str:
        raise TypeError("no text")


@final
class Repository:
    """One that fails the model `broken` and takes all others."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    async def change(self, name: str, unload: bool) -> None:
        assert not unload, name
        self.loaded.append(name)


def answered(access: Access, head: Head, *, loading: bool = False) -> Response:
    """What the routes of a server without models answer at once."""
    answers: list[Response] = []
    routes_of(ModelRegistry(Repository().change, loading=loading), access).handle(Request(head, b""), answers.append)
    (answer,) = answers
    return answer


def get(path: str = "/v1/stats", method: str = "GET", **headers: str) -> Head:
    return Head(method, path, {name.replace("_", "-"): value for name, value in headers.items()})


def headers_of(response: Response) -> dict[str, str]:
    assert len({name for name, _ in response.headers}) == len(response.headers), response.headers
    return dict(response.headers)


def test_the_file_says_who_has_which_key_and_keeps_none_in_the_clear(keys: Keys) -> None:
    assert [(key.name, key.admin) for key in keys.keys] == [("anna", True), ("ben", False)]
    assert ANNA not in repr(keys)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has no keys"),
        ("# anna\n", "has no keys"),
        ("anna\n", "line 1 of .* is not 'NAME KEY'"),
        (f"anna {ANNA} root\n", "line 1 of .* is not 'NAME KEY'"),
        (f"anna {ANNA}\n\nben {BEN} admin now\n", "line 3 of "),
        ("anna 0123456789abcde\n", "key of 'anna' in .* has 15 characters, fewer than 16"),
        (f"anna {ANNA}\nben {ANNA} admin\n", "'anna' and 'ben' in .* have the same key"),
        ("anna gruß-0123456789abcdef\n", "key of 'anna' in .* has characters that a header cannot carry"),
    ],
)
def test_another_file_is_refused_with_the_line_and_the_fix(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(ServeError, match=why) as refusal:
        Keys.read(written(tmp_path, text))
    # What is printed at start ends up in logs.
    assert ANNA not in str(refusal.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServeError, match="missing cannot be read"):
        Keys.read(tmp_path / "missing")
    (tmp_path / "keys").write_bytes(b"anna \xff\xfe")
    with pytest.raises(ServeError, match="keys cannot be read"):
        Keys.read(tmp_path / "keys")


@pytest.mark.parametrize(
    ("headers", "client"),
    [
        ({"authorization": f"Token {ANNA}"}, "anna"),
        ({"authorization": f"token {BEN}"}, "ben"),
        ({"authorization": f"Token {ANNA}", "x_api_key": BEN}, "anna"),
        ({"authorization": f"Basic {ANNA}", "x_api_key": BEN}, "ben"),
        ({"sec_websocket_protocol": f"realtime, openai-insecure-api-key.{ANNA}"}, "anna"),
        ({"sec_websocket_protocol": f"token, {BEN}"}, "ben"),
        ({"sec_websocket_protocol": f"token, {BEN}, penstock"}, None),
        ({"sec_websocket_protocol": f"penstock, {BEN}"}, None),
        ({"authorization": f"Basic {ANNA}"}, None),
    ],
)
def test_clients_of_speech_services_send_their_keys_as_they_do(
    keys: Keys, headers: dict[str, str], client: str | None
) -> None:
    assert Access(keys).client(get("/v1/listen", **headers)) == client


def test_one_client_may_have_two_keys_while_they_change(tmp_path: Path) -> None:
    keys = Keys.read(written(tmp_path, f"anna {ANNA}\nanna {BEN}\n"))
    keys.check(f"Bearer {ANNA}", admin=False)
    keys.check(f"Bearer {BEN}", admin=False)


@pytest.mark.parametrize("authorization", [f"Bearer {BEN}", f"bearer {BEN}", f"BEARER   {BEN} "])
def test_a_known_key_passes(keys: Keys, authorization: str) -> None:
    keys.check(authorization, admin=False)


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", BEN, f"Basic {BEN}", f"Bearer {BEN[:-1]}", f"Bearer {BEN}x", "Bearer \xff\xfe"],
)
def test_any_other_is_refused_without_saying_what_was_near(keys: Keys, authorization: str | None) -> None:
    with pytest.raises(Unauthorized) as refusal:
        keys.check(authorization, admin=False)
    assert str(refusal.value) == "This server requires an API key; send 'Authorization: Bearer KEY'."


def test_only_an_admin_may_do_what_only_admins_may(keys: Keys) -> None:
    keys.check(f"Bearer {ANNA}", admin=True)
    with pytest.raises(Forbidden, match="'ben' may not load"):
        keys.check(f"Bearer {BEN}", admin=True)


def test_every_key_is_compared_in_constant_time_wherever_the_right_one_stands(
    keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[int, int]] = []
    compare = hmac.compare_digest

    def watched(one: Any, other: Any) -> bool:
        compared.append((len(one), len(other)))
        return compare(one, other)

    monkeypatch.setattr("penstock.serve.exchange.access.hmac.compare_digest", watched)
    for key in (ANNA, BEN):
        compared.clear()
        keys.check(f"Bearer {key}", admin=False)
        # Digests, so that not even a key's length shows.
        assert compared == [(32, 32)] * 2


@pytest.mark.parametrize("path", ["/", "/page/page.js", "/v2/health/live", "/v2/health/ready"])
def test_the_page_and_probes_need_no_key(keys: Keys, path: str) -> None:
    assert answered(Access(keys), get(path)).status == 200


@pytest.mark.parametrize(
    "path",
    ["/v1/stats", "/v1/apps", "/v1/apps/x", "/metrics", "/v2", "/v2/models/x", "//", "/v2/health/live/../../models"],
)
def test_all_else_needs_one_even_where_there_is_nothing(keys: Keys, path: str) -> None:
    answer = answered(Access(keys), get(path))
    assert (answer.status, headers_of(answer)) == (401, {"WWW-Authenticate": "Bearer"})
    assert "API key" in orjson.loads(answer.body)["error"]


def test_a_path_that_begins_like_the_page_leads_nowhere(keys: Keys) -> None:
    assert answered(Access(keys), get("/page/../v1/stats")).status == 404


def test_both_headers_carry_a_key(keys: Keys) -> None:
    assert answered(Access(keys), get(authorization=f"Bearer {BEN}")).status == 200
    assert answered(Access(keys), get(x_api_key=BEN)).status == 200
    assert answered(Access(keys), get(x_api_key=f"{BEN}x")).status == 401


def test_a_proxys_own_authorization_does_not_hide_the_key(keys: Keys) -> None:
    assert answered(Access(keys), get(authorization="Basic dTpw", x_api_key=BEN)).status == 200
    assert answered(Access(keys), get(authorization=f"Bearer {ANNA}x", x_api_key=BEN)).status == 401


def test_loading_needs_an_admin_and_a_server_that_loads(keys: Keys) -> None:
    load = "/v2/repository/models/small/load"
    refusal = answered(Access(keys), get(load, "POST", x_api_key=BEN), loading=True)
    assert (refusal.status, headers_of(refusal)) == (403, {})
    assert answered(Access(keys), get(load, "POST"), loading=True).status == 401
    assert answered(Access(keys), get(load, "POST", x_api_key=ANNA), loading=False).status == 403


@pytest.mark.parametrize("error", [InvalidInput("\ud800\0 bad"), _Unspeakable("no"), ValueError("\ud800")])
def test_a_change_is_answered_whatever_its_error_says(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    # As a server writes them. pytest keeps the texts themselves, which its workers cannot send.
    lines = io.TextIOWrapper(io.BytesIO(), "utf-8")
    handler = logging.StreamHandler(lines)
    handler.setFormatter(JsonFormatter("front-end 1"))
    log = logging.getLogger(routes.__name__)
    monkeypatch.setattr(log, "handlers", [handler])
    monkeypatch.setattr(log, "propagate", False)

    async def change(name: str, unload: bool) -> None:
        raise error

    async def scene() -> Response:
        answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        asked = routes_of(ModelRegistry(change, loading=True), Access())
        head = get("/v2/repository/models/small/load", "POST")
        asked.handle(Request(head, b""), answer.set_result)
        return await asyncio.wait_for(answer, 10)

    answer = asyncio.run(scene())
    said = orjson.loads(answer.body)["error"]
    expected = (400, "\\ud800\0 bad") if error.args == ("\ud800\0 bad",) else (500, str(internal_error()))
    assert (answer.status, said) == expected
    lines.seek(0)
    logged = [orjson.loads(line)["message"] for line in lines]
    assert logged == (["'small' could not be changed"] if answer.status == 500 else [])


def test_without_keys_everybody_may_ask() -> None:
    Access().check(get(), admin=True)
    assert answered(Access(), get()).status == 200


LISTED, ALL = Access(origins=(SITE, "http://localhost:5173")), Access(origins=("*",))


@pytest.mark.parametrize("origin", ["http://[", "null", "", "://", "http://host.example.evil", "host.example", SITE])
@pytest.mark.parametrize("host", [{"host": "host.example"}, {"host": ""}, {}])
def test_a_page_of_elsewhere_or_of_nowhere_opens_no_stream(origin: str, host: dict[str, str]) -> None:
    with pytest.raises(Forbidden, match="may not open streams"):
        Access().check_origin(get(origin=origin, **host))
    Access().check_origin(get(origin="http://host.example", host="host.example"))


def test_a_listed_site_is_named_back_and_caches_keep_its_answers_apart() -> None:
    told = headers_of(answered(LISTED, get(origin=SITE)))
    assert told["Access-Control-Allow-Origin"] == SITE
    assert told["Vary"] == "Origin"
    assert "Retry-After" in told["Access-Control-Expose-Headers"]
    # An answer that was kept for somebody else would lack the header, so those vary too.
    for head in (get(origin="https://other.example"), get()):
        assert headers_of(answered(LISTED, head)) == {"Vary": "Origin"}


def test_every_site_is_told_a_star() -> None:
    told = headers_of(answered(ALL, get(origin="https://other.example")))
    assert told["Access-Control-Allow-Origin"] == "*"
    assert "Vary" not in told
    assert headers_of(answered(ALL, get())) == {}


@pytest.mark.parametrize("origin", [f"{SITE}.evil.example", "null", "https://site.example:444", SITE.upper(), ""])
def test_a_site_that_is_only_like_a_listed_one_is_told_nothing(origin: str) -> None:
    assert "Access-Control-Allow-Origin" not in headers_of(answered(LISTED, get(origin=origin)))


def test_without_the_option_nobody_is_told_anything() -> None:
    assert answered(Access(), get(origin=SITE)).headers == ()
    preflight = get("/v1/stats", "OPTIONS", origin=SITE, access_control_request_method="GET")
    refusal = answered(Access(), preflight)
    assert (refusal.status, headers_of(refusal)) == (405, {"Allow": "GET, HEAD"})


def test_a_preflight_is_answered_without_a_key_which_a_browser_leaves_out(keys: Keys) -> None:
    asks = {"origin": SITE, "access_control_request_method": "POST"}
    wanted = "authorization,content-type,penstock-latency-ms"
    head = get("/v1/apps/x", "OPTIONS", **asks, access_control_request_headers=wanted)
    answer = answered(Access(keys, (SITE,)), head)
    told = headers_of(answer)
    assert (answer.status, answer.body) == (204, b"")
    assert told["Access-Control-Allow-Origin"] == SITE
    assert told["Access-Control-Allow-Headers"] == wanted
    assert "POST" in told["Access-Control-Allow-Methods"]
    assert int(told["Access-Control-Max-Age"]) > 0
    # Any header by name: `*` would not cover Authorization.
    assert headers_of(answered(ALL, head))["Access-Control-Allow-Headers"] == wanted


def test_a_preflight_of_another_site_is_not_answered(keys: Keys) -> None:
    head = get("/v1/apps/x", "OPTIONS", origin="https://other.example", access_control_request_method="POST")
    refusal = answered(Access(keys, (SITE,)), head)
    assert refusal.status == 401
    assert "Access-Control-Allow-Origin" not in headers_of(refusal)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (get("/nowhere", authorization=f"Bearer {BEN}", origin=SITE), 404),
        (get("/v1/apps/x", "POST", authorization=f"Bearer {BEN}", origin=SITE), 404),
        (get("/v1/stats", "POST", authorization=f"Bearer {BEN}", origin=SITE), 405),
        (get("/v1/stats", origin=SITE), 401),
    ],
)
def test_a_listed_site_may_read_refusals_too(keys: Keys, head: Head, status: int) -> None:
    answer = answered(Access(keys, (SITE,)), head)
    assert answer.status == status
    assert headers_of(answer)["Access-Control-Allow-Origin"] == SITE


def test_a_listed_site_may_read_of_a_fault_of_the_server() -> None:
    def crash() -> float:
        raise ZeroDivisionError

    answers: list[Response] = []
    routes = routes_of(ModelRegistry(Repository().change, loading=False), LISTED, crash)
    routes._stats = crash  # type: ignore[method-assign]
    routes.handle(Request(get(origin=SITE), b""), answers.append)
    assert [answer.status for answer in answers] == [500]
    assert headers_of(answers[0])["Access-Control-Allow-Origin"] == SITE


def test_a_lane_ends_with_the_route_of_its_head() -> None:
    models = ModelRegistry(Repository().change, loading=False)
    routes, head = routes_of(models, Access()), get("/v1/apps")
    for _ in range(2):
        head.lane = False
        routes.handle(Request(head, b""), lambda response: None)
        assert head.lane is None
        head.lane = False
        routes.handle(Request(head, b""), lambda response: None)
        assert head.lane is False
        models.epoch += 1
