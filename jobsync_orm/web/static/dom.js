// Elements, made without a word of HTML: whatever a payload or an error says, it is text.

const SVG = "http://www.w3.org/2000/svg";

function make(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "style") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const el = (name, attributes, ...children) => make(document.createElement(name), attributes, children);
export const svg = (name, attributes, ...children) => make(document.createElementNS(SVG, name), attributes, children);

const key = (node) => (node.nodeType === Node.ELEMENT_NODE ? node.getAttribute("data-key") : null);
const alike = (a, b) => a.nodeType === b.nodeType && a.nodeName === b.nodeName && key(a) === key(b);

function morphAttributes(old, wanted) {
  for (const { name } of [...old.attributes]) {
    // The browser's, or the reader's, once it is on the page.
    if (name === "style" || name === "open" || wanted.hasAttribute(name)) continue;
    old.removeAttribute(name);
  }
  for (const { name, value } of [...wanted.attributes]) {
    if (name !== "style" && name !== "open" && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  if (old.style && old.style.cssText !== wanted.style.cssText) old.style.cssText = wanted.style.cssText;
}

// Make `old` what `wanted` is and keep its elements where they are alike: focus, selection, what is unfolded and
// running transitions stay. Elements of a list have a data-key.
export function morph(old, wanted) {
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.data !== wanted.data) old.data = wanted.data;
    return;
  }
  morphAttributes(old, wanted);
  if (old.tagName === "INPUT" || old.tagName === "SELECT") return;
  morphChildren(old, [...wanted.childNodes]);
}

export function morphChildren(parent, wanted) {
  const keyed = new Map([...parent.childNodes].filter((child) => key(child) !== null).map((child) => [key(child), child]));
  let at = parent.firstChild;
  for (const child of wanted) {
    const found = key(child) === null ? null : keyed.get(key(child));
    if (found && found !== at && alike(found, child)) {
      parent.insertBefore(found, at);
      morph(found, child);
    } else if (at && alike(at, child)) {
      const next = at.nextSibling;
      morph(at, child);
      at = next;
    } else {
      parent.insertBefore(child, at);
    }
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}
