// Which page is shown, and when it is read anew: as soon as the server may have something newer, and only while it is
// looked at.

import { get, meet, session } from "./api.js";
import { ask } from "./asking.js";
import * as cluster from "./cluster.js";
import { el, morphChildren } from "./dom.js";
import { age, time } from "./format.js";
import { drawJob, drawSearch, search } from "./jobs.js";
import * as queue from "./queue.js";

const main = document.getElementById("main");
const pulse = document.getElementById("pulse");
const notice = document.getElementById("notice");

// Seconds until a job is looked at again, while it may change and when it has finished.
const JOB_SEC = 2, DONE_SEC = 15;

const met = meet().catch(() => {});

let visit = 0;
let timer = 0;
let lastRead = null;

const watched = (page) => ({
  title: page.title,
  async load() {
    const found = await page.load();
    return { value: found.value, problem: found.problem, age: found.age_sec, again: found.next_sec };
  },
  draw: page.draw,
});

function route() {
  const [path, query] = location.hash.replace(/^#/, "").split("?");
  const job = /^\/jobs\/(\d+)$/.exec(path);
  if (job) {
    return {
      nav: "#/jobs", title: `Job ${job[1]}`,
      async load() {
        const value = await get(`jobs/${job[1]}`);
        return { value, again: ["completed", "failed", "cancelled"].includes(value.state) ? DONE_SEC : JOB_SEC };
      },
      draw: drawJob,
    };
  }
  if (path === "/jobs") {
    const wanted = Object.fromEntries(new URLSearchParams(query));
    return { nav: "#/jobs", title: "Jobs", load: async () => ({ value: await search(wanted), again: null }), draw: (found) => drawSearch(wanted, found) };
  }
  if (path === "/queue") return { nav: "#/queue", ...watched(queue) };
  return { nav: "#/", ...watched(cluster) };
}

function say(text, kind) {
  const wanted = text ? [el("p", { class: `notice ${kind}` }, text)] : [];
  if (notice.textContent !== (text ?? "")) morphChildren(notice, wanted);
}

function beat(problem, old) {
  const who = session.who ? `${session.who} · ` : session.writes ? "you may only look · " : "read-only · ";
  const parts = [el("span", { class: `dot ${problem ? "bad" : "good"}`, "aria-hidden": "true" }), el("span", { class: "who" }, who), el("span", { class: "clock" }, time(Date.now() - (old ?? 0) * 1000))];
  morphChildren(pulse, parts);
}

async function refresh(page, mine, first) {
  clearTimeout(timer);
  let again = 1;
  try {
    // Who looks decides what can be clicked; asking takes no longer than reading.
    const [found] = await Promise.all([page.load(), met]);
    if (mine !== visit) return;
    again = found.again;
    if (found.value) {
      morphChildren(main, page.draw(found.value).flat(Infinity).filter(Boolean));
      lastRead = Date.now() - (found.age ?? 0) * 1000;
    }
    if (found.problem) say(found.value ? `${found.problem}: what is shown is ${age(found.age)} old` : found.problem, "bad");
    else if (notice.dataset.kind !== "done") say(null);
    beat(found.problem, found.age);
  } catch (error) {
    if (mine !== visit) return;
    const lost = error instanceof TypeError;
    const text = lost ? "the dashboard's server does not answer" : error.message;
    say(lastRead ? `${text}: what is shown is ${age((Date.now() - lastRead) / 1000)} old` : text, "bad");
    if (first) morphChildren(main, [el("h1", { tabindex: "-1" }, page.title), el("p", { class: "quiet" }, "There is nothing to show.")]);
    beat(text, 0);
  }
  if (first) {
    document.title = `${page.title} · jobsync`;
    if (visit > 1) main.querySelector("h1")?.focus({ preventScroll: true });
  }
  if (again !== null) timer = setTimeout(() => document.hidden || refresh(page, mine, false), Math.max(100, again * 1000 + 10));
}

let shown = null;

function show() {
  visit += 1;
  lastRead = null;
  notice.dataset.kind = "";
  shown = route();
  for (const link of document.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === shown.nav) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (visit > 1) window.scrollTo(0, 0);
  // Fields of another search are not this one's.
  if (shown.nav === "#/jobs") morphChildren(main, []);
  return refresh(shown, visit, true);
}

async function asked(button) {
  const said = await ask(button.dataset.act, JSON.parse(button.dataset.what));
  if (said === null) return;
  notice.dataset.kind = "done";
  say(said, "good");
  setTimeout(() => { notice.dataset.kind = ""; }, 6000);
  await refresh(shown, visit, false);
}

document.addEventListener("click", (event) => {
  const target = event.target.closest("[data-action]");
  if (!target) return;
  if (target.dataset.action === "skip") {
    event.preventDefault();
    main.focus();
  } else if (target.dataset.action === "ask") {
    asked(target);
  }
});
document.addEventListener("submit", (event) => {
  // Its property of that name is the field called id.
  if (event.target.getAttribute("id") !== "search") return;
  event.preventDefault();
  const given = [...new FormData(event.target)].map(([name, value]) => [name, value.trim()]).filter(([, value]) => value);
  const hash = `#/jobs${given.length ? `?${new URLSearchParams(given)}` : ""}`;
  if (location.hash === hash) show();
  else location.hash = hash;
});
window.addEventListener("hashchange", show);
window.addEventListener("resize", () => shown && shown.nav !== "#/jobs" && refresh(shown, visit, false));
document.addEventListener("visibilitychange", () => document.hidden || (shown && refresh(shown, visit, false)));

show();
