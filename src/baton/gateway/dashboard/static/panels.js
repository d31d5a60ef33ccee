// Tables and figures that are drawn from one tick, or from one report of links.

import { byId, el, setText } from "./dom.js";
import { bandwidth, duration, NONE, number, percent, price } from "./format.js";
import { drawSoon } from "./frames.js";
import { showStore } from "./store.js";
import { Table } from "./tables.js";
import { keyOf, nameOf, standingOf, usedShare } from "./topology.js";
import { showRequest } from "./waterfall.js";

/** @typedef {Record<string, any>} Data */

const TOKENS = 1000;
/** @type {Record<string, string>} */
const OBJECTIVES = { ttft: "time to first token", tpot: "time per output token", itl: "gaps between tokens (p99)" };
/** @type {Map<string, HTMLElement>} */
const figures = new Map();

/** @param {string} place @param {Table<any>} table @returns {Table<any>} */
function put(place, table) {
  byId(place).append(table.element);
  return table;
}

const requests = put(
  "request-table",
  new Table(
    "Latest requests",
    [
      { head: "request", text: (/** @type {Data} */ row) => row.id },
      { head: "status", isNumber: true, text: (row) => String(row.status), className: (row) => (row.status >= 500 ? "number bad" : row.status >= 400 ? "number warn" : "number") },
      { head: "mode", text: (row) => row.mode ?? NONE },
      { head: "workers", text: (row) => row.workers ?? NONE },
      { head: "queued", isNumber: true, text: (row) => duration(row.waited_s) },
      { head: "first token", isNumber: true, text: (row) => duration(row.first_token_s) },
      { head: "total", isNumber: true, text: (row) => duration(row.total_s) },
      { head: "outcome", text: (row) => row.outcome ?? NONE },
    ],
    (row) => row.id,
    (row) => void showRequest(row.id),
  ),
);
const waiting = put(
  "queue-table",
  new Table(
    "Requests that wait",
    [
      { head: "model", text: (/** @type {Data} */ row) => row.model },
      { head: "priority", text: (row) => row.priority },
      { head: "tenant", text: (row) => row.tenant || NONE },
      { head: "requests", isNumber: true, text: (row) => number(row.num_requests) },
      { head: "tokens", isNumber: true, text: (row) => number(row.num_tokens) },
      { head: "oldest", isNumber: true, text: (row) => duration(row.oldest_s) },
    ],
    (row) => `${row.model}\n${row.priority}\n${row.tenant}`,
  ),
);
const targets = put(
  "slo-table",
  new Table(
    "Answers within the targets",
    [
      { head: "model", text: (/** @type {Data} */ row) => row.model },
      { head: "target", text: (row) => OBJECTIVES[row.objective] ?? row.objective },
      { head: "at most", isNumber: true, text: (row) => duration(row.target_s) },
      { head: "requests", isNumber: true, text: (row) => number(row.num) },
      { head: "within", isNumber: true, text: (row) => (row.num ? percent(1 - row.num_missed / row.num) : NONE) },
    ],
    (row) => `${row.model}\n${row.objective}`,
  ),
);
targets.empty.textContent = "no request of a model with targets has ended yet";
const workersTable = put(
  "worker-table",
  new Table(
    "All workers",
    [
      { head: "worker", text: (/** @type {Data} */ row) => nameOf(row) },
      { head: "role", text: (row) => row.role },
      { head: "state", text: (row) => standingOf(row), className: (row) => (standingOf(row) === "healthy" ? "" : "warn") },
      { head: "place", text: (row) => row.topology ?? NONE },
      { head: "prompts", isNumber: true, text: (row) => number(row.given?.num_prefills) },
      { head: "answers", isNumber: true, text: (row) => number(row.given?.num_decodes) },
      { head: "KV used", isNumber: true, text: (row) => percent(usedShare(row)) },
      { head: "reason", text: (row) => row.reason ?? "" },
    ],
    keyOf,
  ),
);
const costs = put(
  "distance-costs",
  new Table(
    "Expected cost of a handoff",
    [
      { head: "model", text: (/** @type {Data} */ row) => row.model },
      { head: "distance", text: (row) => row.distance.replaceAll("_", " ") },
      { head: "known from", text: (row) => row.source },
      { head: "adds to TTFT", isNumber: true, text: (row) => duration(row.fixed_s + row.each_s * TOKENS) },
      { head: "link", isNumber: true, text: (row) => bandwidth(row.link_bytes_per_s) },
      { head: "pairs", isNumber: true, text: (row) => number(row.num_pairs) },
    ],
    (row) => `${row.model}\n${row.distance}`,
  ),
);

/** @param {Data} tick */
export function showTick(tick) {
  drawSoon("figures", () => showFigures(tick));
  drawSoon("requests", () => {
    // Rows that are replaced each second could not be picked: they stay while somebody is there.
    const isHeld = byId("request-table").matches(":hover, :focus-within") || byId("request").hasAttribute("open");
    if (!isHeld || !requests.rows.size) requests.show(tick.requests);
  });
  drawSoon("queue", () => {
    const { queue } = tick;
    setText(byId("queue-room"), `${queue.num_requests} of ${queue.max_requests} requests, ${number(queue.num_tokens)} of ${number(queue.max_tokens)} tokens`);
    waiting.show(queue.waiting);
    targets.show([...tick.targets].sort((a, b) => a.model.localeCompare(b.model) || rankOf(a) - rankOf(b)));
  });
  drawSoon("store", () => showStore(tick));
  drawSoon("workers", () => {
    if (/** @type {HTMLDetailsElement} */ (byId("worker-table").parentElement).open) workersTable.show(tick.workers.workers);
  });
}

/** @param {Data} target @returns {number} */
function rankOf(target) {
  return Object.keys(OBJECTIVES).indexOf(target.objective);
}

/** @param {Data} links */
export function showCosts(links) {
  drawSoon("costs", () => {
    costs.show(links.models.flatMap((/** @type {Data} */ model) => model.handoffs.map((/** @type {Data} */ line) => ({ model: model.model, ...line }))));
  });
}

/** @param {Data} tick */
function showFigures(tick) {
  const { point } = tick;
  const sum = point.computed_tokens + point.cached_tokens;
  show("requests/s", number(point.requests));
  show("failed/s", number(point.failed));
  show("in flight", number(point.num_inflight));
  show("waiting", number(point.num_waiting));
  show("TTFT p50", duration(point.ttft_p50_s));
  show("TTFT p99", duration(point.ttft_p99_s));
  show("per token p50", duration(point.tpot_p50_s));
  show("prompt tokens/s", number(sum));
  show("answer tokens/s", number(point.answer_tokens));
  if (tick.cost) {
    show("cost of 1,000 input tokens", price(tick.cost.input_per_1000));
    show("cost of 1,000 output tokens", price(tick.cost.output_per_1000));
    show("workers, per hour", price(tick.cost.workers_per_hour));
  }
}

/** @param {string} name @param {string} text */
function show(name, text) {
  let value = figures.get(name);
  if (!value) {
    value = el("b");
    figures.set(name, value);
    byId("figures").append(el("div", { class: "figure" }, el("span", { text: name }), value));
  }
  setText(value, text);
}
