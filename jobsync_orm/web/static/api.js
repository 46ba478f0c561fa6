// What the server is asked, and told.

export const session = { writes: false, who: null, token: null };

async function said(answer) {
  try {
    return await answer.json();
  } catch {
    return { error: `the server answered ${answer.status}` };
  }
}

export async function get(path, parameters = {}) {
  const given = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined && value !== ""));
  const answer = await fetch(`api/${path}${given.size ? `?${given}` : ""}`, { headers: { accept: "application/json" } });
  const found = await said(answer);
  if (!answer.ok && !("value" in found)) throw new Error(found.error);
  return found;
}

export async function act(action, what) {
  const answer = await fetch(`api/act/${action}`, {
    method: "POST",
    headers: { "content-type": "application/json", "x-jobsync-token": session.token ?? "" },
    body: JSON.stringify(what),
  });
  const found = await said(answer);
  if (!answer.ok) throw new Error(found.error);
  return found.said;
}

export async function meet() {
  Object.assign(session, await get("session"));
}
