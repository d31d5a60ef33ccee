from __future__ import annotations

from prometheus_client import CollectorRegistry

from baton.telemetry.links import LinkInstruments
from baton.transfer.links.choice import Chooser, LinkObserver, Outcome
from baton.transfer.links.cost_model import LinkModel, TransferShape

MODELS = {"shared": LinkModel(1e-5, 1e-7, 1e-10), "tcp": LinkModel(1e-4, 1e-7, 1e-9)}


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    found = registry.get_sample_value(name, labels)
    assert found is not None, f"{name} {labels} does not exist from the start"
    return found


def outcome(predicted_s: float, observed_s: float, *, refined: bool = True) -> Outcome:
    return Outcome("tcp", "push", 1, 1000, predicted_s, observed_s, refined)


def test_every_choice_mismatch_and_error_is_counted() -> None:
    registry = CollectorRegistry()
    instruments: LinkObserver = LinkInstruments(registry, ("shared", "tcp"))
    push = {"direction": "push", "transport": "tcp"}
    pair = {"direction": "push", "expected": "shared", "used": "tcp"}
    assert value(registry, "baton_link_choices_total", **push) == 0
    assert value(registry, "baton_link_mismatches_total", **pair) == 0
    choice = Chooser("measured").choose(TransferShape(1000, 1), MODELS, ["tcp"])
    assert choice is not None
    instruments.chosen("push", choice)
    assert value(registry, "baton_link_choices_total", **push) == 1
    assert value(registry, "baton_link_mismatches_total", **pair) == 1
    instruments.carried(outcome(0.1, 0.2))
    instruments.carried(outcome(0.1, 9.0, refined=False))
    assert value(registry, "baton_link_bytes_total", **push) == 2000
    assert value(registry, "baton_link_predicted_seconds_total", **push) == 0.2
    assert value(registry, "baton_link_observed_seconds_total", **push) == 9.2
    assert value(registry, "baton_link_model_relative_error_count", **push) == 1
    assert value(registry, "baton_link_model_relative_error_sum", **push) == 0.5
    instruments.failed("push", "tcp")
    assert value(registry, "baton_link_failures_total", **push) == 1
    instruments.measured("push", "tcp", LinkModel(1e-4, 1e-6, 1 / 3e9))
    assert value(registry, "baton_link_latency_seconds", **push) == 1e-4
    assert value(registry, "baton_link_bandwidth_bytes_per_second", **push) == 3e9


def test_an_unknown_transport_makes_no_new_label() -> None:
    registry = CollectorRegistry()
    instruments = LinkInstruments(registry, ("shared",))
    instruments.failed("pull", "carrier-pigeon")
    other = {"direction": "pull", "transport": "other"}
    assert value(registry, "baton_link_failures_total", **other) == 1
