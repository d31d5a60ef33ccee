// One request, from /debug/requests/ID: where its time went, which way it took, and why.

import { byId, el } from "./dom.js";
import { bytes, duration, NONE } from "./format.js";

/**
 * @typedef {{role: string, worker: string, stamps: Record<string, number>, peer_stamps: Record<string, number>, [field: string]: unknown}} Span
 * @typedef {{id: string, status: number, placement: string[], summary: Record<string, any> | null, gateway: Span, decode: Span | null, prefill: Span | null, missing: string[]}} Trace
 */

/** Stages of a span: name, from, to, color. */
const STAGES = /** @type {const} */ ([
  ["admit", "received", "admitted", "c-grey"],
  ["queue", "received", "prefill_started", "c-grey"],
  ["prefill", "prefill_started", "prefill_done", "c-blue"],
  ["KV transfer", "first_layer_ready", "last_layer_landed", "c-orange"],
  ["exposed transfer", "prefill_done", "last_layer_landed", "c-red"],
  ["decode queue", "kv_ready", "decode_scheduled", "c-purple"],
  ["first decode step", "decode_scheduled", "first_token", "c-sky"],
  ["to first token", "received", "first_token", "c-sky"],
  ["answer", "first_token", "finished", "c-green"],
]);
const OF_GATEWAY = new Set(["admit", "to first token", "answer"]);
const FACTS = [
  "mode", "operation", "transport", "expected_transport", "distance", "num_prompt_tokens", "num_cached_tokens",
  "num_loaded_tokens", "num_received_tokens", "num_output_tokens", "num_pages", "num_bytes", "waited_s", "held_s",
  "outcome",
];

let asked = 0;

/** @param {string} id */
export async function showRequest(id) {
  const dialog = /** @type {HTMLDialogElement} */ (byId("request"));
  const body = byId("request-body");
  byId("request-title").textContent = `Request ${id}`;
  body.replaceChildren(el("p", { text: "loading…" }));
  if (!dialog.open) dialog.showModal();
  const mine = (asked += 1);
  try {
    const answer = await fetch(`../debug/requests/${encodeURIComponent(id)}`, { signal: AbortSignal.timeout(10_000) });
    const shown = await answer.json();
    if (mine !== asked) return;
    if (!answer.ok) throw new Error(shown.error?.message ?? `the gateway answered ${answer.status}`);
    body.replaceChildren(...draw(/** @type {Trace} */ (shown)));
  } catch (error) {
    if (mine === asked) {
      body.replaceChildren(el("p", { class: "problem", text: `not shown: ${/** @type {Error} */ (error).message}` }));
    }
  }
}

/** @param {Trace} trace @returns {Node[]} */
function draw(trace) {
  const spans = [trace.gateway, trace.prefill, trace.decode].filter((span) => span !== null);
  const parts = [];
  const outcome = trace.gateway.outcome ?? NONE;
  parts.push(el("p", { text: `status ${trace.status}, ${outcome}` }));
  for (const span of spans) parts.push(drawSpan(span, lengthOf(spans)));
  if (trace.missing.length) {
    parts.push(el("p", { class: "problem", text: `no trace any more from: ${trace.missing.join(", ")}` }));
  }
  parts.push(el("h3", { text: "Why these workers" }));
  const reasons = trace.placement.length ? trace.placement : ["as configured: nothing was weighed"];
  parts.push(el("ul", {}, ...reasons.map((text) => el("li", { text }))));
  parts.push(el("h3", { text: "Facts" }), drawFacts(spans));
  return parts;
}

/** @param {Span[]} spans @returns {number} seconds of the longest one */
function lengthOf(spans) {
  return Math.max(1e-6, ...spans.map((span) => lastOf(span) - zeroOf(span)));
}

/** @param {Span} span */
function instantsOf(span) {
  return { ...span.peer_stamps, ...span.stamps };
}

/** @param {Span} span @returns {number} */
function zeroOf(span) {
  return Math.min(...Object.values(instantsOf(span)));
}

/** @param {Span} span @returns {number} */
function lastOf(span) {
  return Math.max(...Object.values(instantsOf(span)));
}

/**
 * Each process has a clock of its own: a span begins at its own zero.
 * @param {Span} span @param {number} length @returns {HTMLElement}
 */
function drawSpan(span, length) {
  const instants = instantsOf(span);
  const zero = zeroOf(span);
  const rows = [];
  for (const [name, from, to, color] of STAGES) {
    if (span.role === "gateway" ? !OF_GATEWAY.has(name) : name === "admit" || name === "to first token") continue;
    const begin = instants[from];
    const end = instants[to];
    if (begin === undefined || end === undefined || end < begin) continue;
    const bar = el("i", { class: `bar ${color}` });
    bar.style.marginInlineStart = `${(100 * (begin - zero)) / length}%`;
    bar.style.width = `${Math.max(0.4, (100 * (end - begin)) / length)}%`;
    rows.push(
      el(
        "tr",
        {},
        el("th", { text: name, attrs: { scope: "row" } }),
        el("td", { class: "lane", attrs: { "aria-hidden": "true" } }, bar),
        el("td", { class: "number", text: `at ${duration(begin - zero)}` }),
        el("td", { class: "number", text: duration(end - begin) }),
      ),
    );
  }
  const title = span.role === "gateway" ? "gateway" : `${span.role} worker ${span.worker}`;
  const heads = ["stage", "", "begins", "takes"].map((text) => el("th", { text, attrs: { scope: "col" } }));
  return el(
    "table",
    { class: "waterfall" },
    el("caption", { text: title }),
    el("thead", { class: "hidden" }, el("tr", {}, ...heads)),
    el("tbody", {}, ...(rows.length ? rows : [el("tr", {}, el("td", { text: "no stage was recorded" }))])),
  );
}

/** @param {Span[]} spans @returns {HTMLElement} */
function drawFacts(spans) {
  const heads = ["", ...spans.map((span) => span.role)].map((text) => el("th", { text, attrs: { scope: "col" } }));
  const names = FACTS.filter((name) => spans.some((span) => span[name]));
  const lists = ["fallbacks", "reroutes", "encodings", "moves"].filter((name) =>
    spans.some((span) => /** @type {unknown[]} */ (span[name] ?? []).length),
  );
  const rows = [...names, ...lists].map((name) =>
    el(
      "tr",
      {},
      el("th", { text: name.replace(/^num_/, "").replace(/_s$/, "").replaceAll("_", " "), attrs: { scope: "row" } }),
      ...spans.map((span) => el("td", { text: factText(name, span[name]) })),
    ),
  );
  const table = el("table", { class: "facts" }, el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...rows));
  return el("div", { class: "table", attrs: { tabindex: "0", role: "region", "aria-label": "Facts" } }, table);
}

/** @param {string} name @param {unknown} value @returns {string} */
function factText(name, value) {
  if (value === null || value === undefined || value === "") return NONE;
  if (name === "num_bytes") return bytes(Number(value));
  if (name.endsWith("_s")) return duration(Number(value));
  return Array.isArray(value) ? value.join("; ") : String(value);
}
