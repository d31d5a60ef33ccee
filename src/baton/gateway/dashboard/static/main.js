// The page's start: connects the stream of snapshots with the panels.

import { firingPairs, showAlertFigures, showAlerts } from "./alerts.js";
import { Chart } from "./charts.js";
import { byId, setAttr, setText } from "./dom.js";
import { openFeed } from "./feed.js";
import { bandwidth, duration, number } from "./format.js";
import { HeatMap } from "./heatmap.js";
import { showCosts, showTick } from "./panels.js";
import { Ring } from "./ring.js";
import { showTiers } from "./store.js";
import { Topology } from "./topology.js";
import { showTransfers, transferLayers, trafficOf } from "./transfers.js";

/** @typedef {Record<string, any>} Data */

/** @type {import("./charts.js").ChartSpec[]} */
const CHARTS = [
  {
    id: "ttft-parts", title: "Time to first token by part", format: duration, isStacked: true,
    help: "Means of streamed answers. Queue: waiting in the gateway. Prefill: the worker's queue included. Handoff: from there to the first token.",
    lines: [
      { field: "waited_s", label: "queue", color: "c-grey" },
      { field: "prefill_s", label: "prefill", color: "c-blue" },
      { field: "handoff_s", label: "handoff", color: "c-orange" },
    ],
  },
  {
    id: "ttft", title: "Time to first token", format: duration,
    help: "Streamed answers that ended in each second. p99 far above p50: a few requests wait, or take a slow link.",
    lines: [
      { field: "ttft_p50_s", label: "p50", color: "c-blue" },
      { field: "ttft_p99_s", label: "p99", color: "c-red", dash: [3, 3] },
    ],
  },
  {
    id: "tpot", title: "Time per output token", format: duration,
    help: "Median of the answers that ended in each second. It rises with answers per decode worker.",
    lines: [{ field: "tpot_p50_s", label: "p50", color: "c-green" }],
  },
  {
    id: "rate", title: "Requests per second", format: number,
    help: "All that ended, and those that ended with a server's error (5xx).",
    lines: [
      { field: "requests", label: "ended", color: "c-blue" },
      { field: "failed", label: "failed", color: "c-red", dash: [3, 3] },
    ],
  },
  {
    id: "inflight", title: "Requests in the gateway", format: number,
    help: "Waiting ones that grow while those in flight do not: the workers are full.",
    lines: [
      { field: "num_inflight", label: "in flight", color: "c-blue" },
      { field: "num_waiting", label: "waiting", color: "c-red", dash: [3, 3] },
    ],
  },
  {
    id: "tokens", title: "Tokens per second", format: number, isStacked: true,
    help: "Of answers that ended: prompt tokens that were computed, those that were cached, tokens of answers.",
    lines: [
      { field: "computed_tokens", label: "computed", color: "c-blue" },
      { field: "cached_tokens", label: "cached", color: "c-green" },
      { field: "answer_tokens", label: "answers", color: "c-purple" },
    ],
  },
];
const STATES = {
  connecting: "connecting", live: "live", late: "no news for some seconds", lost: "connection lost; trying again", paused: "paused",
};

const charts = CHARTS.map((spec) => new Chart(spec, byId("charts")));
const topology = new Topology();
const heat = new HeatMap();
const span = /** @type {HTMLSelectElement} */ (byId("span"));
const pause = byId("pause");
/** @type {Ring | null} */
let ring = null;
let isPaused = false;

function drawCharts() {
  if (ring) for (const chart of charts) chart.update(ring, Number(span.value));
}

/** @param {keyof typeof STATES} state */
function showState(state) {
  const shown = isPaused ? "paused" : state;
  setText(byId("state"), STATES[shown]);
  setAttr(byId("state"), "class", shown);
}

const feed = openFeed(
  {
    /** @param {Data} history */
    history(history) {
      if (!ring || ring.fields.join() !== history.fields.join()) ring = new Ring(history.fields);
      for (const point of history.points) ring.add(point);
      drawCharts();
    },
    /** @param {Data} tick */
    tick(tick) {
      if (!ring) return;
      ring.add(tick.point);
      setText(byId("version"), tick.version);
      tick.point = Object.fromEntries(ring.fields.map((field, i) => [field, tick.point[i]]));
      drawCharts();
      topology.update(tick.workers.workers, tick.num_hidden);
      showTick(tick);
      showAlerts(tick.alerts);
      const alerting = firingPairs(tick.alerts.alerts);
      topology.setAlerting(alerting);
      heat.setAlerting(alerting);
    },
    /** @param {Data} report */
    links(report) {
      showCosts(report.links);
      showTransfers(report.transfers);
      showTiers(report.transfers);
      showAlertFigures(report);
      const traffic = trafficOf(report.transfers);
      const links = report.links.models.flatMap((/** @type {Data} */ model) => model.links);
      topology.setLinks(links.map((/** @type {Data} */ link) => ({ ...link, traffic: traffic.get(`${link.from}\n${link.to}`) ?? 0 })));
      heat.update([
        ...transferLayers(report.transfers),
        {
          name: "measured bandwidth", format: bandwidth,
          cells: links.map((/** @type {Data} */ link) => ({ from: link.from, to: link.to, value: link.bytes_per_s, note: link.transport })),
        },
        {
          name: "measured latency", format: duration,
          cells: links.map((/** @type {Data} */ link) => ({ from: link.from, to: link.to, value: link.latency_s, note: link.transport })),
        },
      ]);
    },
  },
  showState,
);

span.addEventListener("change", drawCharts);
pause.addEventListener("click", () => {
  isPaused = !isPaused;
  setAttr(pause, "aria-pressed", String(isPaused));
  setText(pause, isPaused ? "Resume" : "Pause");
  if (isPaused) feed.pause();
  else feed.resume();
  showState("connecting");
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const chart of charts) chart.restyle();
  drawCharts();
});
