// Plots, as SVG of the size they are shown in. Each has a label that says what it shows, for those who do not see it.

import { el, svg } from "./dom.js";
import { compact, time } from "./format.js";

const LEFT = 44, RIGHT = 8, TOP = 8, BOTTOM = 20;

// The next round number.
function ceiling(value) {
  if (value <= 1) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((step) => step * power).find((round) => round >= value);
}

function frame(width, height, top, from, to) {
  const y = (value) => TOP + (1 - value / top) * (height - TOP - BOTTOM);
  const x = (at) => LEFT + ((at - from) / (to - from)) * (width - LEFT - RIGHT);
  const lines = [0, 0.5, 1].map((part) => [
    svg("line", { class: part ? "grid" : "axis", x1: LEFT, x2: width - RIGHT, y1: y(part * top), y2: y(part * top) }),
    svg("text", { class: "tick", x: LEFT - 6, y: y(part * top) + 4, "text-anchor": "end" }, compact(part * top)),
  ]);
  return { x, y, lines };
}

const below = (width, height, from, to) =>
  [[from, LEFT, "start"], [(from + to) / 2, (LEFT + width - RIGHT) / 2, "middle"], [to, width - RIGHT, "end"]].map(
    ([at, x, anchor]) => svg("text", { class: "tick", x, y: height - 4, "text-anchor": anchor }, time(at * 1000)),
  );

const plot = (width, height, label, ...parts) =>
  svg("svg", { class: "plot", role: "img", "aria-label": label, width, height, viewBox: `0 0 ${width} ${height}` }, ...parts);

export const legend = (...entries) =>
  el("ul", { class: "legend" }, entries.map(([kind, name, value]) =>
    el("li", { "data-key": name }, el("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), `${name} `, el("b", {}, value))));

// From when on there is something to show: `most` seconds at most, and a minute at least.
export const begin = (samples, now, most) => Math.max(now - most, Math.min(samples[0]?.at ?? now, now - 60));

// Samples with new ones after them, however often the same ones come.
export const joined = (old, found) => [...old.filter((sample) => sample.at < (found[0]?.at ?? Infinity)), ...found].slice(-600);

// Each sample holds until the next one.
function steps(samples, from, now, value) {
  const points = [];
  samples.forEach((sample, number) => {
    const until = samples[number + 1]?.at ?? now;
    if (until < from) return;
    points.push([Math.max(sample.at, from), value(sample)], [until, value(sample)]);
  });
  return points;
}

const path = (points, { x, y }) => points.map(([at, value], n) => `${n ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`).join("");

export function stacked({ width, height, samples, names, total, now, hue, label }) {
  const from = begin(samples, now, 600);
  const scale = frame(width, height, total || 1, from, now);
  let floor = new Map();
  const bands = names.map((name) => {
    const low = floor;
    floor = new Map(samples.map((sample) => [sample, (low.get(sample) ?? 0) + (sample.values[name] ?? 0)]));
    const edge = (heights) => steps(samples, from, now, (sample) => heights.get(sample) ?? 0);
    const outline = [...edge(floor), ...edge(low).reverse()];
    const shape = outline.length ? `${path(outline, scale)}Z` : "";
    return svg("path", { "data-key": `b${name}`, class: name ? "band node" : "band nobody", d: shape, style: name ? { "--hue": hue(name) } : {} },
      svg("title", {}, name || "nobody's"));
  });
  return plot(width, height, label, bands, scale.lines, below(width, height, from, now));
}

export function lines({ width, height, samples, series, now, label }) {
  const from = begin(samples, now, 600);
  const top = ceiling(Math.max(1, ...samples.flatMap((sample) => series.map((name) => sample.values[name] ?? 0))));
  const scale = frame(width, height, top, from, now);
  const drawn = series.map((name) =>
    svg("path", { "data-key": name, class: `line ${name}`, d: path(steps(samples, from, now, (sample) => sample.values[name] ?? 0), scale) }));
  return plot(width, height, label, scale.lines, drawn, below(width, height, from, now));
}

export function throughput({ width, height, ended, label }) {
  const { at: now, every_sec: every, since } = ended;
  const from = now - 300;
  const most = Math.max(0.2, ...ended.ended.map((one) => (one.completed + one.failed) / every));
  const scale = frame(width, height, most < 1 ? 1 : ceiling(most), from, now);
  const bars = ended.ended.filter((one) => one.at >= from).map((one) => {
    // The last stretch has not ended yet.
    const seconds = Math.max(1, Math.min(every, now - one.at));
    const x = scale.x(one.at), wide = Math.max(1, scale.x(one.at + every) - x - 1);
    const done = scale.y(one.completed / seconds), all = scale.y(Math.min((one.completed + one.failed) / seconds, most < 1 ? 1 : ceiling(most)));
    return svg("g", { "data-key": one.at },
      svg("rect", { class: "bar completed", x, width: wide, y: done, height: Math.max(0, scale.y(0) - done) }),
      svg("rect", { class: "bar failed", x, width: wide, y: all, height: Math.max(0, done - all) }),
      svg("title", {}, `${time(one.at * 1000)}: ${(one.completed / seconds).toFixed(1)} completed, ${(one.failed / seconds).toFixed(1)} failed per second`));
  });
  const unknown = since > from + every
    ? svg("rect", { class: "unknown", x: scale.x(from), y: TOP, width: Math.max(0, scale.x(since) - scale.x(from)), height: height - TOP - BOTTOM }, svg("title", {}, "not counted"))
    : null;
  return plot(width, height, label, unknown, scale.lines, bars, below(width, height, from, now));
}

export function columns({ width, height, values, label }) {
  const top = ceiling(Math.max(1, ...values.map((one) => one.value)));
  const count = Math.max(values.length, 12);
  const scale = frame(width, height, top, 0, count);
  const bars = values.map((one, number) => {
    const x = scale.x(number + count - values.length) + 1, y = scale.y(one.value);
    return svg("rect", { "data-key": one.key, class: `bar ${one.kind}`, x, y, width: Math.max(2, scale.x(1) - scale.x(0) - 2), height: scale.y(0) - y, rx: 1 },
      svg("title", {}, one.title));
  });
  const ends = values.length
    ? [svg("text", { class: "tick", x: Math.min(scale.x(count - values.length), width - 140), y: height - 4 }, values[0].short),
       svg("text", { class: "tick", x: width - RIGHT, y: height - 4, "text-anchor": "end" }, values.length > 1 ? values.at(-1).short : "")]
    : [];
  return plot(width, height, label, scale.lines, bars, ends);
}
