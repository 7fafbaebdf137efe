"use strict";
// One page without libraries: it polls /metrics each second, and talks to /v1/chat/completions.

const $ = (id) => document.getElementById(id);
const HISTORY = 120; // samples, one a second
const WINDOW = 60; // seconds that latencies are taken over
const ROUNDS = 5; // tool calls that are answered in a row

let key = sessionStorage.getItem("weft-key") || "";

const base = location.pathname.replace(/\/*$/, ""); // a proxy may show this page under a path

function api(path, options = {}) {
  const headers = { ...(options.headers || {}) };
  if (key) headers.authorization = "Bearer " + key;
  return fetch(base + path, { ...options, headers });
}

function make(tag, text, attributes = {}) {
  const element = document.createElement(tag);
  if (text !== undefined && text !== null) element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

// ---- metrics

function parseMetrics(text) {
  // name -> [{labels, value}]
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = /^weft:([a-z0-9_]+)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] || "").matchAll(/([a-z_]+)="((?:[^"\\]|\\.)*)"/g)) labels[name] = value;
    if (!found.has(match[1])) found.set(match[1], []);
    found.get(match[1]).push({ labels, value: Number(match[3]) });
  }
  return found;
}

const samplesOf = (metrics, name) => metrics.get(name) || [];
const total = (metrics, name) => samplesOf(metrics, name).reduce((sum, one) => sum + one.value, 0);

function byHead(metrics, name) {
  const found = {};
  for (const { labels, value } of samplesOf(metrics, name)) found[labels.head] = (found[labels.head] || 0) + value;
  return found;
}

function buckets(metrics, name) {
  const found = new Map();
  for (const { labels, value } of samplesOf(metrics, name + "_bucket")) {
    const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
    found.set(bound, (found.get(bound) || 0) + value);
  }
  return [...found.entries()].sort((a, b) => a[0] - b[0]);
}

function quantile(now, before, share) {
  // Linear within a bucket. null where nothing was measured between the two.
  const earlier = new Map(before);
  const counts = now.map(([bound, count]) => [bound, Math.max(count - (earlier.get(bound) || 0), 0)]);
  const all = counts.length ? counts[counts.length - 1][1] : 0;
  if (!all) return null;
  let low = 0, below = 0;
  for (const [bound, count] of counts) {
    if (count >= share * all) {
      if (bound === Infinity) return low;
      return low + (bound - low) * (count > below ? (share * all - below) / (count - below) : 1);
    }
    low = bound;
    below = count;
  }
  return low;
}

const history = []; // {at, metrics, point}

function measure(at, metrics) {
  const last = history[history.length - 1];
  const first = history.find((one) => at - one.at <= WINDOW) || last;
  const seconds = last ? Math.max(at - last.at, 1e-3) : 1;
  const since = (name) => (last ? Math.max(total(metrics, name) - total(last.metrics, name), 0) : 0);
  const steps = since("engine_steps_total");
  const rows = (name) => (steps ? since(name) / steps : 0);
  const latency = (name, share) =>
    first ? quantile(buckets(metrics, name), buckets(first.metrics, name), share) : null;
  return {
    output: since("generation_tokens_total") / seconds,
    prompts: since("prompt_tokens_total") / seconds,
    decodeRows: rows("engine_decode_rows_total"),
    prefillRows: rows("engine_prefill_rows_total"),
    running: total(metrics, "num_requests_running"),
    waiting: total(metrics, "num_requests_waiting"),
    ttft50: latency("time_to_first_token_seconds", 0.5),
    ttft99: latency("time_to_first_token_seconds", 0.99),
    itl50: latency("inter_token_latency_seconds", 0.5),
    itl99: latency("inter_token_latency_seconds", 0.99),
    kv: Math.max(0, ...samplesOf(metrics, "kv_cache_usage_perc").map((one) => one.value)),
  };
}

function number(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1000) return Math.round(value).toLocaleString("en");
  return value >= 10 || Number.isInteger(value) ? String(Math.round(value)) : value.toFixed(value < 0.1 ? 2 : 1);
}

const milliseconds = (value) => (value === null ? "–" : number(value * 1000) + " ms");
const percent = (value) => Math.round(value * 100) + "%";

function roundUp(value) {
  // The next of 1, 2, 5, 10, 20, 50, ...: the top of an axis.
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * unit).find((top) => top >= value * 0.999);
}

function axis(svg, top, show) {
  // Labels are HTML over the drawing, which is stretched. They repeat what aria-label says.
  let labels = svg.nextElementSibling;
  if (!labels || labels.className !== "axis") {
    labels = make("div", null, { class: "axis", "aria-hidden": "true" });
    svg.after(labels);
    labels.append(make("span"), make("span"), make("span"), make("span", "2 min ago"), make("span", "1 min ago"), make("span", "now"));
  }
  [top, top / 2, 0].forEach((value, at) => (labels.children[at].textContent = show(value)));
}

function chart(id, names, label, show, floor) {
  const svg = $(id);
  const points = history.map((one) => one.point);
  const highest = Math.max(floor, ...points.flatMap((point) => names.map((name) => point[name] || 0)));
  const most = roundUp(highest);
  axis(svg, most, show);
  const grid = [4, 41, 78].map((y) => {
    const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
    line.setAttribute("class", "grid");
    line.setAttribute("d", `M0 ${y}H300`);
    return line;
  });
  svg.replaceChildren(
    ...grid,
    ...names.map((name, which) => {
      const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
      const shown = points.map((point, at) => [at, point[name]]).filter(([, value]) => value !== null);
      line.setAttribute("class", "s" + which);
      line.setAttribute(
        "points",
        shown
          .map(([at, value]) => `${((at + HISTORY - points.length) * 300) / (HISTORY - 1)},${78 - (value / most) * 74}`)
          .join(" "),
      );
      return line;
    }),
  );
  const last = points[points.length - 1] || {};
  const text = names.map((name) => show(last[name] === undefined ? null : last[name])).join(" / ");
  $(id + "-now").textContent = text;
  svg.setAttribute("aria-label", `${label}: now ${text}; highest in two minutes ${show(highest)}`);
}

function draw() {
  chart("tokens", ["output", "prompts"], "Tokens per second, output and prompts", number, 1);
  chart("rows", ["decodeRows", "prefillRows"], "Rows per step, decode and prefill", number, 1);
  chart("queue", ["running", "waiting"], "Sequences, running and waiting", number, 1);
  chart("ttft", ["ttft50", "ttft99"], "Time to first token, median and p99", milliseconds, 0.001);
  chart("itl", ["itl50", "itl99"], "Time between tokens, median and p99", milliseconds, 0.001);
  chart("kv", ["kv"], "KV pool used", percent, 1);
}

function drawHeads(at, metrics) {
  const last = history[history.length - 2];
  const seconds = last ? Math.max(at - last.at, 1e-3) : 1;
  const running = byHead(metrics, "num_requests_running"), waiting = byHead(metrics, "num_requests_waiting");
  const kv = byHead(metrics, "kv_cache_usage_perc");
  const change = (name, head) =>
    last ? Math.max((byHead(metrics, name)[head] || 0) - (byHead(last.metrics, name)[head] || 0), 0) : 0;
  const lines = samplesOf(metrics, "engine_up").map(({ labels, value }) => {
    const { head, role } = labels;
    const steps = change("engine_steps_total", head);
    const mean = (name) => number(steps ? change(name, head) / steps : 0);
    const meter = make("meter", percent(kv[head] || 0), { min: 0, max: 1, value: kv[head] || 0, "aria-label": "KV pool" });
    const used = make("td");
    used.append(meter, " " + percent(kv[head] || 0));
    const row = make("tr");
    row.append(
      make("th", head, { scope: "row" }),
      make("td", role || "unified"),
      make("td", value ? "up" : "down"),
      make("td", number(running[head] || 0)),
      make("td", number(waiting[head] || 0)),
      used,
      make("td", number(steps / seconds)),
      make("td", `${mean("engine_decode_rows_total")} decode, ${mean("engine_prefill_rows_total")} prefill`),
    );
    return row;
  });
  $("heads").replaceChildren(...lines);
}

async function describe() {
  const answer = await api("/v1/models");
  if (!answer.ok) return false;
  const models = (await answer.json()).data;
  const version = await (await api("/version")).json();
  $("version").textContent = version.version;
  const card = $("card");
  card.replaceChildren();
  const facts = [
    ["name", models.map((one) => one.id).join(", ")],
    ["context", models[0].max_model_len.toLocaleString("en") + " tokens"],
    ["address", location.origin + base + "/v1"],
    ...(models[0].about ? [["about", models[0].about]] : []),
  ];
  for (const [name, value] of facts) card.append(make("dt", name), make("dd", value));
  if (models[0].example) $("question").placeholder = models[0].example;
  seesImages = (models[0].input_modalities || []).includes("image");
  $("attach").hidden = !seesImages;
  model = models[0].id;
  document.title = model + " on Weft";
  return true;
}

let model = "";
let seesImages = false;

function show(text, good) {
  const state = $("state");
  if (state.textContent !== text) state.textContent = text; // or it would be read aloud each second
  state.className = good ? "good" : "bad";
}

async function poll() {
  try {
    const answer = await api("/metrics", { cache: "no-store" });
    $("key-form").hidden = answer.status !== 401;
    if (answer.status === 401) return show(key ? "the key is wrong" : "the server needs an API key", false);
    if (!answer.ok) return show("the server answered with status " + answer.status, false);
    const at = performance.now() / 1000;
    const metrics = parseMetrics(await answer.text());
    const point = measure(at, metrics);
    history.push({ at, metrics, point });
    if (history.length > HISTORY) history.shift();
    if (!model) await describe();
    const ready = await api("/ready", { cache: "no-store" });
    show((await ready.json()).status, ready.ok);
    drawHeads(at, metrics);
    draw();
  } catch {
    show("the server does not answer", false);
  }
}

async function polling() {
  if (!document.hidden) await poll();
  setTimeout(polling, 1000);
}

// ---- markdown, into elements: no text of the model is ever read as HTML

function inline(parent, text) {
  const rule = /(`+)([^`][\s\S]*?)\1|\*\*([^*]+)\*\*|\*([^*\s][^*]*)\*|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/g;
  let last = 0;
  for (const match of text.matchAll(rule)) {
    parent.append(text.slice(last, match.index));
    if (match[2] !== undefined) parent.append(make("code", match[2]));
    else if (match[3] !== undefined) parent.append(make("strong", match[3]));
    else if (match[4] !== undefined) parent.append(make("em", match[4]));
    else parent.append(make("a", match[5], { href: match[6], rel: "noopener noreferrer", target: "_blank" }));
    last = match.index + match[0].length;
  }
  parent.append(text.slice(last));
}

function markdown(text) {
  const parts = [];
  let paragraph = [], list = null, fence = null;
  const flush = () => {
    if (paragraph.length) {
      const p = make("p");
      paragraph.forEach((line, at) => {
        if (at) p.append(make("br"));
        inline(p, line);
      });
      parts.push(p);
    }
    paragraph = [];
    list = null;
  };
  for (const line of text.split("\n")) {
    const mark = /^\s*(```|~~~)(.*)$/.exec(line);
    if (fence) {
      if (mark && mark[1] === fence.mark && !mark[2].trim()) fence = null;
      else fence.code.append(line + "\n");
      continue;
    }
    const item = /^\s*(?:([-*+])|\d{1,9}[.)])\s+(.*)$/.exec(line);
    const head = /^(#{1,6})\s+(.*)$/.exec(line);
    if (mark) {
      flush();
      const code = make("code");
      const pre = make("pre", null, { tabindex: 0 });
      pre.append(code);
      parts.push(pre);
      fence = { mark: mark[1], code };
    } else if (item) {
      const kind = item[1] ? "UL" : "OL";
      if (!list || list.tagName !== kind) {
        flush();
        list = make(kind);
        parts.push(list);
      }
      const one = make("li");
      inline(one, item[2]);
      list.append(one);
    } else if (head) {
      flush();
      const title = make("h" + Math.min(head[1].length + 3, 6));
      inline(title, head[2]);
      parts.push(title);
    } else if (!line.trim()) {
      flush();
    } else {
      if (list) flush();
      paragraph.push(line);
    }
  }
  flush();
  return parts;
}

// ---- chat

let conversation = []; // a new one takes its place, while a reply of the old one may still come
let running = null; // AbortController of the reply that is under way
let images = []; // data: URLs that go with the next message
const MOST_IMAGE_BYTES = 4 << 20;

const CALCULATOR = {
  type: "function",
  function: {
    name: "calculator",
    description: "Works out an arithmetic expression.",
    parameters: {
      type: "object",
      properties: { expression: { type: "string" } },
      required: ["expression"],
      additionalProperties: false,
    },
  },
};

function calculate(text) {
  // + - * / and parentheses; throws for anything else.
  const tokens = text.match(/\d+(?:\.\d+)?|[-+*/()]/g) || [];
  if (tokens.join("") !== text.replace(/\s+/g, "")) throw new Error("not an arithmetic expression");
  let at = 0;
  const factor = () => {
    const token = tokens[at++];
    if (token === "-") return -factor();
    if (token === "(") {
      const value = sum();
      if (tokens[at++] !== ")") throw new Error("a parenthesis is missing");
      return value;
    }
    if (!/^\d/.test(token || "")) throw new Error("a number is missing");
    return Number(token);
  };
  const product = () => {
    let value = factor();
    while (tokens[at] === "*" || tokens[at] === "/") value = tokens[at++] === "*" ? value * factor() : value / factor();
    return value;
  };
  const sum = () => {
    let value = product();
    while (tokens[at] === "+" || tokens[at] === "-") value = tokens[at++] === "+" ? value + product() : value - product();
    return value;
  };
  const result = sum();
  if (at < tokens.length) throw new Error("not an arithmetic expression");
  return String(result);
}

function bubble(who) {
  const article = make("article");
  const body = make("div");
  article.append(make("h3", who), body);
  $("log").append(article);
  return body;
}

function render(body, reply) {
  const parts = [];
  if (reply.reasoning) {
    const details = make("details", null, { class: "thought" });
    details.open = !reply.content;
    details.append(make("summary", "Reasoning"), ...markdown(reply.reasoning));
    parts.push(details);
  }
  parts.push(...markdown(reply.content));
  for (const call of reply.calls) {
    const part = make("div", null, { class: "call" });
    part.append(make("strong", call.function.name), make("pre", call.function.arguments));
    parts.push(part);
  }
  if (reply.note) parts.push(make("p", reply.note, { class: "failed" }));
  const log = $("log");
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  body.replaceChildren(...parts);
  if (atEnd) log.scrollTop = log.scrollHeight;
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    waiting += value;
    const blocks = waiting.split("\n\n");
    waiting = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

function take(reply, delta) {
  reply.content += delta.content || "";
  reply.reasoning += delta.reasoning_content || "";
  for (const piece of delta.tool_calls || []) {
    const call = (reply.calls[piece.index] ||= { id: piece.id, type: "function", function: { name: "", arguments: "" } });
    call.function.name += piece.function.name || "";
    call.function.arguments += piece.function.arguments || "";
  }
}

async function receive(reply, body, talk) {
  const system = $("system").value.trim();
  const request = {
    model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...talk],
    temperature: Number($("temperature").value) || 0,
    max_tokens: Number($("most").value) || 512,
    stream: true,
    ...($("calculator").checked ? { tools: [CALCULATOR] } : {}),
  };
  const answer = await api("/v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(request),
    signal: running.signal,
  });
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  let due = false;
  for await (const chunk of events(answer)) {
    if (chunk.error) throw new Error(chunk.error.message);
    for (const choice of chunk.choices) {
      take(reply, choice.delta);
      if (choice.finish_reason === "length") reply.note = "The answer was cut off: raise the maximum of output tokens.";
    }
    if (!due) {
      due = true;
      setTimeout(() => {
        due = false;
        render(body, reply);
      }, 30);
    }
  }
}

async function reply(talk) {
  // One answer. Returns whether tool results were added, so that there is another one to come.
  const made = { content: "", reasoning: "", calls: [], note: "" };
  const body = bubble("assistant");
  body.setAttribute("aria-busy", "true");
  try {
    await receive(made, body, talk);
  } catch (error) {
    made.note = error.name === "AbortError" ? "Stopped." : error.message;
  }
  render(body, made);
  body.removeAttribute("aria-busy");
  const message = { role: "assistant", content: made.content };
  if (made.calls.length && !made.note) message.tool_calls = made.calls;
  if (made.content || message.tool_calls) talk.push(message);
  if (!message.tool_calls) return false;
  for (const call of made.calls) {
    let result;
    try {
      if (call.function.name !== "calculator") throw new Error("no tool has this name");
      result = calculate(JSON.parse(call.function.arguments).expression);
    } catch (error) {
      result = "error: " + error.message;
    }
    talk.push({ role: "tool", tool_call_id: call.id, content: result });
    bubble("calculator").append(make("p", result));
  }
  return true;
}

function complain(text) {
  $("problem").textContent = text;
}

function showImages() {
  $("images").replaceChildren(
    ...images.map((url, at) => {
      const remove = make("button", "×", { type: "button", "aria-label": `Remove image ${at + 1}` });
      remove.addEventListener("click", () => {
        images.splice(at, 1);
        showImages();
      });
      const item = make("span");
      item.append(make("img", null, { src: url, alt: `Image ${at + 1} of the next message` }), remove);
      return item;
    }),
  );
}

async function attach(files) {
  complain("");
  if (!model) await describe();
  for (const file of files) {
    if (!seesImages) return complain(`${model || "This model"} does not accept images.`);
    if (!file.type.startsWith("image/")) return complain(`${file.name} is not an image.`);
    if (file.size > MOST_IMAGE_BYTES) return complain(`${file.name} is larger than 4 MiB.`);
    images.push(await new Promise((resolve, reject) => {
      const reader = new FileReader();
      reader.onload = () => resolve(reader.result);
      reader.onerror = () => reject(reader.error);
      reader.readAsDataURL(file);
    }));
    showImages();
  }
}

async function ask() {
  const question = $("question").value.trim();
  if ((!question && !images.length) || running) return;
  complain("");
  running = new AbortController();
  $("question").value = "";
  $("send").hidden = true;
  $("stop").hidden = false;
  const talk = conversation;
  const shown = images;
  images = [];
  showImages();
  const parts = shown.map((url) => ({ type: "image_url", image_url: { url } }));
  if (question) parts.push({ type: "text", text: question });
  talk.push({ role: "user", content: shown.length ? parts : question });
  const pictures = shown.map((url, at) => make("img", null, { src: url, alt: `Image ${at + 1}` }));
  bubble("you").append(...pictures, ...markdown(question));
  $("log").scrollTop = $("log").scrollHeight;
  try {
    if (!model) await describe();
    for (let round = 0; round < ROUNDS && (await reply(talk)); round++);
  } catch {
    show("the server does not answer", false);
  }
  running = null;
  $("send").hidden = false;
  $("stop").hidden = true;
  $("question").focus();
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    ask();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
});
$("stop").addEventListener("click", () => running && running.abort());
$("fresh").addEventListener("click", () => {
  if (running) running.abort();
  conversation = [];
  images = [];
  showImages();
  complain("");
  $("log").replaceChildren();
  $("question").focus();
});
const filesOf = (data) => [...(data ? data.files : [])];
$("attach").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", () => {
  attach([...$("file").files]).catch((error) => complain(String(error)));
  $("file").value = "";
});
$("question").addEventListener("paste", (event) => {
  const files = filesOf(event.clipboardData);
  if (!files.length) return;
  event.preventDefault();
  attach(files).catch((error) => complain(String(error)));
});
for (const name of ["dragover", "drop"]) {
  $("chat-section").addEventListener(name, (event) => {
    if (!event.dataTransfer || ![...event.dataTransfer.types].includes("Files")) return;
    event.preventDefault();
    if (name === "drop") attach(filesOf(event.dataTransfer)).catch((error) => complain(String(error)));
  });
}
for (const link of document.querySelectorAll("nav a")) link.href = base + link.getAttribute("href");
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value;
  sessionStorage.setItem("weft-key", key);
  $("key").value = "";
  poll();
});

draw();
polling();
