// The list of trajectories: search, filters, order; only the lines in sight are in the document.

const LINE = 76;
const byId = (id) => document.getElementById(id);
const list = byId("list"), lines = byId("rows");
let found = rows, chosen = -1, drawnFrom = -1, textHits = null;

function fill(select, all, options) {
  select.replaceChildren(make("option", { value: "" }, all), ...options.map(([value, text]) => make("option", { value }, text)));
}

function fillFilters() {
  const statuses = new Map(), tools = new Map(), reasons = new Map(), steps = new Map();
  const count = (map, key, more) => map.set(key, (map.get(key) ?? 0) + more);
  for (const row of rows) {
    count(reasons, row.reason, 1);
    count(steps, row.step, 1);
    for (const [status, calls] of row.statuses) count(statuses, status, calls);
    for (const [tool, calls] of row.tools) count(tools, tool, calls);
  }
  const most = (map) => [...map].sort((a, b) => b[1] - a[1]).slice(0, 300);
  fill(byId("by-status"), "all", [["any", "with any failed call"], ["none", "without a failed call"],
    ...most(statuses).map(([status, n]) => [status, `${INDEX.statuses[status][0]} (${n})`])]);
  fill(byId("by-tool"), "all", most(tools).map(([tool, n]) => [tool, `${INDEX.tools[tool] || "unreadable"} (${n})`]));
  fill(byId("by-reason"), "anything", most(reasons).map(([reason, n]) => [reason, `${INDEX.reasons[reason] || "unknown"} (${n})`]));
  fill(byId("by-step"), "all", [...steps].sort((a, b) => a[0] - b[0]).map(([step, n]) => [step, `${step} (${n})`]));
  return { statuses, tools };
}

const NUMBERS = { step: (row) => row.step, score: (row) => row.score, advantage: (row) => row.advantage,
  turns: (row) => row.turns, calls: (row) => row.calls, errors: (row) => row.errors };
const TEXTS = {
  run: (row, value) => (INDEX.run_names[row.run] || "none").startsWith(value),
  task: (row, value) => row.task === value,
  group: (row, value) => row.group !== null && String(groups[row.group].name) === value,
  reason: (row, value) => (INDEX.reasons[row.reason] || "none") === value,
  tool: (row, value) => row.tools.some(([tool]) => INDEX.tools[tool] === value),
  status: (row, value) => row.statuses.some(([status]) => INDEX.statuses[status][0] === value),
  id: (row, value) => row.id.replaceAll("-", "").toLowerCase().startsWith(value.replaceAll("-", "").toLowerCase()),
};
const COMPARE = { ":": (a, b) => a === b, "=": (a, b) => a === b, "!=": (a, b) => a !== b, "<": (a, b) => a < b,
  "<=": (a, b) => a <= b, ">": (a, b) => a > b, ">=": (a, b) => a >= b };
let queryTests = [];

/** Split a query, as of the terminal viewer, into tests of a row and the words to search. */
function parsed(query) {
  const tests = [];
  const words = query.replace(/(^|\s)(-?)([a-z]+)(<=|>=|!=|[:<>=])("[^"]*"|\S+)/g, (all, space, minus, name, compare, said) => {
    const values = said.replaceAll('"', "").split(",").filter(Boolean), wanted = !minus;
    if (Object.hasOwn(TEXTS, name) && ":!=".includes(compare))
      tests.push((row) => values.some((value) => TEXTS[name](row, value)) === (wanted === (compare !== "!=")));
    else if (Object.hasOwn(NUMBERS, name))
      tests.push((row) => values.some((value) => {
        const number = NUMBERS[name](row);
        if (value === "none" || number === null) return (number === null && value === "none") === (compare !== "!=");
        return COMPARE[compare](number, Number(value));
      }) === wanted);
    else return all;
    return space;
  });
  return { tests, words: words.trim() };
}

/** Give what the filters let through, as a function of a row. */
function filters() {
  const [status, tool, reason, step, low, high] =
    ["by-status", "by-tool", "by-reason", "by-step", "from-score", "to-score"].map((id) => byId(id).value);
  const tests = [];
  if (status === "any") tests.push((row) => row.errors > 0);
  else if (status === "none") tests.push((row) => row.errors === 0);
  else if (status) tests.push((row) => row.statuses.some(([one]) => one === Number(status)));
  if (tool) tests.push((row) => row.tools.some(([one]) => one === Number(tool)));
  if (reason) tests.push((row) => row.reason === Number(reason));
  if (step) tests.push((row) => row.step === Number(step));
  if (low) tests.push((row) => row.score !== null && row.score >= Number(low));
  if (high) tests.push((row) => row.score !== null && row.score <= Number(high));
  tests.push(...queryTests);
  byId("filtering").textContent = tests.length > queryTests.length ? `(${tests.length - queryTests.length} set)` : "";
  if (textHits) tests.push((row) => textHits.has(row.number));
  return (row) => tests.every((test) => test(row));
}

const unknownLast = (score, other) => score ?? other;
const ORDERS = {
  dump: null,
  worst: (a, b) => unknownLast(a.score, Infinity) - unknownLast(b.score, Infinity) || 0,
  best: (a, b) => unknownLast(b.score, -Infinity) - unknownLast(a.score, -Infinity) || 0,
  errors: (a, b) => b.errors - a.errors,
  turns: (a, b) => b.turns - a.turns,
};

function refreshList(note = "") {
  const order = ORDERS[byId("order").value];
  found = rows.filter(filters());
  if (order) found.sort((a, b) => order(a, b) || a.number - b.number);
  byId("count").textContent = found.length === rows.length ? `${found.length.toLocaleString("en")} in all${note}`
    : `${found.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")}${note}`;
  lines.style.height = `${found.length * LINE}px`;
  drawnFrom = -1;
  drawList();
}

function drawList() {
  const from = Math.max(0, Math.floor(list.scrollTop / LINE) - 5);
  if (from === drawnFrom) return;
  drawnFrom = from;
  const to = Math.min(found.length, from + Math.ceil(list.clientHeight / LINE) + 12);
  lines.replaceChildren(...found.slice(from, to).map((row, n) => line(row, from + n)));
  markChosen();
}

function line(row, place) {
  const score = make("span", { class: `score ${tone(row.score)}`, title: "score" }, row.scoreText);
  const failed = row.errors ? make("span", { class: "failed" }, `${row.errors} failed`) : null;
  const tools = row.tools.map(([tool]) => INDEX.tools[tool] || "unreadable").join(", ");
  const option = make("div", { role: "option", id: `line-${row.number}`, "aria-selected": "false",
    "aria-setsize": found.length, "aria-posinset": place + 1, click: () => go(row.number) },
    make("p", { class: "asked" }, score, row.excerpt || row.id || "(no text)"),
    make("p", { class: "facts" }, row.advantage === null ? "" : `advantage ${signed(row.advantage)} · `, many(row.turns, "turn"), ` · ${many(row.calls, "call")}`, failed),
    make("p", { class: "facts" }, `${INDEX.run_names.length > 1 ? `run ${(INDEX.run_names[row.run] || "without an id").slice(0, 8)} · ` : ""}step ${row.step} · ${INDEX.reasons[row.reason] || "?"}${tools ? ` · ${tools}` : ""}`));
  option.style.top = `${place * LINE}px`;
  return option;
}

const scores = rows.map((row) => row.score).filter((score) => score !== null);
const lowest = scores.reduce((a, b) => Math.min(a, b), Infinity);
const highest = scores.reduce((a, b) => Math.max(a, b), -Infinity);

/** Whether a score is among the better or the worse of this dump. */
function tone(score) {
  if (score === null || lowest === highest) return "";
  return score >= lowest + (highest - lowest) * 0.75 ? "good" : score <= lowest + (highest - lowest) * 0.25 ? "bad" : "";
}

function markChosen() {
  for (const option of lines.children) option.setAttribute("aria-selected", String(option.id === `line-${chosen}`));
  if (byId(`line-${chosen}`)) list.setAttribute("aria-activedescendant", `line-${chosen}`);
  else list.removeAttribute("aria-activedescendant");
}

/** Mark a trajectory in the list, and bring its line into sight. */
function choose(number) {
  chosen = number;
  const place = found.findIndex((row) => row.number === number);
  if (place >= 0) {
    const top = place * LINE;
    if (top < list.scrollTop) list.scrollTop = top;
    else if (top + LINE > list.scrollTop + list.clientHeight) list.scrollTop = top + LINE - list.clientHeight;
  }
  drawList();
  markChosen();
}

let searches = 0;

/** Look through all texts of all trajectories; the list grows while it looks. */
async function search() {
  const mine = ++searches, { tests, words } = parsed(byId("search").value), wanted = words.toLowerCase();
  queryTests = tests;
  textHits = wanted ? new Set() : null;
  // Letters and digits stand in JSON as they are: a line without them need not be parsed.
  const sure = (wanted.match(/[a-z0-9 ]+/g) ?? [""]).reduce((a, b) => (b.length > a.length ? b : a));
  const says = (line) => {
    if (!line.toLowerCase().includes(sure)) return false;
    for (const text of textsOf(JSON.parse(line))) if (text.toLowerCase().includes(wanted)) return true;
    return false;
  };
  refreshList(wanted ? " · searching…" : "");
  for (const [chunk, first] of wanted ? firstOfChunk.entries() : []) {
    const bodies = await linesOf(chunk);
    if (mine !== searches) return;
    bodies.forEach((body, n) => {
      if (says(body)) textHits.add(first + n);
    });
    refreshList(` · searching… ${Math.round((100 * (chunk + 1)) / firstOfChunk.length)} %`);
    await new Promise((resolve) => setTimeout(resolve));
    if (mine !== searches) return;
  }
  refilter();
}

/** Show what the filters let through: in the list, and in the overview where that is shown. */
function refilter() {
  refreshList();
  if (current === -1) overview();
}
