"""`baton top`: a fleet at a glance, once or each second.

Enters: a gateway's URL. Leaves: snapshots of what its pages show, on a terminal, as text or as
JSON. Nothing is changed; a page that does not answer costs its own part.

File map:
    pages.py     what is read of each page
    window.py    latencies and rates of the last minute, from two readings of /metrics
    snapshot.py  one look at all pages → `FleetSnapshot`
    tables.py    a snapshot → headline and rows of text
    printing.py  the same on standard output
    screen.py    the same on the whole terminal; needs textual
"""
