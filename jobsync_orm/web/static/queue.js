// The page of the queue: how much waits, how fast it is worked off, by type and by worker.

import { get, session } from "./api.js";
import { joined, legend, lines, throughput } from "./charts.js";
import { el } from "./dom.js";
import { about, age, number, plural, rate, when } from "./format.js";
import { button, facts, link, mark, panel, room, table } from "./parts.js";

export const title = "Queue";

let waiting = [];

export async function load() {
  const found = await get("queue", { after: waiting.at(-1)?.at });
  if (found.value) {
    waiting = joined(waiting, found.value.waiting);
  }
  return found;
}

const LATER = ["scheduled", "retrying", "blocked"];
const sum = (counts, states) => states.reduce((total, state) => total + (counts[state] ?? 0), 0);
const guessed = (one, states) => states.some((state) => one.estimated.includes(state));

function counted(one, states, filter) {
  const total = sum(one.counts, states);
  const text = about(total, guessed(one, states));
  return total && filter ? link(`#/jobs?${new URLSearchParams(filter)}`, text) : text;
}

function row(one, paused) {
  const stopped = paused.find((pause) => pause.type === one.type);
  const slow = (times) => (times ? `${age(times.p50)} / ${age(times.p95)}` : "–");
  return {
    key: one.type,
    cells: [
      [link(`#/jobs?${new URLSearchParams({ type: one.type })}`, el("span", { class: "long" }, one.type)), stopped ? mark("busy", "paused") : null],
      counted(one, ["pending"], { type: one.type, state: "pending" }),
      counted(one, ["processing"], { type: one.type, state: "processing" }),
      counted(one, LATER),
      counted(one, ["failed"], { type: one.type, state: "failed" }),
      counted(one, ["completed"]),
      age(one.oldest_pending_sec),
      rate(one.last_minute.completed_per_sec),
      slow(one.wait_sec),
      slow(one.run_sec),
      one.workers === 0 ? mark("bad", "none") : number(one.workers),
      ...(session.writes && session.who
        ? [stopped ? button("resume", { type: one.type }, "Resume", `Resume type ${one.type}`) : button("pause", { type: one.type }, "Pause", `Pause type ${one.type}`)]
        : []),
    ],
  };
}

const COLUMNS = [["Type"], ["Ready", "n"], ["Running", "n wide"], ["Later", "n wide"], ["Failed", "n"], ["Done", "n wide"], ["Oldest", "n wide"], ["Rate", "n"], ["Wait p50 / p95", "n wide"], ["Run p50 / p95", "n wide"], ["Workers", "n wide"]];

const WORKER_COLUMNS = [["Worker"], ["State"], ["Running", "n"], ["Completed", "n"], ["Failed", "n"], ["Last job", "n wide"], ["Types", "wide"]];

function workers(found) {
  const rows = found.map((one) => ({
    key: one.node,
    kind: one.alive ? "" : "bad",
    cells: [el("span", { class: "long" }, one.node), one.alive ? mark("good", "alive") : mark("bad", "gone"), `${number(one.running)} / ${number(one.concurrency)}`, number(one.completed), number(one.failed), when(one.claimed_at), el("span", { class: "long" }, one.types.join(", "))],
  }));
  return table("Workers", WORKER_COLUMNS, rows, "No worker runs. Jobs wait until one does: jobsync-orm worker MODULE:QUEUE.");
}

export function draw(found) {
  const { types, paused, ended } = found;
  const total = (...states) => types.reduce((all, one) => all + sum(one.counts, states), 0);
  const vague = (...states) => types.some((one) => guessed(one, states));
  const oldest = types.reduce((most, one) => Math.max(most, one.oldest_pending_sec ?? -1), -1);
  const stopped = paused.find((pause) => pause.type === null);
  const minute = found.all.last_minute;
  const last = waiting.at(-1)?.values ?? {};
  return [
    el("h1", { tabindex: "-1" }, "Queue"),
    stopped || paused.length
      ? el("p", { class: "notice busy", "data-key": "paused" }, stopped ? "The whole queue is paused" : `Paused: ${paused.map((pause) => pause.type).join(", ")}`, (stopped ?? paused[0]).reason ? ` (${(stopped ?? paused[0]).reason}, since ${when((stopped ?? paused[0]).since)})` : "", ".")
      : null,
    facts(
      ["Ready", about(total("pending"), vague("pending"))],
      ["Running", about(total("processing"), vague("processing"))],
      ["Later", about(total(...LATER), vague(...LATER)), "scheduled, retrying, blocked"],
      ["Failed", about(total("failed"), vague("failed")), null, total("failed") ? "bad" : ""],
      ["Oldest ready", oldest < 0 ? "–" : age(oldest)],
      ["Completed", rate(minute.completed_per_sec), `last ${age(minute.over_sec)}`],
      ["Failing", rate(minute.failed_per_sec), `last ${age(minute.over_sec)}`, minute.failed_per_sec ? "bad" : ""],
      ["Wait p95", age(found.all.wait_sec?.p95 ?? null)],
    ),
    el("div", { class: "pair", "data-key": "pair" },
      panel("Throughput, last five minutes",
        throughput({ width: room(0.5), height: 190, ended, label: `Attempts that ended per second in the last five minutes. Last minute: ${rate(minute.completed_per_sec)} completed, ${rate(minute.failed_per_sec)} failed.` }),
        legend(["completed", "completed", rate(minute.completed_per_sec)], ["failed", "failed", rate(minute.failed_per_sec)])),
      panel("Depth, since somebody looked first",
        lines({ width: room(0.5), height: 190, samples: waiting, series: ["later", "ready", "processing"], now: Math.max(found.at, waiting.at(-1)?.at ?? 0), label: `Jobs over time. Now ${plural(last.ready ?? 0, "job")} ready, ${number(last.processing)} running, ${number(last.later)} later.` }),
        legend(["ready", "ready", number(last.ready)], ["processing", "running", number(last.processing)], ["later", "later", number(last.later)]))),
    panel("Types",
      session.writes && session.who
        ? el("p", { class: "buttons" }, stopped ? button("resume", {}, "Resume the queue", "Resume the whole queue") : button("pause", {}, "Pause the queue", "Pause the whole queue"))
        : null,
      table("Job types", session.writes && session.who ? [...COLUMNS, ["Action"]] : COLUMNS, types.map((one) => row(one, paused)), "There are no jobs.")),
    panel("Workers", workers(found.workers)),
    el("p", { class: "quiet" }, "Counts with ~ are estimates. Rates and times are those of the last minute and the last five; a moment is shown in this browser's time."),
  ];
}
