// Numbers, moments and durations for people.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const fine = new Intl.NumberFormat("en-US", { maximumFractionDigits: 2 });
const short = new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 1 });

export const number = (value) => (value === null || value === undefined ? "–" : whole.format(value));
export const compact = (value) => (value < 10000 ? fine.format(value) : short.format(value));
export const about = (value, estimated) => (estimated && value > 0 ? `~${short.format(value)}` : number(value));
export const plural = (count, one, many = `${one}s`) => `${number(count)} ${count === 1 ? one : many}`;

export function rate(perSecond) {
  if (perSecond === null || perSecond === undefined) return "–";
  if (perSecond === 0) return "0/s";
  return perSecond < 10 ? `${perSecond.toFixed(perSecond < 0.1 ? 2 : 1)}/s` : `${whole.format(perSecond)}/s`;
}

export function age(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  const s = Math.round(seconds);
  if (s < 120) return `${s} s`;
  if (s < 7200) return `${Math.floor(s / 60)} min ${s % 60} s`;
  if (s < 172800) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${whole.format(Math.floor(s / 86400))} d ${Math.floor((s % 86400) / 3600)} h`;
}

// The same in one unit.
export const ago = (seconds) => age(Math.max(0, seconds)).replace(/^(\d+ (?:min|h|d)) .*/, "$1");

const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
const day = new Intl.DateTimeFormat(undefined, { day: "numeric", month: "short" });

export const time = (moment) => clock.format(new Date(moment));

export function when(moment, now = Date.now()) {
  if (!moment) return "–";
  const date = new Date(moment);
  return Math.abs(now - date) < 12 * 3600e3 ? clock.format(date) : `${day.format(date)} ${clock.format(date)}`;
}
