"""`/v1/stats` at its top level: counts of all models."""

from typing import Any

from penstock.serve.observe.metrics import server_stats


def _stats(answered: int, total: int, **more: Any) -> dict[str, Any]:
    outcomes = {"answered": answered, "refused": 1, "expired": 2, "failed": 0, "invalid": 3}
    return outcomes | {"slots": {"total": total, "in_use": 1}, "latency_ms": answered} | more


def test_counts_are_summed_over_models() -> None:
    models = {
        "a": _stats(0, 8, retried=1, costs={"rows": [1]}),
        "b": _stats(14_184, 16, retried=2, costs={"rows": [4]}),
        "chain": _stats(5, 24, parts=["a", "b"]),
    }
    found = server_stats(models)
    assert {name: found[name] for name in ("answered", "refused", "expired", "invalid", "retried")} == {
        "answered": 14_189,
        "refused": 3,
        "expired": 6,
        "invalid": 9,
        "retried": 3,
    }
    assert found["slots"] == {"total": 24, "in_use": 2}
    # All else is that of the first.
    assert found["latency_ms"] == 0
    assert found["costs"] == {"rows": [1]}


def test_of_one_model_and_of_none() -> None:
    only = _stats(7, 8, retried=0)
    assert server_stats({"a": only}) == only
    assert server_stats({}) == {}
