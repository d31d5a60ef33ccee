"""The command line: flags in, exit codes out.

Enters: arguments. Leaves: a configuration handed to the package that does the work, and an exit
code: 0 done, 1 it failed while running, 2 the command or the configuration is wrong, 130 killed
by a second Ctrl-C. Each command's module is imported only when that command runs.

File map:
    main.py         the commands and their one-line help; errors → exit codes
    __main__.py     `python -m baton.cli`: how the launcher starts its children
    exit_codes.py   what commands end with
    flags.py        the flags that every command shares
    engine_options.py  an engine's own options, checked before a process starts;
                    plugin_options.py those of transports and tiers

Commands that serve:
    up.py           `baton up`: one machine, one command; launching.py what it does;
                    background.py the same with --detach; launching_ray.py with --on ray
    gateway.py      `baton gateway`
    worker.py       `baton worker`; serving.py the same around an engine with its own server
    picker.py       `baton picker`
    fleet.py        `baton status`, `logs`, `scale`, `drain`, `upgrade`, `down`
    autoscale.py    `baton autoscale`
    store.py        `baton store`
    key.py          `baton key`

Commands that look:
    top.py, explain.py, route.py, trace.py, debug.py, doctor.py  those of `baton.ops`
    config.py       `baton config show`

Commands that compute and measure:
    plan.py         `baton plan`; planning.py: the same for `baton up --on ray`
    size.py         `baton size`
    sim.py          `baton sim`
    model.py        `baton model make`
    bench.py        `baton bench link` and `compare`
    bench_serve.py, bench_architectures.py  the other two
    bench_workload.py  the workload of these, and of `baton route replay`
"""
