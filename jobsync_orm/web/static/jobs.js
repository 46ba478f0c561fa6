// Search jobs, page by page, and look at one.

import { get, session } from "./api.js";
import { el } from "./dom.js";
import { age, number, plural, when } from "./format.js";
import { button, facts, link, mark, panel, pre, table } from "./parts.js";

const STATES = ["pending", "scheduled", "blocked", "processing", "retrying", "completed", "failed", "cancelled"];
const SORT = { completed: "good", failed: "bad", cancelled: "dull", processing: "busy", retrying: "busy", pending: "", scheduled: "", blocked: "" };
const OUTCOME = { completed: "good", cancelled: "dull", released: "dull", snoozed: "dull" };

// One search goes on by itself over so many stretches in which nothing is found.
const STRETCHES = 10;

export async function search(wanted) {
  let before = wanted.before, looked = 0, jobs = [];
  for (let stretch = 0; stretch < STRETCHES; stretch += 1) {
    const found = await get("jobs", { ...wanted, before });
    looked += found.looked_at;
    jobs = jobs.concat(found.jobs);
    before = found.before;
    if (before === null || jobs.length) break;
  }
  return { jobs, before, looked };
}

const actions = (job) =>
  session.writes && session.who
    ? [["failed", "cancelled", "retrying"].includes(job.state) ? button("retry", { id: job.id }, "Retry", `Retry job ${job.id}`) : null,
       !["completed", "failed", "cancelled"].includes(job.state) ? button("cancel", { id: job.id }, "Cancel", `Cancel job ${job.id}`) : null]
    : [];

function form(wanted) {
  const field = (name, text, attributes = {}) =>
    el("label", {}, text, el("input", { name, value: wanted[name] ?? "", autocomplete: "off", spellcheck: "false", ...attributes }));
  return el("form", { class: "search", id: "search", role: "search", "aria-label": "Jobs" },
    field("id", "Id", { inputmode: "numeric", pattern: "[0-9]*", size: "9" }),
    field("type", "Type", { size: "14" }),
    el("label", {}, "State", el("select", { name: "state" }, el("option", { value: "" }, "any"),
      STATES.map((state) => el("option", { value: state, selected: wanted.state === state }, state)))),
    field("key", "Key", { size: "12" }),
    field("error", "Error contains", { size: "16" }),
    el("div", { class: "buttons" }, el("button", { class: "strong" }, "Search"), link("#/jobs", "Clear")));
}

export function drawSearch(wanted, { jobs, before, looked }) {
  const rows = jobs.map((job) => ({
    key: String(job.id),
    cells: [
      link(`#/jobs/${job.id}`, String(job.id)),
      el("span", { class: "long" }, job.type),
      mark(SORT[job.state], job.state),
      `${number(job.attempt)}`,
      when(job.created_at),
      job.started_at && job.finished_at ? age((Date.parse(job.finished_at) - Date.parse(job.started_at)) / 1000) : "–",
      el("span", { class: "long" }, job.key ?? "–"),
      el("span", { class: "clip", title: job.error }, job.error?.split("\n")[0] ?? "–"),
      ...(session.writes && session.who ? [actions(job)] : []),
    ],
  }));
  const heads = [["Job", "n"], ["Type"], ["State"], ["Attempt", "n wide"], ["Enqueued", "n wide"], ["Took", "n wide"], ["Key", "wide"], ["Error", "wide"]];
  const asked = Object.entries(wanted).some(([name, value]) => value && name !== "before");
  const older = before === null ? null : link(`#/jobs?${new URLSearchParams({ ...wanted, before })}`, "Older jobs");
  const nothing = asked
    ? `Nothing fits among ${plural(looked, "job")}${before === null ? "." : `, down to job ${before}.`}`
    : "There are no jobs. They show up here when they are enqueued.";
  return [
    el("h1", { tabindex: "-1" }, "Jobs"),
    form(wanted),
    panel(wanted.before ? `Before job ${wanted.before}` : "Newest first",
      table("Jobs", session.writes && session.who ? [...heads, ["Action"]] : heads, rows, nothing),
      el("p", { class: "buttons" }, wanted.before ? link(`#/jobs?${new URLSearchParams({ ...wanted, before: "" })}`, "Newest jobs") : null, older)),
  ];
}

const attempt = (one) =>
  el("details", { class: "attempt", "data-key": String(one.attempt), open: Boolean(one.traceback) },
    el("summary", {}, `Attempt ${one.attempt} `, mark(OUTCOME[one.outcome] ?? "bad", one.outcome), el("span", { class: "quiet" },
      ` ${when(one.started_at)}, took ${age((Date.parse(one.ended_at) - Date.parse(one.started_at)) / 1000)}${one.worker ? `, on ${one.worker}` : ""}`)),
    one.error ? el("p", { class: "error" }, one.error) : null,
    one.traceback ? pre(one.traceback) : null);

export function drawJob(job) {
  const last = [...job.attempts].reverse();
  const moments = [["Enqueued", job.created_at], ["Ready", job.ready_at], ["Runs at", job.run_at], ["Begun", job.started_at], ["Deadline", job.deadline], ["Finished", job.finished_at]];
  return [
    el("p", { class: "back" }, link("#/jobs", "← Jobs")),
    el("h1", { tabindex: "-1" }, `Job ${job.id} `, el("small", {}, job.type), " ", mark(SORT[job.state], job.state)),
    el("p", { class: "buttons" }, actions(job)),
    job.why.length ? el("ul", { class: `notice ${job.workers === 0 ? "bad" : "busy"}` }, job.why.map((reason) => el("li", {}, reason))) : null,
    job.cancel_requested ? el("p", { class: "notice busy" }, "Its worker has been told to stop.") : null,
    facts(
      ["Attempt", number(job.attempt), `${number(job.failures)} failed, ${plural(job.max_retries, "retry", "retries")} allowed`],
      ["Priority", number(job.priority)],
      ["Key", el("span", { class: "long" }, job.key ?? "–")],
      ["Idempotency key", el("span", { class: "long" }, job.idempotency_key ?? "–")],
      ["Worker", el("span", { class: "long" }, job.worker ?? "–")],
      job.ahead === null ? null : ["Ahead of it", job.ahead >= 1000 ? "1,000 or more" : number(job.ahead)],
      job.waits_for.length ? ["Waits for", job.waits_for.slice(0, 8).map((id) => [link(`#/jobs/${id}`, String(id)), " "])] : null,
      ...moments.filter(([, moment]) => moment).map(([name, moment]) => [name, el("time", { datetime: moment, title: moment }, when(moment))]),
    ),
    job.error ? panel("Error", el("p", { class: "error" }, job.error)) : null,
    el("div", { class: "pair", "data-key": "pair" },
      panel("Payload", pre(job.payload)),
      panel("Result", job.result === null ? el("p", { class: "quiet" }, "None yet.") : pre(job.result))),
    panel("Attempts that have ended",
      job.attempts_left_out ? el("p", { class: "quiet" }, `The last ${number(job.attempts.length)}; ${number(job.attempts_left_out)} before them are not shown.`) : null,
      last.length ? last.map(attempt) : el("p", { class: "quiet" }, "None has.")),
  ];
}
