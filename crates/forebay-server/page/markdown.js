// Renders Markdown as nodes. Text becomes text nodes only, so that HTML of a model is shown and never run.
//
// Time grows linearly with the text, whatever the text is: the reader of blocks (CommonMark's algorithm) looks at each line once for each
// open container, of which there are at most CONTAINERS_MAX; the reader of a block's text never looks for the same thing twice.
// A growing answer is read again only from the start of its last block, and nodes that did not change stay.

const CONTAINERS_MAX = 24;
const SPANS_MAX = 32;
const LINK_MAX = 2000;
const FORMULA_MAX = 4000;

/**
 * Renders text into a node that nothing else fills.
 * `tools` may have `copy(text)`, `highlight(node, text, language)` and `math(node, source, display)`.
 * `growing` says that more of the text will come: code is coloured when its block ends.
 */
export function render(node, text, { tools = {}, growing = false } = {}) {
  let past = node.markdown;
  if (!past || !text.startsWith(past.text)) past = { text: "", from: 0, settled: 0, kids: [], tools };
  if (past.text === text && past.growing === growing) return;
  const { kids, settled } = blocks(text, past.from);
  const all = [...past.kids.slice(0, past.settled), ...kids];
  drawAll(node, all, past.kids, { tools, growing });
  // What follows may still change the block that the last whole line belongs to.
  const from = settled >= 0 ? kids[settled].from : past.from;
  node.markdown = { text, growing, kids: all, from, settled: past.settled + Math.max(settled, 0) };
}

export function element(tag, name = "", text = "") {
  const node = document.createElement(tag);
  if (name) node.className = name;
  if (text) node.textContent = text;
  return node;
}

// Blocks

/** Reads the blocks of text from an offset on. `settled` is the last block that a whole line began. */
function blocks(text, from) {
  const reader = new Reader();
  let settled = -1;
  for (let at = from; at < text.length; ) {
    const found = text.indexOf("\n", at);
    const end = found < 0 ? text.length : found;
    reader.read(text.slice(at, text[end - 1] === "\r" ? end - 1 : end), at);
    if (found >= 0) settled = reader.root.kids.length - 1;
    at = end + 1;
  }
  return { kids: reader.root.kids, settled };
}

/** Reads lines one after another. `open` has the containers that the next line may continue, the outermost first. */
class Reader {
  root = { kind: "root", kids: [] };
  open = [this.root];
  /** The open paragraph, code, formula or table, if there is one. */
  leaf = null;
  /** True if the last line was blank. */
  blank = false;

  read(line, at) {
    this.line = line.replace(/^[ \t]*/, (space) => space.replace(/\t/g, "    "));
    this.at = at;
    this.pos = 0;
    this.skip();
    const matched = this.continued();
    const all = matched === this.open.length;
    if (this.leaf && all && this.verbatim()) return;
    if (this.leaf && !all && this.leaf.kind !== "text") this.leaf = null;
    const lazy = this.leaf?.kind === "text";
    this.matched = matched;
    if (this.starts(all)) {
      this.blank = false;
      return;
    }
    const rest = this.next >= this.line.length;
    if (lazy && this.leaf && !rest && this.matched < this.open.length) {
      this.addLine();
      this.blank = false;
      return;
    }
    this.close();
    if (rest) {
      this.leaf = null;
      this.blank = true;
      return;
    }
    this.text();
    this.blank = false;
  }

  /** Finds where the text after the spaces at `pos` begins. */
  skip() {
    if (!(this.next > this.pos) || this.nextOf !== this.line) {
      let next = this.pos;
      while (this.line[next] === " " || this.line[next] === "\t") next++;
      this.next = next;
      this.nextOf = this.line;
    }
    this.indent = this.next - this.pos;
  }

  move(pos) {
    this.pos = pos;
    this.skip();
  }

  /** Returns how many of the open containers the line continues. */
  continued() {
    this.nextOf = null;
    this.skip();
    for (let index = 1; index < this.open.length; index++) {
      const container = this.open[index];
      const rest = this.next >= this.line.length;
      if (container.kind === "quote") {
        if (this.indent > 3 || this.line[this.next] !== ">") return index;
        this.quoteMark();
      } else if (container.kind === "item") {
        if (rest && !container.kids.length && this.blank) return index;
        if (rest) this.move(this.next);
        else if (this.indent >= container.width) this.move(this.pos + container.width);
        else return index;
      }
    }
    return this.open.length;
  }

  quoteMark() {
    const space = this.line[this.next + 1] === " " ? 2 : 1;
    this.move(this.next + space);
  }

  /** Adds the line to code or a formula that is open. Returns false if the line ends it and is no part of it. */
  verbatim() {
    const { leaf } = this;
    if (leaf.kind === "code" && leaf.fence) {
      const rest = this.line.slice(this.next);
      if (this.indent <= 3 && isFence(rest, leaf.fence)) {
        leaf.closed = true;
        this.leaf = null;
      } else {
        leaf.lines.push(this.line.slice(this.pos + Math.min(this.indent, leaf.indent)));
      }
      this.blank = false;
      return true;
    }
    if (leaf.kind === "math") {
      const end = this.line.indexOf(leaf.end, this.pos);
      if (this.next < this.line.length && leaf.size < FORMULA_MAX) {
        this.mathLine(leaf, this.line.slice(this.pos, end < 0 ? undefined : end));
        if (end >= 0) this.mathEnd(leaf, end);
        return true;
      }
      // A formula has no blank line. What looked like one was text.
      this.unmath(leaf);
      return false;
    }
    if (leaf.kind === "code") {
      if (this.next >= this.line.length || this.indent >= 4) {
        leaf.lines.push(this.line.slice(this.pos + 4));
        this.blank = this.next >= this.line.length;
        return true;
      }
      this.leaf = null;
    }
    return false;
  }

  mathLine(leaf, text) {
    leaf.lines.push(text);
    leaf.size += text.length + 1;
  }

  mathEnd(leaf, end) {
    leaf.closed = true;
    this.leaf = null;
    const after = this.line.slice(end + leaf.end.length).trim();
    if (after) this.add({ kind: "text", lines: [after] });
  }

  unmath(leaf) {
    leaf.kind = "text";
    leaf.lines[0] = leaf.begin + leaf.lines[0];
    this.leaf = leaf;
  }

  /** Opens the containers that begin in the line. Returns true if the line was used up. */
  starts(all) {
    for (;;) {
      if (this.next >= this.line.length) return false;
      const inText = this.leaf?.kind === "text" && all && this.matched === this.open.length;
      if (this.indent >= 4) {
        if (this.leaf?.kind === "text" || this.leaf?.kind === "table") return false;
        this.close();
        this.leaf = this.add({ kind: "code", lines: [this.line.slice(this.pos + 4)], language: "" });
        return true;
      }
      const mark = this.line[this.next];
      if (mark === ">" && this.open.length < CONTAINERS_MAX) {
        this.close();
        this.leaf = null;
        this.push({ kind: "quote", kids: [] });
        this.quoteMark();
      } else if (this.item(mark)) {
        // The line continues inside the item.
      } else {
        return this.startsLeaf(mark, inText);
      }
      this.matched = this.open.length;
    }
  }

  startsLeaf(mark, inText) {
    const rest = this.line.slice(this.next);
    if (mark === "#") {
      const level = /^#{1,7}/.exec(rest)[0].length;
      if (level > 6 || (rest.length > level && !/\s/.test(rest[level]))) return false;
      this.single({ kind: "heading", level, lines: [headingText(rest, level)] });
      return true;
    }
    if (mark === "`" || mark === "~") return this.fence(rest);
    if (inText && (mark === "=" || mark === "-") && isUnderline(rest, mark)) {
      this.leaf.kind = "heading";
      this.leaf.level = mark === "=" ? 1 : 2;
      this.leaf = null;
      return true;
    }
    if (isRule(rest, mark)) {
      this.single({ kind: "rule" });
      return true;
    }
    return (mark === "$" || mark === "\\") && this.math(rest);
  }

  fence(rest) {
    const mark = /^(?:`{3,}|~{3,})/.exec(rest)?.[0];
    if (!mark || (mark[0] === "`" && rest.includes("`", mark.length))) return false;
    const language = rest.slice(mark.length).trim().split(/\s/, 1)[0].slice(0, 40);
    const code = { kind: "code", fence: mark, indent: this.indent, language, lines: [], closed: false };
    this.single(code);
    this.leaf = code;
    return true;
  }

  math(rest) {
    const [begin, end] = rest.startsWith("$$") ? ["$$", "$$"] : rest.startsWith("\\[") ? ["\\[", "\\]"] : [];
    if (!begin || this.leaf?.kind === "text") return false;
    const from = this.next + 2;
    const close = this.line.indexOf(end, from);
    if (close - from > FORMULA_MAX || this.line.length - from > FORMULA_MAX) return false;
    const leaf = { kind: "math", begin, end, lines: [], size: 0, closed: false };
    this.single(leaf);
    this.leaf = leaf;
    this.mathLine(leaf, this.line.slice(from, close < 0 ? undefined : close));
    if (close >= 0) this.mathEnd(leaf, close);
    return true;
  }

  /** Opens an item, and a list if the item continues none. */
  item(mark) {
    const found = /^(?:[-+*]|\d{1,9}[.)])(?=[ \t]|$)/.exec(this.line.slice(this.next, this.next + 11));
    if (!found || this.open.length + 1 >= CONTAINERS_MAX) return false;
    const rest = this.next + found[0].length;
    if (isRule(this.line.slice(this.next), mark)) return false;
    let after = rest;
    while (after < this.line.length && /[ \t]/.test(this.line[after])) after++;
    const empty = after >= this.line.length;
    const sort = found[0].at(-1);
    const number = parseInt(found[0], 10);
    if (this.leaf?.kind === "text" && this.matched === this.open.length && this.open.at(-1).kind !== "list" && (empty || number > 1)) return false;
    const spaces = empty || after - rest > 4 ? 1 : after - rest;
    const width = rest + spaces - this.pos;
    // The open list continues if its mark is of the same sort.
    const list = this.open[this.matched - 1];
    const goes = list.kind === "list" && list.sort === sort;
    if (list.kind === "list" && !goes) this.matched--;
    this.close();
    this.leaf = null;
    if (!goes) this.push({ kind: "list", sort, start: Number.isNaN(number) ? null : number, loose: false, kids: [] });
    this.push({ kind: "item", width, kids: [] });
    this.move(Math.min(rest + spaces, this.line.length));
    return true;
  }

  /** Closes the containers that the line does not continue. */
  close() {
    if (this.matched >= this.open.length) return;
    this.open.length = this.matched;
    this.leaf = null;
  }

  push(container) {
    this.add(container);
    this.open.push(container);
  }

  single(block) {
    this.close();
    this.leaf = null;
    this.add(block);
  }

  /** Adds a block to the innermost container. */
  add(block) {
    // A list whose item ended takes nothing but items.
    if (this.open.at(-1).kind === "list" && block.kind !== "item") this.open.pop();
    const parent = this.open.at(-1);
    if (this.blank && parent.kids.length) {
      if (parent.kind === "list") parent.loose = true;
      if (parent.kind === "item") this.open.at(-2).loose = true;
    }
    block.from ??= this.at;
    block.task = parent.kind === "item" && !parent.kids.length;
    parent.kids.push(block);
    return block;
  }

  addLine() {
    this.leaf.lines.push(this.line.slice(this.next));
    this.leaf.last = this.at;
  }

  /** Adds the rest of the line as text. */
  text() {
    const { leaf } = this;
    if (leaf?.kind === "table") {
      leaf.lines.push(this.line.slice(this.next));
    } else if (leaf?.kind === "text") {
      if (!this.table()) this.addLine();
    } else {
      this.leaf = this.add({ kind: "text", lines: [this.line.slice(this.next)], last: this.at });
    }
  }

  /** Makes a table of the last line of a paragraph, if the line is the rule below a table's head. */
  table() {
    const rule = this.line.slice(this.next).trimEnd();
    const head = this.leaf.lines.at(-1);
    if (!/^[|:\- ]+$/.test(rule) || !(rule.includes("|") || head.includes("|"))) return false;
    const marks = cells(rule);
    if (!marks.every((mark) => /^:?-+:?$/.test(mark)) || marks.length !== cells(head).length) return false;
    const aligns = marks.map((mark) => (mark.endsWith(":") ? (mark[0] === ":" ? "center" : "right") : ""));
    const text = this.leaf;
    const siblings = this.open.at(-1).kids;
    text.lines.pop();
    if (!text.lines.length) siblings.pop();
    const table = { kind: "table", lines: [head], aligns, from: text.lines.length ? text.last : text.from };
    siblings.push(table);
    this.leaf = table;
    return true;
  }
}

function isFence(text, fence) {
  let size = 0;
  while (text[size] === fence[0]) size++;
  return size >= fence.length && !text.slice(size).trim();
}

function isUnderline(text, mark) {
  let size = 0;
  while (text[size] === mark) size++;
  // A shorter line is more often the beginning of something else.
  return size > 2 && !text.slice(size).trim();
}

function isRule(text, mark) {
  if (!"-*_".includes(mark)) return false;
  let count = 0;
  for (const char of text) {
    if (char === mark) count++;
    else if (char !== " " && char !== "\t") return false;
  }
  return count >= 3;
}

/** Returns a heading's text without the marks that may close it. */
function headingText(line, level) {
  const text = line.slice(level).trim();
  let end = text.length;
  while (text[end - 1] === "#") end--;
  return end === 0 || /\s/.test(text[end - 1]) ? text.slice(0, end).trimEnd() : text;
}

/** Splits a row of a table. */
function cells(line) {
  const found = [];
  let text = "";
  let from = 0;
  const row = line.trim();
  for (let at = row[0] === "|" ? (from = 1) : 0; at < row.length; at++) {
    if (row[at] === "\\" && row[at + 1] === "|") {
      text += row.slice(from, at);
      from = ++at;
    } else if (row[at] === "|") {
      found.push((text + row.slice(from, at)).trim());
      text = "";
      from = at + 1;
    }
  }
  if (from < row.length || text) found.push((text + row.slice(from)).trim());
  return found;
}

// Nodes of blocks

/** Shows blocks in a node that shows older ones. */
function drawAll(node, kids, old, context) {
  let index = 0;
  while (index < kids.length && index < old.length && update(kids[index], old[index], context)) index++;
  while (node.childNodes.length > index) node.lastChild.remove();
  for (; index < kids.length; index++) {
    kids[index].node = DRAW[kids[index].kind](kids[index], context);
    node.append(kids[index].node);
  }
}

/** Lets a block take the node of an older one. Returns false if it cannot. */
function update(block, old, context) {
  if (block === old) return true;
  if (block.kind !== old.kind) return false;
  block.node = old.node;
  const same = () => block.lines.length === old.lines.length && block.lines.every((line, index) => line === old.lines[index]);
  switch (block.kind) {
    case "rule":
      return true;
    case "heading":
    case "text":
      if (block.level !== old.level) return false;
      if (!same()) fillText(block, context);
      return true;
    case "code":
      if (block.language !== old.language || !block.fence !== !old.fence) return false;
      block.code = old.code;
      block.coloured = old.coloured && same();
      if (!same()) fillCode(block);
      colour(block, context);
      return true;
    case "list":
      if ((block.start ?? -1) !== (old.start ?? -1)) return false;
      block.node.className = block.loose ? "" : "tight";
      drawAll(block.node, block.kids, old.kids, context);
      return true;
    case "quote":
    case "item":
      drawAll(block.node, block.kids, old.kids, context);
      return true;
    default:
      return same() && block.closed === old.closed;
  }
}

const DRAW = {
  rule: () => element("hr"),
  heading: (block, context) => textNode(element(`h${block.level}`), block, context),
  text: (block, context) => textNode(element("p"), block, context),
  quote: (block, context) => filled(element("blockquote"), block, context),
  item: (block, context) => filled(element("li"), block, context),
  list(block, context) {
    const node = element(block.start === null ? "ul" : "ol", block.loose ? "" : "tight");
    if (block.start !== null) node.start = block.start;
    return filled(node, block, context);
  },
  code(block, context) {
    const box = element("div", "code");
    const top = element("div", "top");
    top.append(element("span", "", block.language));
    block.node = box;
    block.code = element("code");
    fillCode(block);
    if (context.tools.copy) {
      const copy = element("button", "", "Copy");
      copy.type = "button";
      copy.addEventListener("click", () => context.tools.copy(copy, block.code.textContent));
      top.append(copy);
    }
    const pre = element("pre");
    pre.tabIndex = 0;
    pre.append(block.code);
    box.append(top, pre);
    colour(block, context);
    return box;
  },
  math(block, context) {
    const source = block.lines.join("\n");
    const node = element("div", "formula", block.begin + source + (block.closed ? block.end : ""));
    if (block.closed) context.tools.math?.(node, source, true);
    return node;
  },
  table(block, context) {
    const node = element("table");
    block.lines.forEach((line, index) => {
      const row = element("tr");
      cells(line).forEach((text, column) => {
        const cell = element(index ? "td" : "th", block.aligns[column] ?? "");
        row.append(inline(cell, text, context));
      });
      node.append(row);
    });
    const box = element("div", "table");
    box.append(node);
    return box;
  },
};

function filled(node, block, context) {
  drawAll(node, block.kids, [], context);
  return node;
}

function textNode(node, block, context) {
  block.node = node;
  fillText(block, context);
  return node;
}

function fillText(block, context) {
  const { node } = block;
  while (node.childNodes.length) node.lastChild.remove();
  let text = block.lines.join("\n");
  if (block.task && /^\[[ xX]\] /.test(text)) {
    const box = element("input");
    box.type = "checkbox";
    box.disabled = true;
    box.checked = text[1] !== " ";
    node.append(box, " ");
    text = text.slice(4);
  }
  inline(node, text, context);
}

function fillCode(block) {
  // Blank lines after indented code are no part of it.
  let end = block.lines.length;
  while (!block.fence && end && !block.lines[end - 1].trim()) end--;
  block.code.textContent = block.lines.slice(0, end).join("\n");
}

function colour(block, { tools, growing }) {
  if (block.coloured || !block.language || (growing && !block.closed)) return;
  block.coloured = true;
  tools.highlight?.(block.code, block.lines.join("\n"), block.language);
}

// Text within a block

const SPECIAL = /[\\`*_~[\]<&$\n!]|https?:\/\//g;
const BREAK = /<[bB][rR] ?\/?>/y;
const ENTITY = /&(?:#(\d{1,7})|#[xX]([\da-fA-F]{1,6})|(amp|lt|gt|quot|apos|nbsp));/y;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
const WEB = /https?:\/\/[^\s<>"`[\]|\u3000-\u303f\uff00-\uffef]*/y;
const PUNCTUATION = /[\p{P}\p{S}\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Hangul}]/u;

function inline(node, text, context) {
  const scan = new Scan(text);
  scan.run();
  place(node, scan.tokens, context);
  return node;
}

/** Reads a block's text into tokens: strings, nodes to make, marks of emphasis and brackets. */
class Scan {
  tokens = [];
  /** The last mark of emphasis that may still pair. Marks are a linked list. */
  last = null;
  count = 0;
  brackets = [];
  ahead = new Map();

  constructor(text) {
    this.text = text;
  }

  run() {
    const { text } = this;
    let at = 0;
    while (at < text.length) {
      SPECIAL.lastIndex = at;
      const found = SPECIAL.exec(text);
      if (!found) break;
      if (found.index > at) this.tokens.push(text.slice(at, found.index));
      at = this.special(found.index, found[0]);
    }
    if (at < text.length) this.tokens.push(text.slice(at));
    this.pair(null);
  }

  special(at, mark) {
    switch (mark) {
      case "\\": return this.escape(at);
      case "`": return this.code(at);
      case "*": case "_": case "~": return this.delimiter(at, mark);
      case "!": return this.text[at + 1] === "[" ? this.bracket(at, "![") : this.literal(at, 1);
      case "[": return this.bracket(at, "[");
      case "]": return this.closeBracket(at);
      case "<": return this.angle(at);
      case "&": return this.entity(at);
      case "$": return this.dollar(at);
      case "\n": return this.newline(at);
      default: return this.web(at);
    }
  }

  literal(at, size) {
    this.tokens.push(this.text.slice(at, at + size));
    return at + size;
  }

  /** Finds a string. A place that was found is remembered until it is passed. */
  find(needle, from) {
    const known = this.ahead.get(needle);
    if (known !== undefined && (known < 0 || known >= from)) return known;
    const found = this.text.indexOf(needle, from);
    this.ahead.set(needle, found);
    return found;
  }

  escape(at) {
    const next = this.text[at + 1];
    if (next === "\n") {
      this.tokens.push({ br: true });
      return at + 2;
    }
    if (next === "(" || next === "[") {
      const end = this.find(next === "(" ? "\\)" : "\\]", at + 2);
      if (end > at + 2 && end - at < FORMULA_MAX) return this.formula(at, at + 2, end, next === "[");
    }
    if (next !== undefined && /[!-/:-@[-`{-~]/.test(next)) {
      this.tokens.push(next);
      return at + 2;
    }
    return this.literal(at, 1);
  }

  formula(at, from, end, display) {
    const to = end + (from - at);
    this.tokens.push({ math: this.text.slice(from, end), source: this.text.slice(at, to), display });
    return to;
  }

  dollar(at) {
    const double = this.text[at + 1] === "$";
    const from = at + (double ? 2 : 1);
    const end = this.find(double ? "$$" : "$", from);
    if (end <= from || end - from > FORMULA_MAX) return this.literal(at, from - at);
    if (!double) {
      // Prices are no formulas.
      const inner = this.text[from] + this.text[end - 1];
      if (/\s/.test(inner) || this.text[end - 1] === "\\" || /\d/.test(this.text[end + 1] ?? "")) return this.literal(at, 1);
    }
    return this.formula(at, from, end, double);
  }

  code(at) {
    let end = at;
    while (this.text[end] === "`") end++;
    const size = end - at;
    const close = this.nextRun(size, end);
    if (close < 0) return this.literal(at, size);
    let inner = this.text.slice(end, close).replaceAll("\n", " ");
    if (inner.length > 2 && inner[0] === " " && inner.at(-1) === " " && inner.trim()) inner = inner.slice(1, -1);
    this.tokens.push({ code: inner });
    return close + size;
  }

  /** Returns where the next run of exactly `size` backticks begins. */
  nextRun(size, from) {
    if (!this.runs) {
      this.runs = new Map();
      for (const { 0: run, index } of this.text.matchAll(/`+/g)) {
        if (!this.runs.has(run.length)) this.runs.set(run.length, { starts: [], next: 0 });
        this.runs.get(run.length).starts.push(index);
      }
    }
    // An escaped backtick shortens its run, so a size may be missing.
    const runs = this.runs.get(size);
    if (!runs) return -1;
    while (runs.next < runs.starts.length && runs.starts[runs.next] < from) runs.next++;
    return runs.starts[runs.next] ?? -1;
  }

  newline(at) {
    const before = this.tokens.at(-1);
    const hard = typeof before === "string" && before.endsWith("  ");
    if (hard) this.tokens[this.tokens.length - 1] = before.trimEnd();
    this.tokens.push(hard ? { br: true } : "\n");
    return at + 1;
  }

  angle(at) {
    BREAK.lastIndex = at;
    const found = BREAK.exec(this.text);
    if (found) {
      this.tokens.push({ br: true });
      return at + found[0].length;
    }
    return this.literal(at, 1);
  }

  entity(at) {
    ENTITY.lastIndex = at;
    const found = ENTITY.exec(this.text);
    if (!found) return this.literal(at, 1);
    const code = found[1] ? parseInt(found[1], 10) : parseInt(found[2] ?? "0", 16);
    const known = found[3] ? ENTITIES[found[3]] : code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : "\ufffd";
    this.tokens.push(known);
    return at + found[0].length;
  }

  /** Makes a link of an address in the text, without the punctuation after it. */
  web(at) {
    WEB.lastIndex = at;
    const whole = WEB.exec(this.text)[0];
    let depth = 0;
    for (const char of whole) depth += char === "(" ? 1 : char === ")" ? -1 : 0;
    let end = whole.length;
    for (; end > 0; end--) {
      if (whole[end - 1] === ")" && depth < 0) depth++;
      else if (!/[.,;:!?*_~'$]/.test(whole[end - 1])) break;
    }
    const target = whole.slice(0, end);
    const word = at > 0 && /\w/.test(this.text[at - 1]);
    if (end < 9 || word || !safe(target)) return this.literal(at, Math.max(end, 7));
    this.tokens.push({ web: target });
    return at + end;
  }

  bracket(at, mark) {
    const token = { bracket: mark, before: this.last };
    this.tokens.push(token);
    this.brackets.push(token);
    return at + mark.length;
  }

  closeBracket(at) {
    const opening = this.brackets.pop();
    const found = opening && this.text[at + 1] === "(" ? this.target(at + 1) : null;
    if (!found) return this.literal(at, 1);
    this.pair(opening.before);
    opening.target = found.target;
    this.tokens.push({ end: this.text.slice(at, found.end) });
    // A link has no links inside.
    if (opening.bracket === "[") this.brackets = [];
    return found.end;
  }

  /** Reads `(target "title")` of a link. Returns null if there is none, or if it leads anywhere but to the web. */
  target(at) {
    const parens = (this.parens ??= parensOf(this.text));
    const place = parens.get(at);
    if (!place) return null;
    let end = place.close;
    const stop = place.close >= 0 ? place.close : place.space;
    if (stop < 0 || stop - at > LINK_MAX) return null;
    let target = this.text.slice(at + 1, stop);
    if (place.close < 0) {
      let title = stop;
      while (title - stop < 10 && /\s/.test(this.text[title] ?? "")) title++;
      const quote = this.text[title];
      end = quote === '"' || quote === "'" ? this.find(quote, title + 1) + 1 : quote === ")" ? title : 0;
      if (end <= 0 || end - at > LINK_MAX || this.text[end] !== ")") return null;
    }
    if (target[0] === "<" && target.at(-1) === ">") target = target.slice(1, -1);
    return safe(target) ? { target, end: end + 1 } : null;
  }

  delimiter(at, mark) {
    let end = at;
    while (this.text[end] === mark) end++;
    const size = end - at;
    if (mark === "~" && size !== 2) return this.literal(at, size);
    const before = at > 0 ? lastChar(this.text, at) : " ";
    const after = end < this.text.length ? String.fromCodePoint(this.text.codePointAt(end)) : " ";
    const [spaceBefore, spaceAfter] = [/\s/.test(before), /\s/.test(after)];
    const [markBefore, markAfter] = [PUNCTUATION.test(before), PUNCTUATION.test(after)];
    const left = !spaceAfter && (!markAfter || spaceBefore || markBefore);
    const right = !spaceBefore && (!markBefore || spaceAfter || markAfter);
    const product = size === 1 && /\d/.test(before) && /\d/.test(after);
    const opens = left && !product && (mark !== "_" || !right || markBefore);
    const closes = right && !product && (mark !== "_" || !left || markAfter);
    const token = { mark, size, left: size, opens, closes, begun: [], ended: [], index: ++this.count, previous: this.last, following: null };
    if (this.last) this.last.following = token;
    this.last = token;
    this.tokens.push(token);
    return end;
  }

  unlink(token) {
    if (token.previous) token.previous.following = token.following;
    if (token.following) token.following.previous = token.previous;
    else this.last = token.previous;
  }

  /** Pairs the marks after one, and forgets them. For each sort of mark, what was searched in vain is not searched again. */
  pair(bottom) {
    const searched = new Map();
    let closer = this.last;
    while (closer && closer.previous !== bottom) closer = closer.previous;
    while (closer) {
      if (!closer.closes) {
        closer = closer.following;
        continue;
      }
      const sort = `${closer.mark}${closer.opens}${closer.size % 3}`;
      const least = searched.get(sort) ?? bottom?.index ?? 0;
      let opener = closer.previous;
      while (opener && opener.index > least && !matches(opener, closer)) opener = opener.previous;
      if (opener && opener.index > least) {
        closer = this.join(opener, closer);
      } else {
        searched.set(sort, closer.previous?.index ?? 0);
        const next = closer.following;
        if (!closer.opens) this.unlink(closer);
        closer = next;
      }
    }
    if (bottom) bottom.following = null;
    this.last = bottom;
  }

  /** Makes emphasis between two marks. Returns the mark to continue with. */
  join(opener, closer) {
    const size = opener.mark === "~" || (opener.left > 1 && closer.left > 1) ? 2 : 1;
    opener.left -= size;
    closer.left -= size;
    const tag = opener.mark === "~" ? "s" : size === 2 ? "strong" : "em";
    opener.begun.push({ tag, source: opener.mark.repeat(size) });
    closer.ended.push(size);
    opener.following = closer;
    closer.previous = opener;
    if (!opener.left) this.unlink(opener);
    if (closer.left) return closer;
    this.unlink(closer);
    return closer.following;
  }
}

function lastChar(text, at) {
  const low = text.charCodeAt(at - 1);
  return low >= 0xdc00 && low < 0xe000 && at > 1 ? text.slice(at - 2, at) : text[at - 1];
}

function matches(opener, closer) {
  if (opener.mark !== closer.mark || !opener.opens) return false;
  const either = closer.opens || opener.closes;
  return !either || closer.size % 3 === 0 || (opener.size + closer.size) % 3 !== 0;
}

/** Finds for each opening parenthesis its closing one, or the white space that comes first. */
function parensOf(text) {
  const found = new Map();
  const open = [];
  for (const { 0: char, index } of text.matchAll(/\\[()]|[()\s]/g)) {
    if (char === "(") {
      open.push(index);
    } else if (char === ")") {
      if (open.length) found.set(open.pop(), { close: index, space: -1 });
    } else if (char.length === 1) {
      for (const at of open) found.set(at, { close: -1, space: index });
      open.length = 0;
    }
  }
  return found;
}

/** Returns true if a target is on the web. */
function safe(target) {
  return target.length <= LINK_MAX && /^https?:\/\/[^\s/]/i.test(target) && URL.canParse(target);
}

/** Makes nodes of tokens. Emphasis that is nested too deeply stays text. */
function place(root, tokens, context) {
  const nodes = [root];
  const shown = [];
  let text = "";
  let links = 0;
  const flush = () => {
    if (text) nodes.at(-1).append(text);
    text = "";
  };
  const put = (node) => {
    flush();
    nodes.at(-1).append(node);
  };
  const begin = (make, source) => {
    const fits = nodes.length <= SPANS_MAX;
    shown.push(fits ? "" : source);
    if (!fits) return (text += source);
    const node = make();
    put(node);
    nodes.push(node);
  };
  const end = (source) => {
    if (shown.pop()) return (text += source);
    flush();
    nodes.pop();
  };
  for (const token of tokens) {
    if (typeof token === "string") text += token;
    else if (token.br) put(element("br"));
    else if (token.code !== undefined) put(element("code", "", token.code));
    else if (token.math !== undefined) put(formulaNode(token, context));
    else if (token.web) {
      if (links) text += token.web;
      else put(linkNode(token.web, token.web));
    } else if (token.mark) {
      for (const size of token.ended) end(token.mark.repeat(size));
      text += token.mark.repeat(token.left);
      for (const { tag, source } of token.begun.reverse()) begin(() => element(tag), source);
    } else if (token.target) {
      links++;
      begin(() => linkNode(token.target), token.bracket);
    } else if (token.bracket) {
      text += token.bracket;
    } else if (token.end) {
      links--;
      end(token.end);
    }
  }
  flush();
}

function formulaNode({ math, source, display }, context) {
  const node = element("span", "formula", source);
  context.tools.math?.(node, math, display);
  return node;
}

function linkNode(target, label = "") {
  const node = element("a", "", label);
  node.href = target;
  node.target = "_blank";
  node.rel = "noopener noreferrer";
  return node;
}
