// The view of the machine: rates and limits, memory, and the experts of each model.

import { element } from "./markdown.js";

const SVG = "http://www.w3.org/2000/svg";

/** Shows all models. Cards of models that stay are kept, so that pointer and focus stay where they are. */
export function showLive(into, live) {
  const cards = (into.cards ??= new Map());
  const names = new Set(live.models.map((model) => model.name));
  for (const [name, card] of cards) {
    if (names.has(name)) continue;
    card.node.remove();
    cards.delete(name);
  }
  for (const model of live.models) {
    if (!cards.has(model.name)) {
      const card = newCard(model.name);
      cards.set(model.name, card);
      into.append(card.node);
    }
    fill(cards.get(model.name), model);
  }
}

function newCard(name) {
  const node = element("article", "card");
  const [sub, facts, halves] = [element("p", "sub"), element("div", "facts"), element("div", "halves")];
  const [memory, rates] = [element("div"), element("div")];
  const heat = heatMap();
  halves.append(memory, rates);
  node.append(element("h2", "", name), sub, facts, halves, heat.node);
  return { node, sub, facts, memory, rates, heat };
}

function fill(card, model) {
  card.sub.textContent = `${model.device}, context of ${model.context} positions, expert policy ${model.policy}`;
  card.facts.replaceChildren(...facts(model));
  card.memory.replaceChildren(element("h3", "", "Memory"), ...memory(model));
  card.rates.replaceChildren(element("h3", "", "Transfers and time"), ...rates(model));
  card.heat.show(model.experts, model.rates);
}

function fact(name, value, note = "") {
  const node = element("div", "fact");
  node.append(element("div", "name", name), element("div", "value", value), element("div", "note", note));
  return node;
}

function facts(model) {
  const { rates, queue } = model;
  const predicted = model.predicted?.rate.tokens_per_second;
  const found = rates.expert_hits + rates.expert_misses;
  const list = [
    fact("Generating", `${rates.generated_tokens.toFixed(1)} tokens/s`, predicted ? `predicted ${predicted.toFixed(1)}` : ""),
    fact("Reading prompts", `${rates.prompt_tokens.toFixed(0)} tokens/s`),
    fact("Limited by", model.limited_by ?? "nothing, idle", model.predicted ? `predicted: ${words(model.predicted.limit)}` : ""),
    fact("Requests", `${queue.running} of ${queue.running_max}`, `${queue.waiting} waiting, ${queue.suspended} suspensions`),
  ];
  if (model.experts.length) {
    const rate = found > 0 ? `${percent(rates.expert_hits / found)}` : "none now";
    const note = `${rates.expert_misses.toFixed(0)} misses/s, ${rates.evictions.toFixed(0)} evictions/s`;
    list.push(fact("Expert hits", rate, note));
  }
  list.push(fact("One more GiB would bring", gain(model.one_more_gib), model.one_more_gib ? "tokens/s, predicted" : "run forebay doctor to know"));
  return list;
}

/** Returns a share in words that never rounds up to everything. */
function percent(share) {
  return `${(Math.floor(1000 * share) / 10).toFixed(1)} %`;
}

function words(name) {
  return name.replaceAll("_", " ");
}

function gain(more) {
  if (!more) return "not measured";
  const parts = [];
  for (const [name, gain] of [["VRAM", more.vram_gain], ["RAM", more.ram_gain]]) {
    if (gain === null || gain === undefined) continue;
    const percent = Math.round(100 * (gain - 1));
    parts.push(percent > 0 ? `+${percent} % with ${name}` : `nothing with ${name}`);
  }
  return parts.join(", ") || "not known";
}

function memory(model) {
  const { vram, ram, disk } = model.memory;
  const list = [];
  if (vram) {
    const other = vram.activation_bytes + vram.context_bytes;
    const parts = [["weights", vram.weights_bytes], ["kv", vram.kv_cache_bytes], ["other", other]];
    list.push(meter("VRAM", parts, vram.budget_bytes));
  }
  const used = ram.weights_used_bytes ?? ram.weights_bytes;
  const kv = ram.kv_cache_bytes + ram.kv_tier_bytes;
  const whole = (ram.budget_bytes ?? ram.weights_bytes) + kv;
  list.push(meter("RAM", [["weights", used], ["kv", kv]], whole));
  const held = used + (vram?.weights_bytes ?? 0);
  const rest = Math.max(0, disk.weights_bytes - held);
  list.push(meter("Only on disk", [["absent", rest]], disk.weights_bytes));
  const entries = [["", "weights"], ["kv", "keys and values"]];
  list.push(legend(vram ? [...entries, ["other", "activations and driver"]] : entries));
  return list;
}

function rates(model) {
  const { rates, limits } = model;
  const list = [rateMeter("Disk reads", rates.disk_bytes, limits.disk_bytes_per_second)];
  if (model.memory.vram) list.push(rateMeter("RAM to GPU", rates.pcie_bytes, limits.pcie_bytes_per_second));
  for (const [name, share] of rates.time) {
    list.push(meter(`Time: ${name}`, [["weights", share]], 1, `${Math.round(100 * share)} %`));
  }
  return list;
}

function rateMeter(name, rate, limit) {
  const text = limit ? `${bytes(rate)}/s of ${bytes(limit)}/s` : `${bytes(rate)}/s, limit not measured`;
  return meter(name, [["weights", rate]], limit ?? 0, text);
}

function meter(name, parts, whole, text = null) {
  const node = element("div", "meter");
  const label = element("div", "label");
  const sum = parts.reduce((sum, [, value]) => sum + value, 0);
  label.append(element("span", "", name), element("span", "", text ?? `${bytes(sum)} of ${bytes(whole)}`));
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("viewBox", "0 0 1000 1");
  svg.setAttribute("aria-hidden", "true");
  let from = 0;
  for (const [kind, value] of parts) {
    const width = whole > 0 ? Math.min(1000 - from, (1000 * value) / whole) : 0;
    const bar = document.createElementNS(SVG, "rect");
    bar.setAttribute("class", kind);
    for (const [key, number] of [["x", from], ["y", 0], ["width", width], ["height", 1]]) bar.setAttribute(key, number);
    svg.append(bar);
    from += width;
  }
  node.append(label, svg);
  return node;
}

function legend(entries) {
  const node = element("div", "legend");
  for (const [kind, name] of entries) {
    const entry = element("span");
    entry.append(element("i", kind), name);
    node.append(entry);
  }
  return node;
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit++;
  }
  return `${value.toFixed(unit === 0 || value >= 100 ? 0 : 1)} ${units[unit]}`;
}

/** Returns the map of experts: one row for each layer, one cell for each expert. */
function heatMap() {
  const node = element("div", "heat");
  const [title, canvas, tip] = [element("h3"), element("canvas"), element("p", "tip")];
  canvas.setAttribute("role", "img");
  canvas.tabIndex = 0;
  tip.setAttribute("aria-live", "polite");
  node.append(title, canvas, legend([["", "in memory, stronger if used more"], ["absent", "not in memory"], ["evicted", "evicted in the last second"]]), tip);
  let layers = [];
  let at = null;
  let before = new Map();
  let recent = new Map();

  const tell = () => {
    if (!at || !layers[at.row]) return (tip.textContent = "Point at a cell, or use the arrow keys, for its counts.");
    const layer = layers[at.row];
    const { column } = at;
    if (column >= layer.lookups.length) return;
    const misses = layer.lookups[column] - layer.hits[column];
    const place = layer.resident[column] ? "in memory" : "not in memory";
    tip.textContent = `Layer ${layer.layer}, expert ${column}: ${place}, ${layer.lookups[column]} uses, ${layer.hits[column]} hits, ${misses} misses, ${layer.evictions[column]} evictions`;
  };
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const most = Math.max(...layers.map((layer) => layer.lookups.length));
    at = {
      row: Math.floor(((event.clientY - box.top) / box.height) * layers.length),
      column: Math.floor(((event.clientX - box.left) / box.width) * most),
    };
    tell();
  });
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const { row, column } = at ?? { row: 0, column: -step[1] };
    const within = (value, count) => Math.min(count - 1, Math.max(0, value));
    at = { row: within(row + step[0], layers.length), column: within(column + step[1], layers[0].lookups.length) };
    tell();
  });
  canvas.addEventListener("pointerleave", () => {
    at = null;
    tell();
  });

  function show(experts) {
    layers = experts;
    node.hidden = !layers.length;
    if (!layers.length) return;
    const most = Math.max(...layers.map((layer) => layer.lookups.length));
    const resident = layers.reduce((sum, layer) => sum + layer.resident.filter(Boolean).length, 0);
    const all = layers.reduce((sum, layer) => sum + layer.lookups.length, 0);
    title.textContent = `Experts: ${resident} of ${all} in memory, one row per layer`;
    canvas.setAttribute("aria-label", title.textContent);
    draw(most);
    tell();
  }

  function draw(most) {
    const width = canvas.clientWidth * devicePixelRatio;
    const cell = Math.max(1, Math.floor(width / most));
    const height = Math.max(4, Math.min(cell, 14 * devicePixelRatio));
    if (canvas.width !== cell * most || canvas.height !== height * layers.length) {
      canvas.width = cell * most;
      canvas.height = height * layers.length;
    }
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    const [hot, cold, warn] = [color("--accent"), color("--cold"), color("--warn")];
    const paint = canvas.getContext("2d");
    paint.clearRect(0, 0, canvas.width, canvas.height);
    const gap = cell > 4 ? 1 : 0;
    const now = performance.now();
    layers.forEach((layer, row) => {
      const peak = Math.max(1, ...layer.lookups);
      layer.lookups.forEach((uses, column) => {
        const key = row * 65536 + column;
        if ((before.get(key) ?? layer.evictions[column]) < layer.evictions[column]) recent.set(key, now);
        before.set(key, layer.evictions[column]);
        const area = [column * cell, row * height, cell - gap, height - gap];
        paint.globalAlpha = 1;
        paint.fillStyle = cold;
        paint.fillRect(...area);
        if (layer.resident[column]) {
          paint.globalAlpha = 0.25 + 0.75 * Math.sqrt(uses / peak);
          paint.fillStyle = hot;
          paint.fillRect(...area);
        } else if (now - (recent.get(key) ?? -1e9) < 1000) {
          paint.fillStyle = warn;
          paint.fillRect(...area);
        }
      });
    });
    paint.globalAlpha = 1;
  }

  return { node, show };
}
