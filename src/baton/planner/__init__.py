"""What would be, without starting anything: sizes of KV, times to move it, hosts for workers.

File map:
    sizing.py          a model and links → a report; printing.py: for people; which model is meant:
                       a shipped config, a file, a folder
    links.py           links by their data sheets, and by `baton bench link --json`
    traffic.py         the KV that is expected, and the rates of links by distance
    measured_rates.py  these rates as a running fleet's workers have measured them
    assignment.py      which host each worker is to start on (pure)
    fleet_plan.py      workers on their hosts and the KV between them; fleet_printing.py: for people
"""
