"""Which arrangements are known, and that an unknown one is never guessed."""

from __future__ import annotations

import pytest

from baton.engines.vllm.layouts import Arrangement, read_arrangement
from baton.errors import ConfigError
from tests.unit.engines_vllm.caches import AttentionModule


class Mla:
    @staticmethod
    def get_name() -> str:
        return "CPU_MLA"


class Flash:
    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"


def test_read_from_the_layers() -> None:
    modules = {"a": AttentionModule("vec"), "b": AttentionModule("vec"), "c": object()}
    found = read_arrangement(modules, ["a", "b"], device="cpu", layout="LBHNC")
    assert str(found) == "vllm-cpu/vec/LBHNC"
    assert found.transposes_k
    assert not found.is_canonical


def test_layers_of_two_head_sizes() -> None:
    modules = {"a": AttentionModule("vec16"), "b": AttentionModule("vec")}
    found = read_arrangement(modules, ["a", "b"], device="cpu", layout="LBHNC")
    assert str(found) == "vllm-cpu/vec+vec16/LBHNC"
    assert found.transposes_k


@pytest.mark.parametrize(
    "module", [object(), None, type("Unbuilt", (), {"attn_backend": AttentionModule.attn_backend})]
)
def test_a_layer_that_does_not_report_it(module: object) -> None:
    with pytest.raises(ConfigError, match=r"of layer a$"):
        read_arrangement({"a": module}, ["a"], device="cpu", layout="LBHNC")


def test_other_backends_go_by_their_names() -> None:
    modules = {"mla": AttentionModule(attn_backend=Mla), "fa": AttentionModule(attn_backend=Flash)}
    mla = read_arrangement(modules, ["mla"], device="cpu", layout="LBHNC")
    assert mla.is_canonical
    assert not mla.transposes_k
    flash = read_arrangement(modules, ["fa"], device="cuda", layout="LBNHC")
    assert str(flash) == "vllm-cuda/flash_attn/LBNHC"
    assert not flash.is_canonical


@pytest.mark.parametrize(
    "other",
    [
        Arrangement("cpu", ("amx",), "LBHNC"),
        Arrangement("cpu", ("amx", "vec"), "LBHNC"),
        Arrangement("cpu", ("vec",), "LBNHC"),
        Arrangement("cuda", ("vec",), "LBHNC"),
    ],
)
def test_only_checked_arrangements_are_converted(other: Arrangement) -> None:
    assert not other.transposes_k
    assert not other.is_canonical
