"""What a gateway's supervisor knows of the workers, against a naive model."""

from hypothesis import given
from hypothesis import strategies as st

from baton.launch.fleet import FleetMember
from baton.launch.ray.known_workers import KnownWorkers
from baton.protocol.members import decode_members, encode_members

NAMES = ["prefill-0", "decode-0", "decode-1", "worker-0", "gateway-0"]
ROLES = {"prefill": "prefill", "decode": "decode", "worker": "both", "gateway": "gateway"}

reports = st.builds(
    lambda name, state, port: FleetMember(
        name=name,
        role=ROLES[name.partition("-")[0]],
        state=state,
        host="h",
        url=None if port is None else f"https://h:{port}",
    ),
    st.sampled_from(NAMES),
    st.sampled_from(["starting", "ready", "draining", "ended", "failed"]),
    st.one_of(st.none(), st.integers(1, 4)),
)
listings = st.frozensets(st.sampled_from(NAMES))


@given(st.lists(st.one_of(reports, listings), max_size=30))
def test_the_file_has_the_last_report_of_each_worker_that_ray_still_has(steps):
    known, last = KnownWorkers(), {}
    for step in steps:
        if isinstance(step, frozenset):
            known.retain(step)
            last = {name: report for name, report in last.items() if name in step}
        else:
            known.apply(step)
            last[step.name] = step
        expected = {
            report.url: (report.role, report.state == "draining")
            for _, report in sorted(last.items())
            if report.role != "gateway"
            and report.url is not None
            and report.state not in {"ended", "failed"}
        }
        file = known.to_file()
        assert {w.url: (w.role, w.draining) for w in file.workers} == expected
        assert len(file.workers) == len(expected), "each address once"
        assert decode_members(encode_members(file)) == file
