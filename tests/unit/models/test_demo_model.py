"""The shipped model: small, readable, and broken where its KV is broken."""

from __future__ import annotations

import re

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from baton.models import DEMO_MODEL_PATH  # noqa: E402

UNSEEN = (
    # From a chapter of Emma that was held out of training.
    "Sorrow came--a gentle sorrow--but not at all in the shape of any disagreeable consciousness."
    "--Miss Taylor married. It was Miss Taylor's loss which first brought grief. It was on the "
    "wedding-day of this beloved friend that Emma first sat in mournful thought of any "
    "continuance. The wedding over, and the bride-people gone, her father and herself were left "
    "to dine together, with no prospect of a third to cheer a long evening. Her father composed "
    "himself to sleep after dinner, as usual, and she had then only to sit and think of what she "
    "had lost."
)
PROMPTS = (
    "It is a truth",
    "She looked out of the window, and",
    "The next morning,",
    '"My dear sister," said he,',
)


@pytest.fixture(scope="module")
def model():
    return transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL_PATH, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(DEMO_MODEL_PATH)


@pytest.fixture(scope="module")
def whole_words(tokenizer) -> frozenset[str]:
    """Words frequent enough in the training text to be one token: 2,575 of them."""
    tokens = tokenizer.get_vocab()
    return frozenset(t[1:].lower() for t in tokens if t.startswith("Ġ") and t[1:].isalpha())


def words_of(text: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Za-z]+", text)]


def continue_greedily(model, tokens: list[int], num_tokens: int) -> list[int]:
    prompt = torch.tensor([tokens])
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=num_tokens, do_sample=False
    )
    return output[0, len(tokens) :].tolist()


@torch.no_grad()
def compute_loss(model, tokens: list[int]) -> float:
    batch = torch.tensor([tokens])
    return model(input_ids=batch, labels=batch).loss.item()


def test_is_under_12_mb() -> None:
    files = [file for file in DEMO_MODEL_PATH.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 12_000_000


def test_has_a_model_card() -> None:
    card = (DEMO_MODEL_PATH / "README.md").read_text(encoding="utf-8")
    for heading in ("## Source and licence", "## Training", "## Limits"):
        assert heading in card


def test_is_a_llama_with_grouped_query_attention(model) -> None:
    assert model.config.model_type == "llama"
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    assert model.config.max_position_embeddings == 8192


@pytest.fixture(scope="module")
def continuations(model, tokenizer) -> list[list[int]]:
    """48 tokens after each of the prompts."""
    return [continue_greedily(model, tokenizer.encode(prompt), 48) for prompt in PROMPTS]


def test_greedy_continuations_are_words(
    continuations: list[list[int]], tokenizer, whole_words: frozenset[str]
) -> None:
    for text in map(tokenizer.decode, continuations):
        words = words_of(text)
        assert len(words) >= 8, text
        assert sum(word in whole_words for word in words) > 0.8 * len(words), text


def test_greedy_does_not_loop_at_once(continuations: list[list[int]], tokenizer) -> None:
    for tokens in continuations:
        words = words_of(tokenizer.decode(tokens))
        assert len(set(words)) > 0.4 * len(words), words


def test_knows_english_that_it_has_not_seen(model, tokenizer) -> None:
    tokens = tokenizer.encode(UNSEEN)
    shuffled = [tokens[0], *reversed(tokens[1:])]
    assert compute_loss(model, tokens) < 4.5  # chance is ln 4096 = 8.3
    assert compute_loss(model, shuffled) > 6.5


def test_still_speaks_english_after_4000_tokens(
    model, tokenizer, whole_words: frozenset[str]
) -> None:
    tokens = tokenizer.encode((UNSEEN + "\n\n") * 40)[:4000]
    asked = tokenizer.encode("\n\nThe next morning, she", add_special_tokens=False)
    words = words_of(tokenizer.decode(continue_greedily(model, [*tokens, *asked], 32)))
    assert len(words) >= 8
    assert sum(word in whole_words for word in words) > 0.8 * len(words), words


@pytest.mark.parametrize("layer", [0, 3, 5])
def test_one_page_of_someone_elses_kv_changes_the_answer(model, tokenizer, layer: int) -> None:
    own, foreign = (tokenizer.encode(text)[:97] for text in (UNSEEN, " ".join(PROMPTS) * 9))

    def prefill(tokens: list[int]):
        cache = transformers.DynamicCache(config=model.config)
        model(input_ids=torch.tensor([tokens[:-1]]), past_key_values=cache)
        return cache

    @torch.no_grad()
    def compute_next_logits(*, damaged: bool):
        cache = prefill(own)
        if damaged:
            mine, theirs = cache.layers[layer], prefill(foreign).layers[layer]
            mine.keys[:, :, 64:96] = theirs.keys[:, :, 64:96]
            mine.values[:, :, 64:96] = theirs.values[:, :, 64:96]
        return model(input_ids=torch.tensor([own[-1:]]), past_key_values=cache).logits[0, -1]

    healthy, damaged = compute_next_logits(damaged=False), compute_next_logits(damaged=True)
    assert (healthy - damaged).abs().max() > 0.1


def test_chat_template_renders_roles(tokenizer) -> None:
    rendered = tokenizer.apply_chat_template(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello."},
            {"role": "assistant", "content": "Good day."},
            {"role": "user", "content": "And?"},
        ],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert rendered == (
        "<|begin|><|system|>Be brief.<|end|><|user|>Hello.<|end|>"
        "<|assistant|>Good day.<|end|><|user|>And?<|end|><|assistant|>"
    )
    tokens = tokenizer.encode(rendered, add_special_tokens=False)
    assert tokens.count(tokenizer.eos_token_id) == 4
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "Be brief.Hello.Good day.And?"


def test_chat_template_refuses_unknown_roles(tokenizer) -> None:
    with pytest.raises(Exception, match="unknown role: robot"):
        tokenizer.apply_chat_template([{"role": "robot", "content": "Beep."}], tokenize=False)


def test_chat_answers_end(model, tokenizer, whole_words: frozenset[str]) -> None:
    ended = 0
    for question in ("Who is Emma?", "Continue: She was", "How do you do?", "Write about Bath."):
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        prompt = tokenizer.encode(rendered, add_special_tokens=False)
        answer = continue_greedily(model, prompt, 96)
        ended += answer[-1] == tokenizer.eos_token_id
        words = words_of(tokenizer.decode(answer, skip_special_tokens=True))
        assert sum(word in whole_words for word in words) > 0.8 * len(words), words
    assert ended, "no answer came to its end"


@pytest.mark.parametrize("text", ["naïve café: 東京 🙂", "a  b\n\n\tc", "Hello", ""])
def test_any_text_survives_the_tokenizer(tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert tokens[0] == tokenizer.bos_token_id
    assert tokenizer.decode(tokens, skip_special_tokens=True) == text
