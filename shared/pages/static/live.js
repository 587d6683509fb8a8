// Keeps a page up to date: asks again whether it has changed, and changes only what differs. Whatever the reader is
// doing stays: scroll position, focus, selected text, typed input, open details, an open dialog. Without this script,
// pages work and are as old as the moment they were loaded.
"use strict";

const baseMs = 1000 * Number(document.body.dataset.liveS || 0);
const slowestMs = 60_000;
const isLive = baseMs > 0 && document.querySelector("[data-live]") !== null;
const banner = document.getElementById("connection");
const dialog = document.getElementById("dialog");
let etag = null;
let latest = null; // the newest page, while parts of it still have to be shown
let failures = 0;
let timer = 0;
let asking = false;

// Changing the page

function keyOf(node) {
  return node.nodeType === Node.ELEMENT_NODE ? node.id || node.dataset.keep || node.dataset.key || "" : "";
}

function isSelected(node) {
  const selection = document.getSelection();
  return selection !== null && !selection.isCollapsed && selection.containsNode(node, true);
}

// Returns whether everything could be changed: selected text has to wait.
function morph(now, next) {
  if (now.isEqualNode(next)) return true;
  if (now.nodeType !== Node.ELEMENT_NODE) {
    if (isSelected(now)) return false;
    now.nodeValue = next.nodeValue;
    return true;
  }
  const ownsOpen = now.matches("details, dialog");
  for (const { name, value } of [...next.attributes]) {
    if (!(ownsOpen && name === "open") && now.getAttribute(name) !== value) now.setAttribute(name, value);
  }
  for (const { name } of [...now.attributes]) {
    if (!(ownsOpen && name === "open") && !next.hasAttribute(name) && !name.startsWith("data-js")) {
      now.removeAttribute(name);
    }
  }
  return morphChildren(now, next);
}

function morphChildren(now, next) {
  const keyed = new Map([...now.childNodes].filter(keyOf).map((child) => [keyOf(child), child]));
  let complete = true;
  let place = now.firstChild;
  for (const wanted of [...next.childNodes]) {
    const key = keyOf(wanted);
    let match = key ? keyed.get(key) : place;
    if (match && (match.nodeName !== wanted.nodeName || keyOf(match) !== key)) match = null;
    if (!match) {
      now.insertBefore(document.importNode(wanted, true), place);
      continue;
    }
    if (match === place) place = place.nextSibling;
    else now.insertBefore(match, place);
    complete = morph(match, wanted) && complete;
  }
  while (place) {
    const extra = place;
    place = place.nextSibling;
    if (extra.contains(document.activeElement)) extra.closest("[data-live]")?.setAttribute("tabindex", "-1");
    extra.remove();
  }
  return complete;
}

function show(page) {
  let complete = true;
  for (const section of document.querySelectorAll("[data-live][id]")) {
    const next = page.getElementById(section.id);
    if (next) complete = morph(section, next) && complete;
  }
  if (document.title !== page.title) document.title = page.title;
  latest = complete ? null : page;
  prepare();
}

// Asking

function say(text, link) {
  banner.hidden = !text;
  if (banner.dataset.jsText === text) return; // screen readers read every change
  banner.dataset.jsText = text;
  banner.textContent = text;
  if (link) {
    const anchor = document.createElement("a");
    anchor.href = link;
    anchor.textContent = "Sign in again";
    banner.append(" ", anchor);
  }
}

async function ask() {
  asking = true;
  try {
    const headers = { Accept: "text/html", ...(etag ? { "If-None-Match": etag } : {}) };
    const answer = await fetch(location.href, { headers, signal: AbortSignal.timeout(15_000) });
    if (answer.redirected || answer.status === 401) {
      say("You have been signed out.", answer.redirected ? answer.url : location.href);
      return false;
    }
    if (answer.status === 200) {
      etag = answer.headers.get("ETag");
      show(new DOMParser().parseFromString(await answer.text(), "text/html"));
    } else if (answer.status === 304) {
      if (latest) show(latest);
    } else {
      throw new Error(`status ${answer.status}`);
    }
    failures = 0;
    say("");
  } catch {
    failures += 1;
    if (failures > 1) say("Connection lost. This page may be out of date; trying again.");
  } finally {
    asking = false;
  }
  return true;
}

async function turn() {
  clearTimeout(timer);
  if (document.hidden || asking) return;
  if (await ask()) timer = setTimeout(turn, Math.min(slowestMs, baseMs * 2 ** Math.min(failures, 10)));
}

// Times

function relative(at) {
  const gap = Date.now() / 1000 - at;
  const length = Math.abs(gap);
  if (length < 60) return gap >= 0 ? "just now" : "in a moment";
  const [size, unit] = [[86_400, "d"], [3600, "h"], [60, "min"]].find(([seconds]) => length >= seconds);
  const amount = Math.floor(length / size);
  return gap >= 0 ? `${amount} ${unit} ago` : `in ${amount} ${unit}`;
}

function prepare() {
  for (const time of document.querySelectorAll("time[data-at]")) {
    const text = relative(Number(time.dataset.at));
    if (time.textContent !== text && !isSelected(time)) time.textContent = text;
  }
  for (const button of document.querySelectorAll("[data-copy][hidden]")) button.hidden = false;
}

// Dialogs and copying

async function openDialog(link) {
  try {
    const answer = await fetch(link.href);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const content = page.querySelector("[data-dialog-content]");
    if (!answer.ok || answer.redirected || !content) throw new Error("no form");
    dialog.replaceChildren(document.importNode(content, true));
    prepare();
    dialog.showModal();
  } catch {
    location.assign(link.href);
  }
}

document.addEventListener("click", async (event) => {
  const plain = event.button === 0 && !(event.ctrlKey || event.metaKey || event.shiftKey || event.altKey);
  const link = event.target.closest("a[data-dialog]");
  if (link && plain) {
    event.preventDefault();
    await openDialog(link);
    return;
  }
  if (event.target.closest("[data-close]") && dialog.open) {
    event.preventDefault();
    dialog.close();
    return;
  }
  const copy = event.target.closest("[data-copy]");
  if (copy) {
    const code = copy.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
      copy.textContent = "Copied";
    } catch {
      document.getSelection().selectAllChildren(code); // plain HTTP: the reader copies it
    }
  }
});

prepare();
setInterval(prepare, 10_000);
if (isLive) {
  document.addEventListener("visibilitychange", turn);
  addEventListener("online", turn);
  timer = setTimeout(turn, baseMs);
}
