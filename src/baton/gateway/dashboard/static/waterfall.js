// One request, from /debug/requests/ID: where its time went, which way it took, and why.

import { byId, el } from "./dom.js";
import { bytes, duration, NONE } from "./format.js";

/**
 * @typedef {Record<string, any>} Span
 * @typedef {{name: string, start_s: number, end_s: number, is_part: boolean}} Stage
 * @typedef {{name: string, worker: string, start_s: number, end_s: number, stages: Stage[], clock: {error_s: number} | null}} Lane
 * @typedef {{part: string, predicted_s: number, actual_s: number | null}} Compared
 * @typedef {{num: number, mean_s: number, p50_s: number, p99_s: number, max_s: number}} Gaps
 * @typedef {{status: number, placement: string[], gateway: Span, decode: Span | null, prefill: Span | null, missing: string[], timeline: Lane[], compared: Compared[], token_gaps: Gaps | null, distance: string | null, kept: string | null}} Trace
 */

const COLORS = new Map([
  ["prefill", "c-blue"], ["transfer", "c-orange"], ["exposed transfer", "c-red"], ["first step", "c-sky"],
  ["answer", "c-green"], ["decode", "c-green"], ["wait", "c-sky"], ["place", "c-purple"], ["reserve", "c-purple"],
]);
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
  const spans = /** @type {Span[]} */ ([trace.gateway, trace.prefill, trace.decode].filter((span) => span !== null));
  const distance = trace.distance ? `, ${trace.distance.replaceAll("_", " ")}` : "";
  const kept = trace.kept ? `; kept: ${trace.kept}` : "";
  const parts = [el("p", { text: `status ${trace.status}, ${trace.gateway.outcome ?? NONE}${distance}${kept}` })];
  const ends = trace.timeline.map((lane) => lane.end_s);
  const begins = trace.timeline.map((lane) => lane.start_s);
  const zero = Math.min(0, ...begins);
  const length = Math.max(1e-6, ...ends) - zero;
  for (const lane of trace.timeline) parts.push(drawLane(lane, zero, length));
  if (trace.missing.length) {
    parts.push(el("p", { class: "problem", text: `no trace any more from: ${trace.missing.join(", ")}` }));
  }
  if (trace.token_gaps) {
    const { num, p50_s, p99_s, max_s } = trace.token_gaps;
    parts.push(el("p", { text: `between tokens (${num}): p50 ${duration(p50_s)}, p99 ${duration(p99_s)}, longest ${duration(max_s)}` }));
  }
  parts.push(el("h3", { text: "Why these workers" }));
  const reasons = trace.placement.length ? trace.placement : ["as configured: nothing was weighed"];
  parts.push(el("ul", {}, ...reasons.map((text) => el("li", { text }))));
  if (trace.compared.length) parts.push(el("h3", { text: "Predicted and actual" }), drawCompared(trace.compared));
  parts.push(el("h3", { text: "Facts" }), drawFacts(spans));
  return parts;
}

/**
 * All lanes have one time axis, the gateway's clock.
 * @param {Lane} lane @param {number} zero @param {number} length @returns {HTMLElement}
 */
function drawLane(lane, zero, length) {
  const rows = lane.stages.map((stage) => {
    const bar = el("i", { class: `bar ${stage.is_part ? "part " : ""}${COLORS.get(stage.name) ?? "c-grey"}` });
    bar.style.marginInlineStart = `${(100 * (stage.start_s - zero)) / length}%`;
    bar.style.width = `${Math.max(0.4, (100 * (stage.end_s - stage.start_s)) / length)}%`;
    return el(
      "tr",
      {},
      el("th", { text: stage.name, attrs: { scope: "row" } }),
      el("td", { class: "lane", attrs: { "aria-hidden": "true" } }, bar),
      el("td", { class: "number", text: `at ${duration(stage.start_s)}` }),
      el("td", { class: "number", text: duration(stage.end_s - stage.start_s) }),
    );
  });
  const heads = ["stage", "", "begins", "takes"].map((text) => el("th", { text, attrs: { scope: "col" } }));
  const clock = lane.clock ? "" : ", its clock is not known: it begins where it was placed";
  const error = lane.clock?.error_s ? `, ± ${duration(lane.clock.error_s)}` : "";
  return el(
    "table",
    { class: "waterfall" },
    el("caption", { text: lane.name === "gateway" ? "gateway" : `${lane.name}: ${lane.worker}${clock}${error}` }),
    el("thead", { class: "hidden" }, el("tr", {}, ...heads)),
    el("tbody", {}, ...rows),
  );
}

/** @param {Compared[]} compared @returns {HTMLElement} */
function drawCompared(compared) {
  const heads = ["part", "predicted", "actual"].map((text) => el("th", { text, attrs: { scope: "col" } }));
  const rows = compared.map((row) =>
    el(
      "tr",
      {},
      el("th", { text: row.part, attrs: { scope: "row" } }),
      el("td", { text: duration(row.predicted_s) }),
      el("td", { text: duration(row.actual_s) }),
    ),
  );
  return el("table", { class: "facts" }, el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...rows));
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
