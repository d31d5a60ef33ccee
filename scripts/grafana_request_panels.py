"""Panels on what clients see, on queues and on workers."""

from __future__ import annotations

from typing import Final

from scripts.grafana_queries import Panel, Query, quantile, quantiles, rate

MODEL: Final = 'model=~"$model"'
REQUESTS_OF_MODEL: Final = f"baton_gateway_requests_total{{{MODEL}}}"
FAILED: Final = f'baton_gateway_requests_total{{{MODEL},code=~"5.."}}'
TTFT: Final = "baton_gateway_time_to_first_token_seconds"
ITL: Final = "baton_gateway_inter_token_latency_seconds"

OVERVIEW: Final = (
    Panel(
        "Requests per second",
        "Completions that ended.",
        "reqps",
        (Query(rate(REQUESTS_OF_MODEL)),),
        width=3,
        kind="stat",
    ),
    Panel(
        "Failed requests",
        "Share of requests that ended with a status of 500 or more.",
        "percentunit",
        (
            Query(
                f"{rate(FAILED)} / ({rate(REQUESTS_OF_MODEL)} > 0) or vector(0)",
            ),
        ),
        width=3,
        kind="stat",
        limits=(0.001, 0.01),
    ),
    Panel(
        "TTFT p99",
        "From a request's arrival to the first byte of its answer.",
        "s",
        (Query(quantile(0.99, TTFT, MODEL)),),
        width=3,
        kind="stat",
    ),
    Panel(
        "ITL p99",
        "Between two chunks of a stream.",
        "s",
        (Query(quantile(0.99, ITL, MODEL)),),
        width=3,
        kind="stat",
    ),
    Panel(
        "Workers up",
        "Workers that requests may be placed on.",
        "none",
        (Query("sum(max by (url, role) (baton_gateway_worker_up))"),),
        width=3,
        kind="stat",
    ),
    Panel(
        "Alerts",
        "Firing at gateways: GET /alerts lists them with their labels.",
        "none",
        (Query("sum(max by (alert) (baton_alert_firing))"),),
        width=3,
        kind="stat",
        limits=(1, 5),
    ),
    Panel(
        "Handoffs not over the expected transport",
        "In the last hour. They work, and are slower: run `baton doctor` on the workers' hosts.",
        "none",
        (Query("sum(increase(baton_handoff_transport_mismatch_total[1h]))"),),
        width=6,
        kind="stat",
        limits=(1, 100),
    ),
)

REQUESTS: Final = (
    Panel(
        "Requests by status",
        "499: the client left before its answer was complete.",
        "reqps",
        (Query(rate(REQUESTS_OF_MODEL, "code"), "{{code}}"),),
        is_stacked=True,
    ),
    Panel("Time to first token (TTFT)", "As clients see it.", "s", quantiles(TTFT, MODEL)),
    Panel("Inter-token latency (ITL)", "As clients see it.", "s", quantiles(ITL, MODEL)),
    Panel(
        "Request duration",
        "From arrival to the last byte.",
        "s",
        quantiles("baton_gateway_request_duration_seconds", MODEL),
    ),
    Panel(
        "TTFT p99 by mode",
        "How KV was handed over: push, pull, pool, reference; colocated: not at all.",
        "s",
        (Query(quantile(0.99, TTFT, MODEL, "mode"), "{{mode}}"),),
    ),
    Panel(
        "Requests under way",
        "Being served, and those that wait for a worker to come back.",
        "none",
        (
            Query("sum(baton_gateway_inflight_requests)", "in flight"),
            Query("sum(baton_gateway_waiting_requests)", "wait for a worker"),
        ),
    ),
)

QUEUES: Final = (
    Panel(
        "Queued requests",
        "Requests that wait in the gateway for a worker with room.",
        "none",
        (Query("sum by (priority) (baton_gateway_queued_requests)", "{{priority}}"),),
        is_stacked=True,
    ),
    Panel(
        "Queue wait p99",
        "Of requests that had to wait.",
        "s",
        (
            Query(
                quantile(0.99, "baton_gateway_queue_wait_seconds", "", "priority"), "{{priority}}"
            ),
        ),
    ),
    Panel(
        "Refused and expired",
        "Requests that could not wait, or waited for too long.",
        "reqps",
        (
            Query(rate("baton_gateway_queue_refused_total", "cause"), "refused: {{cause}}"),
            Query(rate("baton_gateway_queue_expired_total", "cause"), "expired: {{cause}}"),
        ),
    ),
    Panel(
        "Requests inside engines",
        "awaiting_kv: their KV is on its way.",
        "none",
        (Query("sum by (state) (baton_worker_inflight_requests)", "{{state}}"),),
        is_stacked=True,
    ),
    Panel(
        "Queue time in workers p99",
        "From arrival at the worker to the start of prefill.",
        "s",
        (Query(quantile(0.99, "baton_worker_request_queue_time_seconds", "", "role"), "{{role}}"),),
    ),
    Panel(
        "Prefill time p99",
        "As each role saw it.",
        "s",
        (
            Query(
                quantile(0.99, "baton_worker_request_prefill_time_seconds", "", "role"), "{{role}}"
            ),
        ),
    ),
)

WORKERS: Final = (
    Panel(
        "Workers and their state",
        "As the gateway sees them.",
        "none",
        (Query("max by (url, role, state) (baton_gateway_worker_state) == 1"),),
        kind="table",
    ),
    Panel(
        "KV blocks",
        "quarantined: pages of aborted handoffs, until nothing can land in them any more.",
        "none",
        (Query("sum by (state) (baton_worker_blocks)", "{{state}}"),),
    ),
    Panel(
        "KV blocks in use",
        "Share of blocks that are not free, of the fullest worker and of all.",
        "percentunit",
        (
            Query(
                '1 - min(baton_worker_blocks{state="free"} / ignoring(state) '
                "(baton_worker_blocks_capacity > 0))",
                "fullest",
            ),
            Query(
                '1 - sum(baton_worker_blocks{state="free"}) / '
                "(sum(baton_worker_blocks_capacity) > 0)",
                "all",
            ),
        ),
    ),
    Panel(
        "Requests at workers",
        "Of all gateways: prompts to compute, and answers under way.",
        "none",
        (
            Query(
                f"sum by (worker, part) (baton_router_requests{{{MODEL}}})", "{{worker}} {{part}}"
            ),
        ),
    ),
    Panel(
        "Error of predicted costs",
        "By which the policy `cost` places requests: the difference over the larger of the two.",
        "percentunit",
        (Query(f"max by (cost) (baton_router_cost_error_ratio{{{MODEL}}})", "{{cost}}, highest"),),
    ),
    Panel(
        "Tokens generated",
        "By all workers.",
        "short",
        (Query(rate("baton_worker_output_tokens_total"), "tokens per second"),),
    ),
    Panel(
        "Ejected, silent and preempted workers",
        "Why workers were taken out.",
        "ops",
        (
            Query(rate("baton_gateway_ejections_total", "cause"), "ejected: {{cause}}"),
            Query(rate("baton_gateway_silent_workers_total"), "silent"),
            Query(rate("baton_gateway_preempted_workers_total"), "preempted"),
        ),
    ),
    Panel(
        "Streams whose worker was lost, or that moved",
        "resumed: the client noticed a pause at most.",
        "ops",
        (
            Query(rate("baton_gateway_resumed_streams_total", "result"), "lost: {{result}}"),
            Query(rate("baton_gateway_moved_streams_total", "result"), "moved: {{result}}"),
            Query(rate("baton_gateway_broken_streams_total", "cause"), "broken: {{cause}}"),
        ),
    ),
    Panel(
        "Warnings",
        "Those that clients and unauthenticated peers can cause: most are counted, not logged.",
        "ops",
        (Query(rate("baton_warnings_total", "source, subject"), "{{source}}: {{subject}}"),),
    ),
)
