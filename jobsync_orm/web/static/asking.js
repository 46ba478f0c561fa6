// The dialog before anything is changed. The browser keeps the focus in it, and Escape leaves everything as it is.

import { act } from "./api.js";

const WORDS = {
  retry: ({ id }) => [`Retry job ${id}?`, "It runs again as soon as a worker is free, with all its retries.", "Retry"],
  cancel: ({ id }) => [`Cancel job ${id}?`, "It does not run any more. If a worker has it, that one is told to stop.", "Cancel the job"],
  pause: ({ type }) => [type ? `Pause type ${type}?` : "Pause the whole queue?", "What runs goes on; nothing more is taken until it is resumed.", "Pause"],
  resume: ({ type }) => [type ? `Resume type ${type}?` : "Resume the whole queue?", "Workers take jobs again at once.", "Resume"],
  drain: ({ node }) => [`Drain ${node}?`, "It gives up its tokens to the others and gets none until it is undrained, not even when it restarts.", "Drain"],
  undrain: ({ node }) => [`Undrain ${node}?`, "It gets its share of the tokens again.", "Undrain"],
};
const REASONED = ["pause", "drain"];

const part = (name) => document.getElementById(`dialog${name ? `-${name}` : ""}`);

// Resolves to what the server said, or to null if everything was left as it is.
export function ask(action, what) {
  const [title, text, yes] = WORDS[action](what);
  const dialog = part(), opener = document.activeElement;
  part("title").textContent = title;
  part("text").textContent = text;
  part("yes").textContent = yes;
  part("error").textContent = "";
  part("reason").value = "";
  part("label").hidden = !REASONED.includes(action);
  return new Promise((resolve) => {
    const end = (said) => {
      part("yes").onclick = dialog.onclose = null;
      if (dialog.open) dialog.close();
      opener?.focus?.();
      resolve(said);
    };
    part("yes").onclick = async (event) => {
      event.preventDefault();
      part("yes").disabled = true;
      try {
        const reason = part("reason").value.trim();
        end(await act(action, REASONED.includes(action) && reason ? { ...what, reason } : what));
      } catch (error) {
        part("error").textContent = error.message;
      } finally {
        part("yes").disabled = false;
      }
    };
    dialog.onclose = () => end(null);
    dialog.showModal();
    part("no").focus();
  });
}
