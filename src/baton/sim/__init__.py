"""Simulators: production code in one process, with a virtual clock and a seed.

handoff/  the handoff protocol under every fault that a seed draws
router/   placement before simulated workers: what a policy would have done
"""
