// The page of the cluster: who owns how much, what moves, which nodes there are, what is pinned.

import { get, session } from "./api.js";
import { begin, columns, joined, legend, stacked } from "./charts.js";
import { el } from "./dom.js";
import { age, ago, number, plural, time, when } from "./format.js";
import { button, facts, mark, panel, room, table, tall } from "./parts.js";

export const title = "Cluster";

let owned = [];
let pins = null;
let pinsDue = 0;

// The golden angle keeps neighbours apart, however many there are. A node keeps its colour while the page is open.
const hues = new Map();
function hue(name) {
  if (!hues.has(name)) hues.set(name, ((230 + hues.size * 137.508) % 360).toFixed(1));
  return hues.get(name);
}

export async function load() {
  const found = await get("cluster", { after: owned.at(-1)?.at });
  if (found.value) {
    owned = joined(owned, found.value.owned);
    if (performance.now() >= pinsDue) {
      const next = await get("pins");
      pins = next.value ?? pins;
      pinsDue = performance.now() + next.next_sec * 1000;
    }
  }
  return found;
}

const SORT = { live: "good", joining: "busy", "cut off": "bad", silent: "bad", away: "dull" };

function strip(status) {
  const { tokens } = status;
  const share = (count) => `${((count / (tokens.total || 1)) * 100).toFixed(3)}%`;
  const parts = status.nodes.map((node) => {
    const { owned: all, leaving } = node.tokens;
    const wide = all / (tokens.total || 1);
    return el("div", { "data-key": node.name, class: `share ${SORT[node.condition]}`, style: { "flex-basis": share(all), "--hue": hue(node.name) },
      title: `${node.name}: ${number(all)} tokens${leaving ? `, ${number(leaving)} on their way out` : ""}` },
      wide > 0.07 ? el("span", { class: "name" }, node.name) : null,
      wide > 0.13 ? el("span", { class: "count" }, number(all)) : null,
      leaving ? el("i", { class: "leaving", style: { width: `${((leaving / all) * 100).toFixed(2)}%` } }) : null);
  });
  parts.push(el("div", { "data-key": "", class: "share nobody", style: { "flex-basis": share(tokens.unowned) }, title: `nobody: ${number(tokens.unowned)} tokens` },
    tokens.unowned / (tokens.total || 1) > 0.1 ? el("span", { class: "name" }, "nobody") : null));
  const told = status.nodes.map((node) => `${node.name} ${number(node.tokens.owned)}`).join(", ") || "nobody";
  return el("div", { class: "strip", role: "img", "aria-label": `Who has how many of ${number(tokens.total)} tokens: ${told}${tokens.unowned ? `, nobody ${number(tokens.unowned)}` : ""}` }, parts);
}

function nodeRow(node, most, total) {
  const { owned: all, leaving, coming } = node.tokens;
  const share = (count) => `${((count / (most || 1)) * 100).toFixed(2)}%`;
  const lease = node.heartbeat_timeout_sec ? node.lease_left_sec / node.heartbeat_timeout_sec : 0;
  const moving = [leaving ? `−${number(leaving)}` : "", coming ? `+${number(coming)}` : ""].filter(Boolean).join(" ");
  return {
    key: node.name,
    kind: SORT[node.condition] === "bad" ? "bad" : "",
    cells: [
      [el("span", { class: "swatch node", style: { "--hue": hue(node.name) }, "aria-hidden": "true" }), el("span", { class: "long" }, node.name), node.leader ? mark("leads wide", "leads") : null],
      [mark(SORT[node.condition], node.condition), node.drained ? mark("busy", "drained") : null],
      [age(node.heartbeat_age_sec)],
      el("span", { class: "meter", title: `of ${age(node.heartbeat_timeout_sec)}` },
        el("i", { style: { width: `${(lease * 100).toFixed(1)}%` } }), el("b", {}, node.condition === "away" ? "–" : age(node.lease_left_sec))),
      number(all),
      moving || "–",
      el("span", { class: "load", style: { "--hue": hue(node.name) }, title: `${((all / (total || 1)) * 100).toFixed(1)} %` },
        el("i", { class: "has", style: { width: share(all - leaving) } }),
        el("i", { class: "leaving", style: { width: share(leaving) } }),
        el("i", { class: "coming", style: { width: share(coming) } })),
      number(node.weight),
      `${node.host || "–"}:${node.pid}`,
      node.version || "–",
      ...(session.writes && session.who
        ? [node.drained
          ? button("undrain", { node: node.name }, "Undrain", `Undrain ${node.name}`)
          : button("drain", { node: node.name }, "Drain", `Drain ${node.name}`)]
        : []),
    ],
  };
}

const NODE_COLUMNS = [["Node"], ["Condition"], ["Heartbeat", "n"], ["Lease left", "wide"], ["Tokens", "n"], ["Moving", "n wide"], ["Load", "wide"], ["Weight", "n wide"], ["Process", "wide"], ["Version", "wide"]];

function nodes(status) {
  const most = Math.max(1, ...status.nodes.map((node) => node.tokens.owned + node.tokens.coming));
  const heads = session.writes && session.who ? [...NODE_COLUMNS, ["Action"]] : NODE_COLUMNS;
  return table("Nodes", heads, status.nodes.map((node) => nodeRow(node, most, status.tokens.total)),
    "No node is registered. Start a worker, and it shows up here.");
}

function history(status) {
  const now = Date.parse(status.at) / 1000;
  // Those that are there first, so that colours go by age.
  status.nodes.forEach((node) => hue(node.name));
  const seen = owned.filter((sample, number) => (owned[number + 1]?.at ?? now) >= begin(owned, now, 600));
  // And those that are gone, who had some.
  seen.forEach((sample) => Object.keys(sample.values).forEach((name) => name && hue(name)));
  const names = [...hues.keys()].filter((name) => seen.some((sample) => sample.values[name]));
  const label = `Tokens of each node since ${time(begin(owned, now, 600) * 1000)}, with ${plural(Math.max(0, seen.length - 1), "change")}. Now: ` +
    (status.nodes.map((node) => `${node.name} ${number(node.tokens.owned)}`).join(", ") || "no node") + ".";
  return [
    stacked({ width: room(0.5), height: tall(330, 200), samples: seen, names: [...names, ""], total: status.tokens.total, now, hue, label }),
    el("details", {}, el("summary", {}, "As a table"),
      table("Tokens of each node over time", [["From"], ["Tokens"]],
        seen.slice(-30).reverse().map((sample) => ({
          key: String(sample.at),
          cells: [time(sample.at * 1000), Object.entries(sample.values).filter(([, count]) => count).map(([name, count]) => `${name || "nobody"} ${number(count)}`).join(", ") || "–"],
        })), "Nothing yet.")),
  ];
}

function rebalances(found) {
  const latest = [...found].reverse();
  const kind = (reason) => (reason.includes("leave") || reason === "new leader" ? "lost" : "moved");
  const values = latest.map((one) => ({
    key: one.epoch, value: one.tokens_moved, kind: kind(one.reason), short: when(one.triggered_at),
    title: `${when(one.triggered_at)}: ${one.reason}, ${number(one.tokens_moved)} tokens, ${one.nodes_before} to ${one.nodes_after} nodes`,
  }));
  const label = found.length
    ? `Tokens moved by each of the last ${plural(found.length, "rebalance")}; most: ${number(Math.max(...found.map((one) => one.tokens_moved)))}. The table below has them.`
    : "No rebalances yet.";
  const rows = found.slice(0, 6).map((one) => ({
    key: String(one.epoch),
    cells: [when(one.triggered_at), one.reason, `${one.nodes_before} → ${one.nodes_after}`, number(one.tokens_moved), one.leader, age(one.duration_sec), number(one.epoch)],
  }));
  return [
    columns({ width: room(0.5), height: 190, values, label }),
    legend(["moved", "join, pins, drain", ""], ["lost", "a node left or died", ""]),
    table("Latest rebalances", [["When"], ["Reason"], ["Nodes", "n"], ["Moved", "n"], ["Leader", "wide"], ["Planned in", "n wide"], ["Epoch", "n wide"]], rows,
      "No rebalance yet: the first one is when the first node joins."),
  ];
}

function pinned() {
  if (!pins) return el("p", { class: "quiet" }, "Loading…");
  const parked = new Set(pins.parked.map((pin) => pin.task_id));
  const rest = pins.pins.filter((pin) => !parked.has(pin.task_id));
  const rows = [...pins.parked, ...rest].map((pin) => ({
    key: pin.task_id,
    kind: parked.has(pin.task_id) ? "bad" : "",
    cells: [
      el("span", { class: "long" }, pin.task_id),
      parked.has(pin.task_id) ? mark("bad", "parked") : mark("good", "placed"),
      String(pin.token_id),
      el("code", {}, pin.patterns.join("  then  ") || "no pattern"),
      pin.reason ?? "–",
      pin.created_by,
      pin.expires_at ? when(pin.expires_at) : "never",
    ],
  }));
  return table("Pins", [["Task"], ["State"], ["Token", "n"], ["Nodes it may be on"], ["Reason", "wide"], ["By", "wide"], ["Ends", "wide"]], rows,
    "Nothing is pinned: balance alone decides who has what.");
}

// So many are told at a glance; fifty that are wrong at once would fill the screen.
const FIRST = 4;

function problems(found) {
  // One more takes no more room than the line that says so.
  const shown = found.length > FIRST + 1 ? found.slice(0, FIRST) : found, rest = found.slice(shown.length);
  const items = (some) => some.map((problem) => el("li", {}, problem));
  return el("div", { class: "notice bad", "data-key": "health" },
    el("ul", {}, items(shown)),
    rest.length ? el("details", {}, el("summary", {}, `${number(rest.length)} more`), el("ul", {}, items(rest))) : null);
}

export function draw({ status, rebalances: found }) {
  const { tokens, nodes: all } = status;
  const live = all.filter((node) => node.condition === "live").length;
  const last = status.last_rebalance;
  const now = Date.parse(status.at);
  return [
    el("h1", { tabindex: "-1" }, "Cluster ", el("small", {}, status.schema ? `${status.schema}.${status.appname}` : status.appname)),
    status.healthy
      ? el("p", { class: "notice good", "data-key": "health" }, `Healthy: ${plural(all.length, "node")} ${all.length === 1 ? "has" : "share"} ${number(tokens.total)} tokens.`)
      : problems(status.problems),
    facts(
      ["Nodes live", number(live), live === all.length ? null : `of ${number(all.length)}`, live === all.length ? "" : "bad"],
      ["Tokens owned", number(tokens.owned), `of ${number(tokens.total)}`],
      ["Moving", number(tokens.draining), tokens.overdue ? `${number(tokens.overdue)} overdue` : null, tokens.overdue ? "bad" : ""],
      ["Parked", number(tokens.parked), null, tokens.parked ? "bad" : ""],
      ["Without owner", number(tokens.unowned - tokens.parked), null, tokens.unowned > tokens.parked ? "bad" : ""],
      ["Leader", el("span", { class: "long" }, status.leader ?? "–")],
      ["Epoch", number(status.epoch)],
      ["Last rebalance", last ? ago((now - Date.parse(last.triggered_at)) / 1000) : "–", last ? `ago, ${last.reason}` : null],
    ),
    panel("Who owns how much", strip(status), nodes(status)),
    el("div", { class: "pair", "data-key": "pair" },
      panel("Ownership, last ten minutes", history(status)),
      panel("Rebalances", rebalances(found))),
    panel("Pins and parked tokens", pinned()),
  ];
}
