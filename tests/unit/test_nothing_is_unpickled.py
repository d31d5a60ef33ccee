"""No module of ours takes code for data: what comes over a wire or out of a file is decoded."""

import ast
import re
from pathlib import Path

import baton

SOURCES = sorted(Path(baton.__file__).parent.rglob("*.py"))
FORBIDDEN = {"pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "jsonpickle"}
LOAD = re.compile(r"\.\s*load\b").search


def imported(tree):
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                yield from (name.name.partition(".")[0] for name in names)
            case ast.ImportFrom(module=str(module)):
                yield module.partition(".")[0]
            case ast.Attribute(value=ast.Name("torch"), attr="load"):
                yield "torch.load"


def unpickles(source):
    """To parse hundreds of modules takes seconds; most do not have these words at all."""
    if not any(word in source for word in FORBIDDEN) and not ("torch" in source and LOAD(source)):
        return False
    return bool((FORBIDDEN | {"torch.load"}) & set(imported(ast.parse(source))))


def test_no_module_unpickles():
    assert not [str(path) for path in SOURCES if unpickles(path.read_text("utf-8"))]


def test_the_search_finds_something():
    spoilt = "from pickle import loads\nimport torch\ntorch.load('x')\nimport marshal.x"
    assert set(imported(ast.parse(spoilt))) == {"pickle", "torch", "torch.load", "marshal"}
    assert all(map(unpickles, ["from pickle import loads", "import torch\nx = torch.load('x')"]))
    assert not unpickles("import json\n'pickle'\ntorch, json.load")
    assert len(SOURCES) > 300
