// Charts over time, by uPlot, each with its latest values as text and a table of the same figures.

import { cssColor, el, setText } from "./dom.js";
import { clock, NONE } from "./format.js";
import { drawSoon } from "./frames.js";

/** @typedef {import("./ring.js").Ring} Ring */
/** @typedef {{field: string, label: string, color: string, dash?: number[]}} Line */
/**
 * `isStacked`: each line is drawn on top of those before it.
 * @typedef {{id: string, title: string, help: string, lines: Line[], format: (value: number) => string, isStacked?: boolean}} ChartSpec
 */

const HEIGHT = 160;
const TABLE_ROWS = 12;

export class Chart {
  /** @param {ChartSpec} spec @param {HTMLElement} parent */
  constructor(spec, parent) {
    this.spec = spec;
    /** @type {any} */
    this.plot = null;
    this.legend = el("ul", { class: "legend" });
    this.values = spec.lines.map((line) => {
      const value = el("b", { text: NONE });
      const mark = el("i", { class: `mark ${line.color}${line.dash ? " dashed" : ""}` });
      this.legend.append(el("li", {}, mark, `${line.label} `, value));
      return value;
    });
    this.canvas = el("div", { class: "plot", attrs: { "aria-hidden": "true" } });
    this.table = el("tbody");
    const heads = ["time", ...spec.lines.map((line) => line.label)];
    this.details = /** @type {HTMLDetailsElement} */ (
      el(
        "details",
        { class: "figures" },
        el("summary", { text: "figures" }),
        el(
          "table",
          {},
          el("caption", { class: "hidden", text: `${spec.title}: the latest points` }),
          el("thead", {}, el("tr", {}, ...heads.map((text) => el("th", { text, attrs: { scope: "col" } })))),
          this.table,
        ),
      )
    );
    const heading = el("h3", { text: spec.title, attrs: { id: `${spec.id}-title` } });
    parent.append(
      el(
        "section",
        { class: "chart", attrs: { "aria-labelledby": `${spec.id}-title` } },
        heading,
        el("p", { class: "help", text: spec.help }),
        this.legend,
        this.canvas,
        this.details,
      ),
    );
    this.width = 0;
    new ResizeObserver(() => {
      const width = Math.floor(this.canvas.clientWidth);
      if (width && width !== this.width) {
        this.width = width;
        this.plot?.setSize({ width, height: HEIGHT });
      }
    }).observe(this.canvas);
  }

  /** @param {Ring} ring @param {number} seconds */
  update(ring, seconds) {
    drawSoon(this.spec.id, () => this.#draw(ring, seconds));
  }

  /** Colors and fonts have changed: the next update builds the plot anew. */
  restyle() {
    this.plot?.destroy();
    this.plot = null;
  }

  /** @param {Ring} ring @param {number} seconds */
  #draw(ring, seconds) {
    const { lines, format, isStacked } = this.spec;
    const times = ring.column("at", seconds);
    const columns = lines.map((line) => ring.column(line.field, seconds));
    lines.forEach((_, i) => {
      const last = columns[i].length ? lastNumber(columns[i]) : NaN;
      setText(this.values[i], Number.isNaN(last) ? NONE : format(last));
    });
    if (this.details.open) this.#fill(times, columns);
    if (!this.width || !times.length) return;
    const shown = (isStacked ? stack(columns) : columns).map(withGaps);
    if (isStacked) shown.reverse();
    const data = [times, ...shown];
    if (this.plot) this.plot.setData(data);
    else this.plot = makePlot(this.spec, this.width, data, this.canvas);
  }

  /** @param {Float64Array} times @param {Float64Array[]} columns */
  #fill(times, columns) {
    const rows = [];
    for (let i = times.length - 1; i >= Math.max(0, times.length - TABLE_ROWS); i -= 1) {
      const cells = columns.map((column) =>
        el("td", { text: Number.isNaN(column[i]) ? NONE : this.spec.format(column[i]) }),
      );
      rows.push(el("tr", {}, el("th", { text: clock(times[i]), attrs: { scope: "row" } }), ...cells));
    }
    this.table.replaceChildren(...rows);
  }
}

/**
 * @param {ChartSpec} spec @param {number} width @param {any[]} data @param {HTMLElement} parent
 */
function makePlot(spec, width, data, parent) {
  const lines = spec.isStacked ? [...spec.lines].reverse() : spec.lines;
  const axis = { stroke: cssColor("soft"), grid: { stroke: cssColor("line"), width: 1 }, ticks: { show: false } };
  // uPlot is a classic script: it is the one global name.
  const { uPlot } = /** @type {any} */ (window);
  return new uPlot(
    {
      width,
      height: HEIGHT,
      legend: { show: false },
      cursor: { y: false, drag: { setScale: false, x: false, y: false } },
      scales: { y: { range: (/** @type {any} */ _, /** @type {number} */ _low, /** @type {number} */ high) => [0, high > 0 ? high * 1.1 : 1] } },
      axes: [
        { ...axis, values: (/** @type {any} */ _, /** @type {number[]} */ at) => at.map(clock), space: 70, size: 28 },
        { ...axis, values: (/** @type {any} */ _, /** @type {number[]} */ at) => at.map(spec.format), size: 62 },
      ],
      series: [
        {},
        ...lines.map((line) => ({
          label: line.label,
          stroke: cssColor(line.color),
          fill: spec.isStacked ? cssColor(line.color) : undefined,
          width: spec.isStacked ? 0 : 1.6,
          dash: line.dash,
          spanGaps: true,
          points: { show: false },
        })),
      ],
    },
    data,
    parent,
  );
}

/** @param {Float64Array[]} columns @returns {Float64Array[]} sums of a column and those before it */
function stack(columns) {
  const sums = [];
  /** @type {Float64Array | null} */
  let below = null;
  for (const column of columns) {
    const sum = Float64Array.from(column);
    if (below) for (let i = 0; i < sum.length; i += 1) sum[i] += below[i];
    sums.push(sum);
    below = sum;
  }
  return sums;
}

/** @param {Float64Array} column @returns {(number | null)[]} uPlot's gaps are null */
function withGaps(column) {
  return Array.from(column, (value) => (Number.isNaN(value) ? null : value));
}

/** @param {Float64Array} column @returns {number} */
function lastNumber(column) {
  for (let i = column.length - 1; i >= 0; i -= 1) if (!Number.isNaN(column[i])) return column[i];
  return NaN;
}
