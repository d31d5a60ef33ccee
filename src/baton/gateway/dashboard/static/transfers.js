// What handoffs took in the last minute: by distance and transport, and by pair for the heat map.

import { byId, el, setText } from "./dom.js";
import { bandwidth, bytes, duration, number, percent } from "./format.js";
import { drawSoon } from "./frames.js";
import { Table } from "./tables.js";

/** @typedef {Record<string, any>} Data */

const DISTANCES = ["same_device", "same_host", "same_rack", "same_zone", "cross_zone", "unknown"];
const MOST_PROBLEMS = 20;

const distances = new Table(
  "Transfers by distance and transport",
  [
    { head: "distance", text: (/** @type {Data} */ row) => row.distance.replaceAll("_", " ") },
    { head: "transport", text: (row) => row.transport },
    { head: "pairs", isNumber: true, text: (row) => number(row.num_pairs) },
    { head: "handoffs", isNumber: true, text: (row) => number(row.num) },
    { head: "KV", isNumber: true, text: (row) => bytes(row.num_bytes) },
    { head: "time p50", isNumber: true, text: (row) => duration(row.transfer_p50_s) },
    { head: "p99", isNumber: true, text: (row) => duration(row.transfer_p99_s) },
    { head: "bandwidth", isNumber: true, text: (row) => bandwidth(row.bytes_per_s_p50) },
    { head: "exposed", isNumber: true, text: (row) => percent(row.exposed_share_p50) },
  ],
  (row) => `${row.distance}\n${row.transport}`,
);
const problems = el("ul", { class: "problem" });
const rest = el("p", { class: "help" });
byId("distance-transfers").append(distances.element, problems, rest);

/** @param {Data} link @returns {[string, string]} sender and receiver, as alerts name them: what is read comes from the peer */
function endsOf(link) {
  return link.operation === "READ" ? [link.peer, link.worker] : [link.worker, link.peer];
}

/** @param {Data} transfers */
export function showTransfers(transfers) {
  drawSoon("distances", () => {
    const rank = (/** @type {Data} */ row) => DISTANCES.indexOf(row.distance);
    distances.show([...transfers.distances].sort((a, b) => rank(a) - rank(b)));
    const mismatches = transfers.pairs
      .filter((/** @type {Data} */ pair) => pair.num_mismatches)
      .map((/** @type {Data} */ pair) => `${pair.prefill} → ${pair.decode}: ${number(pair.num_mismatches)} handoffs by ${pair.transport} where ${pair.expected_transport} was expected`);
    const drifts = transfers.drifts
      .filter((/** @type {Data} */ link) => link.state === "drifted")
      .map((/** @type {Data} */ link) => `${endsOf(link).join(" → ")} (${link.transport} ${link.operation}): ${number(link.ratio)} times its time at first`);
    problems.replaceChildren(...[...mismatches, ...drifts].slice(0, MOST_PROBLEMS).map((text) => el("li", { text })));
    setText(rest, transfers.num_left_out ? `${transfers.num_left_out} pairs with less traffic are not listed, and count by distance.` : "");
  });
}

/** @param {Data} transfers @returns {import("./heatmap.js").Layer[]} */
export function transferLayers(transfers) {
  const senders = new Set(transfers.pairs.map((/** @type {Data} */ pair) => pair.prefill));
  const used = addByPair(transfers.pairs.filter((/** @type {Data} */ pair) => pair.num));
  const layer = (/** @type {string} */ name, /** @type {string} */ field, /** @type {(value: number) => string} */ format) => ({
    name,
    format,
    cells: used
      .filter((/** @type {Data} */ pair) => pair[field] !== null)
      .map((/** @type {Data} */ pair) => ({ from: pair.prefill, to: pair.decode, value: pair[field], note: `${pair.transport}, ${pair.distance.replaceAll("_", " ")}` })),
  });
  return [
    layer("handoffs in the last minute", "num", number),
    layer("KV in the last minute", "num_bytes", bytes),
    layer("time of a handoff, p50", "transfer_p50_s", duration),
    layer("time for each MiB, p50", "s_per_mib_p50", duration),
    {
      name: "drift of links",
      format: (value) => `×${number(value)}`,
      cells: transfers.drifts.map((/** @type {Data} */ link) => {
        const [from, to] = endsOf(link);
        return { from, to, value: link.ratio, note: `${link.transport} ${link.operation}, ${link.state}` };
      }),
    },
    {
      name: "lost TCP segments",
      format: percent,
      // What receivers of KV send back is little, and would double the grid.
      cells: transfers.losses
        .filter((/** @type {Data} */ link) => senders.has(link.sender))
        .map((/** @type {Data} */ link) => ({ from: link.sender, to: link.receiver, value: link.lost_share, note: `of ${number(link.num)} over ${link.transport}` })),
    },
  ];
}

/**
 * What handoffs from one worker to another took in the last minute, and what was measured of that direction.
 * @param {Data} report @param {string} from @param {string} to @returns {string}
 */
export function figuresOfPair(report, from, to) {
  const [pair] = addByPair(report.transfers.pairs.filter((/** @type {Data} */ each) => each.num && each.prefill === from && each.decode === to));
  const links = report.links.models.flatMap((/** @type {Data} */ model) => model.links).filter((/** @type {Data} */ link) => link.from === from && link.to === to);
  const parts = links.slice(0, 2).map((/** @type {Data} */ link) => `${link.transport} measured: ${duration(link.latency_s)} latency, ${bandwidth(link.bytes_per_s)}`);
  const loss = report.transfers.losses.find((/** @type {Data} */ link) => link.sender === from && link.receiver === to);
  if (loss) parts.push(`${percent(loss.lost_share)} of ${number(loss.num)} TCP segments lost in the last minute`);
  if (pair) parts.unshift(`last minute: ${number(pair.num)} handoffs, p50 ${duration(pair.transfer_p50_s)}, ${duration(pair.s_per_mib_p50)} for each MiB`);
  return parts.length ? `${from} → ${to}, ${parts.join(" · ")}` : "";
}

/**
 * Of several transports or modes of a pair: the sums, and the times of the one with the most bytes.
 * @param {Data[]} pairs most bytes first @returns {Data[]}
 */
function addByPair(pairs) {
  /** @type {Map<string, Data>} */
  const sums = new Map();
  for (const pair of pairs) {
    const key = `${pair.prefill}\n${pair.decode}`;
    const sum = sums.get(key);
    if (sum) {
      sum.num += pair.num;
      sum.num_bytes += pair.num_bytes;
    } else {
      sums.set(key, { ...pair });
    }
  }
  return [...sums.values()];
}

/** @param {Data} transfers @returns {Map<string, number>} bytes in the last minute, by pair */
export function trafficOf(transfers) {
  return new Map(addByPair(transfers.pairs).map((pair) => [`${pair.prefill}\n${pair.decode}`, pair.num_bytes]));
}
