"""Versions of models, as they are typed."""

from pathlib import Path

import pytest

from penstock.core.errors import ServeError
from penstock.serve.model_versions import VersionPolicy, parse_versions
from penstock.serve.settings import ModelSettings


def test_policies_are_parsed_by_name() -> None:
    assert parse_versions(["all", "speech=3,1,3", "digits=newest"]) == {
        "": VersionPolicy("all"),
        "speech": VersionPolicy((1, 3)),
        "digits": VersionPolicy("newest"),
    }


@pytest.mark.parametrize("text", ["latest", "speech=", "=2", "1,", "-1", "speech=1=2", ""])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(ServeError, match=r"give newest, all, 2 or 2,3, or for one model NAME=2"):
        parse_versions([text])


def test_a_policy_is_given_once_and_needs_a_directory() -> None:
    with pytest.raises(ServeError, match="twice for all models"):
        parse_versions(["all", "2"])
    with pytest.raises(ServeError, match="give --models"):
        ModelSettings(bundles=(Path("b"),), versions=("all",))


@pytest.mark.parametrize(("versions", "several"), [("newest", False), ("all", True), ((1,), False), ((1, 2), True)])
def test_several_versions_have_names_of_their_own_in_statistics(versions: str | tuple[int, ...], several: bool) -> None:
    assert VersionPolicy(versions).several == several
