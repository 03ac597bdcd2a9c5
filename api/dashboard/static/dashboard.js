// Keeps the regions of a page fresh over one event stream; everything else works without this file.
"use strict";

document.documentElement.classList.add("has-script");

const FIELDS = "input:not([type=hidden]), select, textarea";
const FOCUSABLE = "a[href], button, summary, input:not([type=hidden]), select, video";
const waiting = new Map();

function isInUse(region) {
  const active = document.activeElement;
  if (region.contains(active) && active.matches(FIELDS)) return true;
  if (region.querySelector("details.ask[open]") !== null) return true;
  const video = region.querySelector("video");
  return video !== null && !video.paused;
}

function replace(region, html) {
  const active = document.activeElement;
  const place = region.contains(active) ? [...region.querySelectorAll(FOCUSABLE)].indexOf(active) : -1;
  const open = [...region.querySelectorAll("details")].map((fold) => fold.open);
  const scroll = [...region.querySelectorAll("pre")].map((text) => text.scrollTop);
  region.innerHTML = html; // escaped by the server; the page's policy lets no script in it run
  region.querySelectorAll("details").forEach((fold, index) => {
    if (index < open.length) fold.open = open[index];
  });
  region.querySelectorAll("pre").forEach((text, index) => { text.scrollTop = scroll[index] || 0; });
  if (place >= 0) {
    const again = region.querySelectorAll(FOCUSABLE)[place];
    if (again) again.focus({ preventScroll: true });
  }
}

function show(id, html) {
  const region = document.getElementById(id);
  if (region === null) return;
  if (isInUse(region)) {
    waiting.set(id, html);
  } else {
    waiting.delete(id);
    replace(region, html);
  }
}

function catchUp() {
  for (const [id, html] of [...waiting]) show(id, html);
}

function follow(url) {
  const liveness = document.getElementById("liveness");
  const say = (state, text) => {
    if (liveness === null || liveness.dataset.state === state) return;
    liveness.dataset.state = state;
    liveness.textContent = text;
  };
  if (liveness !== null) liveness.textContent = "Connecting";
  const source = new EventSource(url);
  source.addEventListener("open", () => say("live", "Live"));
  source.addEventListener("regions", (event) => {
    say("live", "Live");
    for (const [id, html] of Object.entries(JSON.parse(event.data))) show(id, html);
  });
  source.addEventListener("over", () => {
    source.close();
    say("lost", "Not live any more: reload the page");
  });
  source.addEventListener("error", () => {
    if (source.readyState === EventSource.CLOSED) say("lost", "Not live: reload the page");
    else say("wait", "Reconnecting");
  });
  window.addEventListener("pagehide", () => source.close());
  document.addEventListener("focusout", () => setTimeout(catchUp, 0));
  document.addEventListener("toggle", () => setTimeout(catchUp, 0), true);
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-copy]");
  if (button !== null) {
    const text = document.getElementById(button.dataset.copy).textContent;
    navigator.clipboard.writeText(text).then(
      () => { button.textContent = "Copied"; },
      () => { button.textContent = "Select it and copy by hand"; },
    );
  }
  for (const ask of document.querySelectorAll("details.ask[open]")) {
    if (!ask.contains(event.target)) ask.open = false;
  }
});

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  for (const ask of document.querySelectorAll("details.ask[open]")) {
    ask.open = false;
    ask.querySelector("summary").focus();
  }
});

document.addEventListener("submit", (event) => {
  const button = event.target.querySelector("button[type=submit]");
  if (event.target.method !== "post" || button === null) return;
  if (button.getAttribute("aria-busy") === "true") {
    event.preventDefault();
    return;
  }
  button.setAttribute("aria-busy", "true");
});

window.addEventListener("pageshow", (event) => {
  if (!event.persisted) return;
  for (const button of document.querySelectorAll("button[aria-busy=true]")) button.removeAttribute("aria-busy");
});

if (document.body.dataset.live) follow(document.body.dataset.live);
