// Drawing is divided among frames: one panel a frame, the latest state of each only. A page in the
// background draws nothing, and holds one update for each panel.

/** @type {Map<string, () => void>} */
const waiting = new Map();
let isScheduled = false;

/**
 * Draw in one of the next frames; a draw of the same panel that still waits is replaced.
 * @param {string} panel
 * @param {() => void} draw
 */
export function drawSoon(panel, draw) {
  waiting.set(panel, draw);
  if (!isScheduled) {
    isScheduled = true;
    requestAnimationFrame(drawNext);
  }
}

function drawNext() {
  const next = waiting.entries().next();
  isScheduled = waiting.size > 1;
  if (isScheduled) requestAnimationFrame(drawNext);
  if (next.done) return;
  const [panel, draw] = next.value;
  waiting.delete(panel);
  draw();
}
