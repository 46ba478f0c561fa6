// What several pages are made of.

import { el } from "./dom.js";

export const link = (href, ...children) => el("a", { href }, ...children);

export const facts = (...entries) =>
  el("dl", { class: "facts" }, entries.filter(Boolean).map(([name, value, note, kind]) =>
    el("div", { "data-key": name, class: kind ?? "" }, el("dt", {}, name), el("dd", {}, value, note ? el("small", {}, note) : null))));

export const panel = (title, ...children) => {
  const id = `h-${title.toLowerCase().replace(/\W+/g, "-")}`;
  return el("section", { class: "panel", "data-key": id, "aria-labelledby": id }, el("h2", { id }, title), ...children);
};

// Columns: [title, kind], kind being some of "n" (a number) and "wide" (left out on a narrow screen).
export function table(label, columns, rows, empty) {
  if (!rows.length) return el("p", { class: "quiet" }, empty);
  const cell = (name, content, number, attributes = {}) =>
    el(name, { class: columns[number][1] ?? "", ...attributes }, content);
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
    el("table", {},
      el("thead", {}, el("tr", {}, columns.map(([title], number) => cell("th", title, number, { scope: "col" })))),
      el("tbody", {}, rows.map(({ key, cells, kind }) =>
        el("tr", { "data-key": key, class: kind ?? "" }, cells.map((content, number) =>
          number ? cell("td", content, number) : cell("th", content, number, { scope: "row" })))))));
}

export const mark = (kind, text) => el("span", { class: `mark ${kind}` }, text);

// A button that opens the dialog: what it does, and to what.
export const button = (action, what, text, label) =>
  el("button", { type: "button", "data-action": "ask", "data-act": action, "data-what": JSON.stringify(what), "aria-label": label }, text);

export const pre = (value) => el("pre", { tabindex: "0" }, typeof value === "string" ? value : JSON.stringify(value, null, 2));

const roomy = () => window.matchMedia("(min-width: 900px)").matches;

// How high a plot is beside another one, and below it.
export const tall = (beside, below) => (roomy() ? beside : below);

// How wide a plot may be.
export function room(share = 1) {
  const main = document.getElementById("main").clientWidth;
  const gap = 16, padding = 34;
  return Math.max(240, Math.floor(roomy() ? (main - gap * (1 / share - 1)) * share : main) - padding);
}
