"""Pages on a GPU: moved between places that one index array names, and to the host meanwhile.

Enters: a tensor of pages, indices, a place to put them. Leaves: the pages there, on the stream that
is current; or, by a copy stream, on a stream of its own beside the model's.

File map:
    rows.py         a tensor's pages as rows of bytes, and which rows may be touched
    page_copier.py  `PageCopier`: gather, scatter, copy; by kernels, or by torch alone
    kernels.py      the Triton kernel; the only module that imports triton
    copy_stream.py  device ⇄ pinned host memory on a stream of its own
"""
