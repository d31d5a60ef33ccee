"""What an operator looks at: what works on a host and why not, and where requests go.

File map:
    doctor/           `baton doctor`: probes of this host, or of a running fleet → findings
    route.py          `baton route explain`: where a request would go, or went
    explain.py        `baton explain`: a request as a waterfall; perfetto.py: `baton trace export`
    request_traces.py what both fetch from a gateway
    store.py          `baton store`: what the tiers hold, checked, removed or pinned
    store_archive.py  `baton store export` and `import`
    store_daemon.py   `baton store serve`
    top/              `baton top`: a fleet at a glance, on a terminal, as text or as JSON
    bundle/           `baton debug bundle`: one archive for an issue report, without secrets
    gateway_pages.py  a running gateway's pages
    page_reader.py    pages of gateways and workers, several at once
"""
