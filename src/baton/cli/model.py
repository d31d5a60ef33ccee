"""`baton model make`: models for tests and benchmarks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import App, Parameter

from baton.errors import ConfigError

app = App(name="model", help="Make models for tests and benchmarks.")


class MadeModel(msgspec.Struct, frozen=True):
    """What `--json` prints."""

    path: str
    num_bytes: int


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ShapeFlags:
    """The model's shape."""

    layers: Annotated[int, Parameter(help="Number of layers.")]
    hidden: Annotated[int, Parameter(help="Hidden size.")]
    heads: Annotated[int, Parameter(help="Number of attention heads.")]
    kv_heads: Annotated[int | None, Parameter(help="Number of KV heads [default: --heads].")] = None
    intermediate: Annotated[int | None, Parameter(help="MLP width [default: 8/3 hidden].")] = None
    vocab: Annotated[int | None, Parameter(help="Vocabulary size [default: the demo's].")] = None
    context: Annotated[int, Parameter(help="Longest context, in tokens.")] = 8192
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], Parameter(help="The weights' type.")
    ] = "bfloat16"
    seed: Annotated[int, Parameter(help="The same seed gives the same weights.")] = 0


@app.command
def make(
    shape: ShapeFlags,
    *,
    out: Annotated[Path, Parameter(help="The folder to write; it must not exist yet.")],
    random: Annotated[bool, Parameter(help="Random weights: the only kind yet.")],
    json: Annotated[bool, Parameter(help="Print JSON.")] = False,
) -> int:
    """Make a Llama with random weights: real shapes and speed, no sense."""
    if not random:
        raise ConfigError("--random is required: there is no other kind yet")
    # Here, so that --help does not import torch.
    from baton.engines.transformers.random_model import RandomModelSpec, make_random_model  # noqa: PLC0415

    spec = RandomModelSpec(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_heads=shape.heads,
        num_kv_heads=shape.heads if shape.kv_heads is None else shape.kv_heads,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocab,
        max_context_tokens=shape.context,
        dtype=shape.dtype,
        seed=shape.seed,
    )
    make_random_model(out, spec)
    made = MadeModel(str(out), sum(file.stat().st_size for file in out.rglob("*")))
    if json:
        print(msgspec.json.encode(made).decode())
    else:
        print(f"made {made.path} ({made.num_bytes / 1e6:.1f} MB)")
    return 0
