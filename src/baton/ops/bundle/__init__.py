"""`baton debug bundle`: one archive with what an issue report needs, and no secrets.

Enters: gateways' URLs, the resolved configuration, log files. Leaves: a `tar.gz` of bounded size,
readable by its owner alone, whose manifest lists what is missing and why.

What is kept is listed, what is not listed is cut: names of settings, of fields in JSON pages, of
labels in metrics. Free text (log lines, reasons of failures) cannot be listed; there known secrets
and what looks like one are cut. What a part cannot give costs that part alone.

File map:
    collecting.py runs all parts → the archive and its manifest
    archive.py    what was collected and what is missing → a file
    redaction.py  text, JSON pages and metrics without secrets
    settings.py   the configuration without secrets; which texts on this machine are secrets
    host.py       versions: Python, packages, kernel, GPUs
    fleet.py      pages of gateways, metrics of their workers, traces of the latest requests
    logs.py       the ends of log files
"""
