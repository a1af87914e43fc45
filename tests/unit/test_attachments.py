"""The tables that a front-end works on, when engines end and come back."""

import asyncio
import gc
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from penstock.core.bundles.bundle import read_manifest
from penstock.core.errors import BundleError, Overloaded
from penstock.core.source_files.find_application import find_application
from penstock.core.spec import Array
from penstock.serve.control.front_end import FrontEnd
from penstock.serve.frontend.table_writer import OVERDUE_NS
from penstock.serve.grpc.thread import GrpcThread
from penstock.serve.http.listener import OWN
from penstock.serve.messages import LoadModel, ModelLoaded, ModelState
from penstock.serve.registry.attachments import VERSION_HEADER, Attachments
from penstock.serve.registry.model_registry import ModelRegistry
from penstock.serve.registry.served_model import ServedModel
from penstock.serve.settings import ModelSettings, NetworkSettings, Settings
from penstock.serve.table.costs import Costs
from penstock.serve.table.slots import ENGINE_LOST, EXPIRED, ONE_ENGINE_LOST, SlotTable, TableLayout
from tests.support.clock import idle_loop
from tests.support.letters import letters_bundle
from tests.support.live import new_live_bundle
from tests.support.serving import write_doubler
from tests.support.tickets import sealer_with


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_doubler(tmp_path_factory.mktemp("doubler"))


def loaded(bundle: Path, engine: int = 0, key: int = 0, model: int = 0) -> ModelLoaded:
    manifest = read_manifest(bundle)
    return ModelLoaded(
        command=LoadModel(key=key, model=model, name="doubler", version="1", bundle=str(bundle)),
        engine=engine,
        device="cpu",
        slots=4,
        frontends=1,
        bundle_hash=manifest.content_hash,
        application=manifest.reference,
    )


def table(bundle: Path, batch_ns: float = 1e6) -> SlotTable:
    application = find_application(read_manifest(bundle).reference).application
    made = SlotTable.private(TableLayout(slots=4, chunks=1, input=application.input, output=application.output))
    Costs([1, 4], [batch_ns, batch_ns]).publish(made)
    return made


def attachments(engines: int = 2) -> tuple[ModelRegistry, Attachments]:
    models = ModelRegistry(cast(Any, None), loading=False)
    made = Attachments(
        models=models,
        budget_ns=50_000_000,
        idle_ns=10**12,
        margin_ns=0,
        index=0,
        wakes=[lambda: None] * engines,
        batch_loop=idle_loop(lambda: 1),
        now_ns=lambda: 1,
    )
    return models, made


def doubler(models: ModelRegistry) -> ServedModel:
    served = models.named("doubler")
    assert isinstance(served, ServedModel)
    return served


def test_tickets_are_bound_to_the_sources_that_answer(tmp_path_factory: pytest.TempPathFactory) -> None:
    bundle = new_live_bundle(tmp_path_factory)
    application = find_application(read_manifest(bundle).reference).application
    models, attached = attachments()
    attached.sealer = sealer_with()
    layout = TableLayout(
        slots=4, chunks=application.chunks, input=application.input_tensor, output=application.output_tensor
    )
    for engine in range(2):
        made = SlotTable.private(replace(layout, state_bytes=8))
        Costs([1, 4], [1e6, 1e6]).publish(made)
        attached.attach(
            replace(loaded(bundle, engine=engine, key=engine), state_bytes=8, state_layout="float32[2]"), made
        )
    served = doubler(models)
    for replica in served.replicas:
        assert replica.streams is not None
        assert replica.streams.tickets is not None
        assert served.version_headers == ((VERSION_HEADER, replica.streams.tickets.version_hash),)


def test_an_engine_that_loaded_another_bundle_than_the_one_that_is_served_says_so(bundle: Path) -> None:
    models, attached = attachments()
    attached.attach(loaded(bundle), table(bundle))
    other = replace(loaded(bundle, engine=1, key=1), bundle_hash="another")
    with pytest.raises(BundleError, match="holds another bundle now than the one that is served; load the model again"):
        attached.attach(other, table(bundle))
    assert [replica.engine for replica in doubler(models).replicas] == [0]
    # Where nothing is served yet, it was replaced between two readings.
    _, anew = attachments()
    with pytest.raises(BundleError, match="was replaced while it was loaded"):
        anew.attach(other, table(bundle))


def test_the_beam_of_a_model_that_cannot_be_attached_is_unloaded(tmp_path: Path) -> None:
    bundle = letters_bundle(tmp_path)
    beams: set[int] = set()

    def add(*given: Any) -> int:
        beams.add(7)
        return 7

    # Without an engine to wake.
    _, attached = attachments(engines=0)
    attached.beams = cast(Any, SimpleNamespace(add=add, remove=beams.remove))
    for _ in range(2):
        with pytest.raises(IndexError):
            attached.attach(loaded(bundle), table(bundle))
        assert not beams
    attached.wakes = [lambda: None]
    attached.attach(loaded(bundle), table(bundle))
    assert beams == {7}
    asyncio.run(attached.retire(0))
    assert not beams


def test_a_model_that_a_replaced_front_end_cannot_attach_is_refused_whatever_the_others_say(bundle: Path) -> None:
    """The front-ends beside it attach the model, after which the repository says to all that it is ready."""
    models, attached = attachments()
    ready = ModelState(name="doubler", version="1", state="READY")
    models.set_state(replace(ready, state="LOADING"))
    models.set_not_attached("doubler", "1", "it cannot be served here")
    for said in (ready, replace(ready, state="LOADING"), ready):
        models.set_state(said)
        with pytest.raises(Overloaded, match="it cannot be served here"):
            models.reject_unready()
    with pytest.raises(Overloaded, match="it cannot be served here"):
        models.named("doubler")
    assert [(each["state"], each["reason"]) for each in models.index()] == [("UNAVAILABLE", "it cannot be served here")]
    # The version before was given the name back, which the repository does not say again.
    attached.attach(loaded(bundle), table(bundle))
    models.reject_unready()
    assert models.index()[0]["state"] == "READY"
    models.set_not_attached("doubler", "1", "it cannot be served here")
    models.set_state(replace(ready, state="UNAVAILABLE", reason="unloaded"))
    models.reject_unready()


def test_who_waits_for_one_of_several_engines_is_answered_by_another_or_told_to_ask_again(bundle: Path) -> None:
    models, attached = attachments()
    for engine in (0, 1):
        attached.attach(loaded(bundle, engine=engine, key=engine), table(bundle, 1e6 if engine == 0 else 5e6))
    served, statuses = doubler(models), list[int]()

    def done(status: int, output: Array, last: bool) -> None:
        statuses.append(status)

    first, other = [replica.writer for replica in served.replicas]
    chunk = np.zeros(4, np.float32)
    # A batch takes 5 ms in the other engine.
    handles = [served.submit(chunk, done, 1, budget_ns) for budget_ns in (3_000_000, None)]
    assert [handle.writer for handle in handles] == [first, first]
    attached.lose_engine(0)
    assert statuses == [ONE_ENGINE_LOST]
    error = served.error_of(statuses[0], None)
    assert isinstance(error, Overloaded)
    assert (str(error), error.retry_after_s) == ("The engine that it was on stopped; send it again.", 1.0)
    assert handles[1].writer is other
    # Of the last one, the next start is what there is to wait for.
    attached.lose_engine(1)
    assert statuses[1:] == [ENGINE_LOST]
    assert "is being started again" in str(served.error_of(ENGINE_LOST, None))


def test_time_in_which_the_loop_was_held_is_no_silence_of_an_engine(
    bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    models, attached = attachments(engines=1)
    attached.attach(loaded(bundle), table(bundle))
    statuses = list[int]()
    doubler(models).submit(np.zeros(4, np.float32), lambda status, output, last: statuses.append(status), 1)
    now_ns = 50_000_000 + OVERDUE_NS + 2
    attached.now_ns = lambda: now_ns
    attached.sweep(held_ns=1)
    assert (statuses, caplog.messages) == ([], [])
    attached.sweep()
    assert statuses == [EXPIRED]
    assert caplog.messages == ["an engine does not answer; requests long past their deadline: 1"]


def test_a_version_that_goes_when_its_engine_is_lost_is_not_remembered(bundle: Path) -> None:
    async def scene() -> None:
        models, attached = attachments(engines=1)
        attached.attach(loaded(bundle), table(bundle))
        before = doubler(models)
        attached.attach(loaded(bundle, key=1, model=1), table(bundle))
        # Somebody waits for the version before.
        before.submit(np.zeros(4, np.float32), lambda status, output, last: None, 1)
        retiring = asyncio.create_task(attached.retire(0))
        await asyncio.sleep(0)
        attached.lose_engine(0)
        assert list(attached._lost) == [1]
        await asyncio.wait_for(retiring, 5)
        assert doubler(models).engine_lost

    asyncio.run(scene())


def test_a_large_model_attached_while_grpc_starts_is_named_in_the_log(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def never_started(thread: GrpcThread) -> None:
        await asyncio.Event().wait()

    async def scene() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            settings = Settings(models=ModelSettings(bundles=(bundle,)), network=NetworkSettings(grpc_port=0))
            change, batch_loop = cast(Any, None), idle_loop(lambda: 1)
            front = FrontEnd(settings, listener, change, index=0, wakes=[lambda: None], batch_loop=batch_loop)
            listening = asyncio.create_task(front.started())
            await asyncio.sleep(0)
            front.attach(loaded(bundle), table(bundle))
            listening.cancel()
            front.http.release(OWN)
            await asyncio.gather(listening, return_exceptions=True)

    monkeypatch.setattr(GrpcThread, "start", never_started)
    # They change the garbage collection of the whole process.
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr(gc, "set_threshold", lambda count: None)
    asyncio.run(scene())
    assert "doubler takes bodies of up to 1048576 bytes, but gRPC messages are limited to the 0 bytes" in caplog.text
