"""The check of words: what it reads from the glossary, and what it finds."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("check_words", ROOT / "scripts/check_words.py")
check_words = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = check_words  # dataclasses look their module up
SPEC.loader.exec_module(check_words)

TEXT = """
| term | meaning | do not say |
|---|---|---|
| tombstone | a finished id | `grave`, `on trial`, window |
| KV view | pages read as KV | `face` |

| phrase | why |
|---|---|
| `Hugging Face` | a company |
"""
GLOSSARY = check_words.Glossary.read(TEXT)


def test_words_in_code_marks_are_refused_and_the_others_are_advice():
    assert GLOSSARY.terms == {"grave": "tombstone", "on trial": "tombstone", "face": "KV view"}
    assert GLOSSARY.allowed == ("hugging face",)


def test_identifiers_are_taken_apart():
    found = list(GLOSSARY.find("x = 1\nold_grave = FaceOffer()\nGRAVES, on_trial, HTTPFace"))
    assert found == [(2, "grave"), (2, "face"), (3, "on trial"), (3, "face")]


def test_parts_of_words_are_not_words():
    assert not list(GLOSSARY.find("interface, surface, engraved, gravel, window"))


def test_a_phrase_is_allowed_where_its_word_is_not():
    found = list(GLOSSARY.find("a Hugging Face checkpoint\nthe hugging_face of a face"))
    assert found == [(2, "face")]


def test_the_real_glossary_refuses_words_and_its_terms_use_none_of_them():
    glossary = check_words.Glossary.read((ROOT / "docs/glossary.md").read_text())
    assert {"desk", "lend", "in vain"} <= glossary.terms.keys()
    assert not [term for term in glossary.terms.values() if list(glossary.find(term))]


def test_decisions_and_the_glossary_are_not_checked():
    files = {path.relative_to(ROOT).as_posix() for path in check_words.list_files(ROOT)}
    assert {"README.md", "docs/store.md", "src/baton/clock.py"} <= files
    assert not [file for file in files if "/adr/" in file or file == "docs/glossary.md"]
