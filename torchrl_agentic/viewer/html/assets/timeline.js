// The timeline of a batch: a line per trajectory, its spans as bars. Only the lines in sight are drawn.

const ROW = 16, GROUP = 18, AXIS = 40, NAMES = 190, HELD = 100, LANES = 3, ROWS_OF_TABLE = 1000;
const READY = 0.005; // seconds; a batch that is taken sooner was complete before
const COLORS = { engine: "--bar", tool: "--tool", tools: "--queue", reward: "--good", user: "--assistant", admission: "--queue", update: "--update", trainer: "--queue" };
const SAYS = { engine: "sampled", tool: "ran", tools: "ran the tool calls of a turn", reward: "was rewarded", user: "waited for the simulated user",
  admission: "waited to begin", update: "loaded new weights", trainer: "waited for the trainer" };
const addressOfBatch = (number) => `#:batch-${number + 1}`;

/** Spans of JSON as objects; calls that run at the same time get different lanes. */
function spansOf(listed, texts) {
  const spans = listed.map(([cause, from, to, name, turn, version, tokens, status]) =>
    ({ cause, from, to, name: texts[name], turn, version, tokens, status: texts[status], lane: 0, lanes: 1 }));
  let ends = [], together = [];
  const close = () => { for (const span of together) span.lanes = Math.min(LANES, ends.length); };
  for (const span of spans) {
    if (span.cause !== "tool") continue;
    if (ends.every((end) => end <= span.from)) {
      close();
      [ends, together] = [[], []];
    }
    const free = ends.findIndex((end) => end <= span.from), lane = free < 0 ? ends.length : free;
    ends[lane] = span.to;
    span.lane = lane % LANES;
    together.push(span);
  }
  close();
  return spans;
}

function toldOf(span) {
  const what = span.cause === "tool" ? `ran ${span.name || "an unreadable call"}` : SAYS[span.cause];
  const parts = [`turn ${span.turn + 1}: ${what} for ${duration(span.to - span.from)}, from ${duration(span.from)} to ${duration(span.to)}`];
  if (span.cause === "engine") parts.push(`${many(span.tokens, "token")}, policy version ${span.version}`);
  if (span.status) parts.push(span.status);
  return parts.join(", ");
}

const failedSpan = (span) => span.cause === "tool" && span.status !== "" && span.status !== "ok";

/** The trajectories that held up the batch for a good part of the wait. */
function lateOnes(batch) {
  const wait = batch.waited === null ? 0 : batch.stop - batch.waited;
  if (wait < READY) return new Set();
  return new Set([...batch.rows].sort((a, b) => b.held - a.held).filter((row) => row.held > 0 && row.held >= wait * 0.1).slice(0, 10));
}

const secondsOf = (row, causes) => row.spans.reduce((sum, span) => sum + (causes.includes(span.cause) ? span.to - span.from : 0), 0);

class Timeline {
  constructor(batch, late) {
    this.batch = batch;
    this.late = late;
    this.from = Math.min(0, ...batch.own.map((span) => span.from));
    this.from = Math.max(this.from, -batch.stop); // an update long before the batch does not squeeze it
    [this.first, this.last] = [this.from, batch.stop || 1];
    this.chosen = -1;
    this.span = -1;
    this.lines = [];
    this.height = AXIS;
    let group = null;
    batch.rows.forEach((row, number) => {
      if (row.group !== group) {
        this.lines.push({ y: this.height, group: row.group, number: -1 });
        this.height += GROUP;
        group = row.group;
      }
      this.lines.push({ y: this.height, row, number });
      row.y = this.height;
      this.height += ROW;
    });
    this.canvas = make("canvas", { "aria-hidden": "true" });
    this.tip = make("p", { class: "time-tip", hidden: true });
    this.space = make("div", {}, this.canvas);
    this.at = make("p", { class: "time-at", role: "status", id: "time-at" }, "Choose a trajectory with the arrow keys, or point at a bar.");
    this.box = make("div", { class: "time-box", tabindex: "0", role: "group", "aria-describedby": "time-at",
      "aria-label": `Timeline of ${many(batch.rows.length, "trajectory").replace("trajectorys", "trajectories")}: the arrow keys choose a trajectory and a span, s the next straggler, Enter opens the conversation. The table below has the same figures.`,
      keydown: (event) => this.key(event), scroll: () => this.later(), mousemove: (event) => this.point(event),
      mouseleave: () => { this.tip.hidden = true; }, click: (event) => this.click(event), dblclick: () => this.open() }, this.space, this.tip);
    this.space.style.height = `${this.height + 4}px`;
    this.resizes = new ResizeObserver(() => this.later());
    this.resizes.observe(this.box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.later());
  }

  later() {
    this.due ??= requestAnimationFrame(() => {
      this.due = null;
      if (this.box.isConnected) this.draw();
    });
  }

  x(time) {
    return NAMES + ((time - this.first) / (this.last - this.first)) * this.room;
  }

  draw() {
    const width = this.box.clientWidth, height = Math.min(this.box.clientHeight, this.height + 4), scale = devicePixelRatio || 1;
    if (!width || !height) return;
    const sizes = [Math.round(width * scale), Math.round(height * scale)];
    if (this.canvas.width !== sizes[0] || this.canvas.height !== sizes[1]) [this.canvas.width, this.canvas.height] = sizes;
    [this.canvas.style.width, this.canvas.style.height] = [`${width}px`, `${height}px`];
    this.room = Math.max(50, width - NAMES - HELD);
    const style = getComputedStyle(document.documentElement), color = (name) => style.getPropertyValue(name);
    const pen = this.canvas.getContext("2d"), top = this.box.scrollTop;
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    if (this.batch.waited !== null) this.band(pen, this.batch.waited, this.batch.stop, height, color("--wait"));
    const first = this.lines.findIndex((line) => line.y + GROUP > top + AXIS - GROUP);
    for (const line of this.lines.slice(Math.max(0, first))) {
      if (line.y > top + height) break;
      if (line.number < 0) this.drawGroup(pen, line, top, width, color);
      else this.drawRow(pen, line, top, width, color);
    }
    for (const span of this.batch.own) {
      if (span.cause !== "update") continue;
      pen.globalAlpha = 0.25;
      this.band(pen, span.from, span.to, height, color("--update"));
      pen.globalAlpha = 1;
    }
    this.drawAxis(pen, width, color);
  }

  band(pen, from, to, height, fill) {
    const [left, right] = [Math.max(NAMES, this.x(from)), Math.min(NAMES + this.room, this.x(to))];
    pen.fillStyle = fill;
    if (right >= left) pen.fillRect(left, 0, Math.max(1, right - left), height);
  }

  drawGroup(pen, line, top, width, color) {
    const y = line.y - top;
    pen.fillStyle = color("--faint");
    pen.textAlign = "left";
    pen.fillText(fit(visible(`group ${line.group}`), width - 20), 8, y + GROUP / 2 + 1);
    pen.fillStyle = color("--line");
    pen.fillRect(0, y, width, 1);
  }

  drawRow(pen, { row, number, y: at }, top, width, color) {
    const y = at - top, late = this.late.has(row);
    if (late || number === this.chosen) {
      pen.fillStyle = color(number === this.chosen ? "--mark" : "--bad-back");
      pen.fillRect(0, y, number === this.chosen ? width : NAMES - 2, ROW);
      if (late) pen.fillRect(NAMES + this.room, y, HELD, ROW);
    }
    pen.textAlign = "left";
    pen.fillStyle = color(late ? "--bad" : "--text");
    pen.fillText(shortName(visible(row.name), 24), 16, y + ROW / 2 + 1);
    if (late) pen.fillText(`held ${duration(row.held)}`, NAMES + this.room + 4, y + ROW / 2 + 1);
    row.spans.forEach((span, n) => {
      if (span.to < this.first || span.from > this.last) return;
      const [left, from, long, tall] = this.place(span, y);
      pen.fillStyle = color(failedSpan(span) ? "--bad" : COLORS[span.cause]);
      pen.fillRect(left, from, long, tall);
      if (number === this.chosen && n === this.span) {
        pen.strokeStyle = color("--text");
        pen.lineWidth = 2;
        pen.strokeRect(left - 1, from - 1, long + 2, tall + 2);
      }
    });
  }

  /** Where the bar of a span is: left, top, width, height. */
  place(span, y) {
    const left = Math.max(NAMES, this.x(span.from)), right = Math.min(NAMES + this.room, this.x(span.to));
    const long = Math.max(1, right - left);
    if (span.cause === "tools" || span.cause === "admission") return [left, y + ROW / 2 - 1, long, 2];
    if (span.cause !== "tool") return [left, y + 2, long, ROW - 4];
    const tall = (ROW - 6) / span.lanes;
    return [left, y + 3 + span.lane * tall, long, Math.max(2, tall - (span.lanes > 1 ? 1 : 0))];
  }

  drawAxis(pen, width, color) {
    pen.fillStyle = color("--panel");
    pen.fillRect(0, 0, width, AXIS - 2);
    pen.fillStyle = color("--faint");
    const step = niceStep((this.last - this.first) / Math.max(2, this.room / 110));
    pen.textAlign = "center";
    for (let tick = Math.ceil(this.first / step) * step; tick <= this.last; tick += step) {
      pen.fillText(tick ? duration(tick) : "0", this.x(tick), 9);
      pen.fillRect(this.x(tick), 17, 1, 4);
    }
    pen.textAlign = "left";
    pen.fillStyle = color("--text");
    pen.fillText("trainer, updates", 8, 30);
    if (this.batch.waited !== null && this.batch.waited < this.last) {
      const from = Math.max(NAMES, this.x(this.batch.waited));
      pen.fillStyle = color("--wait");
      pen.fillRect(from, 23, NAMES + this.room - from, 14);
      pen.fillStyle = color("--text");
      pen.fillText(fit("the trainer waits", NAMES + this.room - from), from + 3, 30);
    }
    for (const span of this.batch.own) {
      if (span.cause !== "update" || span.to < this.first || span.from > this.last) continue;
      const left = Math.max(NAMES, this.x(span.from));
      pen.fillStyle = color("--update");
      pen.fillRect(left, 23, Math.max(2, this.x(span.to) - left), 14);
    }
    pen.fillStyle = color("--line");
    pen.fillRect(0, AXIS - 2, width, 1);
  }

  /** What is at a place of the window: [number of the trajectory, number of the span], or -1. */
  hit(event) {
    const edge = this.canvas.getBoundingClientRect(), x = event.clientX - edge.left, y = event.clientY - edge.top + this.box.scrollTop;
    if (y - this.box.scrollTop < AXIS) return [-1, -1, x, y];
    const line = this.lines.find((one) => one.number >= 0 && y >= one.y && y < one.y + ROW);
    if (!line) return [-1, -1, x, y];
    const near = (span) => {
      const [left, from, long, tall] = this.place(span, line.y);
      return x >= left - 1 && x <= left + long + 1 && y >= from - 1 && y <= from + tall + 1;
    };
    const exact = line.row.spans.findLastIndex(near);
    const time = this.first + ((x - NAMES) / this.room) * (this.last - this.first);
    return [line.number, exact >= 0 ? exact : line.row.spans.findLastIndex((span) => span.from <= time && time <= span.to), x, y];
  }

  point(event) {
    const [number, place, x, y] = this.hit(event);
    this.tip.hidden = number < 0;
    if (number < 0) return;
    const row = this.batch.rows[number];
    this.tip.textContent = visible(`${row.name}\n${place < 0 ? this.summary(row) : toldOf(row.spans[place])}`);
    this.tip.style.left = `${Math.max(4, Math.min(x + 12, this.box.clientWidth - this.tip.offsetWidth - 4))}px`;
    const below = y + 18 - this.box.scrollTop + this.tip.offsetHeight < this.box.clientHeight;
    this.tip.style.top = `${below ? y + 18 : y - this.tip.offsetHeight - 6}px`;
  }

  click(event) {
    const [number, place] = this.hit(event);
    if (number >= 0) this.choose(number, place);
  }

  summary(row) {
    const held = row.held > 0 ? `; the trainer waited ${duration(row.held)} for it` : "";
    const omitted = row.omitted ? `; its first ${many(row.omitted, "span")} are left out` : "";
    return `group ${row.group}, from ${duration(row.began)} to ${duration(row.ended)}, ${many(row.tokens, "token")}, ended by ${row.reason || "?"}${held}${omitted}`;
  }

  choose(number, place = -1) {
    this.chosen = Math.max(0, Math.min(this.batch.rows.length - 1, number));
    const row = this.batch.rows[this.chosen];
    if (!row) return;
    this.span = Math.max(-1, Math.min(row.spans.length - 1, place));
    const span = row.spans[this.span];
    this.at.textContent = visible(`${row.name}: ${span ? `${toldOf(span)} (span ${this.span + 1} of ${row.spans.length})` : this.summary(row)}`);
    const top = this.box.scrollTop, room = this.box.clientHeight;
    if (row.y - AXIS - GROUP < top) this.box.scrollTop = row.y - AXIS - GROUP;
    else if (row.y + ROW + 4 > top + room) this.box.scrollTop = row.y + ROW + 4 - room;
    const long = this.last - this.first;
    if (span && (span.to < this.first || span.from > this.last)) this.show((span.from + span.to - long) / 2, long);
    this.later();
  }

  /** Show a part of the time. */
  show(first, long) {
    const whole = (this.batch.stop || 1) - this.from;
    long = Math.max(whole / 10_000, Math.min(long, whole));
    this.first = Math.max(this.from, Math.min(first, this.from + whole - long));
    this.last = this.first + long;
    this.later();
  }

  zoom(by) {
    const span = this.batch.rows[this.chosen]?.spans[this.span];
    const long = this.last - this.first, middle = span ? (span.from + span.to) / 2 : this.last - long / 2;
    this.show(middle - (long * by) / 2, long * by);
  }

  all() {
    this.show(this.from, Infinity);
  }

  open() {
    const number = this.batch.rows[this.chosen]?.record;
    if (number !== null && number !== undefined) go(number);
    else if (this.chosen >= 0) this.at.textContent = "Its conversation is not in this dump, or several have its name.";
  }

  nextLate() {
    const late = this.batch.rows.flatMap((row, number) => (this.late.has(row) ? [number] : []));
    if (late.length) this.choose(late.find((number) => number > this.chosen) ?? late[0]);
    else this.at.textContent = "No trajectory held up this batch.";
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const row = this.batch.rows[this.chosen];
    const keys = {
      ArrowDown: () => this.choose(this.chosen + 1), ArrowUp: () => this.choose(this.chosen - 1),
      PageDown: () => this.choose(this.chosen + 10), PageUp: () => this.choose(this.chosen - 10),
      ArrowRight: () => this.choose(this.chosen, this.span + 1), ArrowLeft: () => this.choose(this.chosen, this.span - 1),
      Home: () => this.choose(this.chosen, 0), End: () => this.choose(this.chosen, (row?.spans.length ?? 0) - 1),
      Enter: () => this.open(), s: () => this.nextLate(),
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), 0: () => this.all(),
    };
    if (!Object.hasOwn(keys, event.key)) return;
    keys[event.key]();
    event.preventDefault();
    event.stopPropagation();
  }
}

function shortName(text, most) {
  return text.length <= most ? text : `${text.slice(0, Math.ceil((most - 1) / 2))}…${text.slice(-Math.floor((most - 1) / 2))}`;
}

/** The smallest of 1, 2, 5, 10, … seconds that is no smaller. */
function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1e-6)));
  return [1, 2, 5, 10].map((digit) => digit * power).find((step) => step >= least) ?? 10 * power;
}

function headOfBatch(number, batch) {
  const [name, run, time, seconds, , count, tokens] = INDEX.batches[number];
  const near = (step, text) => INDEX.batches[number + step] ? make("a", { href: addressOfBatch(number + step), class: "button" }, text)
    : make("span", { class: "button off" }, text);
  const groups = new Set(batch.rows.map((row) => row.group)).size, all = batch.ages.reduce((sum, [, n]) => sum + n, 0);
  const ages = batch.ages.map(([age, n]) => `${age ? many(age, "update") : "current"} ${Math.round((100 * n) / (all || 1))} %`).join(", ");
  return make("div", { class: "heading" }, make("h2", { tabindex: "-1", id: "title" }, `Batch ${name}`),
    make("p", { class: "near" }, near(-1, "← Previous"), near(1, "Next →")),
    make("p", { class: "facts" }, [run ? `run ${run}` : "", time ? `complete ${new Date(time * 1000).toLocaleString()}` : "", `${duration(seconds)} from its first trajectory on`,
      `${many(count, "trajectory").replace("trajectorys", "trajectories")} in ${many(groups, "group")}`, `${many(tokens, "token")} sampled`,
      ages ? `age of its tokens: ${ages}` : ""].filter(Boolean).join(" · ")),
    number === 0 && INDEX.n_batches_omitted ? make("p", { class: "facts" }, `The ${many(INDEX.n_batches_omitted, "batch").replace("batchs", "batches")} before are not in this page.`) : null);
}

const causeClass = (cause) => ({ reward: "reward", user: "user", update: "update", engine: "bar" })[cause] ?? (cause.startsWith("tool/") ? "tool" : "queue");
const causeWords = (cause) => cause.replace(/^tool\//, "tool ").replace(/^other$/, "between spans").replace(/^batch$/, "building the batch");

function waitOfBatch(batch, late) {
  if (batch.waited === null || batch.stop - batch.waited < READY) return section("Why the trainer waited", make("p", {}, "It did not wait: the batch was complete before it was needed."));
  const wait = batch.stop - batch.waited, shown = batch.causes.slice(0, 12);
  const share = (took) => `${duration(took)}, ${Math.round((100 * took) / (wait || 1))} %`;
  const who = [...late].map((row) => `${row.name} (${duration(row.held)})`).join(", ");
  return section("Why the trainer waited", make("p", {}, `It waited ${duration(wait)} for this batch. Each moment is divided equally among the trajectories that were missing, and goes to what they were doing.`),
    shown.length ? bars("Seconds of the wait", shown.map(([cause, took]) => [causeWords(cause), took, share(took), causeClass(cause)])) : null,
    who ? make("p", {}, `Held up by: ${who}.`) : null);
}

function tableOfBatch(batch, late) {
  const columns = ["Group", "Began", "Took", "Engine", "Tools", "Reward", "Turns", "Tokens", "Ended by", "Held up"];
  const lines = batch.rows.slice(0, ROWS_OF_TABLE).map((row) => make("tr", { class: late.has(row) ? "late" : null },
    make("th", { scope: "row", class: "name" }, row.record === null ? row.name : make("a", { href: addressOf(row.record) }, row.name)),
    make("td", { class: "name" }, row.group),
    ...[duration(row.began), duration(row.ended - row.began), duration(secondsOf(row, ["engine"])), duration(secondsOf(row, ["tools"]) || secondsOf(row, ["tool"])),
      duration(secondsOf(row, ["reward"])), String(row.spans.reduce((most, span) => Math.max(most, span.turn + 1), 0)), row.tokens.toLocaleString("en"),
      row.reason || "?", row.held > 0 ? duration(row.held) : "–"].map((text) => make("td", {}, text))));
  const more = batch.rows.length - lines.length;
  return make("details", { class: "thought" }, make("summary", {}, "As a table"), make("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "The timeline as a table" },
    make("table", {}, make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "Trajectory"), ...columns.map((name) => make("th", { scope: "col" }, name)))),
      make("tbody", {}, ...lines))), more > 0 ? make("p", { class: "legend" }, `… and ${more.toLocaleString("en")} more.`) : null);
}

let drawnTimeline = null; // the one on the page, for programs that drive it

async function showBatch(number) {
  current = -2 - number;
  const mine = current;
  choose(-1);
  let batch;
  try {
    batch = await batchOf(number);
  } catch (error) {
    if (current === mine) byId("main").replaceChildren(make("p", { class: "cut" }, `This batch cannot be unpacked; the file may have been cut off. (${error.message})`));
    return;
  }
  if (current !== mine) return;
  batch.own = spansOf(batch.own, batch.texts);
  for (const row of batch.rows) row.spans = spansOf(row.spans, batch.texts);
  const late = lateOnes(batch), drawn = new Timeline(batch, late), key = (name, text) => make("span", {}, make("span", { class: `key ${name}` }, ""), `${text} `);
  drawnTimeline = drawn;
  const buttons = make("div", { class: "time-tools" },
    make("button", { type: "button", click: () => drawn.zoom(0.5) }, "Zoom in"), make("button", { type: "button", click: () => drawn.zoom(2) }, "Zoom out"),
    make("button", { type: "button", click: () => drawn.all() }, "Show all"), make("button", { type: "button", click: () => { drawn.nextLate(); drawn.box.focus(); } }, "Next straggler"));
  const legend = make("p", { class: "legend" }, key("bar", "sampled"), key("tool", "tool call"), key("bad", "failed call"), key("queue", "queued or waiting to begin"),
    key("reward", "reward"), key("user", "simulated user"), key("update", "weight update"), key("wait", "the trainer waits"), key("late", "straggler"));
  const time = section("Timeline", buttons, drawn.box, drawn.at, legend);
  time.classList.add("time");
  byId("main").replaceChildren(headOfBatch(number, batch), waitOfBatch(batch, late), time, tableOfBatch(batch, late));
  byId("main").scrollTop = 0;
  drawn.draw();
}
