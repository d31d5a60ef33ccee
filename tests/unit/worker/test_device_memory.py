"""What cannot be configured where KV is in a GPU's memory."""

import pytest

from baton.auth.credentials import Credentials
from baton.config.sections import HandoffSection, StoreSection
from baton.errors import ConfigError
from baton.worker.options import ProcessOptions
from baton.worker.process import check_device_memory


def make_options(**options):
    key = Credentials.generate()
    return ProcessOptions(credentials=key, **options)


def test_a_worker_that_only_hands_off_is_accepted():
    check_device_memory(make_options())


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"store": StoreSection(tiers=("host",))}, "store.tiers"),
        ({"handoff": HandoffSection(encoding="int8")}, "handoff.encoding"),
    ],
)
def test_what_reads_kv_from_the_hosts_memory_is_refused(options, name):
    with pytest.raises(ConfigError, match=f"{name} needs KV in the host's memory"):
        check_device_memory(make_options(**options))
