// The store's tiers, by tier and by worker; what is cached; blocks by medium.

import { byId, setText } from "./dom.js";
import { bytes, duration, NONE, number, percent } from "./format.js";
import { drawSoon } from "./frames.js";
import { Table } from "./tables.js";

/** @typedef {Record<string, any>} Data */
/** @typedef {import("./tables.js").Column<Data>} Column */

const FULL_SHARE = 0.9;

/** @type {Column[]} what a tier of one worker and of all have in common */
const FIGURES = [
  { head: "found, last min", isNumber: true, text: (row) => number(row.recent.num_hits) },
  { head: "not found", isNumber: true, text: (row) => number(row.recent.num_misses) },
  { head: "hit rate", isNumber: true, text: (row) => percent(row.recent.hit_share) },
  { head: "since start", isNumber: true, text: (row) => percent(row.total.hit_share) },
  { head: "read, last min", isNumber: true, text: (row) => bytes(row.recent.read_bytes) },
  { head: "written", isNumber: true, text: (row) => bytes(row.recent.written_bytes) },
];
/** @type {Column} */
const USED = {
  head: "used", isNumber: true, text: usedText,
  className: (row) => (row.capacity_bytes && row.used_bytes / row.capacity_bytes > FULL_SHARE ? "number full" : "number"),
};

const tiers = put(
  "store-tiers",
  new Table(
    "Tiers of the store",
    [
      { head: "tier", text: (/** @type {Data} */ row) => row.tier },
      {
        head: "workers", isNumber: true,
        text: (row) => (row.num_unavailable ? `${number(row.num_workers)}, ${number(row.num_unavailable)} cannot reach it` : number(row.num_workers)),
        className: (row) => (row.num_unavailable ? "number bad" : "number"),
      },
      USED,
      ...FIGURES,
    ],
    (row) => row.tier,
  ),
);
const workerTiers = put(
  "store-worker-tiers",
  new Table(
    "Tiers of each worker",
    [
      { head: "worker", text: (/** @type {Data} */ row) => row.worker },
      { head: "tier", text: (row) => (row.is_available ? row.tier : `${row.tier}: not reached`), className: (row) => (row.is_available ? "" : "bad") },
      USED,
      ...FIGURES,
    ],
    (row) => `${row.worker}\n${row.tier}`,
  ),
);
const found = put(
  "store-models",
  new Table(
    "Cached share by model",
    [
      { head: "model", text: (/** @type {Data} */ row) => row.model },
      { head: "cached", isNumber: true, text: (row) => percent(row.found_share) },
    ],
    (row) => row.model,
  ),
);
const media = put(
  "store-media",
  new Table(
    "Blocks by medium",
    [
      { head: "medium", text: (/** @type {Data} */ row) => row.medium },
      { head: "blocks", isNumber: true, text: (row) => number(row.blocks) },
      { head: "workers", isNumber: true, text: (row) => number(row.workers) },
    ],
    (row) => row.medium,
  ),
);

/** @param {string} place @param {Table<Data>} table @returns {Table<Data>} */
function put(place, table) {
  byId(place).append(table.element);
  return table;
}

/** @param {Data} row @returns {string} */
function usedText(row) {
  if (!row.capacity_bytes) return row.used_bytes ? bytes(row.used_bytes) : NONE;
  return `${bytes(row.used_bytes)} of ${bytes(row.capacity_bytes)}, ${percent(row.used_bytes / row.capacity_bytes)}`;
}

/** @param {Data} store @returns {string} */
function promptsText(store) {
  const { total_prompts: total, recent_prompts: recent } = store;
  if (total.found_share === null) return "";
  const num = recent.num_found + recent.num_missing;
  return `Prompts that were looked for in the store in the last minute: ${number(num)}, found there: ${percent(recent.found_share)} (since the workers started: ${percent(total.found_share)}).`;
}

/** @param {Data} transfers */
export function showTiers(transfers) {
  drawSoon("tiers", () => {
    const { store } = transfers;
    tiers.show(store.tiers);
    setText(byId("store-prompts"), promptsText(store));
    const place = /** @type {HTMLDetailsElement} */ (byId("store-worker-tiers").parentElement);
    if (place.open) workerTiers.show(store.worker_tiers);
    place.ontoggle = () => place.open && workerTiers.show(store.worker_tiers);
  });
}

/** @param {Data} tick */
export function showStore(tick) {
  found.show(tick.models);
  /** @type {Map<string, {medium: string, blocks: number, workers: number}>} */
  const byMedium = new Map();
  const loads = { num: 0, tokens: 0, seconds: 0 };
  for (const worker of tick.workers.workers) {
    const seen = new Set();
    for (const events of [worker.kv_events, worker.store_events]) {
      for (const block of events?.blocks ?? []) {
        const medium = byMedium.get(block.medium) ?? { medium: block.medium, blocks: 0, workers: 0 };
        medium.blocks += block.num_blocks;
        if (!seen.has(block.medium)) medium.workers += 1;
        seen.add(block.medium);
        byMedium.set(block.medium, medium);
      }
    }
    const own = worker.load?.store_loads;
    if (own) {
      loads.num += own.num_loads;
      loads.tokens += own.num_tokens;
      loads.seconds += own.seconds;
    }
  }
  media.show([...byMedium.values()]);
  setText(
    byId("store-loads"),
    loads.num
      ? `Loaded from the store since the workers started: ${number(loads.num)} times, ${number(loads.tokens)} tokens, ${duration(loads.seconds / loads.num)} each.`
      : "Nothing was loaded from the store since the workers started, or they have none.",
  );
}
