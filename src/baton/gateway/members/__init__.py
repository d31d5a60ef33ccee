"""Where a gateway learns which workers there are, while it runs."""
