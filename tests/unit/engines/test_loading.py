"""What can be served is served; what cannot is refused with a word on what to do."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Literal

import pytest

pytest.importorskip("transformers")

import torch
from transformers import (
    BloomConfig,
    FalconConfig,
    Llama4TextConfig,
    MambaConfig,
    Qwen3NextConfig,
    T5Config,
)

from baton.clock import MachineClock
from baton.engines.checkpoint import compute_fingerprint, fingerprint_checkpoint
from baton.engines.interface import ENGINES, EngineContext, SamplingDefaults
from baton.engines.transformers import loading
from baton.engines.transformers.loading import load_model, verify_paged_attention
from baton.engines.transformers.options import TransformersOptions
from baton.engines.transformers.shape import LayerShape, check_layer_kinds
from baton.errors import ConfigError
from baton.models import DEMO_MODEL_PATH
from tests.unit.engines.harness import make_model, prepare, tiny_llama

if TYPE_CHECKING:
    from pathlib import Path

OPTIONS = TransformersOptions()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    make_model("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    return shutil.copytree(checkpoint, tmp_path / "copy")


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_folder_becomes_a_model(checkpoint: Path) -> None:
    loaded = load_model(checkpoint, OPTIONS)
    assert loaded.shape.layers == (LayerShape(2, 8, 8, None, is_latent=False),) * 2
    assert (loaded.dtype, loaded.vocab_size, loaded.max_context_tokens) == ("float32", 97, 256)
    assert loaded.eos_token_ids == (2,)
    assert len(loaded.fingerprint) == 64
    assert loaded.fingerprint == fingerprint_checkpoint(checkpoint)  # as every other engine has it


def test_the_checkpoints_sampling_defaults_are_those_that_its_file_states(
    copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load_model(copy, OPTIONS).sampling_defaults == SamplingDefaults()  # not transformers'
    assert "cannot apply" not in caplog.text
    stated = {"do_sample": True, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05}
    (copy / "generation_config.json").write_text(json.dumps(stated))
    got = load_model(copy, OPTIONS).sampling_defaults
    assert got == SamplingDefaults(temperature=0.7, top_k=20)
    assert "repetition_penalty = 1.05, which this engine cannot apply" in caplog.text
    (copy / "generation_config.json").write_text(json.dumps({"top_p": 1.5}))
    with pytest.raises(ConfigError, match=r"cannot be used: .*top_p"):
        load_model(copy, OPTIONS)


def add_tokenizer(folder: Path, eos_token: object) -> None:
    shutil.copy(DEMO_MODEL_PATH / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos_token}))


@pytest.mark.parametrize(
    ("generation", "eos_token", "expected"),
    [
        ({"eos_token_id": 2}, "<|end|>", (2, 1)),  # a chat fine-tune with its base's configuration
        ({"eos_token_id": [3, 1]}, {"content": "<|end|>", "lstrip": False}, (3, 1)),
        ({"eos_token_id": 3}, None, (3,)),
        ({"eos_token_id": 3}, "a token that it has not", (3,)),
        ({}, "<|end|>", (1,)),
        ({}, None, ()),
        (None, "<|end|>", (2, 1)),  # without that file it is config.json's
        (None, None, (2,)),
    ],
)
def test_answers_end_at_the_files_and_the_tokenizers_end_token_as_in_vllm(
    copy: Path, generation: object, eos_token: object, expected: tuple[int, ...]
) -> None:
    add_tokenizer(copy, eos_token)
    (copy / "generation_config.json").unlink()
    if generation is not None:
        (copy / "generation_config.json").write_text(json.dumps(generation))
    assert load_model(copy, OPTIONS).eos_token_ids == expected


def test_end_tokens_outside_the_vocabulary_are_ignored_with_a_warning(
    copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A request with `min_tokens` bans them: that ended the engine's step for all requests."""
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 97, -1]}))
    assert load_model(copy, OPTIONS).eos_token_ids == (2,)
    assert "the end tokens [-1, 97], but its ids are 0 to 96" in caplog.text


def test_the_engine_is_found_by_its_kind_and_says_what_it_is(checkpoint: Path) -> None:
    build = ENGINES.build("transformers", {"block_size": 8, "num_blocks": 3, "dtype": "bfloat16"})
    engine = build(EngineContext(checkpoint, MachineClock()))
    assert (engine.info.engine, engine.info.num_blocks) == ("transformers", 3)
    assert engine.info.layout.dtype == "bfloat16"
    assert engine.info.layout.page_bytes(0) == 2 * 8 * 2 * 8 * 2
    assert [array.num_pages for array in engine.region.arrays] == [3, 3]
    assert not engine.is_alive()


def test_the_kv_budget_gives_the_number_of_blocks(checkpoint: Path) -> None:
    build = ENGINES.build("transformers", {"kv_cache_bytes": 100_000})
    engine = build(EngineContext(checkpoint, MachineClock()))
    assert engine.info.num_blocks == 100_000 // engine.info.layout.block_bytes
    tiny = ENGINES.build("transformers", {"kv_cache_bytes": 100})
    with pytest.raises(ConfigError, match="one block of this model takes 4096 bytes"):
        tiny(EngineContext(checkpoint, MachineClock()))


def test_no_longer_context_is_announced_than_there_is_kv_for(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = EngineContext(checkpoint, MachineClock())
    fits = ENGINES.build("transformers", {"num_blocks": 16})(context).info
    assert (fits.max_context_tokens, caplog.messages) == (256, [])
    less = ENGINES.build("transformers", {"kv_cache_bytes": 3 * fits.layout.block_bytes})(context)
    assert (less.info.max_context_tokens, less.info.model_context_tokens) == (3 * 16, 256)
    assert less.info.fingerprint == fits.fingerprint
    (warning,) = caplog.messages
    assert "48 tokens at most" in warning
    assert warning.endswith(f"raise engine.kv_cache_bytes to {16 * fits.layout.block_bytes}")


def test_a_context_that_was_set_needs_its_kv(checkpoint: Path) -> None:
    context = EngineContext(checkpoint, MachineClock())
    exact = ENGINES.build("transformers", {"num_blocks": 3, "max_context_tokens": 48})
    info = exact(context).info
    assert (info.max_context_tokens, info.model_context_tokens) == (48, 48)
    more = ENGINES.build("transformers", {"num_blocks": 3, "max_context_tokens": 49})
    with pytest.raises(ConfigError, match=r"KV for 48 tokens.*raise engine.num_blocks to 4$"):
        more(context)


def test_more_pages_than_memory_are_refused(checkpoint: Path) -> None:
    build = ENGINES.build("transformers", {"num_blocks": 2**32})
    with pytest.raises(ConfigError, match="region"):
        build(EngineContext(checkpoint, MachineClock()))


def test_importing_the_engine_does_not_import_torch() -> None:
    code = (
        "import sys, baton.engines.transformers as t; t.PLUGIN.build(t.PLUGIN.options()); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_fingerprint_follows_contents(copy: Path) -> None:
    files = [copy / "config.json", copy / "model.safetensors"]
    before = compute_fingerprint(files)
    assert compute_fingerprint(files) == before
    edit_config(copy, rms_norm_eps=1e-5)
    assert compute_fingerprint(files) != before


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (shutil.rmtree, "it has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot read"),
        (lambda folder: (folder / "config.json").write_text('{"model_type":"?"}'), "cannot read"),
        (lambda folder: (folder / "model.safetensors").unlink(), "pickled weights"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"abc"), "cannot load"),
        (lambda folder: edit_config(folder, num_hidden_layers=3), "lack 9 of the model's tensors"),
        (lambda folder: edit_config(folder, intermediate_size=64), "cannot load|another shape"),
    ],
)
def test_broken_checkpoints_are_refused(copy: Path, broken: object, message: str) -> None:
    broken(copy)
    with pytest.raises(ConfigError, match=message):
        load_model(copy, OPTIONS)


def test_a_context_beyond_the_models_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="the model was made for 256"):
        load_model(checkpoint, TransformersOptions(max_context_tokens=300))


def long_rope(original_tokens: int) -> dict[str, object]:
    """Heads of the model of these tests have 8 dimensions."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    limit = {"original_max_position_embeddings": original_tokens}
    return {"rope_type": "longrope", "rope_theta": 10000.0, **factors, **limit}


def test_rope_that_depends_on_the_longest_sequence_of_a_pass_is_refused(copy: Path) -> None:
    """transformers would give equal tokens other KV beside a longer prompt."""
    edit_config(copy, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0})
    with pytest.raises(ConfigError, match="dynamic RoPE scaling"):
        load_model(copy, OPTIONS)
    edit_config(copy, rope_parameters=long_rope(64))
    with pytest.raises(ConfigError, match="max_context_tokens = 64"):
        load_model(copy, OPTIONS)
    options = TransformersOptions(max_context_tokens=64)
    assert load_model(copy, options).max_context_tokens == 64


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_bfloat16_on_a_cpu_that_converts_it_is_warned_of(
    checkpoint: Path,
    dtype: Literal["auto", "float32"],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    (tmp_path / "cpuinfo").write_text("flags : avx2\n", "ascii")
    monkeypatch.setattr(loading, "CPU_INFO", tmp_path / "cpuinfo")
    model = load_model(DEMO_MODEL_PATH, TransformersOptions(dtype=dtype))
    assert model.dtype == {"auto": "bfloat16"}.get(dtype, dtype)
    assert ("engine.dtype=float32" in caplog.text) == (dtype == "auto")


def test_cuda_without_cuda_is_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match='set device = "cpu"'):
        load_model(checkpoint, TransformersOptions(device="cuda"))


def test_kv_of_a_model_on_the_cpu_is_in_no_gpus_memory(checkpoint: Path) -> None:
    factory = ENGINES.build("transformers", {"device": "cpu"})
    with pytest.raises(ConfigError, match=r'model is on cpu: set engine\.device = "cuda"'):
        factory(EngineContext(checkpoint, MachineClock(), memory="cuda"))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MambaConfig(), "linear_attention"),
        (Qwen3NextConfig(), "linear_attention"),
        (Llama4TextConfig(), "chunked_attention"),
        (T5Config(), "cross_attention"),
    ],
)
def test_models_with_other_state_are_refused(config: object, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){reason}.*vllm engine"):
        check_layer_kinds(config)


@pytest.mark.parametrize("config", [FalconConfig, BloomConfig])
def test_models_without_the_attention_interface_are_refused(config: type) -> None:
    model = loading.AutoModelForCausalLM.from_config(
        config(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    )
    with pytest.raises(ConfigError, match="does not run over paged KV"):
        prepare(model.eval())


def test_a_model_that_pages_wrongly_is_refused() -> None:
    model = make_model("llama")
    shape = prepare(model).shape
    forward = model.forward
    model.forward = lambda *args, **kwargs: forward(
        *args, **{**kwargs, "position_ids": None}
    )  # as a model would that counts positions by itself
    with pytest.raises(ConfigError, match="gives other numbers over paged KV"):
        verify_paged_attention(model, shape, "float32")


def test_the_shared_model_of_these_tests_is_latent_free() -> None:
    assert not any(layer.is_latent for layer in tiny_llama().shape.layers)
    latent = prepare(make_model("deepseek_v3")).shape
    assert latent.layers[0] == LayerShape(1, 16, 8, None, is_latent=True)
    (plane,) = latent.to_layout(4, "float32").layers[0].planes
    assert (plane.name, plane.head_dim) == ("latent", 24)
