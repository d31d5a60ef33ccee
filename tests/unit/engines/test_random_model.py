"""Random models: the shape that was asked for, answers that vary, and clear refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from baton.engines.transformers.random_model import RandomModelSpec, make_random_model  # noqa: E402
from baton.errors import ConfigError  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

SPEC = RandomModelSpec(num_layers=3, hidden_size=64, num_heads=4, num_kv_heads=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "random"
    make_random_model(path, SPEC)
    return path


@pytest.fixture(scope="module")
def model(folder: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(folder: Path):
    return transformers.AutoTokenizer.from_pretrained(folder)


def continue_greedily(model, tokens: list[int], num_tokens: int = 32) -> list[int]:
    prompt = torch.tensor([tokens])
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=num_tokens,
        do_sample=False,
    )
    return output[0, len(tokens) :].tolist()


def test_has_the_shape_asked_for(folder: Path, tokenizer) -> None:
    config = transformers.AutoConfig.from_pretrained(folder)
    assert config.model_type == "llama"
    assert config.num_hidden_layers == 3
    assert config.hidden_size == 64
    assert config.num_attention_heads == 4
    assert config.num_key_value_heads == 2
    assert config.head_dim == SPEC.head_dim == 16
    assert config.intermediate_size == SPEC.mlp_width == 192
    assert config.max_position_embeddings == 8192
    assert config.dtype == torch.bfloat16
    assert config.vocab_size == len(tokenizer)
    assert config.eos_token_id == tokenizer.eos_token_id


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_writes_the_dtype_asked_for(tmp_path: Path, dtype: str) -> None:
    make_random_model(tmp_path / "model", replace(SPEC, dtype=dtype))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert {p.dtype for p in loaded.parameters()} == {getattr(torch, dtype)}


def test_speaks_through_the_demo_tokenizer(tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("Émile said: hello!")[1:]) == "Émile said: hello!"
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert "Hi" in rendered


def test_context_length_reaches_config_and_tokenizer(tmp_path: Path) -> None:
    make_random_model(tmp_path / "model", replace(SPEC, max_context_tokens=32_768))
    for name, key in (
        ("config.json", "max_position_embeddings"),
        ("tokenizer_config.json", "model_max_length"),
    ):
        assert json.loads((tmp_path / "model" / name).read_text())[key] == 32_768


def test_greedy_tokens_vary_along_the_answer(model, tokenizer) -> None:
    for prompt in ("Hello", "It was late, and the road was long.", "one two three " * 40):
        answer = continue_greedily(model, tokenizer.encode(prompt))
        assert len(answer) == 32, "a random model does not end its answer"
        assert len(set(answer)) > 16


def test_different_prompts_get_different_answers(model, tokenizer) -> None:
    prompts = ("Hello", "Good night", "The river", "My dear friend")
    answers = {tuple(continue_greedily(model, tokenizer.encode(p), 8)) for p in prompts}
    assert len(answers) == len(prompts)


def test_one_early_token_of_a_long_prompt_changes_the_answer(model, tokenizer) -> None:
    prompt = tokenizer.encode("It was late, and the road was long and dark. " * 30)
    changed = [*prompt[:20], tokenizer.encode("cat")[1], *prompt[21:]]
    assert changed != prompt
    assert continue_greedily(model, prompt) != continue_greedily(model, changed)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_one_foreign_page_changes_the_answer(model, tokenizer, layer: int) -> None:
    own = tokenizer.encode("It was late, and the road was long and dark. " * 16)[:129]
    foreign = tokenizer.encode("She gave him the letter without a word. " * 20)[:129]
    page = slice(48, 64)

    @torch.no_grad()
    def answer(*, damaged: bool) -> list[int]:
        caches = []
        for tokens in (own, foreign):
            cache = transformers.DynamicCache(config=model.config)
            model(input_ids=torch.tensor([tokens[:-1]]), past_key_values=cache)
            caches.append(cache)
        if damaged:
            mine, theirs = (cache.layers[layer] for cache in caches)
            mine.keys[:, :, page] = theirs.keys[:, :, page]
            mine.values[:, :, page] = theirs.values[:, :, page]
        tokens = own[-1:]
        for _ in range(24):
            step = torch.tensor([tokens[-1:]])
            logits = model(input_ids=step, past_key_values=caches[0]).logits
            tokens.append(int(logits[0, -1].argmax()))
        return tokens

    assert answer(damaged=True) != answer(damaged=False)


def test_a_larger_vocabulary_is_computed_but_not_spoken(tmp_path: Path, tokenizer) -> None:
    make_random_model(tmp_path / "model", replace(SPEC, vocab_size=6000))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32
    )
    assert model.lm_head.weight.shape[0] == 6000
    assert max(continue_greedily(model, tokenizer.encode("Hello"))) < len(tokenizer)


def test_the_seed_decides_the_weights(tmp_path: Path, folder: Path) -> None:
    make_random_model(tmp_path / "same", SPEC)
    make_random_model(tmp_path / "other", replace(SPEC, seed=1))
    original = (folder / "model.safetensors").read_bytes()
    assert (tmp_path / "same" / "model.safetensors").read_bytes() == original
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != original


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"hidden_size": 65}, "65 is not divisible by 4 heads"),
        ({"num_kv_heads": 3}, "4 heads are not divisible by 3 KV heads"),
        ({"hidden_size": 60}, "head dimension 15 is odd"),
        ({"num_layers": 0}, "layers must be at least 1, not 0"),
        ({"intermediate_size": -5}, "intermediate size must be at least 1"),
        ({"dtype": "int8"}, "'int8' is none of float32, bfloat16, float16"),
    ],
)
def test_refuses_impossible_shapes(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        replace(SPEC, **change)


def test_refuses_a_vocabulary_below_the_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vocabulary 100 is smaller than the tokenizer's"):
        make_random_model(tmp_path / "model", replace(SPEC, vocab_size=100))
    assert not list(tmp_path.iterdir())


def test_refuses_a_folder_in_use(tmp_path: Path) -> None:
    kept = tmp_path / "notes.txt"
    kept.write_text("mine")
    with pytest.raises(ConfigError, match="not an empty folder"):
        make_random_model(tmp_path, SPEC)
    assert list(tmp_path.iterdir()) == [kept]


def test_refuses_a_file(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("mine")
    with pytest.raises(ConfigError, match="not an empty folder"):
        make_random_model(tmp_path / "model", SPEC)


def test_refuses_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError):
        make_random_model(tmp_path / "file" / "model", SPEC)


def test_weights_can_be_read_by_whoever_reads_the_config(folder: Path) -> None:
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode


def test_fills_an_empty_folder_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    make_random_model(tmp_path / "model", SPEC)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "config.json").exists()
