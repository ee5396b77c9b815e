// The overview, the address, the keys.

function overview() {
  const shown = found, failed = shown.filter((row) => row.errors).length;
  const counts = new Map(INDEX.statuses.map(([name], status) => [status, 0]));
  for (const row of shown) for (const [status, count] of row.statuses) counts.set(status, counts.get(status) + count);
  const known = shown.map((row) => row.score).filter((score) => score !== null);
  const mean = known.reduce((sum, score) => sum + score, 0) / known.length;
  const only = shown.length < rows.length ? " that the filters let through" : "";
  const statuses = [...counts].filter(([, count]) => count).sort((a, b) => b[1] - a[1]);
  const slow = [...INDEX.times].sort((a, b) => b[1] - a[1]);
  const asked = byId("search").value.trim();
  const parts = [make("h2", { tabindex: "-1", id: "title" }, asked ? `Overview of ${asked}` : "Overview")];
  parts.push(make("p", {}, "A trajectory is one conversation in which a language model works on a task: in each turn it writes a message, which may call tools, and reads their results. ",
    `Of ${many(shown.length, "conversation")}${only}, ${failed.toLocaleString("en")} had calls that failed. Choose one in the list to see what happened in it.`));
  if (INDEX.runs.length) parts.push(make("ul", { class: "runs" }, ...INDEX.runs.map((run, number) => make("li", {},
    make("a", { href: addressOfRun(number) }, `Training run ${run.id || "without an id"}`), ` · ${counted(run.count, "trajectory")} of ${many(run.steps.length, "step")}`))));
  if (INDEX.run_names.length > 1) parts.push(make("p", { class: "cut" },
    `The dump mixes ${INDEX.run_names.length} runs; the figures below are of all that the list shows. The query run:ID shows one.`));
  if (!rows.length) parts.push(make("p", { class: "cut" }, "This dump has no readable trajectory."));
  if (INDEX.n_problems) parts.push(problems());
  parts.push(section("Scores", known.length ? histogram(known) : make("p", {}, "None of them has a score."),
    known.length ? make("p", { class: "legend" }, `${many(known.length, "score")}, ${short(mean)} on average.`) : null));
  if (statuses.length) parts.push(section("Calls by status", bars("Calls", statuses.map(([status, count]) =>
    [INDEX.statuses[status][0], count, count.toLocaleString("en"), status === OK ? "bar" : "bad"])),
    make("dl", { class: "pairs" }, ...statuses.flatMap(([status]) => [make("dt", {}, INDEX.statuses[status][0]), make("dd", {}, INDEX.statuses[status][2])]))));
  if (slow.length) parts.push(section("Durations of tool calls", latency(slow.slice(0, 30)), make("p", { class: "legend" },
    `All calls of the dump, regardless of the filters. Half of the calls took at most the median time, 90 % and 99 % at most the other times.${slow.length > 30 ? ` The ${slow.length - 30} tools with the fewest calls are left out.` : ""}`)));
  byId("main").replaceChildren(...parts);
}

function latency(tools) {
  const columns = ["Tool", "Calls", "Median", "90 %", "99 %", "Longest", "Queued (median)"];
  const lines = tools.map(([name, count, queue, run]) => make("tr", {}, make("th", { scope: "row" }, name || "unreadable"),
    ...[count.toLocaleString("en"), ...run.map(duration), duration(queue[0])].map((text) => make("td", {}, text))));
  const drawn = bars("90 % of the calls of a tool took no longer than", tools.slice(0, 12).map(([name, , , run]) => [name || "unreadable", run[1], duration(run[1]), "bar"]));
  return make("div", {}, make("h4", {}, "90 % of its calls took no longer than"), drawn, make("div", { class: "wide" }, make("table", {},
    make("thead", {}, make("tr", {}, ...columns.map((name) => make("th", { scope: "col" }, name)))), make("tbody", {}, ...lines))));
}

function problems() {
  const items = INDEX.problems.map(([file, number, reason]) =>
    make("li", {}, make("b", {}, INDEX.files[file] + (number === null ? "" : `, line ${number}`)), `: ${reason}`));
  const hidden = INDEX.n_problems - INDEX.problems.length;
  return make("details", { class: "problems", open: rows.length === 0 || items.length <= 5 },
    make("summary", {}, `${many(INDEX.n_problems, "part")} of the dump cannot be shown`),
    make("ul", {}, ...items, hidden ? make("li", {}, `… and ${hidden.toLocaleString("en")} more`) : null));
}

/** Show a trajectory, and a call of it. */
async function show(number, call) {
  if (number !== current) {
    choose(number);
    await showTrajectory(number);
  }
  if (call !== null && current === number) showCall(call);
}

function home() {
  current = -1;
  choose(-1);
  overview();
}

let addressing = 0;

/** Let the address follow when the keys rest: browsers refuse many changes of it. */
function follow(address) {
  clearTimeout(addressing);
  addressing = setTimeout(() => history.replaceState(null, "", address), 100);
}

function go(number, call = null) {
  show(number, call);
  follow(addressOf(number, call));
}

/** Show what the address names. */
function route() {
  clearTimeout(addressing);
  const place = placeOf(location.hash), batch = batchOfAddress(location.hash), query = queryOfAddress(location.hash);
  const group = numberOfAddress(location.hash, "group", groups), run = numberOfAddress(location.hash, "run", INDEX.runs);
  if (query !== null) {
    byId("search").value = query;
    home();
    search();
  } else if (batch !== null) showBatch(batch);
  else if (group !== null) showGroup(group);
  else if (run !== null) showRun(run);
  else if (place) show(place.number, place.call);
  else home();
}

function move(step) {
  const place = found.findIndex((row) => row.number === chosen);
  const next = found[place < 0 ? 0 : Math.min(found.length - 1, Math.max(0, place + step))];
  if (next && next.number !== chosen) go(next.number);
}

function nextFailed() {
  const failed = [...document.querySelectorAll("article.call.bad")];
  const at = failed.indexOf(document.activeElement);
  const next = failed[(at + 1) % failed.length];
  if (next) go(current, Number(next.id.slice("call-".length)) - 1);
}

const isField = (element) => element.matches("input, select, textarea");
const KEYS = {
  j: () => move(1),
  k: () => move(-1),
  e: nextFailed,
  o: () => { home(); follow("#"); },
  g: () => {
    const group = rows[chosen]?.group ?? null;
    if (group !== null) { showGroup(group); follow(addressOfGroup(group)); }
  },
  r: () => { if (INDEX.runs.length) { showRun(INDEX.runs.length - 1); follow(addressOfRun(INDEX.runs.length - 1)); } },
  t: () => { if (INDEX.batches.length) { showBatch(INDEX.batches.length - 1); follow(`#:batch-${INDEX.batches.length}`); } },
  "/": () => byId("search").focus(),
  "?": () => byId("help").showModal(),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
  const inList = document.activeElement === list;
  if (event.key === "Escape") {
    if (document.activeElement === byId("search") && byId("search").value) {
      byId("search").value = "";
      search();
    } else list.focus();
  } else if (isField(document.activeElement)) {
    if (event.key === "Enter" && document.activeElement === byId("search")) list.focus();
    else return;
  } else if (inList && event.key === "ArrowDown") move(1);
  else if (inList && event.key === "ArrowUp") move(-1);
  else if (inList && event.key === "Home") go(found[0]?.number ?? 0);
  else if (inList && event.key === "End" && found.length) go(found.at(-1).number);
  else if (inList && event.key === "Enter") byId("title")?.focus();
  else if (Object.hasOwn(KEYS, event.key)) KEYS[event.key]();
  else return;
  event.preventDefault();
});

let typing = 0;
byId("search").addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(search, 200);
});
byId("filters").addEventListener("change", (event) => { if (event.target !== byId("search")) refilter(); });
byId("filters").addEventListener("reset", () => setTimeout(search));
byId("filters").addEventListener("submit", (event) => event.preventDefault());
byId("skip").addEventListener("click", (event) => {
  event.preventDefault();
  byId("title")?.focus();
});
byId("to-help").addEventListener("click", KEYS["?"]);
list.addEventListener("scroll", drawList);
addEventListener("resize", () => { drawnFrom = -1; drawList(); });
addEventListener("hashchange", route);

const sum = (name) => rows.reduce((total, row) => total + row[name], 0);
byId("name").textContent = visible(INDEX.name);
byId("totals").textContent = `${many(rows.length, "trajectory").replace("trajectorys", "trajectories")} · ${many(sum("calls"), "call")} · ${sum("errors").toLocaleString("en")} failed`;
if (INDEX.runs.length) {
  byId("to-run").hidden = false;
  byId("to-run").href = addressOfRun(INDEX.runs.length - 1);
}
if (INDEX.batches.length) {
  byId("to-timeline").hidden = false;
  byId("to-timeline").href = `#:batch-${INDEX.batches.length}`;
}
fillFilters();
refreshList();
route();
