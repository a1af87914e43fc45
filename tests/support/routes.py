"""The routes of a front-end without sockets."""

from collections.abc import Callable
from functools import partial

from penstock.serve.exchange.access import Access
from penstock.serve.http.routes import Routes
from penstock.serve.oip.shared_memory import Regions
from penstock.serve.registry.model_registry import ModelRegistry
from penstock.serve.websocket.handshake import reject_page, upgrade_to_shared, upgrade_to_stream
from penstock.serve.websocket.shared_connection import SharedConnection


def routes_of(models: ModelRegistry, access: Access, uptime_s: Callable[[], float] = lambda: 1.0) -> Routes:
    return Routes(
        models,
        access,
        uptime_s=uptime_s,
        open_stream=partial(upgrade_to_stream, models=models, access=access),
        share_streams=partial(upgrade_to_shared, models=models, access=access, make=_no_connection),
        service_streams={},
        reject_stream=partial(reject_page, access=access),
        regions=Regions(None, 0),
    )


def _no_connection(admit: object) -> SharedConnection:
    raise AssertionError(admit)
