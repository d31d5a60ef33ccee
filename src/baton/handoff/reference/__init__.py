"""Mode reference: nothing is moved. Decode attends over the prefill worker's pages where they lie.

Enters: an export that the decode worker asked for. Leaves: blocks of the peer beside its own, and
in the end their release. The handoff itself is a session like any other, with op NONE.

File map:
    exports.py  blocks that this worker has exported: to whom, and what proves that they are free
    imports.py  blocks that it has imported: mapped beside its own, and given back
"""
