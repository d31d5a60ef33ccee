// Figures as people read them. What was not measured is "–", never 0.

export const NONE = "–";
const CLOCK = new Intl.DateTimeFormat([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });

/** @param {number | null | undefined} seconds @returns {string} */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return NONE;
  const size = Math.abs(seconds);
  if (size === 0) return "0 s";
  if (size < 0.9995e-3) return `${digits(seconds * 1e6)} µs`;
  if (size < 1) return `${digits(seconds * 1e3)} ms`;
  if (size < 120) return `${digits(seconds)} s`;
  return size < 7200 ? `${digits(seconds / 60)} min` : `${digits(seconds / 3600)} h`;
}

/** @param {number | null | undefined} bytes @returns {string} */
export function bytes(bytes) {
  if (bytes === null || bytes === undefined || !Number.isFinite(bytes)) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) {
    bytes /= 1024;
    unit += 1;
  }
  return `${digits(bytes)} ${units[unit]}`;
}

/** @param {number | null | undefined} perSecond @returns {string} */
export function bandwidth(perSecond) {
  const text = bytes(perSecond);
  return text === NONE ? text : `${text}/s`;
}

/** @param {number | null | undefined} value @returns {string} */
export function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  if (Math.abs(value) >= 1e6) return `${digits(value / 1e6)} M`;
  if (Math.abs(value) >= 1e4) return `${digits(value / 1e3)} k`;
  return digits(value);
}

/** @param {number | null | undefined} share 0 to 1 @returns {string} */
export function percent(share) {
  if (share === null || share === undefined || !Number.isFinite(share)) return NONE;
  return `${digits(share * 100)} %`;
}

/** @param {number | null | undefined} price @returns {string} */
export function price(price) {
  return price === null || price === undefined ? NONE : price.toPrecision(3);
}

/** @param {number} unixSeconds @returns {string} */
export function clock(unixSeconds) {
  return CLOCK.format(unixSeconds * 1000);
}

/** @param {number} value @returns {string} three digits at most, without zeros at the end */
function digits(value) {
  const size = Math.abs(value);
  return String(Number(value.toFixed(size < 10 ? 2 : size < 100 ? 1 : 0)));
}
