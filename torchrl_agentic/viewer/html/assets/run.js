// The page of a training run: curves over its steps, how trajectories ended, tools, worst and best.

const RANKED = 8;
const queryOf = (run, first, last) => `${first === last ? `step:${first}` : `step>=${first} step<=${last}`}${INDEX.run_names.length > 1 ? ` run:"${(run.id || "none").replaceAll('"', "")}"` : ""}`;

/** A curve with the spread as a band. Each point is a link to what it is made of. */
function curve(name, unit, points, linkOf) {
  const known = points.map(([step, value, spread, count]) => ({ step, value, count, low: value - (spread ?? 0), high: value + (spread ?? 0), spread }));
  const [low, high] = [Math.min(...known.map((one) => one.low)), Math.max(...known.map((one) => one.high))];
  const [from, to] = [known[0].step, known.at(-1).step];
  const say = (one) => `step ${one.step}: ${written(one.value, unit)}${one.spread ? ` ± ${written(one.spread, unit)}` : ""}${one.count ? `, of ${one.count.toLocaleString("en")}` : ""}`;
  const box = chart(`${name} from step ${from} to ${to}: first ${written(known[0].value, unit)}, last ${written(known.at(-1).value, unit)}, lowest ${written(Math.min(...known.map((one) => one.value)), unit)}, highest ${written(Math.max(...known.map((one) => one.value)), unit)}`, (width) => {
    const height = 150, left = 60, right = 14, top = 10, bottom = 22, room = width - left - right, tall = height - top - bottom;
    const x = (step) => left + (from === to ? room / 2 : ((step - from) / (to - from)) * room);
    const y = (value) => top + tall - (low === high ? 0.5 : (value - low) / (high - low)) * tall;
    const line = (some, at) => some.map((one, n) => `${n ? "L" : "M"}${x(one.step).toFixed(1)},${y(at(one)).toFixed(1)}`).join("");
    const band = known.some((one) => one.spread) ? [make("path", { class: "band", d: `${line(known, (one) => one.high)}${line([...known].reverse(), (one) => one.low).replace("M", "L")}Z` })] : [];
    const size = known.length > 120 ? 2 : 3.5;
    const dots = known.map((one) => {
      const dot = make("circle", { cx: x(one.step).toFixed(1), cy: y(one.value).toFixed(1), r: size, class: "dot" }, make("title", {}, say(one)));
      const link = linkOf(one.step);
      return link ? make("a", { svg: true, href: link, tabindex: "-1" }, dot) : dot;
    });
    const grid = [low, high].map((value) => make("line", { x1: left, x2: width - right, y1: y(value), y2: y(value), class: "axis" }));
    const ticks = low === high ? [label(left - 6, y(low) + 4, written(low, unit), "end", "faint")]
      : [label(left - 6, y(high) + 8, written(high, unit), "end", "faint"), label(left - 6, y(low), written(low, unit), "end", "faint")];
    return svg(width, height, [...grid, ...band, make("path", { class: "curve", d: line(known, (one) => one.value) }), ...dots, ...ticks,
      label(left, height - 6, String(from), "start", "faint"), from === to ? label(width - right, height - 6, "", "end") : label(width - right, height - 6, `step ${to}`, "end", "faint")]);
  });
  return make("figure", { class: "curve-box" }, make("figcaption", {}, name, make("span", { class: "facts" }, ` ${written(known.at(-1).value, unit)}`)), box);
}

const PARTS = ["part-a", "part-b", "part-c", "part-d", "part-e", "part-f"];

/** Shares of the reasons of ends, as a stacked bar for each step. */
function endings(run) {
  const shown = run.reasons.slice(0, PARTS.length - 1), more = run.reasons.length > shown.length;
  const names = [...shown, ...(more ? ["(others)"] : [])];
  const bars = run.steps.map(([first, last, count], n) => {
    const counts = shown.map((_, reason) => run.endings[n][reason]);
    if (more) counts.push(run.endings[n].slice(shown.length).reduce((a, b) => a + b, 0));
    return { first, last, count, counts };
  });
  const drawn = chart(`How trajectories ended, over ${many(bars.length, "step")}: ${names.join(", ")}`, (width) => {
    const height = 140, left = 60, room = width - left - 14, each = Math.min(48, room / bars.length), tall = height - 26;
    const parts = bars.flatMap((bar, n) => {
      let y = 4 + tall;
      const rects = bar.counts.map((count, reason) => {
        const high = (count / (bar.count || 1)) * tall;
        y -= high;
        return rect(left + n * each, y, Math.max(1, each - (each > 4 ? 1 : 0)), high, PARTS[reason], `step ${bar.first}: ${count} of ${bar.count} ended by ${names[reason]}`);
      });
      return [make("a", { svg: true, href: addressOfQuery(queryOf(run, bar.first, bar.last)), tabindex: "-1" }, ...rects)];
    });
    return svg(width, height, [...parts, label(left - 6, 14, "100 %", "end", "faint"), label(left - 6, 4 + tall, "0 %", "end", "faint"),
      label(left, height - 6, String(bars[0].first), "start", "faint"), bars.length > 1 ? label(left + bars.length * each, height - 6, `step ${bars.at(-1).last}`, "end", "faint") : ""].filter((one) => one !== ""));
  });
  const legend = names.map((name, reason) => make("span", {}, make("span", { class: `key ${PARTS[reason]}` }, ""), `${name} `));
  return section("How trajectories ended", drawn, make("p", { class: "legend" }, ...legend));
}

function table(columns, lines) {
  return make("div", { class: "wide" }, make("table", {}, make("thead", {}, make("tr", {}, ...columns.map((name) => make("th", { scope: "col" }, name)))),
    make("tbody", {}, ...lines)));
}

function toolTable(tools) {
  const time = (seconds) => (seconds === null ? "–" : duration(seconds));
  return table(["Tool", "Calls", "Failed", "Infra", "Median", "95 %", "99 %", "Queued (median)"], tools.map(([name, calls, errors, infra, p50, p95, p99, queue]) =>
    make("tr", {}, make("th", { scope: "row" }, name || "unreadable"), ...[calls.toLocaleString("en"), errors.toLocaleString("en"), infra.toLocaleString("en"), time(p50), time(p95), time(p99), time(queue)].map((text) => make("td", {}, text)))));
}

const linked = (address, text) => make("a", { href: address }, text.length > 100 ? `${text.slice(0, 99)}…` : text);

function rankedGroups(number) {
  const known = groups.filter((group) => group.run === number && group.mean !== null).sort((a, b) => a.mean - b.mean || a.number - b.number);
  if (!known.length || known[0].mean === known.at(-1).mean) return [];
  const line = (group) => make("tr", {}, make("td", { class: "name" }, linked(addressOfGroup(group.number), group.rows[0].excerpt || `group ${group.number + 1}`)),
    make("td", {}, `${brief(group.mean)} ± ${brief(group.spread)}`), make("td", {}, String(group.rows.length)), make("td", {}, String(group.step)));
  const columns = ["Prompt", "Score", "Samples", "Step"];
  return [section("Groups with the lowest scores", table(columns, known.slice(0, RANKED).map(line))),
    section("Groups with the highest scores", table(columns, known.slice(-RANKED).reverse().map(line)))];
}

function rankedRows(number) {
  const known = rows.filter((row) => row.run === number && row.score !== null).sort((a, b) => a.score - b.score || a.number - b.number);
  if (!known.length || known[0].score === known.at(-1).score) return [];
  const line = (row) => make("tr", {}, make("td", { class: "name" }, linked(addressOf(row.number), row.excerpt || row.id || `trajectory ${row.number + 1}`)),
    make("td", {}, row.scoreText), make("td", {}, signed(row.advantage)), make("td", {}, INDEX.reasons[row.reason] || "unknown"), make("td", {}, String(row.step)));
  const columns = ["Prompt", "Score", "Advantage", "Ended by", "Step"];
  return [section("Trajectories with the lowest scores", table(columns, known.slice(0, RANKED).map(line))),
    section("Trajectories with the highest scores", table(columns, known.slice(-RANKED).reverse().map(line)))];
}

/** Show the page of a run. */
function showRun(number) {
  const run = INDEX.runs[number], name = INDEX.run_names.indexOf(run.id), spans = run.steps.map(([first, last]) => [first, last]);
  current = -999;
  choose(-1);
  const linkOf = (step) => {
    const span = spans.find(([first, last]) => first <= step && step <= last);
    return span ? addressOfQuery(queryOf(run, ...span)) : null;
  };
  const near = (step, text) => INDEX.runs[number + step] ? make("a", { href: addressOfRun(number + step), class: "button" }, text) : make("span", { class: "button off" }, text);
  const draw = ([title, unit, points]) => curve(title, unit, points, linkOf);
  const batches = INDEX.batches.map((batch, place) => ({ batch, place })).filter(({ batch }) => batch[1] === run.id);
  const steps = table(["Step", "Trajectories", ...run.curves.slice(0, 6).map(([title]) => title)], run.steps.map(([first, last, count]) =>
    make("tr", {}, make("th", { scope: "row" }, make("a", { href: addressOfQuery(queryOf(run, first, last)) }, first === last ? `${first}` : `${first}–${last}`)), make("td", {}, count.toLocaleString("en")),
      ...run.curves.slice(0, 6).map(([, unit, points]) => points.find(([step]) => step === first)).map((point, n) => make("td", {}, point ? written(point[1], run.curves[n][1]) : "–")))));
  byId("main").replaceChildren(...[
    make("div", { class: "heading" },
      make("h2", { tabindex: "-1", id: "title" }, `Training run ${run.id || "without an id"}`),
      INDEX.runs.length > 1 ? make("p", { class: "near" }, near(-1, "← Previous run"), near(1, "Next run →")) : make("p", {}),
      make("p", { class: "facts" }, `${counted(run.count, "trajectory")} · ${many(run.steps.length, "step")}${run.unused ? `, and ${run.unused.toLocaleString("en")} that left in no batch` : ""}. A point is a link to the trajectories of its step; bands are standard deviations.`)),
    section("Curves", make("div", { class: "curves" }, ...run.curves.map(draw))),
    run.metrics.length ? section("Logged by the trainer", make("div", { class: "curves" }, ...run.metrics.map(draw))) : null,
    run.reasons.length ? endings(run) : null,
    run.tools.length ? section("Tools", toolTable(run.tools)) : null,
    ...rankedGroups(name), ...rankedRows(name),
    batches.length ? section("Batches", make("p", {}, ...batches.slice(-60).flatMap(({ batch, place }) => [make("a", { href: addressOfBatch(place) }, `batch ${batch[0] + 1}`), " "])),
      make("p", { class: "legend" }, "The time line of a batch shows what its trajectories and the trainer waited for.")) : null,
    section("Steps", make("details", { class: "thought" }, make("summary", {}, `${many(run.steps.length, "step")} as a table`), steps)),
  ].filter(Boolean));
  byId("main").scrollTop = 0;
}
