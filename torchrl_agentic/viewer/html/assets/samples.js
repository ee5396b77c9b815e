// The samples of one prompt side by side: their scores and advantages, and where they begin to differ.

const SAMPLES_AT_ONCE = 64, SNIPPET = 240, BEFORE = 40;

/** The best score first; trajectories without one last. */
const byScore = (a, b) => unknownLast(b.score, -Infinity) - unknownLast(a.score, -Infinity) || 0 || a.number - b.number;

/** The messages of a trajectory after its prompt, as [turn, role, text]. */
function saidAfterPrompt(body) {
  return body.turns.flatMap((turn, place) => [
    ...(place ? turn.context.map(([role, text]) => [place, role, text]) : []),
    [place, turn.role, turn.said.map(([, text]) => text).join("")],
    ...turn.answers.map(([role, text]) => [place, role, text]),
  ]);
}

/** The first point where the second of two trajectories differs from the first; null where both say the same. */
function firstDifference(first, second) {
  for (let n = 0; n < Math.max(first.length, second.length); n++) {
    if (!second[n]) return { turn: first[n][0], role: "", at: 0, before: "", text: "", other: first[n][2] };
    const [turn, role, text] = second[n];
    if (!first[n]) return { turn, role, at: 0, before: "", text, other: "" };
    const other = first[n][2];
    if (first[n][1] !== role) return { turn, role, at: 0, before: "", text, other };
    if (other !== text) {
      let at = 0;
      while (at < text.length && text[at] === other[at]) at++;
      return { turn, role, at, before: `${at > BEFORE ? "…" : ""}${text.slice(Math.max(0, at - BEFORE), at)}`, text: text.slice(at), other: other.slice(at) };
    }
  }
  return null;
}

function told(difference) {
  if (difference === null) return "says the same as the best sample";
  if (!difference.role) return `ended before turn ${difference.turn + 1}, which the best sample has`;
  const after = difference.at ? ` after ${many(difference.at, "character")}` : "";
  return `differs from the best sample in turn ${difference.turn + 1}: the ${difference.role}${after}`;
}

/** What one of two trajectories says where they begin to differ, after the end of what both say. */
function point(who, { before }, text) {
  const more = text.length > SNIPPET ? "…" : "";
  return make("pre", { class: `point ${who}`, dir: "auto" }, make("b", {}, `${who}: `), before, make("mark", {}, text.slice(0, SNIPPET) || "(ends here)"), more);
}

const advantageClass = (value) => (value === null || Math.abs(value) < 1e-9 ? "" : value > 0 ? "good" : "bad");

function sampleTable(shown) {
  const columns = ["Sample", "Score", "Advantage", "Turns", "Calls", "Failed", "Ended by"];
  const lines = shown.map((row, n) => make("tr", {},
    make("th", { scope: "row" }, make("a", { href: addressOf(row.number) }, `${n + 1}`)),
    make("td", {}, make("span", { class: `score ${tone(row.score)}` }, row.scoreText)),
    make("td", { class: `gain ${advantageClass(row.advantage)}` }, signed(row.advantage)),
    ...[row.turns, row.calls, row.errors].map((count) => make("td", {}, count.toLocaleString("en"))),
    make("td", { class: "name" }, INDEX.reasons[row.reason] || "unknown")));
  return make("div", { class: "wide" }, make("table", {}, make("thead", {}, make("tr", {}, ...columns.map((name) => make("th", { scope: "col" }, name)))),
    make("tbody", {}, ...lines)));
}

function sampleCard(row, rank, body, difference) {
  return make("article", { class: "sample", id: `sample-${row.number + 1}`, tabindex: "-1" },
    make("h4", {}, make("span", { class: `score ${tone(row.score)}`, title: "score" }, row.scoreText),
      make("span", { class: `gain ${advantageClass(row.advantage)}`, title: "advantage" }, signed(row.advantage)), " ",
      make("a", { href: addressOf(row.number) }, `Sample ${rank + 1}${rank === 0 ? ", the best" : ""}`)),
    make("p", { class: "facts" }, `${many(row.turns, "turn")} · ${many(row.calls, "call")}`, row.errors ? make("span", { class: "failed" }, `${row.errors} failed`) : null, ` · ${INDEX.reasons[row.reason] || "unknown end"}`),
    make("p", { class: "facts" }, "last message"),
    block(body.given || "(nothing but calls or reasoning)"),
    ...(rank === 0 ? [] : [make("p", { class: "facts differs" }, told(difference)),
      ...(difference?.role ? [point("best", difference, difference.other), point("here", difference, difference.text)] : [])]));
}

/** Show a group: what its samples scored, and what they said. */
async function showGroup(number) {
  const group = groups[number], shown = [...group.rows].sort(byScore);
  current = -1000 - number;
  const mine = current;
  choose(-1);
  const near = (step, text) => groups[number + step] ? make("a", { href: addressOfGroup(number + step), class: "button" }, text) : make("span", { class: "button off" }, text);
  const flat = group.spread === 0 && shown.length > 1;
  const facts = [`step ${group.step}`];
  if (shown[0].task) facts.push(`task ${shown[0].task}`);
  if (group.mean !== null) facts.push(`score ${brief(group.mean)} ± ${brief(group.spread)}`);
  facts.push(group.recorded ? "advantages as in the batch" : "advantages computed from the scores");
  const cards = make("div", { class: "samples" });
  byId("main").replaceChildren(
    make("div", { class: "heading" },
      make("h2", { tabindex: "-1", id: "title" }, shown[0].excerpt || "Samples of one prompt"),
      make("p", { class: "near" }, near(-1, "← Previous prompt"), near(1, "Next prompt →")),
      make("p", { class: "facts" }, `${many(shown.length, "sample")} of one prompt · ${facts.join(" · ")} · `,
        make("a", { href: addressOfGroup(number), title: "link to this group" }, group.name === null ? "link" : `group ${group.name}`), " · ",
        make("a", { href: addressOfQuery(`step:${group.step}`) }, "all of this step"))),
    ...(flat ? [make("p", { class: "cut" }, "All scores are equal: all advantages are zero, and the group teaches nothing.")] : []),
    sampleTable(shown), section("Side by side", cards));
  byId("main").scrollTop = 0;
  let best = null;
  for (const [rank, row] of shown.slice(0, SAMPLES_AT_ONCE).entries()) {
    let body;
    try {
      body = await bodyOf(row.number);
    } catch (error) {
      cards.append(make("p", { class: "cut" }, `Sample ${rank + 1} cannot be unpacked; the file may have been cut off. (${error.message})`));
      continue;
    }
    if (current !== mine) return;
    const said = saidAfterPrompt(body);
    best ??= said;
    cards.append(sampleCard(row, rank, body, firstDifference(best, said)));
  }
  if (shown.length > SAMPLES_AT_ONCE) cards.append(make("p", { class: "facts" }, `The table above has ${shown.length - SAMPLES_AT_ONCE} more.`));
}
