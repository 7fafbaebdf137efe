"use strict";
// The groups of the server, for an operator with the admin key: state, load, and buttons for commands.

let adminKey = sessionStorage.getItem("weft-admin-key") || "";
const groupRows = new Map(); // group -> its row; a row is kept, so that a button keeps the focus
const SURE_MS = 5000; // time for the second click on a button
const COMMANDS = [
  { path: "drain", label: "Drain", sure: "Really drain?", when: (states) => states.some((one) => one !== "leaving") },
  { path: "restart", label: "Restart", sure: "Really restart?",
    when: (states) => states.some((one) => !["leaving", "retired", "ended"].includes(one)) },
  { path: "revive", label: "Revive", sure: "", when: (states) => states.includes("retired") },
];

async function admin(path, body) {
  // Throws an error with the server's message and the HTTP status.
  const headers = { authorization: "Bearer " + adminKey };
  const post = { method: "POST", headers: { ...headers, "content-type": "application/json" }, body: JSON.stringify(body) };
  const answer = await fetch(base + "/admin/" + path, body ? post : { headers, cache: "no-store" });
  const said = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(said.error.message), { status: answer.status });
  return said;
}

function note(text, bad) {
  const place = $("fleet-note");
  if (place.textContent !== text) place.textContent = text;
  place.className = bad ? "failed" : "";
}

async function showFleet() {
  try {
    const engines = (await admin("groups")).engines;
    $("admin-form").hidden = true;
    $("fleet-table").hidden = false;
    const groups = new Map();
    for (const one of engines) {
      const name = one.group || one.name;
      groups.set(name, [...(groups.get(name) || []), one]);
    }
    drawGroups(groups);
  } catch (error) {
    $("fleet-table").hidden = true;
    $("admin-form").hidden = error.status !== 401;
    if (error.status !== 401) return note(error.status ? error.message : "The server does not answer.", true);
    note(adminKey ? "The admin key is wrong." : "", true);
  }
}

function drawGroups(groups) {
  for (const [name, row] of groupRows) {
    if (!groups.has(name)) {
      row.element.remove();
      groupRows.delete(name);
    }
  }
  for (const [name, engines] of groups) {
    if (!groupRows.has(name)) groupRows.set(name, groupRow(name));
    const { element, cells, buttons } = groupRows.get(name);
    const states = engines.map((one) => (one.state === "running" && !one.alive ? "down" : one.state));
    const counts = [...new Set(states)].map((one) => [states.filter((other) => other === one).length, one]);
    const sum = (field) => number(engines.reduce((all, one) => all + (one[field] || 0), 0));
    const used = engines.map((one) => one.kv_usage).filter((one) => one !== null);
    const texts = {
      role: engines[0].role,
      state: counts.length === 1 ? states[0] : counts.map((pair) => pair.join(" ")).join(", "),
      running: sum("running"),
      waiting: sum("waiting"),
      "KV cache": used.length ? percent(Math.max(...used)) : "–",
    };
    for (const [label, text] of Object.entries(texts)) cells[label].textContent = text;
    COMMANDS.forEach((command, at) => (buttons[at].hidden = !command.when(states)));
    $("groups").append(...(element.isConnected ? [] : [element]));
  }
}

function groupRow(name) {
  const element = make("tr"), cells = {}, actions = make("td", null, { "data-label": "commands", class: "commands" });
  element.append(make("th", name, { scope: "row", "data-label": "group" }));
  for (const label of ["role", "state", "running", "waiting", "KV cache"]) {
    cells[label] = make("td", "", { "data-label": label });
    element.append(cells[label]);
  }
  const buttons = COMMANDS.map((command) => groupButton(name, command));
  actions.append(...buttons);
  element.append(actions);
  return { element, cells, buttons };
}

function groupButton(name, command) {
  // A command that ends processes needs a second click.
  const button = make("button", command.label, { type: "button", "aria-label": `${command.label} ${name}` });
  const set = (text) => {
    button.textContent = text;
    button.setAttribute("aria-label", `${text} ${name}`);
  };
  let waiting = 0;
  button.addEventListener("click", async () => {
    if (command.sure && !waiting) {
      set(command.sure);
      waiting = setTimeout(() => ((waiting = 0), set(command.label)), SURE_MS);
      return;
    }
    clearTimeout(waiting);
    waiting = 0;
    set(command.label);
    button.disabled = true;
    try {
      note((await admin(command.path, { group: name })).status, false);
    } catch (error) {
      note(error.message, true);
    }
    button.disabled = false;
    showFleet();
  });
  return button;
}

$("admin-form").addEventListener("submit", (event) => {
  event.preventDefault();
  adminKey = $("admin-key").value;
  sessionStorage.setItem("weft-admin-key", adminKey);
  $("admin-key").value = "";
  showFleet();
});
$("fleet").addEventListener("toggle", () => $("fleet").open && showFleet());
setInterval(() => {
  // A table that is closed, or without a key, polls nothing.
  if ($("fleet").open && !$("fleet-table").hidden && !document.hidden) showFleet();
}, 1000);
