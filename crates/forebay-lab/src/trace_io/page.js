"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const WHYS = ["demand", "ahead", "load", "small", "kv-read", "kv-write"];
const LEFT = 72, RIGHT = 10, AXIS = 22;
const style = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const tip = document.getElementById("tip");

const scaled = (value, units, base) => {
  let unit = 0;
  while (value >= base && unit + 1 < units.length) { value /= base; unit++; }
  return (unit === 0 || value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2)) + " " + units[unit];
};
const bytes = value => scaled(value, ["B", "KiB", "MiB", "GiB", "TiB"], 1024);
const time = s => s === 0 ? "0" : s < 1e-3 ? (s * 1e6).toFixed(0) + " µs" : s < 1 ? +(s * 1e3).toPrecision(3) + " ms" : +s.toPrecision(4) + " s";
const percent = share => (share * 100).toFixed(share > 0 && share < 0.1 ? 1 : 0) + " %";

/* Returns a step that makes about `count` round ticks. */
function step(most, count, base) {
  const rough = most / count;
  if (!(rough > 0)) return 1;
  if (base === 1024 && rough >= 1) return Math.pow(2, Math.ceil(Math.log2(rough)));
  const power = Math.pow(10, Math.floor(Math.log10(rough)));
  return power * [1, 2, 5, 10].find(m => m * power >= rough * 0.999);
}

function surface(id, height) {
  const canvas = document.getElementById(id);
  const width = canvas.clientWidth;
  const tall = height || +canvas.dataset.height;
  const ratio = window.devicePixelRatio || 1;
  canvas.style.height = tall + "px";
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(tall * ratio);
  const g = canvas.getContext("2d");
  g.scale(ratio, ratio);
  g.font = "11.5px system-ui, sans-serif";
  g.lineWidth = 1;
  return { g, canvas, width, height: tall, right: width - RIGHT, span: width - LEFT - RIGHT };
}

const atTime = (s, seconds) => LEFT + (data.seconds > 0 ? seconds / data.seconds : 0) * s.span;

function label(s, text, x, y, align, base) {
  s.g.fillStyle = style("soft");
  s.g.textAlign = align;
  s.g.textBaseline = base || "middle";
  s.g.fillText(text, x, y);
}

function timeAxis(s, top, bottom) {
  const by = step(data.seconds, Math.max(3, s.span / 110), 10);
  s.g.strokeStyle = style("grid");
  for (let t = 0; t <= data.seconds * 1.0001; t += by) {
    const x = Math.round(atTime(s, t)) + 0.5;
    s.g.beginPath(); s.g.moveTo(x, top); s.g.lineTo(x, bottom); s.g.stroke();
    label(s, time(+t.toPrecision(6)), x, bottom + 6, t === 0 ? "left" : x > s.right - 24 ? "right" : "center", "top");
  }
}

function valueAxis(s, top, bottom, most, base, text) {
  const by = step(most, Math.max(2, (bottom - top) / 46), base);
  s.g.strokeStyle = style("grid");
  for (let v = 0; v <= most * 1.0001; v += by) {
    const y = Math.round(bottom - (bottom - top) * v / most) + 0.5;
    s.g.beginPath(); s.g.moveTo(LEFT, y); s.g.lineTo(s.right, y); s.g.stroke();
    label(s, text(v), LEFT - 8, y, "right");
  }
}

/* Shows a tooltip over a canvas: `find` returns the text for a pointer position, or nothing. */
const hovers = {};
function hover(id, find) {
  hovers[id] = find;
  const canvas = document.getElementById(id);
  if (canvas.dataset.bound) return;
  canvas.dataset.bound = "1";
  canvas.addEventListener("pointermove", event => {
    const box = canvas.getBoundingClientRect();
    const text = hovers[id](event.clientX - box.left, event.clientY - box.top);
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    const x = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8);
    tip.style.left = Math.max(4, x) + "px";
    const below = event.clientY + 16;
    tip.style.top = (below + tip.offsetHeight > window.innerHeight ? event.clientY - tip.offsetHeight - 10 : below) + "px";
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
}
const slice = (s, x) => {
  const i = Math.floor((x - LEFT) / s.span * data.busy.length);
  return i >= 0 && i < data.busy.length ? i : -1;
};
const since = i => time(+(i * data.slice).toPrecision(4)) + " – " + time(+((i + 1) * data.slice).toPrecision(4));

function throughput() {
  const s = surface("throughput");
  const top = 10, bottom = s.height - AXIS, n = data.busy.length;
  const rate = data.bytes.map(row => row.map(b => b / data.slice));
  const sums = Array.from({ length: n }, (_, i) => rate.reduce((sum, row) => sum + row[i], 0));
  const most = Math.max(1, data.limit * 1.05, ...sums);
  timeAxis(s, top, bottom);
  valueAxis(s, top, bottom, most, 1024, v => bytes(v) + "/s");
  const base = new Array(n).fill(0);
  WHYS.forEach((why, w) => {
    s.g.fillStyle = style(why);
    for (let i = 0; i < n; i++) {
      if (!(rate[w][i] > 0)) continue;
      const x0 = Math.round(LEFT + s.span * i / n), x1 = Math.round(LEFT + s.span * (i + 1) / n);
      const y0 = bottom - (bottom - top) * base[i] / most;
      base[i] += rate[w][i];
      const y1 = bottom - (bottom - top) * base[i] / most;
      s.g.fillRect(x0, y1, x1 - x0, Math.max(y0 - y1, 0.6));
    }
  });
  if (data.limit > 0) {
    const y = Math.round(bottom - (bottom - top) * data.limit / most) + 0.5;
    s.g.strokeStyle = style("soft");
    s.g.setLineDash([5, 4]); s.g.beginPath(); s.g.moveTo(LEFT, y); s.g.lineTo(s.right, y); s.g.stroke(); s.g.setLineDash([]);
    const words = "limit " + bytes(data.limit) + "/s";
    s.g.fillStyle = style("card");
    s.g.fillRect(s.right - s.g.measureText(words).width - 8, y - 8, s.g.measureText(words).width + 8, 16);
    label(s, words, s.right - 4, y, "right");
  }
  hover("throughput", x => {
    const i = slice(s, x);
    if (i < 0) return "";
    const parts = WHYS.map((why, w) => rate[w][i] > 0 ? why.padEnd(9) + bytes(rate[w][i]) + "/s" : "").filter(Boolean);
    return [since(i), ...(parts.length ? parts : ["nothing read"])].join("\n");
  });
}

function lanes() {
  const s = surface("lanes");
  const rows = [["disk busy", data.busy, "busy"], ["waiting", data.waiting, "wait"]];
  const n = data.busy.length;
  rows.forEach(([name, values, colour], row) => {
    const y = 6 + row * 26;
    s.g.fillStyle = style("grid");
    s.g.fillRect(LEFT, y, s.span, 18);
    s.g.fillStyle = style(colour);
    for (let i = 0; i < n; i++) {
      if (!(values[i] > 0)) continue;
      const x0 = Math.round(LEFT + s.span * i / n), x1 = Math.round(LEFT + s.span * (i + 1) / n);
      const tall = Math.max(18 * values[i], 0.8);
      s.g.fillRect(x0, y + 18 - tall, x1 - x0, tall);
    }
    label(s, name, LEFT - 8, y + 9, "right");
  });
  hover("lanes", x => {
    const i = slice(s, x);
    return i < 0 ? "" : since(i) + "\ndisk busy " + percent(data.busy[i]) + "\nwaiting   " + percent(data.waiting[i]);
  });
}

function offsets() {
  const s = surface("offsets");
  const top = 8, bottom = s.height - AXIS, [columns, rows] = data.grid;
  const total = data.files.reduce((sum, file) => sum + file[1], 0);
  timeAxis(s, top, bottom);
  valueAxis(s, top, bottom, Math.max(1, total), 1024, bytes);
  let before = 0;
  s.g.strokeStyle = style("soft");
  data.files.slice(0, -1).forEach(file => {
    before += file[1];
    const y = Math.round(bottom - (bottom - top) * before / total) + 0.5;
    s.g.beginPath(); s.g.moveTo(LEFT, y); s.g.lineTo(s.right, y); s.g.stroke();
  });
  const w = Math.max(2, s.span / columns), h = Math.max(2.4, (bottom - top) / rows);
  const cells = new Map();
  for (const [name, steps] of data.points) {
    s.g.fillStyle = style(name);
    s.g.globalAlpha = 0.9;
    let at = 0;
    for (const by of steps) {
      at += by;
      const column = Math.floor(at / rows), row = at % rows;
      const x = LEFT + column / columns * s.span, y = bottom - (row + 0.5) / rows * (bottom - top);
      s.g.fillRect(x, y - h / 2, w, h);
      cells.set(at, name);
    }
  }
  s.g.globalAlpha = 1;
  hover("offsets", (x, y) => {
    const column = Math.floor((x - LEFT) / s.span * columns), row = Math.floor((bottom - y) / (bottom - top) * rows);
    for (let reach = 0; reach <= 4; reach++)
      for (let dx = -reach; dx <= reach; dx++)
        for (let dy = -reach; dy <= reach; dy++) {
          if (row + dy < 0 || row + dy >= rows) continue;
          const name = cells.get((column + dx) * rows + row + dy);
          if (name) return name + "\nat " + time((column + dx) / columns * data.seconds) + "\nbyte " + bytes((row + dy) / rows * total);
        }
    return "";
  });
}

function depth() {
  const s = surface("depth");
  const top = 8, bottom = s.height - AXIS, n = data.depth.length;
  const most = Math.max(1, ...data.depth) * 1.05;
  timeAxis(s, top, bottom);
  valueAxis(s, top, bottom, most, 10, v => String(+v.toPrecision(4)));
  s.g.fillStyle = style("busy");
  for (let i = 0; i < n; i++) {
    if (!(data.depth[i] > 0)) continue;
    const x0 = Math.round(LEFT + s.span * i / n), x1 = Math.round(LEFT + s.span * (i + 1) / n);
    const tall = Math.max((bottom - top) * data.depth[i] / most, 0.6);
    s.g.fillRect(x0, bottom - tall, x1 - x0, tall);
  }
  hover("depth", x => {
    const i = slice(s, x);
    return i < 0 ? "" : since(i) + "\n" + data.depth[i].toFixed(2) + " requests";
  });
}

function experts() {
  const e = data.experts;
  if (!e) return;
  document.getElementById("expert-section").hidden = false;
  const probe = document.getElementById("experts").clientWidth - LEFT - RIGHT;
  const tall = Math.max(5, Math.min(22, Math.max(probe / e.experts, 200 / e.layers)));
  const s = surface("experts", Math.round(tall * e.layers) + 4 + AXIS);
  const bottom = s.height - AXIS;
  const most = Math.max(1, ...e.bytes);
  const heat = style("heat"), gap = tall > 8 && s.span / e.experts > 6 ? 1 : 0;
  for (let layer = 0; layer < e.layers; layer++) {
    for (let expert = 0; expert < e.experts; expert++) {
      const value = e.bytes[layer * e.experts + expert];
      s.g.fillStyle = value ? `rgba(${heat}, ${0.12 + 0.88 * value / most})` : style("grid");
      const x0 = LEFT + s.span * expert / e.experts, x1 = LEFT + s.span * (expert + 1) / e.experts;
      s.g.fillRect(x0, 4 + layer * tall, x1 - x0 - gap, tall - gap);
    }
  }
  const byLayer = Math.max(1, step(e.layers, Math.max(2, (bottom - 4) / 24), 10));
  for (let layer = 0; layer < e.layers; layer += byLayer) label(s, (layer ? "" : "layer ") + layer, LEFT - 8, 4 + (layer + 0.5) * tall, "right");
  const byExpert = Math.max(1, step(e.experts, Math.max(2, s.span / 70), 1024));
  for (let expert = 0; expert < e.experts; expert += byExpert)
    label(s, (expert ? "" : "expert ") + expert, LEFT + s.span * (expert + 0.5) / e.experts, bottom + 6, expert ? "center" : "left", "top");
  const hot = document.getElementById("legend-experts");
  hot.innerHTML = '<span>not read <i class="ramp"></i> <span id="heat-most"></span></span>';
  document.getElementById("heat-most").textContent = bytes(most);
  hover("experts", (x, y) => {
    const expert = Math.floor((x - LEFT) / s.span * e.experts), layer = Math.floor((y - 4) / tall);
    if (expert < 0 || expert >= e.experts || layer < 0 || layer >= e.layers) return "";
    const at = layer * e.experts + expert;
    return `layer ${layer}, expert ${expert}\n${bytes(e.bytes[at])} in ${e.requests[at]} requests`;
  });
}

function latency() {
  const s = surface("latency");
  const top = 8, bottom = s.height - AXIS;
  const classes = data.latency.length ? data.latency[0][1].length : 0;
  const sums = Array.from({ length: classes }, (_, i) => data.latency.reduce((sum, row) => sum + row[1][i], 0));
  const first = Math.max(0, sums.findIndex(v => v > 0) - 2), last = Math.min(classes, classes - [...sums].reverse().findIndex(v => v > 0) + 2);
  const n = last - first, most = Math.max(1, ...sums) * 1.05;
  const at = i => LEFT + s.span * (i - first) / n;
  valueAxis(s, top, bottom, most, 10, v => v >= 1000 ? +(v / 1000).toPrecision(3) + " k" : String(v));
  s.g.strokeStyle = style("grid");
  for (let power = 0; power <= 8; power++) {
    const i = Math.log2(Math.pow(10, power)) * 4;
    if (i < first || i > last) continue;
    const x = Math.round(at(i)) + 0.5;
    s.g.beginPath(); s.g.moveTo(x, top); s.g.lineTo(x, bottom); s.g.stroke();
    label(s, time(Math.pow(10, power) * 1e-6), x, bottom + 6, x > s.right - 24 ? "right" : x < LEFT + 24 ? "left" : "center", "top");
  }
  const base = new Array(classes).fill(0);
  for (const [why, row] of data.latency) {
    s.g.fillStyle = style(why);
    for (let i = first; i < last; i++) {
      if (!row[i]) continue;
      const y0 = bottom - (bottom - top) * base[i] / most;
      base[i] += row[i];
      const y1 = bottom - (bottom - top) * base[i] / most;
      s.g.fillRect(at(i) + 0.5, y1, Math.max(1, at(i + 1) - at(i) - 1), Math.max(y0 - y1, 0.8));
    }
  }
  hover("latency", x => {
    const i = first + Math.floor((x - LEFT) / s.span * n);
    if (i < first || i >= last) return "";
    const border = j => time(+(Math.pow(2, j / 4) * 1e-6).toPrecision(3));
    const parts = data.latency.filter(row => row[1][i]).map(row => row[0].padEnd(9) + row[1][i]);
    return [border(i) + " – " + border(i + 1), ...(parts.length ? parts : ["none"])].join("\n");
  });
}

function legend(id, names) {
  const box = document.getElementById(id);
  box.textContent = "";
  for (const name of names) {
    const item = document.createElement("span"), dot = document.createElement("i");
    dot.style.color = `var(--${name})`;
    item.append(dot, name);
    box.append(item);
  }
}

function draw() {
  const whys = data.latency.map(row => row[0]);
  legend("legend-why", whys);
  legend("legend-latency", whys);
  legend("legend-part", data.points.map(row => row[0]));
  for (const chart of [throughput, lanes, offsets, depth, experts, latency]) chart();
}
draw();
let pending = 0;
const again = () => { cancelAnimationFrame(pending); pending = requestAnimationFrame(draw); };
window.addEventListener("resize", again);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
