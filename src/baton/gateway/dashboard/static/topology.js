// Workers by rack and host, and the busiest links between them. A worker that is picked shows its
// own links.

import { byId, cssColor, el, setAttr, setText } from "./dom.js";
import { bandwidth, duration, NONE, percent } from "./format.js";
import { drawSoon } from "./frames.js";
import { Table } from "./tables.js";

/** @typedef {Record<string, any>} Worker as in /debug/workers */
/** @typedef {{from: string, to: string, transport: string, latency_s: number, bytes_per_s: number, traffic: number}} Link */

const MOST_LINES = 40;
const UNKNOWN_PLACE = "zone and rack not reported";
const LINE_COLORS = ["c-blue", "c-orange", "c-green", "c-purple", "c-sky", "c-red"];
const ROLES = { prefill: "P", decode: "D", both: "B" };
const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };

/** @param {Worker} worker @returns {string} */
export function nameOf(worker) {
  return worker.worker ?? worker.url;
}

/** @param {Worker} worker @returns {string} several workers may have one name: a worker's last and next life */
export function keyOf(worker) {
  return `${nameOf(worker)}\n${worker.url}`;
}

export class Topology {
  constructor() {
    this.map = byId("topology-map");
    this.canvas = /** @type {HTMLCanvasElement} */ (byId("topology-lines"));
    this.detail = byId("worker-detail");
    this.legend = byId("link-legend");
    /** @type {Map<string, {box: HTMLElement, worker: Worker, parts: Record<string, HTMLElement>}>} by `keyOf` */
    this.boxes = new Map();
    /** @type {Link[]} */
    this.links = [];
    /** @type {Set<string>} pairs of workers for which an alert fires */
    this.alerting = new Set();
    /** @type {string | null} */
    this.places = null;
    this.picked = ""; // a key
    this.links_of = new Table(
      "Links of the worker",
      [
        { head: "to", text: (/** @type {Link} */ link) => link.to },
        { head: "from", text: (link) => link.from },
        { head: "transport", text: (link) => link.transport },
        { head: "latency", isNumber: true, text: (link) => duration(link.latency_s) },
        { head: "bandwidth", isNumber: true, text: (link) => bandwidth(link.bytes_per_s) },
        { head: "KV in the last minute", isNumber: true, text: (link) => (link.traffic ? bandwidth(link.traffic / 60) : NONE) },
      ],
      (link) => `${link.from}\n${link.to}`,
    );
    this.map.addEventListener("keydown", (event) => this.#onKey(event));
    this.map.addEventListener("click", (event) => {
      const box = /** @type {HTMLElement} */ (event.target).closest(".worker");
      if (box) this.#pick(/** @type {HTMLElement} */ (box).dataset.key ?? "");
    });
    new ResizeObserver(() => drawSoon("lines", () => this.#drawLines())).observe(this.map);
  }

  /** @param {Worker[]} workers @param {number} numHidden */
  update(workers, numHidden) {
    drawSoon("topology", () => {
      const places = workers.map((worker) => `${keyOf(worker)}\n${worker.topology ?? ""}`).join("\n");
      if (places !== this.places) {
        this.places = places;
        this.#build(workers);
        drawSoon("lines", () => this.#drawLines());
      }
      for (const worker of workers) this.#show(worker);
      const rest = numHidden ? `; ${numHidden} more are not shown` : "";
      setText(byId("num-workers"), `${workers.length} ${workers.length === 1 ? "worker" : "workers"}${rest}`);
      this.#showDetail();
    });
  }

  /** @param {Link[]} links */
  setLinks(links) {
    this.links = links;
    drawSoon("lines", () => this.#drawLines());
  }

  /** @param {Set<string>} pairs */
  setAlerting(pairs) {
    if ([...pairs].join() === [...this.alerting].join()) return;
    this.alerting = pairs;
    drawSoon("lines", () => this.#drawLines());
  }

  /** @param {Worker[]} workers */
  #build(workers) {
    this.boxes.clear();
    /** @type {Map<string, Map<string, HTMLElement[]>>} */
    const racks = new Map();
    for (const worker of workers) {
      const [zone, rack, host] = (worker.topology ?? "").split("/");
      const place = [zone, rack].filter(Boolean).join(" / ") || UNKNOWN_PLACE;
      const hosts = racks.get(place) ?? new Map();
      racks.set(place, hosts);
      const boxes = hosts.get(host ?? "") ?? [];
      hosts.set(host ?? "", boxes);
      boxes.push(this.#makeBox(worker));
    }
    const shown = [...racks].map(([place, hosts]) =>
      el(
        "section",
        { class: "rack", attrs: { "aria-label": place } },
        el("h3", { text: place }),
        el(
          "div",
          { class: "hosts" },
          ...[...hosts].map(([host, boxes]) =>
            el("div", { class: "host" }, el("h4", { text: host || "host not reported" }), el("div", { class: "boxes" }, ...boxes)),
          ),
        ),
      ),
    );
    const none = el("p", { class: "empty", text: "this gateway knows no worker yet" });
    this.map.replaceChildren(...(shown.length ? shown : [none]));
    if (!this.boxes.has(this.picked)) this.picked = "";
    const first = this.map.querySelector(".worker");
    if (first) first.setAttribute("tabindex", "0");
  }

  /** @param {Worker} worker @returns {HTMLElement} */
  #makeBox(worker) {
    const name = nameOf(worker);
    const parts = {
      role: el("b", { text: ROLES[/** @type {keyof ROLES} */ (worker.role)] ?? "?" }),
      name: el("span", { class: "name", text: name }),
      load: el("span", { class: "load" }),
      fill: el("i", { class: "fill" }),
    };
    const box = el(
      "button",
      { class: "worker", attrs: { type: "button", tabindex: "-1" } },
      parts.role,
      parts.name,
      parts.load,
      el("span", { class: "gauge" }, parts.fill),
    );
    box.dataset.key = keyOf(worker);
    this.boxes.set(keyOf(worker), { box, worker, parts });
    return box;
  }

  /** @param {Worker} worker */
  #show(worker) {
    const kept = this.boxes.get(keyOf(worker));
    if (!kept) return;
    kept.worker = worker;
    const standing = standingOf(worker);
    const used = usedShare(worker);
    const running = worker.given ? worker.given.num_prefills + worker.given.num_decodes : 0;
    setText(kept.parts.load, standing === "healthy" ? String(running) : standing);
    const scale = `scaleX(${(used ?? 0).toFixed(2)})`;
    if (kept.parts.fill.style.transform !== scale) kept.parts.fill.style.transform = scale;
    const isWell = standing === "healthy" || standing === "recovering";
    const className = `worker ${isWell ? "ok" : standing === "draining" || standing === "pending" ? "warn" : "bad"}`;
    const picked = keyOf(worker) === this.picked;
    setAttr(kept.box, "class", picked ? `${className} picked` : className);
    setAttr(kept.box, "aria-pressed", String(picked));
    setAttr(
      kept.box,
      "aria-label",
      `${nameOf(worker)}, ${worker.role}, ${standing}, ${running} requests, ${percent(used)} of KV blocks used`,
    );
  }

  /** @param {KeyboardEvent} event */
  #onKey(event) {
    const step = STEPS[/** @type {keyof STEPS} */ (event.key)];
    const boxes = /** @type {HTMLElement[]} */ ([...this.map.querySelectorAll(".worker")]);
    const at = boxes.indexOf(/** @type {HTMLElement} */ (document.activeElement));
    if (event.key === "Escape") this.#pick("");
    if (!step || at < 0) return;
    event.preventDefault();
    const next = boxes[(at + step + boxes.length) % boxes.length];
    boxes[at].setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
  }

  /** @param {string} key picked again: not picked any more */
  #pick(key) {
    this.picked = key === this.picked ? "" : key;
    drawSoon("topology", () => {
      for (const { worker } of this.boxes.values()) this.#show(worker);
      this.#showDetail();
    });
    drawSoon("lines", () => this.#drawLines());
  }

  #showDetail() {
    const kept = this.boxes.get(this.picked);
    this.detail.hidden = !kept;
    if (!kept) return;
    const { worker } = kept;
    setText(byId("worker-name"), nameOf(worker));
    const { given, load } = worker;
    const facts = [
      `${worker.role}, ${standingOf(worker)}${worker.reason ? `: ${worker.reason}` : ""}`,
      `at ${worker.url}, ${worker.topology ?? UNKNOWN_PLACE}`,
      given
        ? `${given.num_prefills} prompts to compute (the next one begins in ${duration(given.queue_s)}), ${given.num_decodes} answers`
        : "no request of this gateway yet",
      load
        ? `${load.num_blocks - load.num_free_blocks} of ${load.num_blocks} KV blocks used, ${load.num_waiting} requests in its own queue`
        : "its load is not reported",
    ];
    setText(byId("worker-facts"), facts.join(" · "));
    this.links_of.show(this.#linksOf(worker).slice(0, 100));
    const place = byId("worker-links");
    if (place.firstElementChild !== this.links_of.element) place.replaceChildren(this.links_of.element);
  }

  #drawLines() {
    const { map, canvas } = this;
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = [map.clientWidth, map.scrollHeight];
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    const context = canvas.getContext("2d");
    if (!context) return;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    const shown = this.#linksToDraw();
    const transports = [...new Set(this.links.map((link) => link.transport))].sort();
    const most = Math.max(1, ...shown.map((link) => link.traffic));
    const colors = transports.map((_, i) => cssColor(LINE_COLORS[i % LINE_COLORS.length]));
    const origin = map.getBoundingClientRect();
    const boxOf = new Map([...this.boxes.values()].map(({ worker, box }) => [nameOf(worker), box]));
    for (const link of shown) {
      const [from, to] = [link.from, link.to].map((name) => boxOf.get(name)?.getBoundingClientRect());
      if (!from || !to || link.from === link.to) continue;
      const isAlerting = this.#isAlerting(link);
      context.strokeStyle = isAlerting ? cssColor("bad") : colors[transports.indexOf(link.transport)];
      context.globalAlpha = isAlerting ? 1 : this.picked ? 0.9 : 0.3 + (0.4 * link.traffic) / most;
      context.lineWidth = isAlerting ? 3 : 1 + (1.5 * link.traffic) / most;
      context.setLineDash(isAlerting ? [7, 4] : []);
      const [x1, y1] = [from.left + from.width / 2 - origin.left, from.top + from.height / 2 - origin.top];
      const [x2, y2] = [to.left + to.width / 2 - origin.left, to.top + to.height / 2 - origin.top];
      const [bentX, bentY] = bend(x2 - x1, y2 - y1, from);
      context.beginPath();
      context.moveTo(x1, y1);
      context.quadraticCurveTo((x1 + x2) / 2 + bentX, (y1 + y2) / 2 + bentY, x2, y2);
      context.stroke();
    }
    const marks = transports.map((name, i) =>
      el("li", {}, el("i", { class: `mark ${LINE_COLORS[i % LINE_COLORS.length]}` }), name),
    );
    if (this.alerting.size) marks.push(el("li", {}, el("i", { class: "mark dashed bad" }), "an alert fires"));
    this.legend.replaceChildren(...marks);
  }

  /** @param {Link} link @returns {boolean} */
  #isAlerting(link) {
    return this.alerting.has(`${link.from}\n${link.to}`);
  }

  /** @returns {Link[]} */
  #linksToDraw() {
    const picked = this.boxes.get(this.picked);
    if (picked) return this.#linksOf(picked.worker).slice(0, 4 * MOST_LINES);
    const busiest = [...this.links].sort((a, b) => Number(this.#isAlerting(b)) - Number(this.#isAlerting(a)) || b.traffic - a.traffic);
    return busiest.slice(0, MOST_LINES);
  }

  /** @param {Worker} worker @returns {Link[]} */
  #linksOf(worker) {
    return this.links.filter((link) => link.from === nameOf(worker) || link.to === nameOf(worker));
  }
}

/** @param {Worker} worker @returns {string} */
export function standingOf(worker) {
  return worker.state === "up" ? worker.health : worker.state;
}

/** @param {Worker} worker @returns {number | null} */
export function usedShare(worker) {
  return worker.load ? 1 - worker.load.num_free_blocks / worker.load.num_blocks : null;
}

/**
 * How far a line's middle is pulled aside, twice. In a row or a column of workers it passes beside those between, which would hide it.
 * @param {number} dx @param {number} dy @param {DOMRect} box of a worker @returns {[number, number]}
 */
function bend(dx, dy, box) {
  if (dy === 0) return [0, -Math.sign(dx) * Math.max(box.height + 14, Math.abs(dx) / 8)];
  if (dx === 0) return [Math.sign(dy) * Math.max(box.width + 24, Math.abs(dy) / 8), 0];
  return [dy / 8, -dx / 8];
}
