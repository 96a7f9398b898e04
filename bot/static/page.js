// Times in the reader's own zone, and pages that keep up by themselves. Everything works without it.
"use strict";

const parts_of_a_day = { month: "short", day: "numeric", hour: "numeric", minute: "2-digit" };
const recent = new Intl.DateTimeFormat(undefined, parts_of_a_day);
const older = new Intl.DateTimeFormat(undefined, { year: "numeric", ...parts_of_a_day });

function localTimes(root) {
  for (const time of root.querySelectorAll("time[datetime]")) {
    const at = new Date(time.dateTime);
    time.title = time.textContent;
    time.textContent = (at.getFullYear() === new Date().getFullYear() ? recent : older).format(at);
  }
}

// What the server sent for each part that keeps up; a part is replaced only when that changes.
const sent = (root) => [...root.querySelectorAll("[data-live]")].map((part) => [part.id, part]);
const parts = new Map(sent(document).map(([id, part]) => [id, part.innerHTML]));

localTimes(document);

async function look() {
  const answer = await fetch(location.href, { credentials: "same-origin" });
  if (answer.redirected || answer.status === 403) return location.reload();
  if (!answer.ok) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  let changed = false;
  for (const [id, part] of sent(page)) {
    const text = part.innerHTML, shown = document.getElementById(id);
    // A form with something wrong in it does not keep up, so that it stays in sight.
    if (shown && shown.dataset.live !== undefined && parts.get(id) !== text) {
      replace(shown, part);
      changed = true;
    }
    parts.set(id, text);
  }
  const news = document.getElementById("news");
  if (changed && news) news.textContent = "The page was brought up to date.";
}

// What was typed, chosen and focused stays.
function replace(shown, part) {
  const focused = shown.contains(document.activeElement) ? document.activeElement : null;
  const typed = [...shown.querySelectorAll("textarea, select")].map((field) => [field.id, field.value]);
  const chosen = [...shown.querySelectorAll("input:checked")].map((field) => field.id);
  localTimes(part);
  shown.className = part.className;
  shown.replaceChildren(...document.importNode(part, true).childNodes);
  for (const [id, value] of typed) if (value && document.getElementById(id)) document.getElementById(id).value = value;
  for (const id of chosen) if (document.getElementById(id)) document.getElementById(id).checked = true;
  if (focused && !focused.isConnected) {
    const again = focused.id ? document.getElementById(focused.id) : null;
    (again || document.getElementById("main")).focus({ preventScroll: true });
  }
}

// One look at a time, and one more if something rang meanwhile.
let looking = null, again = false;
function ring() {
  if (looking) { again = true; return; }
  looking = look().catch(() => {}).finally(() => {
    looking = null;
    if (again) { again = false; ring(); }
  });
}

let stream = null;
function follow() {
  if (document.visibilityState === "hidden") {
    // A browser allows few connections: pages that nobody looks at give theirs back.
    stream?.close();
    stream = null;
  } else if (!stream) {
    stream = new EventSource("/approvals/events");
    // What happened before it was open was not heard.
    stream.addEventListener("open", ring);
    stream.addEventListener("change", ring);
    stream.addEventListener("error", () => {
      if (stream?.readyState !== EventSource.CLOSED) return;
      // Signed out, or a proxy said that the service is away. The first is seen by looking, the second passes.
      stream = null;
      ring();
      setTimeout(follow, 5000);
    });
  }
}

if (document.querySelector("[data-live]")) {
  document.addEventListener("visibilitychange", follow);
  follow();
}
