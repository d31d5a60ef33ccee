"""`baton bench link --choice`: is the transport that would be chosen the best one?

Enters: which transports, and two places. Leaves: for each size, shape and direction what every
transport took, what two workers would have chosen after their survey, and what that cost them
(docs/bench-link.md, "The choice").

    two handoff agents meet ──► links measured        as in the product: its own code
    one pair for each transport ──► times             in turn, transfer by transfer
    links + times ──► choices, regrets                again after the links learnt from the times

File map:
    plan.py        which sizes and shapes (pure)
    surveying.py   two agents meet
    conducting.py  surveys, then times
    judging.py     what would be chosen, and what it would cost (pure)
    report.py      what `--json` prints; printing.py: the table
"""
