// One trajectory: what happened in words, its calls in time, the conversation, its tokens.

const TURNS_AT_ONCE = 100;
const STATUS = new Map(INDEX.statuses.map(([name, words, more, ran]) => [name, { words, more, ran }]));
const TOKENS = { "-1": ["sampled", "written by the model; trained on"], "-2": ["prompt", "put in front of the model"],
  "-3": ["template", "marks between messages"] };

const section = (title, ...children) => make("section", {}, make("h3", {}, title), ...children);
const pairs = (items) => make("dl", { class: "pairs" }, ...items.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));

const CHARACTERS_AT_ONCE = 20_000; // to lay out a million takes a browser seconds

/** A text as it is: as high as it needs to be, up to a height; then it scrolls. */
function block(text, name = "") {
  const long = text.length > 1500 || text.split("\n", 30).length > 20;
  const box = make("pre", { class: name, dir: "auto", tabindex: long ? "0" : null }, text.slice(0, CHARACTERS_AT_ONCE));
  if (text.length <= CHARACTERS_AT_ONCE) return box;
  const rest = text.slice(CHARACTERS_AT_ONCE);
  const more = make("button", { type: "button", click: () => more.replaceWith(visible(rest)) }, `Show ${many(rest.length, "more character")}`);
  box.append(more);
  return box;
}

function heading(row, body) {
  const place = found.findIndex((one) => one.number === row.number);
  const near = (step, text) => {
    const other = found[place + step];
    return place >= 0 && other ? make("a", { href: addressOf(other.number), class: "button" }, text) : make("span", { class: "button off" }, text);
  };
  return make("div", { class: "heading" },
    make("h2", { tabindex: "-1", id: "title" }, body.trajectory || row.id || `Trajectory ${row.number + 1}`),
    make("p", { class: "near" }, near(-1, "← Previous"), near(1, "Next →")),
    row.group === null ? null : make("p", {}, make("a", { href: addressOfGroup(row.group) }, `Compare the ${groups[row.group].rows.length} samples of this prompt`),
      make("span", { class: "facts" }, row.advantage === null ? "" : ` · advantage ${signed(row.advantage)}`)),
    make("p", { class: "facts" }, ...(INDEX.run_names.length > 1 ? [`run ${INDEX.run_names[row.run] || "without an id"} · `] : []),
      make("a", { href: addressOfQuery(`step:${row.step}`), title: "all trajectories of this step" }, `step ${row.step}`), ` · row ${body.row} · `, make("a", { href: addressOf(row.number), title: "link to this trajectory" }, row.id || `number ${row.number + 1}`)));
}

function whatHappened(row, body) {
  const items = body.summary.map(([tone, text, call, quote]) => make("li", { class: `${tone}${call === null ? "" : " of-call"}` },
    call === null ? null : make("a", { href: addressOf(row.number, call) }, `Call ${call + 1}`), text,
    quote ? block(quote, "quote") : null));
  const answers = body.right === null ? [] : [make("div", { class: "answers" },
    make("div", {}, make("h4", {}, "The right answer"), block(body.right)),
    make("div", {}, make("h4", {}, "The model's last message"), block(body.given || "(nothing but calls or reasoning)")))];
  return section("What happened", make("ul", { class: "summary" }, scoreOf(row), ...items), ...answers);
}

function scoreOf(row) {
  if (row.score === null) return make("li", {}, row.scoreText === "–" ? "It has no score." : `Its score is ${row.scoreText}.`);
  const scale = lowest < highest ? ` Scores in this dump go from ${short(lowest)} to ${short(highest)}.` : "";
  return make("li", { class: tone(row.score) }, `Its score is ${row.scoreText}.${scale}`);
}

function rewards(body) {
  const given = body.turns.filter((turn) => turn.reward !== null);
  if (!given.length) return null;
  return section("Reward per turn", make("table", {}, make("tr", {}, ...given.map((turn) => make("th", { scope: "col" }, `turn ${turn.index + 1}`))),
    make("tr", {}, ...given.map((turn) => make("td", {}, amount(turn.reward))))));
}

function times(row, body) {
  const drawn = timeline(body.turns, body.calls, (call) => addressOf(row.number, call));
  return drawn && section("Timeline of tool calls", drawn, make("p", { class: "legend" },
    make("span", { class: "key queue" }, ""), "waiting to be run ", make("span", { class: "key bar" }, ""), "running ",
    make("span", { class: "key bad" }, ""), "running, then failed. Bars above each other ran at the same time; the time in which the model wrote is left out."));
}

function spent(call) {
  if (!STATUS.get(call.status).ran) return "did not run";
  return call.start === null ? "not timed" : `waited ${duration(call.queue)}, ran ${duration(call.run)}`;
}

function callCard(body, number) {
  const call = body.calls[number], status = STATUS.get(call.status), good = call.status === "ok";
  const facts = [spent(call), bytesOf(call.bytes), `id ${call.id}`];
  if (call.stop) facts.push("ended the trajectory");
  if (call.reward !== null) facts.push(`reward ${amount(call.reward)}`);
  const rest = [["Unreadable because", call.error], ["Notes", call.notes], ["Metrics", call.metrics]].filter(([, value]) => value);
  return make("article", { class: `call ${good ? "good" : "bad"}`, id: `call-${number + 1}`, tabindex: "-1" },
    make("h5", {}, `Call ${number + 1} `, make("b", {}, call.tool || "(no name)"), " ",
      make("span", { class: "status", title: status.more }, good ? "✓ " : "✗ ", `${call.status}: ${status.words}`)),
    make("p", { class: "facts" }, facts.join(" · ")),
    call.args.length ? make("dl", { class: "arguments" }, ...call.args.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, block(value))]))
      : make("p", { class: "facts" }, "no arguments"),
    rest.length ? pairs(rest) : null,
    block(call.result || "(empty result)", "result"));
}

const ROLES = new Set(["system", "user", "assistant", "tool"]);
const roleClass = (role) => `message ${{ input: "user", output: "assistant" }[role] ?? (ROLES.has(role) ? role : "other")}`;
const message = ([role, text]) => make("article", { class: roleClass(role) }, make("h4", {}, role), block(text || "(empty)"));

function piece([kind, text, call]) {
  if (kind === "call") return make("p", { class: "placed" }, make("a", { href: addressOf(current, call) }, `↳ call ${call + 1}`), make("code", {}, text.slice(0, 300)));
  if (!text.trim()) return null;
  if (kind === "thought") return make("details", { class: "thought" }, make("summary", {}, `Reasoning (${many(text.length, "character")})`), block(text.trim()));
  return block(text.trim());
}

function turnOf(body, turn) {
  const results = new Set(turn.calls.map((call) => body.calls[call].result));
  const [shown, same] = [[], []];
  for (const answer of turn.answers) (answer[0] === "tool" || results.has(answer[1]) ? same : shown).push(answer);
  const repeated = same.length && make("details", { class: "thought" },
    make("summary", {}, `As the model read ${same.length === 1 ? "it" : "them"} (${many(same.length, "message")})`), ...same.map(message));
  return make("section", { class: "turn", "aria-label": `Turn ${turn.index + 1}` },
    ...turn.context.map(message),
    make("article", { class: roleClass(turn.role) },
      make("h4", {}, turn.role, make("span", { class: "facts" }, ` turn ${turn.index + 1}${turn.reward === null ? "" : ` · reward ${amount(turn.reward)}`}${turn.notes ? ` · ${turn.notes}` : ""}`)),
      ...turn.said.map(piece),
      turn.complete ? null : make("p", { class: "cut" }, "The message was cut off here.")),
    ...turn.calls.map((call) => callCard(body, call)),
    ...shown.map(message), repeated || null);
}

/** The conversation, some turns at a time. `until` shows those up to a call. */
function conversation(body) {
  const box = make("div", {}), more = make("button", { type: "button", click: () => add(TURNS_AT_ONCE) }, "");
  let shown = 0;
  function add(count) {
    const next = body.turns.slice(shown, shown + count);
    shown += next.length;
    box.append(...next.map((turn) => turnOf(body, turn)));
    more.textContent = `Show more: ${many(body.turns.length - shown, "turn")} to come`;
    more.hidden = shown >= body.turns.length;
  }
  add(TURNS_AT_ONCE);
  const until = (call) => add(Math.max(0, body.turns.findIndex((turn) => turn.calls.includes(call)) + 1 - shown));
  return { until, element: section("Conversation", box, more) };
}

function tokens(body) {
  if (!body.tokens) return null;
  const words = (source) => (source < 0 ? TOKENS[source] : ["injected", `result of call ${source + 1}`]);
  const kind = (source) => words(source)[0];
  const painted = body.tokens.map(([source, count, text, likely]) => make("span", { class: `tokens ${kind(source)}`,
    title: `${many(count, "token")}, ${words(source).join(": ")}${likely === null ? "" : `; mean log-probability ${short(likely)}`}` }, text));
  const counts = new Map();
  for (const [source, count] of body.tokens) counts.set(kind(source), (counts.get(kind(source)) ?? 0) + count);
  const legend = ["sampled", "injected", "prompt", "template"].filter((name) => counts.has(name)).map((name) =>
    make("span", {}, make("span", { class: `key tokens ${name}` }, ""), ` ${name} ${counts.get(name).toLocaleString("en")} `));
  return section("Tokens by source", make("p", { class: "legend" }, ...legend, " – only sampled tokens are trained on."),
    make("pre", { class: "painted", dir: "auto", tabindex: "0" }, ...painted));
}

let current = -1, showUntil = () => {};

async function showTrajectory(number) {
  current = number;
  const row = rows[number];
  let body;
  try {
    body = await bodyOf(number);
  } catch (error) {
    if (current === number) byId("main").replaceChildren(make("p", { class: "cut" }, `This trajectory cannot be unpacked; the file may have been cut off. (${error.message})`));
    return;
  }
  if (current !== number) return;
  const { element, until } = conversation(body);
  showUntil = until;
  const cut = body.left_out ? make("p", { class: "cut" }, `Very long texts are cut: ${many(body.left_out, "character")} are not in this page. The cuts are marked, and the dump has the whole texts.`) : null;
  const extras = body.extras.length ? section("Also noted", pairs(body.extras)) : null;
  const origin = make("details", { class: "thought" }, make("summary", {}, "Origin"),
    pairs([["file", INDEX.files[row.file]], ["id", body.id], ["run", body.run || "unknown"], ["group", `${body.group} (the same for all trajectories of this prompt)`],
      ["started", body.started === null ? "unknown" : new Date(body.started * 1000).toString()], ...body.versions]));
  byId("main").replaceChildren(...[heading(row, body), cut, whatHappened(row, body), rewards(body), times(row, body), element, tokens(body), extras, origin].filter(Boolean));
  byId("main").scrollTop = 0;
}

function showCall(call) {
  showUntil(call);
  const card = byId(`call-${call + 1}`);
  card?.scrollIntoView({ block: "start" });
  card?.focus({ preventScroll: true });
}
