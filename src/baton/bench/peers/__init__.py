"""Other ways to move bytes between two processes, driven as their own documentation says.

File map: one file each: `nixl.py`, `mooncake.py`, `gloo.py`, `serialised.py` (pickle, torch.save),
`iperf.py` (iperf3, which moves bytes of its own).
"""
