"""The load report and the agent check, without sockets and with a clock of the test's own."""

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import InvalidInput, ServeError
from penstock.serve.control.agent_check import FOLLOW_S, FULL_WEIGHT, AgentCheck, weight_percent
from penstock.serve.exchange.request import Head
from penstock.serve.exchange.response import Response
from penstock.serve.messages import ModelState
from penstock.serve.observe.load_report import FORMAT_HEADER, FORMS, LoadMeter, LoadReport, form_of
from penstock.serve.observe.reporting_lane import reported, with_report
from penstock.serve.registry.attachments import Attachments
from penstock.serve.registry.model_registry import ModelRegistry
from penstock.serve.settings import LimitSettings, NetworkSettings, TelemetrySettings
from penstock.serve.table.slots import OFFERED, REFUSED
from tests.support.serving import write_doubler
from tests.unit.test_attachments import attachments, doubler, loaded, table

BATCH_NS = 4e6  # four rows in it: 1,000 rows a second
REPORT = LoadReport(utilisation=0.5, rows_s=250.0, errors_s=1.0, finish_ms=3.25)


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_doubler(tmp_path_factory.mktemp("doubler"))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def served(bundle: Path) -> tuple[ModelRegistry, Attachments]:
    models, attached = attachments()
    attached.attach(loaded(bundle), table(bundle, BATCH_NS))
    return models, attached


def offer(models: ModelRegistry, rows: int, refused: int = 0) -> None:
    counts = doubler(models).replicas[0].table.counts
    counts[0, OFFERED] += rows
    counts[0, REFUSED] += refused


def flow(meter: LoadMeter, clock: Clock, models: ModelRegistry, rows_s: int, refused_s: int = 0) -> LoadReport:
    """Offer rows for twenty time constants."""
    for _ in range(40):
        offer(models, rows_s // 2, refused_s // 2)
        clock.now_s += 0.5
        meter.report()
    return meter.report()


def test_the_utilisation_is_what_is_offered_by_what_the_costs_allow(
    served: tuple[ModelRegistry, Attachments], clock: Clock
) -> None:
    models, _ = served
    meter = LoadMeter(models, clock)
    assert meter.report().utilisation == 0
    report = flow(meter, clock, models, 500)
    assert report.utilisation == pytest.approx(0.5, rel=1e-3)
    assert (report.rows_s, report.errors_s) == (pytest.approx(500, rel=1e-3), 0)
    # An idle server answers after one batch.
    assert report.finish_ms == pytest.approx(BATCH_NS / 1e6)


def test_refused_rows_are_load_too(served: tuple[ModelRegistry, Attachments], clock: Clock) -> None:
    models, _ = served
    report = flow(LoadMeter(models, clock), clock, models, 3000, refused_s=2000)
    assert report.utilisation == pytest.approx(3, rel=1e-2)
    assert report.errors_s == pytest.approx(2000, rel=1e-2)


def test_two_engines_carry_twice_as_much(bundle: Path, served: tuple[ModelRegistry, Attachments], clock: Clock) -> None:
    models, attached = served
    attached.attach(loaded(bundle, engine=1, key=1), table(bundle, BATCH_NS))
    assert flow(LoadMeter(models, clock), clock, models, 500).utilisation == pytest.approx(0.25, rel=1e-3)


def test_time_for_reading_is_no_time_for_batches(served: tuple[ModelRegistry, Attachments], clock: Clock) -> None:
    models, _ = served
    meter = LoadMeter(models, clock, lambda: 0.25)
    assert flow(meter, clock, models, 300).utilisation == pytest.approx(0.4, rel=1e-3)


def test_a_report_holds_for_a_moment_and_then_follows(served: tuple[ModelRegistry, Attachments], clock: Clock) -> None:
    models, _ = served
    meter = LoadMeter(models, clock)
    meter.report()
    offer(models, 1000)
    clock.now_s += 0.05
    first = meter.encode("text")
    assert "rps_fractional=0.0" in first
    clock.now_s += 1.0
    assert meter.encode("text") != first


def test_the_predicted_finish_is_of_the_moment(served: tuple[ModelRegistry, Attachments], clock: Clock) -> None:
    models, _ = served
    meter = LoadMeter(models, clock)
    before = meter.report()
    first = {form: meter.encode(form) for form in FORMS}
    # As many rows wait as fill two batches.
    doubler(models).replicas[0].table.held[0, 0] += 8
    assert before.finish_ms is not None
    assert meter.report() == replace(before, finish_ms=before.finish_ms + 2 * BATCH_NS / 1e6)
    assert not any(meter.encode(form) == said for form, said in first.items())
    doubler(models).replicas[0].table.held[0, 0] -= 8
    assert {form: meter.encode(form) for form in FORMS} == first


def test_a_model_that_was_loaded_anew_counts_from_zero(
    bundle: Path, served: tuple[ModelRegistry, Attachments], clock: Clock
) -> None:
    models, _ = served
    meter = LoadMeter(models, clock)
    flow(meter, clock, models, 500)
    doubler(models).replicas[0].table.counts[0, OFFERED] = 0
    clock.now_s += 1
    assert meter.report().rows_s >= 0


def test_without_models_and_with_a_lost_engine_there_is_a_report(
    served: tuple[ModelRegistry, Attachments], clock: Clock
) -> None:
    models, attached = served
    attached.lose_engine(0)
    assert LoadMeter(models, clock).report() == LoadReport()
    assert LoadMeter(attachments()[0], clock).report() == LoadReport()


def test_each_form() -> None:
    assert REPORT.encode("text") == (
        "TEXT application_utilization=0.5,rps_fractional=250.0,eps=1.0,named_metrics.predicted_finish_ms=3.25"
    )
    assert REPORT.encode("json") == (
        'JSON {"application_utilization":0.5,"rps_fractional":250.0,"eps":1.0,'
        '"named_metrics":{"predicted_finish_ms":3.25}}'
    )
    assert "named_metrics" not in replace(REPORT, finish_ms=None).encode("json")
    form, _, encoded = REPORT.encode("bin").partition(" ")
    assert (form, base64.b64decode(encoded)) == ("BIN", REPORT.message())


def test_proxies_find_the_capacity_in_the_report_of_a_fast_network_with_little_load() -> None:
    # 5 us a row, 7 rows a second: Envoy's weight is the rate over the utilisation, and none where that is 0.
    report = replace(REPORT, utilisation=7 * 5e-6, rows_s=7.0)
    text = dict(field.split("=") for field in report.encode("text").removeprefix("TEXT ").split(","))
    fields = json.loads(report.encode("json").removeprefix("JSON "))
    for found in (text, fields):
        capacity_s = float(found["rps_fractional"]) / float(found["application_utilization"])
        assert capacity_s == pytest.approx(200_000, rel=1e-4)


def test_the_message_is_read_by_protobuf() -> None:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="orca.proto", syntax="proto3", package="orca")
    kind = file.message_type.add(name="Report")
    double, message = descriptor_pb2.FieldDescriptorProto.TYPE_DOUBLE, descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE
    for name, number in (("rps_fractional", 6), ("eps", 7), ("application_utilization", 9)):
        kind.field.add(name=name, number=number, type=double, label=1)
    entry = kind.nested_type.add(name="NamedMetricsEntry")
    entry.field.add(name="key", number=1, type=descriptor_pb2.FieldDescriptorProto.TYPE_STRING, label=1)
    entry.field.add(name="value", number=2, type=double, label=1)
    entry.options.map_entry = True
    kind.field.add(name="named_metrics", number=8, type=message, label=3, type_name=".orca.Report.NamedMetricsEntry")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    read: Any = message_factory.GetMessageClass(pool.FindMessageTypeByName("orca.Report")).FromString(REPORT.message())
    assert (read.application_utilization, read.rps_fractional, read.eps) == (0.5, 250.0, 1.0)
    assert dict(read.named_metrics) == {"predicted_finish_ms": 3.25}


def test_a_request_names_the_form_or_takes_the_servers() -> None:
    def head(value: str | None) -> Head:
        return Head("POST", "/", {} if value is None else {FORMAT_HEADER: value})

    assert form_of(head(None)) is None
    assert form_of(head(None), "json") == "json"
    assert form_of(head("TEXT"), "json") == "text"
    with pytest.raises(InvalidInput, match="is 'xml'; it must be text, json or bin"):
        form_of(head("xml"))


def test_a_report_is_one_more_line_of_the_head(served: tuple[ModelRegistry, Attachments], clock: Clock) -> None:
    line = reported(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n\r\n", "TEXT eps=0")
    assert line == b"HTTP/1.1 200 OK\r\nendpoint-load-metrics: TEXT eps=0\r\nContent-Length: 2\r\n\r\n\r\n"
    response = Response(200, headers=(("a", "b"),))
    added = with_report(response, LoadMeter(served[0], clock), "text")
    assert [name for name, _ in added.headers] == ["a", "endpoint-load-metrics"]
    assert response.headers == (("a", "b"),)


def test_the_weight_falls_beyond_the_full_load() -> None:
    assert weight_percent(0) == weight_percent(FULL_WEIGHT) == 100
    assert weight_percent(2 * FULL_WEIGHT) == pytest.approx(100 / 16)


def test_an_agent_check_says_weight_drain_and_down(served: tuple[ModelRegistry, Attachments], clock: Clock) -> None:
    models, attached = served
    meter = LoadMeter(models, clock)
    agent = AgentCheck(models, meter, clock)
    assert agent.line() == b"ready up 100%\n"
    flow(meter, clock, models, 2000)
    clock.now_s += 10 * FOLLOW_S
    offer(models, int(2000 * 10 * FOLLOW_S))
    assert agent.line() == b"ready up 3%\n"
    models.set_state(
        ModelState(name="other", version="1", state="UNAVAILABLE", reason="the engine is being started again")
    )
    models.starting = True
    assert agent.line().startswith(b"down#The server is starting")
    assert b"," not in agent.line()
    models.starting = False
    attached.lose_engine(0)
    assert agent.line().startswith(b"down#The engine of ")
    models.leaving = True
    assert agent.line() == b"drain\n"


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ServeError, match=r"--leave-s is -1; it must be from 0 to 86,400 seconds\."):
        LimitSettings(leave_s=-1)
    with pytest.raises(ServeError, match="--leave-s is nan"):
        LimitSettings(leave_s=float("nan"))
    with pytest.raises(ServeError, match="--agent-port is 70000; it must be from 0 to 65535"):
        NetworkSettings(agent_port=70_000)
    with pytest.raises(ServeError, match="--agent-port is 8000, which is also --port; choose another one"):
        NetworkSettings(agent_port=8000)
    with pytest.raises(ServeError, match="--grpc-port is 8000, which is also --port; choose another one"):
        NetworkSettings(grpc_port=8000)
    assert NetworkSettings(port=0, agent_port=0).agent_port == 0
    with pytest.raises(ServeError, match="--load-report is 'xml'; it must be text, json or bin"):
        TelemetrySettings(load_report="xml")
