"""What identifies LoRA adapters: their files, not their names; and what it is used for."""

from __future__ import annotations

import hashlib
import os
from threading import Event
from typing import TYPE_CHECKING, Any

import pytest

from baton.engines.vllm import adapters as adapters_module
from baton.engines.vllm.adapters import Adapters, NotIdentified, describe_settings
from baton.engines.vllm.prefix_schedule import MAX_UNDER_WAY
from baton.kv.identity import Adapter, adapt_fingerprint
from tests.unit.engines_vllm.test_admission import (
    admission,
    clock,
    make_lora,
    receiving,
    request,
    sending,
    step,
)
from tests.unit.engines_vllm.test_prefix_admission import (
    asking,
    plan,
    pool_fixture,
    stored_fixture,
)

if TYPE_CHECKING:
    from pathlib import Path

    from baton.engines.vllm.admission import Admission

__all__ = ["admission", "clock", "pool_fixture", "stored_fixture"]


def make_files(folder: Path, weights: bytes = b"weights") -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"r": 4}', encoding="ascii")
    (folder / "adapter_model.safetensors").write_bytes(weights)
    (folder / "optimizer.pt").write_bytes(os.urandom(8))
    return folder


def read_digest(folder: Path, settings: bytes = b"", **changes: object) -> str:
    found = Adapters(settings).find(make_lora(folder, **changes))
    assert isinstance(found, Adapter)
    return found.digest


def read_reason(adapters: Adapters, lora: Any) -> str:
    found = adapters.find(lora)
    assert isinstance(found, NotIdentified)
    return found.reason


def test_content_counts_and_neither_name_nor_place(tmp_path: Path) -> None:
    first, same = make_files(tmp_path / "a"), make_files(tmp_path / "b")
    assert read_digest(first) == read_digest(same, name="another name")
    assert read_digest(first) != read_digest(make_files(tmp_path / "c", b"others"))
    assert read_digest(first) != read_digest(first, is_3d_lora_weight=True)


def test_what_vllm_applies_of_an_adapter_counts(tmp_path: Path) -> None:
    config = make_lora  # any object with fields will do
    fields = {
        "target_modules": None,
        "enable_moe_shared_loras": False,
        "enable_mixed_moe_lora_format": False,
        "lora_dtype": "torch.bfloat16",
    }
    changes: tuple[dict[str, object], ...] = (
        {},
        {"target_modules": ["q_proj"]},
        {"lora_dtype": "torch.float16"},
    )
    folder = make_files(tmp_path / "a")
    settings = [describe_settings(config("", **fields | each)) for each in changes]
    assert len({read_digest(folder, each) for each in settings}) == len(changes)


def test_files_are_not_looked_at_in_each_step_for_requests_that_wait(
    tmp_path: Path, stored: Admission, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM asks for each of them in each step."""
    looks: list[Path] = []

    def look(path: Path) -> object:
        looks.append(path)
        return find_version(path)

    find_version = adapters_module._find_version
    monkeypatch.setattr(adapters_module, "_find_version", look)
    lora = make_lora(make_files(tmp_path / "a"))
    waiting = [asking(f"r{n}", lora_request=lora) for n in range(MAX_UNDER_WAY + 20)]
    stored.arrived(waiting[0])
    stored._adapters._reader.shutdown()
    for each in waiting[1:]:
        stored.arrived(each)
    looks.clear()
    for _ in range(10):
        assert {stored.count_missing(each, 0) for each in waiting} == {None}
    assert len(looks) == MAX_UNDER_WAY


def test_files_that_change_are_not_trusted_again(tmp_path: Path) -> None:
    """What is loaded is what they were, or what they are: vLLM may have loaded them anew."""
    folder, adapters = make_files(tmp_path / "a"), Adapters(b"")
    lora = make_lora(folder)
    assert isinstance(adapters.find(lora), Adapter)
    weights = folder / "adapter_model.safetensors"
    before = weights.read_bytes()
    weights.write_bytes(b"new weights")
    assert "changed" in read_reason(adapters, lora)
    weights.write_bytes(before)
    assert "changed" in read_reason(adapters, lora)


def test_requests_do_not_wait_until_all_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, may_read = make_files(tmp_path / "a"), Event()

    def read_slowly(path: Path, settings: bytes) -> object:
        may_read.wait(60)
        return read(path, settings)

    read = adapters_module._read
    monkeypatch.setattr(adapters_module, "_read", read_slowly)
    adapters, lora = Adapters(b""), make_lora(folder)
    assert "still being read" in read_reason(adapters, lora)
    assert "still being read" in read_reason(adapters, lora)
    may_read.set()
    adapters._reader.shutdown()
    assert isinstance(adapters.find(lora), Adapter)


@pytest.mark.parametrize(
    ("folder", "changes", "reason"),
    [("nowhere", {}, "cannot be read"), ("a", {"load_inplace": True}, "in place")],
)
def test_what_is_loaded_is_not_known(
    tmp_path: Path, folder: str, changes: dict[str, object], reason: str
) -> None:
    make_files(tmp_path / "a")
    adapters = Adapters(b"")
    assert reason in read_reason(adapters, make_lora(tmp_path / folder, **changes))
    assert reason in read_reason(adapters, make_lora(tmp_path / folder))


def test_a_models_fingerprint_with_an_adapter_is_as_documented() -> None:
    """Servers of other versions share entries by it: docs/wire/block-hash.md."""
    written = b"baton/adapter/1" + b"\x02\0\0\0fp" + b"\x03\0\0\0d1g"
    expected = hashlib.sha256(written).hexdigest()
    assert adapt_fingerprint("fp", Adapter("sql", "d1g")) == expected
    assert adapt_fingerprint("fp", Adapter("law", "d1g")) == expected
    assert adapt_fingerprint("fp", None) == "fp"


def find_prompt_hash(admission: Admission, lora: object, name: str) -> bytes:
    asked = request(receiving(), name, lora_request=lora)
    assert admission.count_missing(asked, 0) == 9
    admission.allocated(asked, ([1, 2, 3],), 9)
    (expected,) = admission.step(step()).expected
    return expected.prompt.prompt_hash


def test_prompts_of_different_weights_are_different_prompts(
    admission: Admission, tmp_path: Path
) -> None:
    sql, same = make_files(tmp_path / "sql"), make_files(tmp_path / "same")
    law = make_files(tmp_path / "law", b"others")
    hashes = [
        find_prompt_hash(admission, lora, f"r{number}")
        for number, lora in enumerate((
            make_lora(sql),
            make_lora(same, name="another name"),
            make_lora(law),
            None,
        ))
    ]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3


def test_a_prefill_server_refuses_what_it_cannot_identify(admission: Admission) -> None:
    asked = request(sending(), lora_request=make_lora("/nowhere"))
    admission.add(asked)
    _, params = admission.finish(asked)
    report: Any = params
    assert report["baton"]["code"] == "unsupported_request"
    assert "'sql'" in report["baton"]["reason"]


def test_the_store_is_asked_for_an_adapters_own_entries(stored: Admission, tmp_path: Path) -> None:
    lora = make_lora(make_files(tmp_path / "sql"))
    asked = asking(lora_request=lora)
    assert stored.count_missing(asked, 0) is None
    orders = plan(stored)
    assert orders is not None
    (lookup,) = orders.lookups
    stored.finish(asked, range(6))
    orders = plan(stored)
    assert orders is not None
    (keep,) = orders.keeps
    assert lookup.adapter == keep.adapter == Adapter("sql", read_digest(tmp_path / "sql"))
