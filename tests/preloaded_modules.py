"""What `baton worker` and `baton gateway` import, before their model loads (`tests.preloaded`).

All of it is left out of garbage collection: else each forked process goes through a million objects
several times as it starts, and copies the pages that hold them.
"""

import gc
from importlib import import_module

MODULES = (
    "transformers.models.llama.modeling_llama",
    "baton.cli.engine_options",
    "baton.cli.gateway",
    "baton.cli.main",
    "baton.cli.worker",
    "baton.engines.transformers.engine",
    "baton.gateway.process",
    "baton.handoff.verify",
    "baton.store.tiers.file",
    "baton.store.tiers.shared",
    "baton.transfer.transports.shared",
    "baton.transfer.transports.tcp",
    "baton.worker.process",
)

gc.disable()
for _name in MODULES:
    import_module(_name)
# The first model that a process loads has 720 regular expressions compiled: a tenth of its start.
import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
gc.freeze()
gc.enable()
