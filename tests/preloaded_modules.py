"""What `baton worker` and `baton gateway` import, before their model loads (`tests.preloaded`)."""

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

for _name in MODULES:
    import_module(_name)
