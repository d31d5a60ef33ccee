"""What commands end with; 0 is success."""

from typing import Final

FAILED: Final = 1
MISUSED: Final = 2
"""The command or the configuration is wrong."""
INTERRUPTED: Final = 130
