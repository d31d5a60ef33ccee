"""How a node reports what went wrong."""

from baton.errors import ConfigError, TransferError
from baton.rig.node import describe_error


def test_errors_in_one_line():
    assert describe_error(TransferError("no\n  way")) == "no way"
    assert describe_error(ConfigError("no such option")) == "no such option"
    assert describe_error(KeyError("x")) == "KeyError: 'x'"
    assert describe_error(TransferError()) == "TransferError: "
