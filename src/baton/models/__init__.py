"""The demo model that ships with Baton: data only, no code that imports.

`demo/` is a Hugging Face folder (weights, tokenizer, chat template, model card), made by
`scripts/train_demo_model.py`. Its answers are readable English.
"""

from pathlib import Path
from typing import Final

DEMO_MODEL_PATH: Final[Path] = Path(__file__).parent / "demo"
