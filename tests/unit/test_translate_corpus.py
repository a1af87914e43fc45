"""The translator's corpus: what is read from packages, what is kept, what is held out, and packed rows."""

import gzip
import io
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest

from penstock.apps.translate.corpus import archives, catalogues, held_out, help_pages, sentences
from penstock.apps.translate.corpus.catalogues import catalogue_pairs, plain
from penstock.apps.translate.corpus.help_pages import help_pairs
from penstock.apps.translate.corpus.pairs import Pair, distinct, is_good, normal, without
from penstock.apps.translate.corpus.phrases import number, phrase_pairs
from penstock.apps.translate.make_data import encoded
from penstock.apps.translate.packed_pairs import PackedPairs, Pairs
from penstock.apps.translate.tokenizer import END, FIRST, SYNTHETIC, tokenizer
from penstock.core.errors import TrainError


def package(monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]) -> Path:
    """A package with these files; every module of the corpus reads it in place of a .deb."""

    def files_in(package: Path, wanted: object) -> list[tuple[str, bytes]]:
        return [(path, content) for path, content in files.items() if wanted(path)]  # type: ignore[operator]

    for module in (catalogues, help_pages, held_out, sentences):
        monkeypatch.setattr(module, "files_in", files_in)
    return Path("package.deb")


def catalogue(messages: dict[str, str]) -> bytes:
    """A .mo file, by the format that GNU gettext's manual describes."""
    keys = sorted(messages)
    originals, translations = [key.encode() for key in keys], [messages[key].encode() for key in keys]
    at = 28 + 16 * len(keys)
    tables, data = b"", b""
    for texts in (originals, translations):
        for text in texts:
            tables += struct.pack("<II", len(text), at + len(data))
            data += text + b"\0"
    head = struct.pack("<7I", 0x950412DE, 0, len(keys), 28, 28 + 8 * len(keys), 0, 0)
    return head + tables + data


def test_catalogues_give_messages_without_contexts_mnemonics_and_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = {
        "": "Content-Type: text/plain; charset=UTF-8\nPlural-Forms: nplurals=2; plural=(n != 1);\n",
        "menu\x04Save _As...": "Guardar _como...",
        "&Open": "&Abrir",
        "<b>Two</b>\nlines": "<b>Dos</b>\nlíneas",
        "one file\0many files": "un archivo\0muchos archivos",
    }
    made = package(monkeypatch, {"usr/share/locale/es/LC_MESSAGES/x.mo": catalogue(messages), "x/fr/y.mo": b"no"})
    pairs = {pair.english: pair.spanish for pair in catalogue_pairs(made)}
    assert pairs == {
        "Save As...": "Guardar como...",
        "Open": "Abrir",
        "Two lines": "Dos líneas",
        "one file": "un archivo",
    }


def test_names_with_underscores_and_ampersands_stay() -> None:
    assert plain("the file file_name and user_id") == "the file file_name and user_id"
    assert plain("Fish & chips") == "Fish & chips"


def test_help_pages_are_aligned_by_the_ids_of_paragraphs(monkeypatch: pytest.MonkeyPatch) -> None:
    page = '<h1 id="hd_id1">{}</h1><p id="par_id2" class="x">{}<br><span>{}</span></p><p>no id</p><p id="{}">x</p>'
    root = "usr/share/libreoffice/help"
    made = package(
        monkeypatch,
        {
            f"{root}/en-US/text/a/b.html": page.format("Title", "Click", "here.", "par_id3").encode(),
            f"{root}/es/text/a/b.html": page.format("Título", "Pulse", "aquí.", "par_id4").encode(),
            f"{root}/es/text/a/c.html": page.format("Otro", "Otro", "Otro", "par_id5").encode(),
        },
    )
    assert [pair[:2] for pair in help_pairs(made, made)] == [("Title", "Título"), ("Click here.", "Pulse aquí.")]


def test_sentences_are_found_in_fortunes_and_manual_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    manual = (
        ".TH X 1\n.SH NOMBRE\nEl programa \\fBx\\fP muestra una línea. Luego\ntermina sin error.\n.PP\nfoo | bar baz\n"
    )
    made = package(
        monkeypatch,
        {
            "usr/share/games/fortunes/es/a.fortunes": "La vida es\nbreve. Y bella es también.\n%\nNo.\n".encode(),
            "usr/share/man/es/man1/x.1.gz": gzip.compress(manual.encode()),
            "usr/share/wordnet/data.adv": b'0001 02 r 01 so 0 000 | to a degree; "it was so hot"; "so"\n',
        },
    )
    assert list(sentences.fortunes(made)) == ["La vida es breve.", "Y bella es también."]
    assert list(sentences.manual_pages(made)) == ["El programa x muestra una línea.", "Luego termina sin error."]
    assert list(sentences.wordnet_examples(made)) == ["it was so hot"]


def test_prompts_are_paired_by_name_and_forbidden_sentence_by_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    english = b"; comment\na: Please wait here. The line is busy!\nb: Thanks.\nc: [a long sound]\n"
    made = package(monkeypatch, {"usr/share/doc/x/core.txt.gz": gzip.compress(english)})
    assert held_out.read_prompts(made)["a"] == "Please wait here. The line is busy!"
    assert [pair.english for pair in held_out.prompt_pairs(made, made)] == ["Please wait here. The line is busy!"]
    forbidden = held_out.forbidden_texts(made, made)
    assert {"please wait here", "the line is busy", "please wait here the line is busy"} <= forbidden
    assert "thanks" not in forbidden


@pytest.mark.parametrize(
    ("english", "spanish", "good"),
    [
        ("Open the file.", "Abra el fichero.", True),
        ("Open %s", "Abrir %s", True),
        ("Open %s", "Abrir %d", False),
        ("Open", "Open", False),
        ("Open the file.", "", False),
        ("Open the file.", "Open the file now, please.", False),
        ("Yes", "Esta es una traducción mucho más larga que el original", False),
        ("a = b + c;", "a = b + d;", False),
        ("Open the file.", "Откройте файл.", False),
        ("Open the file.", "Abra el\x07 fichero.", False),
    ],
)
def test_what_is_no_translation_is_left_out(english: str, spanish: str, good: bool) -> None:
    assert is_good(Pair(english, spanish, "")) == good


def test_forbidden_texts_are_left_out_whatever_their_case_and_accents() -> None:
    pairs = [Pair("Good  Morning!", "Buenos días", ""), Pair("Hello", "GRACIAS, adios.", ""), Pair("Hi", "Hola", "")]
    forbidden = frozenset({normal("good morning"), normal("Gracias: adiós")})
    assert [pair.english for pair in without(pairs, forbidden)] == ["Hi"]


def test_a_text_keeps_a_few_of_its_translations() -> None:
    pairs = [Pair("Open", spanish, "") for spanish in ("Abrir", "Abre", "Abrir", "Abra", "Abierto")]
    assert [pair.spanish for pair in distinct(pairs)] == ["Abrir", "Abre", "Abra"]


def test_numbers_in_words() -> None:
    for value, english, spanish in (
        (0, "zero", "cero"),
        (21, "twenty one", "veintiuno"),
        (45, "forty five", "cuarenta y cinco"),
        (100, "one hundred", "cien"),
        (101, "one hundred one", "ciento uno"),
        (1000, "one thousand", "mil"),
        (21_500, "twenty one thousand five hundred", "veintiún mil quinientos"),
        (731_031, "seven hundred thirty one thousand thirty one", "setecientos treinta y un mil treinta y uno"),
    ):
        assert number(value) == (english, spanish)


def test_phrases_depend_on_the_seed_alone_and_start_alike() -> None:
    pairs = list(phrase_pairs(500, 3))
    assert pairs == list(phrase_pairs(500, 3)) != list(phrase_pairs(500, 4))
    for pair in pairs:
        # Days and months begin with a capital in English alone.
        assert pair.english[0].isupper() or not pair.spanish.lstrip("¿")[0].isupper()
        assert not pair.english.endswith(".") or pair.spanish.endswith(".")
    assert len({pair.english for pair in pairs}) > 350


def test_pairs_are_packed_whole_into_rows() -> None:
    rng = np.random.default_rng(0)
    texts = [(rng.integers(4, 99, rng.integers(1, 9)), rng.integers(4, 99, rng.integers(1, 9))) for _ in range(100)]
    pairs = Pairs(
        np.concatenate([source for source, _ in texts]),
        np.array([len(source) for source, _ in texts]),
        np.concatenate([target for _, target in texts]),
        np.array([len(target) for _, target in texts]),
    )
    packed = PackedPairs(pairs, seed=1, room=32)
    found: list[tuple[list[int], list[int]]] = []
    rows = packed.empty(len(packed))
    counts = packed.read(np.arange(len(packed)), np.zeros(len(packed), np.uint64), rows)
    for row, count in zip(rows, counts, strict=True):
        for pair in range(1, int(row["source_pair"].max()) + 1):
            target = row["target"][row["target_pair"] == pair].tolist()
            assert (target[0], target[-1]) == (FIRST, END)
            found.append((row["source"][row["source_pair"] == pair].tolist(), target[1:-1]))
        # Every token but the first of each target is scored, and no padding.
        assert count.sum() == (row["target_pair"] > 0).sum() - row["target_pair"].max()
    assert sorted(found) == sorted((source.tolist(), target.tolist()) for source, target in texts)
    assert (rows["source_pair"] > 0).mean() > 0.6


def test_a_pair_that_is_longer_than_a_row_is_refused() -> None:
    pairs = Pairs(np.arange(9), np.array([9]), np.arange(3), np.array([3]))
    with pytest.raises(TrainError, match="a pair has 9 tokens; a row has room for 8"):
        PackedPairs(pairs, seed=0, room=8)


def test_translations_by_rules_are_marked() -> None:
    arrays = encoded([Pair("Hello.", "Hola.", "apertium"), Pair("Hello.", "Hola.", "x.mo")], tokenizer(), "train")
    plain_tokens = tokenizer().encode("Hello.")
    assert arrays["train_source"].tolist() == [SYNTHETIC, *plain_tokens, *plain_tokens]
    assert arrays["train_target_lengths"].tolist() == [len(tokenizer().encode("Hola."))] * 2


def test_data_that_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    (tmp_path / "pairs.npz").write_bytes(b"PK damaged")
    for name in ("none.npz", "pairs.npz"):
        with pytest.raises(TrainError, match=f"{name} cannot be read"):
            Pairs.read(tmp_path / name, "train")


def test_a_package_is_read_through_dpkg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name, text in (("./usr/a.txt", b"one"), ("./usr/b.txt", b"two")):
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    (tmp_path / "archive.tar").write_bytes(content.getvalue())
    dpkg = tmp_path / "dpkg-deb"
    dpkg.write_text(f"#!/bin/sh\ncase $2 in *good*) cat {tmp_path}/archive.tar;; *) exit 2;; esac\n")
    dpkg.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert list(archives.files_in(Path("good.deb"), lambda path: path.endswith("b.txt"))) == [("usr/b.txt", b"two")]
    with pytest.raises(TrainError, match=r"bad.deb .*download it again"):
        list(archives.files_in(Path("bad.deb"), lambda path: True))
