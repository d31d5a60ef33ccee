// Tables whose rows are kept and changed in place: a row that has the focus keeps it.

import { el, setText } from "./dom.js";

/**
 * @template T
 * @typedef {{head: string, text: (row: T) => string, isNumber?: boolean, className?: (row: T) => string}} Column
 */

/** @template T */
export class Table {
  /**
   * @param {string} caption
   * @param {Column<T>[]} columns
   * @param {(row: T) => string} key
   * @param {(row: T) => void} [onPick] makes the first cell a button
   */
  constructor(caption, columns, key, onPick) {
    this.columns = columns;
    this.key = key;
    this.onPick = onPick;
    this.body = el("tbody");
    /** @type {Map<string, {element: HTMLElement, cells: HTMLElement[], row: T}>} */
    this.rows = new Map();
    const heads = columns.map((column) =>
      el("th", { text: column.head, class: column.isNumber ? "number" : "", attrs: { scope: "col" } }),
    );
    this.empty = el("p", { class: "empty", text: "none" });
    this.element = el(
      "div",
      { class: "table", attrs: { tabindex: "0", role: "region", "aria-label": caption } },
      el("table", {}, el("caption", { class: "hidden", text: caption }), el("thead", {}, el("tr", {}, ...heads)), this.body),
      this.empty,
    );
  }

  /** @param {T[]} rows in their order */
  show(rows) {
    const seen = new Set();
    let before = this.body.firstElementChild;
    for (const row of rows) {
      const key = this.key(row);
      if (seen.has(key)) continue;
      seen.add(key);
      const kept = this.rows.get(key) ?? this.#add(key, row);
      kept.row = row;
      this.columns.forEach((column, i) => {
        setText(kept.cells[i], column.text(row));
        const name = column.className?.(row);
        if (name !== undefined && kept.cells[i].className !== name) kept.cells[i].className = name;
      });
      if (kept.element === before) before = before.nextElementSibling;
      else this.body.insertBefore(kept.element, before);
    }
    for (const [key, { element }] of this.rows) {
      if (!seen.has(key)) {
        element.remove();
        this.rows.delete(key);
      }
    }
    this.empty.hidden = rows.length > 0;
  }

  /** @param {string} key @param {T} row */
  #add(key, row) {
    /** @type {{element: HTMLElement, cells: HTMLElement[], row: T}} */
    const kept = { element: el("tr"), cells: [], row };
    this.columns.forEach((column, i) => {
      const cell = el("td", { class: column.isNumber ? "number" : "" });
      kept.element.append(cell);
      if (i === 0 && this.onPick) {
        const button = el("button", {
          class: "pick",
          attrs: { type: "button" },
          on: { click: () => this.onPick?.(kept.row) },
        });
        cell.append(button);
        kept.cells.push(button);
      } else {
        kept.cells.push(cell);
      }
    });
    this.rows.set(key, kept);
    return kept;
  }
}
