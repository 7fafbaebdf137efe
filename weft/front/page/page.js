"use strict";
// One page without libraries: it polls /metrics/history each second, and talks to /v1/chat/completions.

const $ = (id) => document.getElementById(id);
const KEPT = 600; // seconds of history
const GAP = 5; // seconds without a point that interrupt a line
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

// ---- load

const points = []; // objects by column name, one per second, oldest first
let serverNow = 0; // the server's clock at the last answer
let clockOffset = 0; // Date.now() / 1000 less the server's clock

function number(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1000) return Math.round(value).toLocaleString("en");
  return value >= 10 || Number.isInteger(value) ? String(Math.round(value)) : value.toFixed(value < 0.1 ? 2 : 1);
}

const percent = (share) => Math.round(share * 100) + "%";

function roundUp(value) {
  // The next of 1, 2, 5, 10, 20, 50, ...: the top of an axis.
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * unit).find((top) => top >= value * 0.999);
}

// `series`: pairs of name and column. `floor`: the lowest top of the axis, in `unit`.
const CHARTS = [
  { id: "tokens", title: "Tokens per second", unit: "tokens/s", floor: 1,
    series: [["output", "output_per_second"], ["prompts", "prompt_per_second"]] },
  { id: "rows", title: "Rows per step", unit: "rows", floor: 1,
    series: [["decode", "decode_rows_per_step"], ["prefill", "prefill_rows_per_step"]] },
  { id: "queue", title: "Sequences", unit: "sequences", floor: 2, series: [["running", "running"], ["waiting", "waiting"]] },
  { id: "ttft", title: "Time to first token", unit: "ms", factor: 1000, floor: 1,
    series: [["median", "ttft_p50"], ["p99", "ttft_p99"]] },
  { id: "itl", title: "Time between tokens", unit: "ms", factor: 1000, floor: 1,
    series: [["median", "itl_p50"], ["p99", "itl_p99"]] },
  { id: "kv", title: "KV cache used", unit: "%", factor: 100, floor: 100, series: [["fullest engine", "kv_usage"]] },
];
const LEFT = 48, RIGHT = 8, TOP = 20, BOTTOM = 20; // pixels around the plot

function drawing(tag, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function value(chart, point, column) {
  // In the unit of the chart; null where nothing was measured.
  const found = point[column];
  return found === null || found === undefined ? null : found * (chart.factor || 1);
}

const period = () => Number($("period").value);
const shown = () => points.filter((point) => point.second > serverNow - period());

function build(chart) {
  const figure = make("figure"), caption = make("figcaption", chart.title + " "), legend = make("p", null, { class: "legend" });
  caption.append(make("output", null, { id: chart.id + "-now" }));
  chart.series.forEach(([name], at) => legend.append(make("i", null, { class: "s" + at }), name + " "));
  if (chart.unit === "ms") legend.append("(last minute)");
  const names = chart.series.map(([name]) => name).join(" and ");
  // A slider, so that screen readers pass the arrow keys on and read the value at the pointer.
  chart.svg = drawing("svg", {
    id: chart.id, tabindex: 0, role: "slider", "aria-roledescription": "chart", "aria-orientation": "horizontal",
    "aria-label": `${chart.title}: ${names}`, "aria-valuemin": 0, "aria-valuenow": 0,
  });
  chart.tip = make("div", null, { class: "tip", hidden: "" });
  chart.at = null; // second of the point that the tip shows
  figure.append(caption, chart.svg, chart.tip, legend);
  $("charts").append(figure);
  const hover = (event) => {
    const box = chart.svg.getBoundingClientRect();
    const share = (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
    point(chart, serverNow - period() * (1 - share));
  };
  chart.svg.addEventListener("pointermove", hover);
  chart.svg.addEventListener("pointerdown", hover);
  chart.svg.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && point(chart, null));
  chart.svg.addEventListener("focus", () => chart.at === null && point(chart, serverNow));
  chart.svg.addEventListener("blur", () => point(chart, null));
  chart.svg.addEventListener("keydown", (event) => {
    const all = shown(), last = all.length - 1;
    const at = all.findIndex((one) => one.second === chart.at);
    const next = {
      ArrowLeft: at - 1, ArrowDown: at - 1, ArrowRight: at + 1, ArrowUp: at + 1,
      PageDown: at - 30, PageUp: at + 30, Home: 0, End: last,
    }[event.key];
    if (event.key === "Escape" && chart.at !== null) {
      event.stopPropagation();
      point(chart, null);
    }
    if (next === undefined || last < 0) return;
    event.preventDefault();
    point(chart, all[Math.min(Math.max(next, 0), last)].second);
  });
}

function point(chart, second) {
  // Shows the values nearest to a second of the server's clock; hides them for null.
  const all = second === null ? [] : shown();
  const near = all.reduce((best, one) => (!best || Math.abs(one.second - second) < Math.abs(best.second - second) ? one : best), null);
  chart.at = near && near.second;
  draw(chart);
  const text = near ? tipText(chart, near).join(", ") : "";
  chart.svg.setAttribute("aria-valuetext", text || "no value");
  chart.svg.setAttribute("aria-valuemax", Math.max(all.length - 1, 0));
  chart.svg.setAttribute("aria-valuenow", Math.max(all.indexOf(near), 0));
}

function tipText(chart, at) {
  const time = new Date((at.second + clockOffset) * 1000).toLocaleTimeString("en-GB");
  return [time, ...chart.series.map(([name, column]) => `${name} ${number(value(chart, at, column))} ${chart.unit}`)];
}

function draw(chart) {
  const width = chart.svg.clientWidth, height = chart.svg.clientHeight;
  const right = width - RIGHT, bottom = height - BOTTOM, seconds = period(), all = shown();
  let highest = chart.floor;
  for (const one of all) for (const [, column] of chart.series) highest = Math.max(highest, value(chart, one, column) || 0);
  const top = roundUp(highest);
  const x = (second) => right - ((serverNow - second) / seconds) * (right - LEFT);
  const y = (amount) => bottom - (amount / top) * (bottom - TOP);
  const parts = [drawing("text", { class: "unit", x: 0, y: 10 }, chart.unit)];
  for (const amount of [top, top / 2, 0]) {
    parts.push(drawing("path", { class: "grid", d: `M${LEFT} ${y(amount)}H${right}` }));
    parts.push(drawing("text", { class: "y", x: LEFT - 6, y: y(amount) + 4 }, number(amount)));
  }
  for (const [share, anchor] of [[1, "start"], [0.5, "middle"], [0, "end"]]) {
    const label = share ? `−${(seconds * share) / 60} min` : "now";
    parts.push(drawing("text", { class: "x", x: right - share * (right - LEFT), y: height - 4, "text-anchor": anchor }, label));
  }
  chart.series.forEach(([, column], which) => {
    let line = "", before = -Infinity;
    for (const one of all) {
      const amount = value(chart, one, column);
      if (amount === null) continue;
      line += `${one.second - before > GAP ? "M" : "L"}${x(one.second).toFixed(1)} ${y(amount).toFixed(1)}`;
      before = one.second;
    }
    parts.push(drawing("path", { class: "line s" + which, d: line }));
  });
  const at = chart.at === null ? null : all.find((one) => one.second === chart.at);
  if (at) {
    parts.push(drawing("path", { class: "at", d: `M${x(at.second)} ${TOP}V${bottom}` }));
    chart.series.forEach(([, column], which) => {
      const amount = value(chart, at, column);
      if (amount !== null) parts.push(drawing("circle", { class: "s" + which, cx: x(at.second), cy: y(amount), r: 3.5 }));
    });
  }
  chart.svg.replaceChildren(...parts);
  drawTip(chart, at, at && x(at.second), width);
  const last = all[all.length - 1] || {};
  $(chart.id + "-now").textContent = chart.series.map(([, column]) => number(value(chart, last, column))).join(" / ");
}

function drawTip(chart, at, x, width) {
  chart.tip.hidden = !at;
  if (!at) return;
  const [time, ...values] = tipText(chart, at);
  const lines = values.map((text, which) => {
    const line = make("span");
    line.append(make("i", null, { class: "s" + which }), text);
    return line;
  });
  chart.tip.replaceChildren(make("strong", time), ...lines);
  const side = chart.tip.offsetWidth;
  // Beside the line, on the side with more room.
  const left = x < width / 2 ? x + 10 : x - side - 10;
  const box = chart.svg.getBoundingClientRect(), around = chart.tip.offsetParent.getBoundingClientRect();
  chart.tip.style.left = box.left - around.left + Math.min(Math.max(left, 0), Math.max(width - side, 0)) + "px";
  chart.tip.style.top = box.top - around.top + TOP + "px";
}

const drawAll = () => CHARTS.forEach(draw);

function drawEngines(engines) {
  const cell = (label, text) => make("td", text, { "data-label": label });
  const lines = engines.map((one) => {
    const used = cell("KV cache");
    used.append(make("meter", percent(one.kv_usage), { min: 0, max: 1, value: one.kv_usage, "aria-label": "KV cache used" }));
    used.append(" " + percent(one.kv_usage));
    const row = make("tr");
    row.append(
      make("th", one.name, { scope: "row", "data-label": "engine" }),
      cell("role", one.role),
      cell("state", one.up ? "up" : "down"),
      cell("running", number(one.running)),
      cell("waiting", number(one.waiting)),
      used,
      cell("steps/s", number(one.steps_per_second)),
      cell("rows per step", `${number(one.decode_rows_per_step)} decode, ${number(one.prefill_rows_per_step)} prefill`),
    );
    return row;
  });
  $("heads").replaceChildren(...lines);
}

// ---- model

let models = []; // cards of /v1/models
let model = ""; // name of the chosen one
let seesImages = false;

async function describe() {
  const answer = await api("/v1/models");
  if (!answer.ok) return false;
  models = (await answer.json()).data;
  const version = await (await api("/version")).json();
  $("version").textContent = version.version;
  $("model-choice").replaceChildren(...models.map((one) => make("option", one.id, { value: one.id })));
  choose();
  return true;
}

function choose() {
  const card = models.find((one) => one.id === $("model-choice").value) || models[0];
  model = card.id;
  seesImages = (card.input_modalities || []).includes("image");
  const facts = [
    ["name", model],
    ["context", card.max_model_len.toLocaleString("en") + " tokens"],
    ["input", seesImages ? "text and images" : "text"],
    ["address", location.origin + base + "/v1"],
    ...(card.about ? [["abilities", card.about]] : []),
  ];
  $("card").replaceChildren(...facts.flatMap(([name, text]) => [make("dt", name), make("dd", text)]));
  $("attach").hidden = !seesImages;
  $("examples").replaceChildren(
    ...(card.examples || []).map((text) => {
      const button = make("button", text, { type: "button" });
      if (card.example_image) button.prepend(make("img", null, { src: card.example_image, alt: "Example image" }));
      button.addEventListener("click", () => {
        if (running) return;
        $("question").value = text;
        images = card.example_image ? [card.example_image] : [];
        ask();
      });
      return button;
    }),
  );
  showExamples();
  document.title = model + " on Weft";
}

const showExamples = () => ($("examples").hidden = conversation.length > 0 || !$("examples").firstChild);

function show(text, good) {
  const state = $("state");
  if (state.textContent !== text) state.textContent = text; // or screen readers would read the text each second
  state.className = good ? "good" : "bad";
}

function take(found) {
  if (found.now < serverNow) points.length = 0; // another host answers
  serverNow = found.now;
  clockOffset = Date.now() / 1000 - found.now;
  for (const row of found.points) points.push(Object.fromEntries(found.columns.map((name, at) => [name, row[at]])));
  while (points.length && points[0].second <= serverNow - KEPT) points.shift();
}

async function poll() {
  try {
    const since = points.length ? points[points.length - 1].second : 0;
    const answer = await api("/metrics/history?since=" + since, { cache: "no-store" });
    $("key-form").hidden = answer.status !== 401;
    if (answer.status === 401) return show(key ? "the key is wrong" : "the server needs an API key", false);
    if (!answer.ok) return show("the server answers " + answer.status, false);
    const found = await answer.json();
    take(found);
    if (!model) await describe();
    const ready = await api("/ready", { cache: "no-store" });
    show((await ready.json()).status, ready.ok);
    drawEngines(found.engines);
    drawAll();
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
const MOST_CHAT_BYTES = 5 << 20; // all images of a chat, because each request carries the whole chat

const CALCULATOR = {
  type: "function",
  function: {
    name: "calculator",
    description: "Computes an arithmetic expression.",
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
  if (tokens.join("") !== text.replace(/\s+/g, "")) throw new Error("the expression is not arithmetic");
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
  if (at < tokens.length) throw new Error("the expression is not arithmetic");
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
  if (reply.done) parts.push(footer(reply));
  const log = $("log");
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  body.replaceChildren(...parts);
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function footer(reply) {
  const line = make("p", null, { class: "stats" });
  if (reply.content) {
    const button = make("button", "Copy", { type: "button", "aria-label": "Copy the reply" });
    button.addEventListener("click", async () => {
      button.textContent = (await copy(reply.content)) ? "Copied" : "Not copied";
      setTimeout(() => (button.textContent = "Copy"), 2000);
    });
    line.append(button);
  }
  line.append(make("span", stats(reply)));
  return line;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Without HTTPS a browser offers only the older way.
    const area = make("textarea", null, { class: "hidden" });
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

function stats({ tokens, sent, first, last }) {
  // The rate is of the tokens after the first one. A short reply arrives in few pieces, whose times say
  // little, so its rate is of the whole time.
  if (!first) return "";
  const parts = [`first token after ${duration(first - sent)}`];
  if (tokens) {
    const rate = last - first > 100 ? (tokens - 1) / (last - first) : tokens / Math.max(last - sent, 1);
    parts.unshift(`${number(tokens)} token${tokens === 1 ? "" : "s"}`, `${number(rate * 1000)} tokens/s`);
  }
  return parts.join(" · ");
}

const duration = (ms) => (ms < 1000 ? number(ms) + " ms" : (ms / 1000).toFixed(1) + " s");

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

function extend(reply, delta) {
  if (delta.content || delta.reasoning_content || delta.tool_calls) {
    reply.last = performance.now();
    reply.first ||= reply.last;
  }
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
    stream_options: { include_usage: true, continuous_usage_stats: true }, // so that a stopped reply has a count
    ...($("calculator").checked ? { tools: [CALCULATOR] } : {}),
  };
  reply.sent = performance.now();
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
    if (chunk.usage) reply.tokens = chunk.usage.completion_tokens;
    for (const choice of chunk.choices) {
      extend(reply, choice.delta);
      if (choice.finish_reason === "length") reply.note = "The reply was cut off. Raise the maximum of output tokens.";
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
  // One answer. Returns true if tool results were added, so that another answer follows.
  const made = { content: "", reasoning: "", calls: [], note: "", tokens: 0, sent: 0, first: 0, last: 0, done: false };
  const body = bubble("assistant");
  body.setAttribute("aria-busy", "true");
  try {
    await receive(made, body, talk);
  } catch (error) {
    made.note = error.name === "AbortError" ? "Stopped." : error.message;
  }
  made.done = true;
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

function attachedBytes() {
  const sent = conversation.flatMap((message) => (Array.isArray(message.content) ? message.content : []));
  const urls = [...images, ...sent.filter((part) => part.image_url).map((part) => part.image_url.url)];
  return urls.reduce((sum, url) => sum + url.length * 0.75, 0); // base64: 4 characters for 3 bytes
}

async function attach(files) {
  complain("");
  if (!model) await describe();
  for (const file of files) {
    if (!seesImages) return complain(`${model || "This model"} does not accept images.`);
    if (!file.type.startsWith("image/")) return complain(`${file.name} is not an image.`);
    const size = (file.size / (1 << 20)).toFixed(1);
    if (file.size > MOST_IMAGE_BYTES) return complain(`${file.name} has ${size} MiB. An image can have at most 4 MiB.`);
    if (file.size + attachedBytes() > MOST_CHAT_BYTES)
      return complain("The images of a chat can have at most 5 MiB together. Remove an image or start a new chat.");
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
  const sent = images;
  images = [];
  showImages();
  const parts = sent.map((url) => ({ type: "image_url", image_url: { url } }));
  if (question) parts.push({ type: "text", text: question });
  talk.push({ role: "user", content: sent.length ? parts : question });
  showExamples();
  const pictures = sent.map((url, at) => make("img", null, { src: url, alt: `Image ${at + 1}` }));
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
  showExamples();
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

$("model-choice").addEventListener("change", choose);
$("period").addEventListener("change", drawAll);
CHARTS.forEach(build);
new ResizeObserver(drawAll).observe($("charts"));
polling();
