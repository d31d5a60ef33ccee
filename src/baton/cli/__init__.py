"""The command line: flags in, exit codes out.

Enters: arguments. Leaves: a configuration handed to the package that does the work, and an exit
code: 0 done, 1 it failed while running, 2 the command or the configuration is wrong, 130 killed
by a second Ctrl-C. Each command's module is imported only when that command runs.

File map:
    main.py         the commands and their one-line help; errors → exit codes
    flags.py        the flags that every command shares
    up.py           `baton up`: one machine, one command; launching.py what it does
    gateway.py      `baton gateway`
    worker.py       `baton worker`; serving.py the same around an engine with its own server
    model.py        `baton model make`
    config.py       `baton config show`
    store.py        `baton store`
    doctor.py       `baton doctor`
    bench.py        `baton bench link`
    engine_options.py  an engine's own options, checked before a process starts
"""
