// Charts as SVG. A chart is a function of its width in pixels, drawn anew when the window changes.

const resized = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) {
    if (contentRect.width && target.drawnWidth !== Math.round(contentRect.width)) {
      target.drawnWidth = Math.round(contentRect.width);
      target.replaceChildren(target.draw(target.drawnWidth));
    }
  }
});

function chart(label, draw) {
  const box = make("div", { class: "chart", role: "img", "aria-label": label });
  box.draw = draw;
  resized.observe(box);
  return box;
}

const svg = (width, height, children) => make("svg", { width, height, viewBox: `0 0 ${width} ${height}` }, ...children);
const rect = (x, y, width, height, name, told = null) =>
  make("rect", { x, y, width: Math.max(width, 0), height, class: name }, told === null ? null : make("title", {}, told));
const label = (x, y, text, anchor = "start", name = "") =>
  make("text", { x, y, "text-anchor": anchor, class: name }, text);
const fit = (text, pixels) => (text.length * 7 <= pixels ? text : `${text.slice(0, Math.max(1, pixels / 7 - 1))}…`);

/** How many trajectories have which score. */
function histogram(scores) {
  const low = scores.reduce((a, b) => Math.min(a, b), Infinity);
  const high = scores.reduce((a, b) => Math.max(a, b), -Infinity);
  const bins = new Array(low === high ? 1 : 20).fill(0);
  for (const score of scores) bins[Math.min(bins.length - 1, Math.floor(((score - low) / (high - low || 1)) * bins.length))]++;
  const most = Math.max(...bins), span = (high - low) / bins.length;
  return chart(`Scores from ${short(low)} to ${short(high)}; the tallest bar stands for ${most} trajectories`, (width) => {
    const height = 130, each = width / bins.length;
    const drawn = bins.flatMap((count, bin) => {
      const tall = count ? Math.max(2, (count / most) * (height - 20)) : 0, x = bin * each;
      const told = `${many(count, "trajectory").replace("trajectorys", "trajectories")}: ${short(low + bin * span)} to ${short(low + (bin + 1) * span)}`;
      const shown = count && each > 24 ? [label(x + each / 2, height - tall + 10, String(count), "middle")] : [];
      return [rect(x + 1, height - tall + 14, Math.min(each - 2, 120), tall, "bar", told), ...shown];
    });
    const axis = make("line", { x1: 0, x2: width, y1: height + 14, y2: height + 14, class: "axis" });
    return svg(width, height + 34, [...drawn, axis, label(0, height + 30, short(low)), label(width, height + 30, low === high ? "" : short(high), "end")]);
  });
}

/** Horizontal bars, one a line: [name, value, text, class]. */
function bars(told, lines) {
  const most = Math.max(...lines.map(([, value]) => value), 1e-9);
  return chart(`${told}: ${lines.map(([name, , text]) => `${name} ${text}`).join(", ")}`, (width) => {
    const begin = Math.min(190, width * 0.36), room = width - begin - 110;
    const drawn = lines.flatMap(([name, value, text, kind], line) => {
      const y = line * 24, long = Math.max(2, (value / most) * room);
      return [
        label(begin - 8, y + 16, fit(visible(name), begin - 8), "end"),
        rect(begin, y + 4, long, 16, kind),
        label(begin + long + 6, y + 16, text),
      ];
    });
    return svg(width, lines.length * 24 + 4, drawn);
  });
}

/** Calls on a line of time each: waiting, then running. The time between turns, the model's own, is left out. */
function timeline(turns, calls, link) {
  const most = 200, shown = [];
  let at = 0;
  const begins = [];
  for (const turn of turns) {
    const timed = turn.calls.map((number) => ({ number, ...calls[number] })).filter((call) => call.start !== null);
    if (!timed.length) continue;
    const first = timed.reduce((least, call) => Math.min(least, call.start), Infinity);
    begins.push([at, turn.index]);
    let long = 0;
    for (const call of timed) {
      const from = call.start - first, queue = Math.max(0, call.queue ?? 0), run = Math.max(0, call.run ?? 0);
      shown.push({ ...call, at: at + from, queue, run });
      long = Math.max(long, from + queue + run);
    }
    at += long;
  }
  if (!shown.length || !Number.isFinite(at)) return null;
  const told = `${many(Math.min(shown.length, most), "call")} on a line of ${duration(at)}`;
  return chart(told, (width) => {
    const begin = Math.min(170, width * 0.3), room = width - begin - 76, scale = room / (at || 1);
    const tall = shown.length > 40 ? 12 : 22, height = Math.min(shown.length, most) * tall + 30;
    const edges = begins.flatMap(([time, index], n) => {
      const x = begin + time * scale;
      const room = ((begins[n + 1]?.[0] ?? at) - time) * scale;
      return [make("line", { x1: x, x2: x, y1: 16, y2: height - 6, class: "axis" }),
        ...(room > 50 ? [label(x + 3, 12, `turn ${index + 1}`, "start", "faint")] : [])];
    });
    const drawn = shown.slice(0, most).map((call, line) => {
      const y = 20 + line * tall, x = begin + call.at * scale, run = x + call.queue * scale;
      const text = `call ${call.number + 1}, ${call.tool || "unreadable"}: ${spent(call)}`;
      return make("a", { svg: true, href: link(call.number), tabindex: "-1" },
        make("title", {}, text),
        label(begin - 8, y + tall - 7, fit(visible(`${call.number + 1} ${call.tool || "unreadable"}`), begin - 8), "end", tall < 20 ? "tiny" : ""),
        rect(x, y + tall / 3, call.queue * scale, tall / 3, "queue"),
        rect(run, y + 2, Math.max(2, call.run * scale), tall - 4, call.status === "ok" ? "bar" : "bad"),
        label(Math.max(run + 2, run + call.run * scale) + 5, y + tall - 7, STATUS.get(call.status).ran ? duration(call.run) : "did not run", "start", tall < 20 ? "tiny" : "faint"));
    });
    return svg(width, height, [...edges, ...drawn]);
  });
}
