"""The demo model and example configs that ship with Baton: data only, no code that imports.

`demo/` is a Hugging Face folder (weights, tokenizer, chat template, model card), made by
`scripts/train_demo_model.py`. Its answers are readable English.
"""

from pathlib import Path
from typing import Final

DEMO_MODEL_PATH: Final[Path] = Path(__file__).parent / "demo"

CONFIGS_PATH: Final[Path] = Path(__file__).parent / "configs"
"""What of well-known models' config.json KV depends on; docs/size.md names the source."""
