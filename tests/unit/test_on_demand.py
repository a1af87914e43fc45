"""The choice of the model that makes room for another one."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.serve.messages import EngineUse
from penstock.serve.repository.on_demand import UNUSED_S, ModelUse, least_recently_used

SECOND = 1_000_000_000
NOW = 1000 * SECOND


def model(name: str, *, used_s: float = 0, loaded_s: float = 0, busy: bool = False) -> ModelUse:
    return ModelUse(name=name, loaded_ns=int(loaded_s * SECOND), used_ns=int(used_s * SECOND), busy=busy)


def test_the_least_recently_used_model_makes_room() -> None:
    models = [model("a", used_s=30), model("b", used_s=20), model("c", used_s=40)]
    assert least_recently_used(models, NOW) == "b"


def test_a_model_in_use_stays() -> None:
    models = [model("a", used_s=30), model("b", used_s=20, busy=True)]
    assert least_recently_used(models, NOW) == "a"
    assert least_recently_used([model("a", used_s=30, busy=True)], NOW) is None
    assert least_recently_used([], NOW) is None


def test_a_model_that_was_just_loaded_waits_for_its_first_request() -> None:
    loaded_s = 1000 - UNUSED_S + 1
    assert least_recently_used([model("a", loaded_s=loaded_s)], NOW) is None
    assert least_recently_used([model("a", loaded_s=loaded_s), model("b", used_s=999)], NOW) == "b"
    # Nobody came back for it.
    assert least_recently_used([model("a", loaded_s=1000 - UNUSED_S - 1)], NOW) == "a"
    # Its first request has been answered.
    assert least_recently_used([model("a", loaded_s=loaded_s, used_s=loaded_s + 0.1)], NOW) == "a"


@given(
    st.lists(
        st.builds(
            ModelUse,
            name=st.uuids().map(str),
            loaded_ns=st.integers(0, NOW),
            used_ns=st.integers(0, NOW),
            busy=st.booleans(),
        ),
        unique_by=lambda each: each.name,
    )
)
def test_what_is_chosen_is_free_and_no_free_model_was_used_earlier(models: list[ModelUse]) -> None:
    chosen = least_recently_used(models, NOW)
    free = [each for each in models if not each.busy and (each.used_ns or NOW - each.loaded_ns > UNUSED_S * SECOND)]
    assert (chosen is None) == (not free)
    if chosen is not None:
        found = next(each for each in free if each.name == chosen)
        since_ns = max(found.used_ns, found.loaded_ns)
        assert all(since_ns <= max(each.used_ns, each.loaded_ns) for each in free)


def test_the_use_of_a_model_is_that_of_all_its_tables() -> None:
    engines = [
        EngineUse(key=0, tables=(1, 2), used_ns=(10, 90), busy=(False, True), used_bytes=0, total_bytes=0),
        EngineUse(key=1, tables=(3,), used_ns=(50,), busy=(False,), used_bytes=0, total_bytes=0),
    ]
    assert ModelUse.of("a", 5, (1, 3), engines) == ModelUse(name="a", loaded_ns=5, used_ns=50, busy=False)
    assert ModelUse.of("a", 5, (2, 3), engines) == ModelUse(name="a", loaded_ns=5, used_ns=90, busy=True)
    # Its engine died.
    assert ModelUse.of("a", 5, (7,), engines) == ModelUse(name="a", loaded_ns=5, used_ns=0, busy=False)
