"""The tiers that ship with Baton. Reached through their registry, `baton.tiers`."""
