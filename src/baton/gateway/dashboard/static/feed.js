// The stream of snapshots: connects, connects again, and says how old what is shown is.

/** @typedef {"connecting" | "live" | "late" | "lost"} FeedState */

const LATE_AFTER_MS = 4000;

/**
 * @param {Record<string, (data: any) => void>} handlers by event name
 * @param {(state: FeedState) => void} onState
 * @returns {{pause: () => void, resume: () => void}}
 */
export function openFeed(handlers, onState) {
  /** @type {EventSource | null} */
  let source = null;
  let heardAt = performance.now();
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let retry;

  function open() {
    onState("connecting");
    source = new EventSource("events");
    for (const [name, handle] of Object.entries(handlers)) {
      source.addEventListener(name, (event) => {
        heardAt = performance.now();
        onState("live");
        handle(JSON.parse(/** @type {MessageEvent<string>} */ (event).data));
      });
    }
    source.onerror = () => {
      onState("lost");
      // After an answer that is no stream (401, 503) a browser does not try again by itself.
      if (source?.readyState === EventSource.CLOSED) {
        source = null;
        retry = setTimeout(() => source || open(), LATE_AFTER_MS);
      }
    };
  }

  setInterval(() => {
    if (source?.readyState === EventSource.OPEN && performance.now() - heardAt > LATE_AFTER_MS) {
      onState("late");
    }
  }, 1000);
  open();
  return {
    pause() {
      clearTimeout(retry);
      source?.close();
      source = null;
    },
    resume() {
      if (!source) open();
    },
  };
}
