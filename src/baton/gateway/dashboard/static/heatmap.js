// Pairs of workers as a grid: rows send KV (prefill), columns receive it (decode).

import { byId, cssColor, el, setText } from "./dom.js";
import { drawSoon } from "./frames.js";
import { Table } from "./tables.js";

/** @typedef {{from: string, to: string, value: number, note: string}} Cell */
/** @typedef {{name: string, format: (value: number) => string, cells: Cell[]}} Layer */

const MAX_CELL_PX = 22;
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
    this.size = MAX_CELL_PX;
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
      this.#move(Math.floor(event.offsetY / this.size), Math.floor(event.offsetX / this.size));
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
      setText(this.readout, "");
      return;
    }
    this.rows = [...new Set(layer.cells.map((cell) => cell.from))].sort();
    this.columns = [...new Set(layer.cells.map((cell) => cell.to))].sort();
    this.cells = new Map(layer.cells.map((cell) => [`${cell.from}\n${cell.to}`, cell]));
    const room = this.canvas.parentElement?.clientWidth ?? 300;
    this.size = Math.max(MIN_CELL_PX, Math.min(MAX_CELL_PX, Math.floor(room / this.columns.length)));
    const [width, height] = [this.size * this.columns.length, this.size * this.rows.length];
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
    const gap = this.size > 6 ? 1 : 0;
    context.fillStyle = cssColor("panel-2");
    context.fillRect(0, 0, width, height);
    const rowAt = new Map(this.rows.map((name, i) => [name, i]));
    const columnAt = new Map(this.columns.map((name, i) => [name, i]));
    for (const cell of layer.cells) {
      const share = high > low ? (cell.value - low) / (high - low) : 1;
      context.fillStyle = shades[Math.min(NUM_SHADES - 1, Math.floor(share * NUM_SHADES))];
      const [row, column] = [rowAt.get(cell.from) ?? 0, columnAt.get(cell.to) ?? 0];
      context.fillRect(column * this.size, row * this.size, this.size - gap, this.size - gap);
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
    const value = cell ? `${this.#layer()?.format(cell.value)}${cell.note ? `, ${cell.note}` : ""}` : "nothing";
    setText(this.readout, `${from} → ${to}: ${value}`);
  }
}
