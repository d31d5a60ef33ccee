// Pairs of workers as a grid: rows send KV (prefill), columns receive it (decode).

import { byId, cssColor, el, setText } from "./dom.js";
import { drawSoon } from "./frames.js";
import { Table } from "./tables.js";

/** @typedef {{from: string, to: string, value: number, note: string}} Cell */
/** @typedef {{name: string, format: (value: number) => string, cells: Cell[]}} Layer */

const MAX_CELL_PX = 22;
const NAMES_PX = 120;
const NAMED_CELL_PX = [64, 130];
const NAMED_CELL_HEIGHT_PX = 26;
const DARK_SHADES_FROM = 4;
const MIN_CELL_PX = 3;
const TABLE_ROWS = 20;
const NUM_SHADES = 6;

export class HeatMap {
  constructor() {
    this.canvas = /** @type {HTMLCanvasElement} */ (byId("heat"));
    this.choice = /** @type {HTMLSelectElement} */ (byId("heat-layer"));
    this.readout = byId("heat-readout");
    /** @type {Layer[]} */
    this.layers = [];
    /** @type {string[]} */
    this.rows = [];
    /** @type {string[]} */
    this.columns = [];
    /** @type {Map<string, Cell>} */
    this.cells = new Map();
    this.at = [0, 0];
    /** @type {Set<string>} pairs of workers for which an alert fires */
    this.alerting = new Set();
    /** Of a cell, and of the names before it; without room for names they are 0. */
    this.grid = { width: MAX_CELL_PX, height: MAX_CELL_PX, left: 0, top: 0 };
    this.table = new Table(
      "Pairs with the highest values",
      [
        { head: "from", text: (/** @type {Cell} */ cell) => cell.from },
        { head: "to", text: (cell) => cell.to },
        { head: "value", isNumber: true, text: (cell) => this.#layer()?.format(cell.value) ?? "" },
        { head: "", text: (cell) => cell.note },
      ],
      (cell) => `${cell.from}\n${cell.to}`,
    );
    byId("heat-table").append(this.table.element);
    this.choice.addEventListener("change", () => this.#drawSoon());
    this.canvas.addEventListener("pointermove", (event) => {
      const { width, height, left, top } = this.grid;
      this.#move(Math.floor((event.offsetY - top) / height), Math.floor((event.offsetX - left) / width));
    });
    this.canvas.addEventListener("keydown", (event) => this.#onKey(event));
    new ResizeObserver(() => this.#drawSoon()).observe(/** @type {HTMLElement} */ (this.canvas.parentElement));
  }

  /** @param {Layer[]} layers */
  update(layers) {
    this.layers = layers;
    const names = layers.map((layer) => layer.name);
    if (names.join("\n") !== [...this.choice.options].map((option) => option.value).join("\n")) {
      const chosen = this.choice.value;
      this.choice.replaceChildren(...names.map((name) => el("option", { text: name, attrs: { value: name } })));
      if (names.includes(chosen)) this.choice.value = chosen;
    }
    this.#drawSoon();
  }

  /** @param {Set<string>} pairs */
  setAlerting(pairs) {
    if ([...pairs].join() === [...this.alerting].join()) return;
    this.alerting = pairs;
    this.#drawSoon();
  }

  #layer() {
    return this.layers.find((layer) => layer.name === this.choice.value) ?? this.layers[0];
  }

  #drawSoon() {
    drawSoon("heat", () => this.#draw());
  }

  #draw() {
    const layer = this.#layer();
    byId("heat-empty").hidden = Boolean(layer?.cells.length);
    this.canvas.hidden = !layer?.cells.length;
    if (!layer?.cells.length) {
      this.table.show([]);
      for (const text of [this.readout, byId("heat-low"), byId("heat-high")]) setText(text, "");
      return;
    }
    this.rows = [...new Set(layer.cells.map((cell) => cell.from))].sort();
    this.columns = [...new Set(layer.cells.map((cell) => cell.to))].sort();
    this.cells = new Map(layer.cells.map((cell) => [`${cell.from}\n${cell.to}`, cell]));
    const room = this.canvas.parentElement?.clientWidth ?? 300;
    this.grid = gridOf(room, this.columns.length);
    const { grid } = this;
    const [width, height] = [grid.left + grid.width * this.columns.length, grid.top + grid.height * this.rows.length];
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    const context = this.canvas.getContext("2d");
    if (!context) return;
    context.scale(ratio, ratio);
    const values = layer.cells.map((cell) => cell.value);
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const shades = Array.from({ length: NUM_SHADES }, (_, i) => cssColor(`heat-${i}`));
    const gap = grid.width > 6 ? 1 : 0;
    context.fillStyle = cssColor("panel-2");
    context.fillRect(grid.left, grid.top, width, height);
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    if (grid.left) this.#drawNames(context);
    const rowAt = new Map(this.rows.map((name, i) => [name, i]));
    const columnAt = new Map(this.columns.map((name, i) => [name, i]));
    for (const cell of layer.cells) {
      const share = high > low ? (cell.value - low) / (high - low) : 1;
      const shade = Math.min(NUM_SHADES - 1, Math.floor(share * NUM_SHADES));
      context.fillStyle = shades[shade];
      const [x, y] = [grid.left + (columnAt.get(cell.to) ?? 0) * grid.width, grid.top + (rowAt.get(cell.from) ?? 0) * grid.height];
      context.fillRect(x, y, grid.width - gap, grid.height - gap);
      if (grid.left) {
        context.fillStyle = cssColor(shade < DARK_SHADES_FROM ? "text" : "panel");
        context.fillText(layer.format(cell.value), x + 8, y + grid.height / 2, grid.width - 12);
      }
      if (this.alerting.has(`${cell.from}\n${cell.to}`)) {
        context.strokeStyle = cssColor("bad");
        context.lineWidth = Math.min(3, grid.width / 4);
        context.strokeRect(x + 1, y + 1, grid.width - gap - 2, grid.height - gap - 2);
      }
    }
    setText(byId("heat-low"), layer.format(low));
    setText(byId("heat-high"), layer.format(high));
    this.canvas.setAttribute(
      "aria-label",
      `${layer.name}: ${this.rows.length} senders by ${this.columns.length} receivers, ` +
        `from ${layer.format(low)} to ${layer.format(high)}; arrow keys read cells`,
    );
    this.table.show([...layer.cells].sort((a, b) => b.value - a.value).slice(0, TABLE_ROWS));
  }

  /** @param {CanvasRenderingContext2D} context */
  #drawNames(context) {
    const { width, height, left, top } = this.grid;
    context.fillStyle = cssColor("soft");
    this.rows.forEach((name, i) => context.fillText(shorten(context, name, left - 8), 0, top + (i + 0.5) * height));
    this.columns.forEach((name, i) => context.fillText(shorten(context, name, width - 8), left + i * width + 8, top / 2));
  }

  /** @param {KeyboardEvent} event */
  #onKey(event) {
    const [row, column] = this.at;
    const to = {
      ArrowUp: [row - 1, column],
      ArrowDown: [row + 1, column],
      ArrowLeft: [row, column - 1],
      ArrowRight: [row, column + 1],
    }[event.key];
    if (!to) return;
    event.preventDefault();
    this.#move(to[0], to[1]);
  }

  /** @param {number} row @param {number} column */
  #move(row, column) {
    const inside = (/** @type {number} */ at, /** @type {string[]} */ names) => Math.max(0, Math.min(at, names.length - 1));
    this.at = [inside(row, this.rows), inside(column, this.columns)];
    const [from, to] = [this.rows[this.at[0]], this.columns[this.at[1]]];
    if (from === undefined || to === undefined) return;
    const cell = this.cells.get(`${from}\n${to}`);
    const alert = this.alerting.has(`${from}\n${to}`) ? "; an alert fires" : "";
    const value = cell ? `${this.#layer()?.format(cell.value)}${cell.note ? `, ${cell.note}` : ""}${alert}` : "nothing";
    setText(this.readout, `${from} → ${to}: ${value}`);
  }
}

/** @param {number} room @param {number} numColumns @returns {{width: number, height: number, left: number, top: number}} */
function gridOf(room, numColumns) {
  const width = Math.floor((room - NAMES_PX) / numColumns);
  if (width >= NAMED_CELL_PX[0]) return { width: Math.min(width, NAMED_CELL_PX[1]), height: NAMED_CELL_HEIGHT_PX, left: NAMES_PX, top: 20 };
  const size = Math.max(MIN_CELL_PX, Math.min(MAX_CELL_PX, Math.floor(room / numColumns)));
  return { width: size, height: size, left: 0, top: 0 };
}

/** @param {CanvasRenderingContext2D} context @param {string} text @param {number} room in px @returns {string} */
function shorten(context, text, room) {
  const width = context.measureText(text).width;
  return width <= room ? text : `${text.slice(0, Math.max(1, Math.floor((text.length * room) / width) - 1))}…`;
}
