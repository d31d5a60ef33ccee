// Alerts as the gateway evaluates them; what changes is read out.

import { byId, el, setText } from "./dom.js";
import { clock } from "./format.js";
import { drawSoon } from "./frames.js";
import { figuresOfPair } from "./transfers.js";

/** @typedef {{alert: string, state: string, severity: string, labels: Record<string, string>, summary: string, starts_at: number, runbook_url: string}} Alert */

let shown = "";
/** @type {Map<string, string>} */
let states = new Map();
/** @type {{alert: Alert, element: HTMLElement}[]} what the pair of each shown alert takes now */
let figures = [];
/** @type {Record<string, any> | null} */
let report = null;

/** @param {{alerts: Alert[], not_evaluated: Record<string, string>, num_dropped: number}} list */
export function showAlerts(list) {
  // Figures of alerts are not drawn here: their change would take the focus from a link.
  const text = JSON.stringify(list, (name, value) => (name === "value" ? undefined : value));
  if (text === shown) return;
  shown = text;
  drawSoon("alerts", () => draw(list));
}

/** @param {Record<string, any>} latest report of links and transfers */
export function showAlertFigures(latest) {
  report = latest;
  drawSoon("alert-figures", drawFigures);
}

/** @param {Alert[]} alerts @returns {Set<string>} the firing ones' pairs of workers, in both directions */
export function firingPairs(alerts) {
  const pairs = alerts
    .filter((alert) => alert.state === "firing" && alert.labels.from && alert.labels.to)
    .flatMap(({ labels }) => [`${labels.from}\n${labels.to}`, `${labels.to}\n${labels.from}`]);
  return new Set(pairs);
}

function drawFigures() {
  if (!report) return;
  for (const { alert, element } of figures) setText(element, figuresOfPair(report, alert.labels.from, alert.labels.to));
}

/** @param {{alerts: Alert[], not_evaluated: Record<string, string>, num_dropped: number}} list */
function draw(list) {
  figures = list.alerts
    .filter((alert) => alert.state !== "resolved" && alert.labels.from && alert.labels.to)
    .map((alert) => ({ alert, element: el("span", { class: "pair-figures" }) }));
  const figuresOf = new Map(figures.map(({ alert, element }) => [alert, element]));
  const rows = list.alerts.map((alert) =>
    el(
      "div",
      { class: `alert ${alert.state === "resolved" ? "resolved" : alert.severity}` },
      el("b", { text: `${alert.alert} (${alert.state === "firing" ? alert.severity : alert.state})` }),
      el("span", { text: alert.summary }),
      el("small", { text: `${labelsText(alert)} since ${clock(alert.starts_at)}` }),
      runbook(alert),
      figuresOf.get(alert) ?? "",
    ),
  );
  if (!rows.length) rows.push(el("p", { class: "empty", text: "no alert is pending or firing" }));
  const skipped = Object.entries(list.not_evaluated);
  if (skipped.length || list.num_dropped) {
    const reasons = skipped.map(([name, why]) => el("li", { text: `${name}: ${why}` }));
    if (list.num_dropped) reasons.push(el("li", { text: `${list.num_dropped} sets of labels are not followed: too many` }));
    rows.push(
      el("details", { class: "figures" }, el("summary", { text: `${reasons.length} not evaluated` }), el("ul", {}, ...reasons)),
    );
  }
  byId("alerts-list").replaceChildren(...rows);
  drawFigures();
  announce(list.alerts);
}

/** @param {Alert} alert @returns {string} */
function labelsText(alert) {
  return Object.entries(alert.labels)
    .map(([name, value]) => `${name}=${value}`)
    .join(", ");
}

/** @param {Alert} alert @returns {HTMLElement} where the operator serves the documentation, else this gateway's own page */
function runbook(alert) {
  const href = /^https?:\/\//.test(alert.runbook_url) ? alert.runbook_url : `runbook.html#${alert.alert.toLowerCase()}`;
  return el("a", { text: "what to do", attrs: { href, rel: "noreferrer noopener", target: "_blank" } });
}

/** @param {Alert[]} alerts */
function announce(alerts) {
  const now = new Map(alerts.map((alert) => [`${alert.alert} ${labelsText(alert)}`, alert.state]));
  const news = [...now].filter(([key, state]) => states.get(key) !== state && state !== "pending").map(([key, state]) => `${key} ${state}`);
  if (news.length) setText(byId("alerts-news"), news.slice(0, 3).join("; "));
  states = now;
}
