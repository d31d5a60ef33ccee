// The last hour, one point a second, in memory that is taken once: a page that is open for a day
// holds no more than after an hour.

const HOUR_POINTS = 3600;

/** Columns of numbers, oldest first; NaN where a point has no value. */
export class Ring {
  /** @param {string[]} fields @param {number} capacity */
  constructor(fields, capacity = HOUR_POINTS) {
    this.fields = fields;
    this.capacity = capacity;
    this.length = 0;
    // Twice the capacity: points are appended, and moved to the front once an hour.
    this.columns = fields.map(() => new Float64Array(2 * capacity));
    this.end = 0;
  }

  /** @param {(number | null)[]} point in the order of `fields` */
  add(point) {
    const at = this.fields.indexOf("at");
    const last = this.length ? this.columns[at][this.end - 1] : -Infinity;
    if (!((point[at] ?? NaN) > last)) return; // told again after a reconnect, or the clock went back
    if (this.end === 2 * this.capacity) {
      for (const column of this.columns) column.copyWithin(0, this.capacity);
      this.end = this.capacity;
    }
    this.columns.forEach((column, i) => {
      column[this.end] = point[i] ?? NaN;
    });
    this.end += 1;
    this.length = Math.min(this.length + 1, this.capacity);
  }

  /**
   * @param {string} field
   * @param {number} [seconds] of the latest; all of them without it
   * @returns {Float64Array} a view: good until the next `add`
   */
  column(field, seconds) {
    const index = this.fields.indexOf(field);
    if (index < 0) throw new Error(`points have no field ${field}`);
    return this.columns[index].subarray(this.#from(seconds), this.end);
  }

  /** @param {number | undefined} seconds @returns {number} */
  #from(seconds) {
    const first = this.end - this.length;
    if (!seconds || !this.length) return first;
    const at = this.columns[this.fields.indexOf("at")];
    const after = at[this.end - 1] - seconds;
    let low = first;
    let high = this.end;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (at[middle] > after) high = middle;
      else low = middle + 1;
    }
    return low;
  }
}
