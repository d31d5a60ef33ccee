"""Configuration: TOML, environment and flags become one frozen tree of options.

Enters: a TOML file (`--config` or `BATON_CONFIG`), variables named `BATON_SECTION__KEY`, and the
values of command-line flags. Leaves: `Config`, frozen, in which each value was checked, and
`Resolved`, which also has where each value came from. The stronger source wins:

    flag  >  environment  >  file  >  default

Nothing else in Baton reads the environment.

File map:
    sections.py     the sections and keys, their types, bounds and defaults
    resolve.py      the layers, merged and checked: `Resolved`, `Config`; the same, flat:
                    `gateway.port` → its type and default; open tables; where a value came from;
                    one layer of values for each source: file, environment, flags
    cluster_key.py  finds the cluster key, or makes one for this user
    environment.py  the one reader and writer of the environment
    numa.py         the cores of a worker, by NUMA nodes
    topology.py     where a worker is: `zone/rack/host/device`
    bfloat16.py     whether this machine's processors compute bfloat16
    logs.py         the one place that sets logging up
"""
