"""The eviction policies that ship with Baton. Reached through their registry, `baton.evictions`."""
