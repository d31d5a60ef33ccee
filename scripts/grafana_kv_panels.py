"""Panels on where KV goes: handoffs, links, and the store."""

from __future__ import annotations

from typing import Final

from scripts.grafana_queries import Panel, Query, quantile, rate

PATH: Final = "distance, transport"
PATH_LEGEND: Final = "{{distance}} {{transport}}"

RECEIVED: Final = "baton_handoff_received_bytes_total"
HANDOFFS: Final = (
    Panel(
        "Handoffs by transport",
        "Completed ones, on decode's side.",
        "ops",
        (
            Query(
                rate('baton_handoffs_total{role="decode",result="completed"}', "transport"),
                "{{transport}}",
            ),
        ),
        is_stacked=True,
    ),
    Panel(
        "Handoffs that did not complete",
        "declined: decode had nearly all of the prompt's KV already.",
        "ops",
        (
            Query(
                rate('baton_handoffs_total{role="decode",result!="completed"}', "result"),
                "{{result}}",
            ),
        ),
    ),
    Panel(
        "KV received",
        "By distance and transport.",
        "Bps",
        (Query(rate(RECEIVED, PATH), PATH_LEGEND),),
        is_stacked=True,
    ),
    Panel(
        "Transfer time p99",
        "From the first layer computed to the last one landed: in mode push the rest of prefill is "
        "in it.",
        "s",
        (Query(quantile(0.99, "baton_handoff_transfer_seconds", "", PATH), PATH_LEGEND),),
    ),
    Panel(
        "Transfer time for each MiB, p50",
        "Compare distances: a farther one that is faster than a nearer one is a fault.",
        "s",
        (Query(quantile(0.5, "baton_handoff_transfer_seconds_per_mib", "", PATH), PATH_LEGEND),),
    ),
    Panel(
        "Exposed transfer",
        "The part of transfers that came after prefill, and so added to TTFT; 0: it hid behind "
        "compute.",
        "percentunit",
        (Query(quantile(0.9, "baton_handoff_exposed_share", "", PATH), f"p90 {PATH_LEGEND}"),),
    ),
    Panel(
        "Exposed seconds for each handoff",
        "What a handoff adds to TTFT, on the average.",
        "s",
        (
            Query(
                f"{rate('baton_handoff_exposed_seconds_total', PATH)} / "
                f"({rate('baton_handoff_transfer_seconds_count', PATH)} > 0)",
                PATH_LEGEND,
            ),
        ),
    ),
    Panel(
        "Fallbacks",
        "Handoffs and requests that were served in another way than intended: slower, never wrong.",
        "ops",
        (
            Query(rate("baton_handoff_fallbacks_total", "cause"), "handoff: {{cause}}"),
            Query(rate("baton_gateway_fallbacks_total", "cause"), "request: {{cause}}"),
        ),
    ),
    Panel(
        "Mismatches and verification",
        "Transports that were not the expected ones; KV that was not what its sender had; leases "
        "that decode did not renew.",
        "ops",
        (
            Query(
                rate("baton_handoff_transport_mismatch_total", "expected, used"),
                "{{used}} for {{expected}}",
            ),
            Query(
                rate("baton_handoff_digest_failures_total", "transport"), "digest: {{transport}}"
            ),
            Query(rate("baton_handoff_leases_lapsed_total"), "leases lapsed"),
        ),
    ),
)

LINKS: Final = (
    Panel(
        "Measured bandwidth",
        "Of the link that each worker measured last: the lowest and the highest of all workers.",
        "Bps",
        (
            Query(
                "min by (transport, operation) (baton_link_bandwidth_bytes_per_second > 0)",
                "{{transport}} {{operation}}, lowest",
            ),
            Query(
                "max by (transport, operation) (baton_link_bandwidth_bytes_per_second > 0)",
                "{{transport}} {{operation}}, highest",
            ),
        ),
    ),
    Panel(
        "Measured latency",
        "Of the link that each worker measured last: the highest of all workers.",
        "s",
        (
            Query(
                "max by (transport, operation) (baton_link_latency_seconds > 0)",
                "{{transport}} {{operation}}",
            ),
        ),
    ),
    Panel(
        "Error of the link model",
        "Difference of predicted and observed time, over the observed one.",
        "percentunit",
        tuple(
            Query(
                quantile(share, "baton_link_model_relative_error", "", PATH),
                f"{name} {PATH_LEGEND}",
            )
            for share, name in ((0.5, "p50"), (0.9, "p90"))
        ),
    ),
    Panel(
        "Lost TCP segments",
        "Share that was sent again and had not arrived, as the senders' kernels count. Of all "
        "links: a lossy one among many is diluted, /debug/transfers has each.",
        "percentunit",
        (
            Query(
                f"({rate('baton_link_retransmitted_segments_total', PATH)} - "
                f"{rate('baton_link_duplicate_segments_total', PATH)}) / "
                f"({rate('baton_link_segments_total', PATH)} > 0)",
                PATH_LEGEND,
            ),
        ),
    ),
)

STORE: Final = (
    Panel(
        "Store: used share by tier",
        "A tier that is full demotes or drops entries.",
        "percentunit",
        (
            Query(
                "sum by (tier) (baton_store_used_bytes) / "
                "(sum by (tier) (baton_store_capacity_bytes) > 0)",
                "{{tier}}",
            ),
        ),
    ),
    Panel(
        "Store: hit rate by tier",
        "Of the entries that were asked for.",
        "percentunit",
        (
            Query(
                rate('baton_store_leases_total{result="hit"}', "tier")
                + " / ("
                + rate("baton_store_leases_total", "tier")
                + " > 0)",
                "{{tier}}",
            ),
        ),
    ),
    Panel(
        "Store: traffic",
        "Entries put and read.",
        "Bps",
        (Query(rate("baton_store_bytes_total", "tier, direction"), "{{tier}} {{direction}}"),),
    ),
    Panel(
        "Store: entries that left, or could not be read",
        "damaged: not what was put; they are removed and never used.",
        "ops",
        (
            Query(rate("baton_store_evictions_total", "tier, outcome"), "{{tier}} {{outcome}}"),
            Query(rate("baton_store_damaged_total", "tier"), "{{tier}} damaged"),
            Query(rate("baton_store_read_errors_total", "tier"), "{{tier}} read errors"),
        ),
    ),
    Panel(
        "Prompt tokens by source",
        "computed here; cached: from this worker's memory or the store; received: from prefill.",
        "short",
        (Query(rate("baton_worker_prompt_tokens_total", "source"), "{{source}}"),),
        is_stacked=True,
    ),
    Panel(
        "Cached tokens: predicted, actual and found",
        "predicted: what the router expected workers to have of prompts; actual: what they had; "
        "found: of each prompt the smaller of the two. BatonPrefixPrediction fires where found is "
        "below half of predicted.",
        "short",
        (Query(rate("baton_router_cached_tokens_total", "kind"), "{{kind}}"),),
    ),
)
