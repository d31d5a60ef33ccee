"""Copies pages on a GPU by index arrays, and to the host on a stream of its own; digests them.

Enters: a tensor of pages, indices, a place to put them. Leaves: the pages there, on the stream that
is current; or, by a copy stream, on a stream of its own beside the model's. Of pages that stay on
the GPU: their digests, on a stream of its own.

File map:
    page_copier.py  `PageCopier`: gather and scatter; by kernels, or by torch alone
    kernels.py      the Triton kernel that copies
    copy_stream.py  device ⇄ pinned host memory on a stream of its own
    device_region.py  regions in a GPU's memory, and how this process works with them
    page_digester.py  their digests, sum128; by the kernel, or by torch alone
    digest_kernel.py  the Triton kernel that digests
"""
