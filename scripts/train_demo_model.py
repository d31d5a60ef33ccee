"""Train the demo model that ships in `src/baton/models/demo`, from plain text, on one CPU core.

    python scripts/extract_austen.py r-cran-janeaustenr_1.0.0-1_all.deb --out /tmp/austen
    python scripts/train_demo_model.py --text /tmp/austen/*.txt --work /tmp/demo-training

needs the `transformers` extra. It takes the steps of `TrainingPlan`, less when `--max-minutes` ends
sooner (the learning rate then follows the clock, so that it always ends at zero). A run is
continued from its last checkpoint in `--work`. The model is exported once on the way, to be tried
while it learns, and at the end.

The same text, seed and library versions give the same tokenizer. They give the same batches, and
the same weights up to the order of floating-point sums, where no run was ended by the clock or
resumed: the clock moves the learning rate and the lengths of sequences.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from demo_corpus import Chapter, Corpus, Message, make_chat, read_corpus
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    set_seed,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

DEMO_FOLDER = Path(__file__).parents[1] / "src" / "baton" / "models" / "demo"

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLES = ("system", "user", "assistant")
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role: ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """What is learnt from, how much, and how fast."""

    num_steps: int = 2600
    tokens_per_step: int = 4096
    warmup_steps: int = 80
    muon_learning_rate: float = 0.01
    adam_learning_rate: float = 0.003
    weight_decay: float = 0.1
    dropout: float = 0.1
    chat_share: float = 0.25
    seed: int = 20240229

    def length_weights(self, progress: float) -> dict[int, float]:
        """How often a step takes sequences of each length; the long ones come late."""
        if progress < 0.65:
            return {256: 0.8, 512: 0.2}
        return {256: 0.35, 512: 0.35, 1024: 0.15, 2048: 0.1, 4096: 0.05}

    def learning_rate_factor(self, step: int, progress: float) -> float:
        """Linear warm-up, then a cosine to zero."""
        warmup = min(1.0, (step + 1) / self.warmup_steps)
        return warmup * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """When a run ends at the latest, and what it does on the way."""

    total_s: float
    preview_after_s: float = 480
    save_every_s: float = 240


@dataclass(frozen=True, slots=True)
class TokenStreams:
    """The corpus as token ids. A row of `prose` starts anywhere, of `chats` where a chat starts."""

    prose: torch.Tensor
    chats: torch.Tensor
    chat_starts: torch.Tensor
    held_out: torch.Tensor


# ---------------------------------------------------------------------------- tokenizer and model


def build_tokenizer(corpus: Corpus, vocab_size: int = 4096) -> PreTrainedTokenizerFast:
    """A byte-level BPE learnt from the training chapters: any UTF-8 text can be encoded."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = [BEGIN, END, PAD, *(f"<|{role}|>" for role in ROLES)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(("\n\n".join(chapter) for chapter in corpus.training), trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, special.index(BEGIN))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=[f"<|{role}|>" for role in ROLES],
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(tokenizer: PreTrainedTokenizerFast, plan: TrainingPlan) -> LlamaForCausalLM:
    """A Llama of 5 million weights with grouped-query attention, untrained."""
    set_seed(plan.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def add_dropout(model: LlamaForCausalLM, probability: float) -> None:
    """Drop parts of what each layer adds to the residual stream, while the model trains."""

    def drop(module: torch.nn.Module, _: object, output: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(output, probability, training=module.training)

    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.down_proj.register_forward_hook(drop)


# ---------------------------------------------------------------------------- tokens


def tokenize_corpus(
    corpus: Corpus, tokenizer: PreTrainedTokenizerFast, plan: TrainingPlan, num_chats: int = 8000
) -> TokenStreams:
    """All text as token ids, and chats drawn from the training chapters with the plan's seed."""
    rng = random.Random(plan.seed)
    weights = [len(chapter) for chapter in corpus.training]
    chapters = rng.choices(corpus.training, weights, k=num_chats)
    chats = [encode_chat(make_chat(chapter, rng), tokenizer) for chapter in chapters]
    starts = torch.tensor([0, *(len(chat) for chat in chats[:-1])]).cumsum(0)
    return TokenStreams(
        prose=_concatenate(encode_chapter(c, tokenizer) for c in corpus.training),
        chats=_concatenate(chats),
        chat_starts=starts,
        held_out=_concatenate(encode_chapter(c, tokenizer) for c in corpus.held_out),
    )


def encode_chapter(chapter: Chapter, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """`<|begin|>` paragraphs `<|end|>`."""
    return [*tokenizer.encode("\n\n".join(chapter), verbose=False), tokenizer.eos_token_id]


def encode_chat(chat: Sequence[Message], tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The chat as the chat template renders it."""
    messages = [{"role": message.role, "content": message.content} for message in chat]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)


def _concatenate(sequences: Iterable[list[int]]) -> torch.Tensor:
    return torch.tensor([token for sequence in sequences for token in sequence])


def draw_batch(
    streams: TokenStreams, plan: TrainingPlan, step: int, progress: float, bos_token_id: int
) -> torch.Tensor:
    """`[rows, length]` token ids of the step; the same step draws the same rows."""
    rng = random.Random(plan.seed * 1_000_003 + step)
    weights = plan.length_weights(progress)
    length = rng.choices(list(weights), list(weights.values()))[0]
    rows = [_draw_row(streams, plan, length, rng) for _ in range(plan.tokens_per_step // length)]
    batch = torch.stack(rows)
    batch[:, 0] = bos_token_id  # what a prompt starts with at inference
    return batch


def _draw_row(
    streams: TokenStreams, plan: TrainingPlan, length: int, rng: random.Random
) -> torch.Tensor:
    if rng.random() < plan.chat_share:
        usable = int(torch.searchsorted(streams.chat_starts, len(streams.chats) - length))
        start = int(streams.chat_starts[rng.randrange(usable)])
        return streams.chats[start : start + length]
    start = rng.randrange(len(streams.prose) - length)
    return streams.prose[start : start + length]


# ---------------------------------------------------------------------------- training


class Trainer:
    """One training run: the weights, their two optimisers, and how far they have come."""

    def __init__(self, model: LlamaForCausalLM, plan: TrainingPlan, work: Path) -> None:
        self.model, self.plan = model, plan
        self.checkpoint = work / "checkpoint.pt"
        matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
        others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
        self.optimisers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices,
                lr=plan.muon_learning_rate,
                weight_decay=plan.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(
                others, lr=plan.adam_learning_rate, betas=(0.9, 0.95), weight_decay=0.0
            ),
        ]
        self.base_rates = [plan.muon_learning_rate, plan.adam_learning_rate]
        self.step = 0
        self.elapsed_s = 0.0

    def take_step(self, batch: torch.Tensor, progress: float) -> float:
        """Learn from one batch and return its loss (nats per token)."""
        factor = self.plan.learning_rate_factor(self.step, progress)
        for optimiser, rate in zip(self.optimisers, self.base_rates, strict=True):
            for group in optimiser.param_groups:
                group["lr"] = rate * factor
        self.model.train()
        loss = compute_loss(self.model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.step += 1
        return loss.item()

    def save(self) -> None:
        """Write a checkpoint; the one before stays whole until this one is."""
        state = {
            "model": self.model.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "step": self.step,
            "elapsed_s": self.elapsed_s,
        }
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.checkpoint)

    def resume(self) -> None:
        """Go on from the checkpoint, where there is one."""
        if not self.checkpoint.exists():
            return
        state = torch.load(self.checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.step, self.elapsed_s = state["step"], state["elapsed_s"]
        print(f"resumed at step {self.step}", flush=True)


def compute_loss(model: LlamaForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    """Mean next-token loss in nats, computed in bfloat16 where that is safe."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss: torch.Tensor = model(input_ids=batch, labels=batch, use_cache=False).loss
    return loss


@torch.no_grad()
def measure_loss(model: LlamaForCausalLM, tokens: torch.Tensor, length: int = 512) -> float:
    """Mean loss over `tokens`, cut into sequences of `length`."""
    model.eval()
    windows = tokens[: len(tokens) // length * length].view(-1, length)
    losses = [compute_loss(model, batch) * len(batch) for batch in windows.split(8)]
    return float(torch.stack(losses).sum()) / len(windows)


def run_training(
    trainer: Trainer, streams: TokenStreams, tokenizer: PreTrainedTokenizerFast, limits: TimeLimits
) -> None:
    """Train until the plan's steps are taken or the time is spent, printing progress."""
    plan, before_s = trainer.plan, trainer.elapsed_s
    started = time.perf_counter()
    next_save_s = before_s + limits.save_every_s
    previewed = before_s > limits.preview_after_s
    progress = max(trainer.step / plan.num_steps, before_s / limits.total_s)
    while progress < 1:
        batch = draw_batch(streams, plan, trainer.step, progress, tokenizer.bos_token_id)
        loss = trainer.take_step(batch, progress)
        trainer.elapsed_s = before_s + time.perf_counter() - started
        progress = max(trainer.step / plan.num_steps, trainer.elapsed_s / limits.total_s)
        if trainer.step % 20 == 0:
            print_progress(trainer, progress, loss)
        if trainer.elapsed_s > next_save_s or progress >= 1:
            next_save_s = trainer.elapsed_s + limits.save_every_s
            trainer.save()
            print(f"held-out loss {measure_loss(trainer.model, streams.held_out):.4f}", flush=True)
        if trainer.elapsed_s > limits.preview_after_s and not previewed:
            previewed = True
            export_model(trainer.model, tokenizer, DEMO_FOLDER)
    export_model(trainer.model, tokenizer, DEMO_FOLDER)


def print_progress(trainer: Trainer, progress: float, loss: float) -> None:
    """One line: where the run is, and how well it does."""
    num_tokens = trainer.step * trainer.plan.tokens_per_step
    print(
        f"step {trainer.step} progress {progress:.3f} loss {loss:.3f} tokens {num_tokens} "
        f"elapsed {trainer.elapsed_s:.0f} s",
        flush=True,
    )


def export_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the Hugging Face folder, weights in bfloat16.

    Each file is replaced whole: a process that has the old weights mapped keeps them.
    """
    exported = LlamaForCausalLM(model.config)
    exported.load_state_dict(model.state_dict())
    exported.generation_config = model.generation_config
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".demo-") as partial:
        exported.to(torch.bfloat16).save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        _name_portable_tokenizer_class(Path(partial) / "tokenizer_config.json")
        for file in Path(partial).iterdir():
            file.chmod(0o644)
            file.replace(folder / file.name)


def _name_portable_tokenizer_class(tokenizer_config: Path) -> None:
    """Name the class as every transformers release knows it, not only the fifth."""
    settings = json.loads(tokenizer_config.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    tokenizer_config.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


# ---------------------------------------------------------------------------- what came of it


def report(
    trainer: Trainer, streams: TokenStreams, tokenizer: PreTrainedTokenizerFast
) -> dict[str, float]:
    """The figures that the model card quotes."""
    model = trainer.model
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "corpus_tokens": len(streams.prose),
        "held_out_tokens": len(streams.held_out),
        "steps": trainer.step,
        "tokens_seen": trainer.step * trainer.plan.tokens_per_step,
        "minutes": round(trainer.elapsed_s / 60, 1),
        "vocabulary": len(tokenizer),
        "training_loss_512": measure_loss(model, streams.prose[: len(streams.held_out)]),
        "held_out_loss_512": measure_loss(model, streams.held_out),
        "held_out_loss_4096": measure_loss(model, streams.held_out, 4096),
    }


def main() -> None:
    """Train, export and report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="plain-text novels")
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--max-minutes", type=float, default=52)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.work.mkdir(parents=True, exist_ok=True)

    plan = TrainingPlan()
    corpus = read_corpus(path.read_text(encoding="utf-8") for path in sorted(arguments.text))
    if not corpus.training:
        parser.error("--text has no chapters to learn from besides the held-out ones")
    tokenizer = build_tokenizer(corpus)
    streams = tokenize_corpus(corpus, tokenizer, plan)
    print(
        f"{len(corpus.training)} chapters, {len(streams.prose)} tokens of prose, "
        f"{len(streams.chats)} of chats, {len(streams.held_out)} held out",
        flush=True,
    )
    model = build_model(tokenizer, plan)
    add_dropout(model, plan.dropout)
    trainer = Trainer(model, plan, arguments.work)
    trainer.resume()
    run_training(trainer, streams, tokenizer, TimeLimits(arguments.max_minutes * 60))
    print(json.dumps(report(trainer, streams, tokenizer), indent=2))


if __name__ == "__main__":
    main()
