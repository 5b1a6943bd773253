// Puts new figures into the page; without it the page reloads itself.
"use strict";

const main = document.getElementById("main");
const lost = document.getElementById("lost");
const every = Number(main.dataset.every);

function replace(part, fresh) {
  // what is the same stays: the pointer, the selection, and what a screen reader is at
  if (part.innerHTML === fresh.innerHTML && part.className === fresh.className) return;
  const opened = [...part.querySelectorAll("details[open]")].map((one) => one.id);
  const scrolled = [...part.querySelectorAll(".scroll")].map((one) => [one.id, one.scrollTop, one.scrollLeft]);
  const focused = part.contains(document.activeElement) ? document.activeElement : null;
  const focus = focused && (focused.id || (focused.tagName === "SUMMARY" && `${focused.parentElement.id} > summary`));
  part.className = fresh.className;
  part.replaceChildren(...fresh.childNodes);
  for (const id of opened) part.querySelector(`#${id}`)?.setAttribute("open", "");
  for (const [id, top, left] of scrolled) part.querySelector(`#${id}`)?.scrollTo(left, top);
  if (focus) part.querySelector(`#${focus}`)?.focus({ preventScroll: true });
}

async function refresh() {
  const answer = await fetch(main.dataset.parts, { cache: "no-store", signal: AbortSignal.timeout(10000) });
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const part of document.querySelectorAll("[data-part]")) {
    const its = fresh.getElementById(part.id);
    if (its) replace(part, its);
  }
  document.title = document.title.replace(/^.* · /, () => `${document.querySelector("#state strong").textContent} · `);
}

async function turn() {
  // a page that nobody sees asks for nothing
  if (!document.hidden) {
    try {
      await refresh();
      lost.hidden = true;
    } catch {
      lost.hidden = false;
    }
  }
  setTimeout(turn, every);
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) refresh().catch(() => { lost.hidden = false; });
});
setTimeout(turn, every);
