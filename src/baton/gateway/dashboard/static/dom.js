// Elements from data. Text enters the page through textContent alone: names and messages come from
// clients and workers, and may contain anything.

/**
 * @param {string} tag
 * @param {{class?: string, text?: string, attrs?: Record<string, string>, on?: Record<string, EventListener>}} [options]
 * @param {...(Node | string)} children a string becomes text
 * @returns {HTMLElement}
 */
export function el(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  if (options.class) made.className = options.class;
  if (options.text !== undefined) made.textContent = options.text;
  for (const [name, value] of Object.entries(options.attrs ?? {})) made.setAttribute(name, value);
  for (const [name, handler] of Object.entries(options.on ?? {})) made.addEventListener(name, handler);
  made.append(...children);
  return made;
}

/**
 * An element that index.html has.
 * @param {string} id
 * @returns {HTMLElement}
 */
export function byId(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`index.html has no element ${id}`);
  return found;
}

/**
 * Set text only where it changed: an unchanged page costs no layout.
 * @param {Element} element
 * @param {string} text
 */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * @param {Element} element
 * @param {string} name
 * @param {string} value
 */
export function setAttr(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

/** @param {string} name a CSS custom property, without its dashes @returns {string} */
export function cssColor(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
