"use strict";
// What stands in this file: the index of all trajectories, and their bodies in compressed chunks.
// Nothing of it is trusted: it becomes text nodes, never HTML, and never a link to elsewhere.

const INDEX = JSON.parse(document.getElementById("index").textContent);
const OK = 0;

const firstOfChunk = [];
INDEX.chunks.reduce((first, size) => (firstOfChunk.push(first), first + size), 0);

const rows = INDEX.rows.map(([id, file, step, score, reason, turns, statuses, tools, excerpt, run, task], number) => {
  const calls = statuses.reduce((sum, [, count]) => sum + count, 0);
  const answered = statuses.find(([status]) => status === OK)?.[1] ?? 0;
  return {
    number, id, file, step, reason, turns, statuses, tools, excerpt, calls, run, task, group: null, advantage: null,
    score: typeof score === "number" ? score : null,
    scoreText: score === null ? "–" : amount(score),
    errors: calls - answered,
  };
});

const groups = INDEX.groups.map(([step, run, name, recorded, mean, spread, numbers, advantages], number) => {
  numbers.forEach((one, n) => Object.assign(rows[one], { group: number, advantage: advantages[n] }));
  return { number, step, run, name, recorded, mean, spread, rows: numbers.map((one) => rows[one]) };
});
const addressOfGroup = (number) => `#:group-${number + 1}`;
const addressOfRun = (number) => `#:run-${number + 1}`;
const addressOfQuery = (query) => `#?${encodeURIComponent(query.toWellFormed())}`;

const numberOfId = new Map();
for (const row of rows) if (row.id && !numberOfId.has(row.id)) numberOfId.set(row.id, row.number);

/** The part of the address that names a trajectory: its id, or its number where that is not one of its own. */
function addressOf(number, call = null) {
  const { id } = rows[number];
  const own = numberOfId.get(id) === number && id.isWellFormed();
  return `#${own ? encodeURIComponent(id) : `:${number + 1}`}${call === null ? "" : `/call-${call + 1}`}`;
}

/** The trajectory and the call that an address names; null where there is none. */
function placeOf(address) {
  const [, name, call] = /^#(.*?)(?:\/call-(\d+))?$/s.exec(address) ?? [];
  if (!name) return null;
  let number;
  try {
    number = name[0] === ":" ? Number(name.slice(1)) - 1 : numberOfId.get(decodeURIComponent(name));
  } catch {
    return null;
  }
  return rows[number] ? { number, call: call ? Number(call) - 1 : null } : null;
}

const whole = new Promise((resolve) => {
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", resolve);
  else resolve();
});
const unpacked = new Map();

function bytesOfBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const letters = atob(text), bytes = new Uint8Array(letters.length); // browsers before 2025
  for (let n = 0; n < letters.length; n++) bytes[n] = letters.charCodeAt(n);
  return bytes;
}

/** The text of an element that holds it compressed. */
async function inflated(id) {
  const packed = document.getElementById(id).textContent;
  const stream = new Blob([bytesOfBase64(packed)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).text();
}

/** The trajectories of a chunk, each as a line of JSON; the last few chunks are kept. */
async function linesOf(chunk) {
  if (!unpacked.has(chunk)) {
    await whole;
    unpacked.set(chunk, (await inflated(`chunk-${chunk}`)).split("\n"));
    if (unpacked.size > 4) unpacked.delete(unpacked.keys().next().value);
  }
  return unpacked.get(chunk);
}

/** The timeline of a batch. */
async function batchOf(number) {
  await whole;
  return JSON.parse(await inflated(`batch-${number}`));
}

async function bodyOf(number) {
  const chunk = firstOfChunk.findLastIndex((first) => first <= number);
  return JSON.parse((await linesOf(chunk))[number - firstOfChunk[chunk]]);
}

/** The number of the batch that an address names; null where there is none. */
function batchOfAddress(address) {
  const number = Number(/^#:batch-(\d+)$/.exec(address)?.[1] ?? 0) - 1;
  return INDEX.batches[number] ? number : null;
}

/** The number of the group or run that an address names, among some; null where there is none. */
function numberOfAddress(address, kind, some) {
  const number = Number(new RegExp(`^#:${kind}-(\\d+)$`).exec(address)?.[1] ?? 0) - 1;
  return some[number] ? number : null;
}

/** The query that an address names; null where there is none. */
function queryOfAddress(address) {
  if (!address.startsWith("#?")) return null;
  try {
    return decodeURIComponent(address.slice(2));
  } catch {
    return null;
  }
}

/** All texts of a value, those inside of lists and objects too. */
function* textsOf(value) {
  if (typeof value === "string") yield value;
  else if (value !== null && typeof value === "object") for (const one of Object.values(value)) yield* textsOf(one);
}

// Control characters, those that reorder or hide text, and halves of surrogate pairs are written out; the joiners of
// emoji are left.
const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b\u200c\u200e\u200f\u2028-\u202e\u2060-\u206f\u3164\ufe00-\ufe0e\ufeff\uffa0\ufff9-\ufffb\u{e0000}-\u{e0fff}]|\p{Cs}|(?<!\p{Emoji})\ufe0f|(?<!\p{Emoji}\ufe0f?)\u200d/gu;

function visible(text) {
  return String(text).replace(HIDDEN, (letter) => `⟨U+${letter.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

const SVG = new Set(["svg", "g", "rect", "line", "text", "title", "path", "circle"]);

/** Make an element. Properties are attributes; functions listen to events; children are elements or text. */
function make(tag, properties = {}, ...children) {
  const drawn = SVG.has(tag) || properties.svg;
  const element = drawn ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "svg" || value === null || value === false) continue;
    else if (typeof value === "function") element.addEventListener(name, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null).map((child) => child instanceof Node ? child : visible(child)));
  return element;
}

const many = (number, thing) => `${number.toLocaleString("en")} ${thing}${number === 1 ? "" : "s"}`;

function short(number) {
  return Number.isInteger(number) ? String(number) : String(Number(number.toPrecision(4)));
}

/** A number of a dump, in which those that JSON lacks are texts. */
function amount(number) {
  return typeof number === "number" ? short(number) : String(number);
}

function duration(seconds) {
  if (seconds === null) return "unknown";
  if (seconds >= 60) return `${short(seconds / 60)} min`;
  if (seconds >= 1) return `${short(seconds)} s`;
  return seconds >= 0.001 ? `${short(seconds * 1000)} ms` : `${Math.round(seconds * 1e6)} µs`;
}

const signed = (number) => (number === null ? "–" : `${number > 0 ? "+" : ""}${short(Number(number.toFixed(3)))}`);
const counted = (count, thing) => many(count, thing).replace("trajectorys", "trajectories");

const rounded = (number) => (Math.abs(number) >= 1000 ? Math.round(number) : Number(number.toPrecision(3)));
const brief = (number) => (Math.abs(number) >= 1e9 ? short(number) : rounded(number).toLocaleString("en", { maximumSignificantDigits: 15 }));

/** A value of a curve. */
function written(value, unit) {
  return unit === "share" ? `${brief(100 * value)} %` : unit === "seconds" ? duration(rounded(value)) : brief(value);
}

function bytesOf(count) {
  return count < 1000 ? many(count, "byte") : count < 1e6 ? `${short(count / 1000)} kB` : `${short(count / 1e6)} MB`;
}
