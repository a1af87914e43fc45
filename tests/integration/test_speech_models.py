"""Servers with several models that recognise words, and with none, as speech clients find them."""

import base64
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving import RunningServer, write_doubler
from tests.support.thorough import thorough
from tests.support.tones import TONES_PY, spoken, tones_bundle, wav

FORM = {"Content-Type": "multipart/form-data; boundary=X"}
FILE = b'--X\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n' + wav(spoken("alpha"))
SOUND = "encoding=linear16&sample_rate=8000"


def asked(server: RunningServer, model: str | None) -> dict[str, tuple[int, str]]:
    """Status and sentence of each service's route, by the last part of its path."""
    body, query = FILE, ""
    if model is not None:
        body += f'\r\n--X\r\nContent-Disposition: form-data; name="model"\r\n\r\n{model}'.encode()
        query = f"&model={model}"
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    upgrade |= {"Sec-WebSocket-Key": base64.b64encode(os.urandom(16)).decode()}
    answers: dict[str, tuple[int, dict[str, str], Any]] = {
        "transcriptions": server.ask("POST", "/v1/audio/transcriptions", body + b"\r\n--X--\r\n", FORM),
        "listen": server.ask("GET", f"/v1/listen?{SOUND}{query}", headers=upgrade),
        "realtime": server.ask("GET", f"/v1/realtime?intent=transcription{query}", headers=upgrade),
    }
    return {
        name: (status, reply["err_msg"] if name == "listen" else reply["error"]["message"])
        for name, (status, _, reply) in answers.items()
    }


@pytest.mark.parametrize("model", [thorough(None), "doubler", thorough("speech")])
def test_a_server_without_words_says_what_is_missing(model: str | None, tmp_path: Path) -> None:
    why = "No model here recognises words; serve an application whose Live declares speech."
    with RunningServer(write_doubler(tmp_path)) as server:
        assert asked(server, model) == dict.fromkeys(("transcriptions", "listen", "realtime"), (404, why))


@pytest.mark.slow
def test_a_request_chooses_between_several_models(tmp_path: Path) -> None:
    for name in ("tones", "pitches"):
        (tmp_path / name).mkdir()
        tones_bundle(tmp_path / name, TONES_PY.replace('name="tones"', f'name="{name}"'))
    with RunningServer(tmp_path / "tones" / "bundle", str(tmp_path / "pitches" / "bundle")) as server:
        why = "The request names no model; send as model one of those that recognise words: 'tones', 'pitches'."
        assert asked(server, None) == dict.fromkeys(("transcriptions", "listen", "realtime"), (404, why))
        body = FILE + b'\r\n--X\r\nContent-Disposition: form-data; name="model"\r\n\r\npitches\r\n--X--\r\n'
        assert server.ask("POST", "/v1/audio/transcriptions", body, FORM)[2]["text"] == "alpha"
