"""What `baton worker` imports before its model loads (`tests.preloaded`)."""

import transformers.models.llama.modeling_llama  # noqa: F401
