// Renders Markdown as nodes. Text becomes text nodes only, so that HTML of a model is shown and never run.

/** Renders text into a node. Blocks that did not change keep their nodes, so that a growing answer does not flicker. */
export function render(node, text, depth = 0) {
  const parts = blocks(text);
  const old = node.rendered ?? [];
  let same = 0;
  while (same < parts.length && parts[same] === old[same]) same++;
  while (node.childNodes.length > same) node.lastChild.remove();
  for (const part of parts.slice(same)) node.append(block(part.split("\n"), depth));
  node.rendered = parts;
}

const FENCE = /^ {0,3}(```+|~~~+)\s*([^`\s]*)/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const TABLE_LINE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

/** Splits text into blocks: fenced code, and groups of lines of one kind. */
function blocks(text) {
  const found = [];
  let current = [];
  let kind = "";
  let fence = null;
  const end = () => {
    if (current.length) found.push(current.join("\n"));
    current = [];
    kind = "";
  };
  for (const line of text.split("\n")) {
    if (fence) {
      current.push(line);
      if (line.trim().startsWith(fence) && !line.trim().slice(fence.length).trim()) {
        fence = null;
        end();
      }
      continue;
    }
    const opening = FENCE.exec(line);
    if (opening) {
      end();
      fence = opening[1];
      current.push(line);
      continue;
    }
    if (!line.trim()) {
      end();
      continue;
    }
    const now = kindOf(line, kind);
    if (now !== kind || now === "heading" || now === "rule") end();
    kind = now;
    current.push(line);
  }
  end();
  return found;
}

function kindOf(line, before) {
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (line.startsWith(">")) return "quote";
  if (ITEM.test(line) || (before === "list" && /^\s/.test(line))) return "list";
  return "text";
}

const QUOTES_MOST = 8;

function block(lines, depth) {
  const opening = FENCE.exec(lines[0]);
  if (opening) return code(lines, opening);
  const heading = HEADING.exec(lines[0]);
  if (heading) return inline(element(`h${heading[1].length}`), heading[2]);
  if (RULE.test(lines[0])) return element("hr");
  if (lines[0].startsWith(">") && depth < QUOTES_MOST) {
    const quote = element("blockquote");
    render(quote, lines.map((line) => line.replace(/^>{1,20} ?/, "")).join("\n"), depth + 1);
    return quote;
  }
  if (ITEM.test(lines[0])) return list(lines);
  if (lines.length > 1 && lines[0].includes("|") && TABLE_LINE.test(lines[1])) return table(lines);
  return inline(element("p"), lines.join("\n"));
}

function code(lines, opening) {
  const ends = lines.length > 1 && lines.at(-1).trim().startsWith(opening[1]);
  const text = lines.slice(1, ends ? -1 : undefined).join("\n");
  const box = element("div", "code");
  const top = element("div", "top");
  const copy = element("button", "", "Copy");
  copy.type = "button";
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      copy.textContent = "Copied";
    } catch {
      copy.textContent = "Not allowed";
    }
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  });
  top.append(element("span", "", opening[2]), copy);
  const pre = element("pre");
  pre.tabIndex = 0;
  pre.append(element("code", "", text));
  box.append(top, pre);
  return box;
}

function list(lines) {
  const first = ITEM.exec(lines[0]);
  const indent = first[1].length;
  const node = element(/\d/.test(first[2]) ? "ol" : "ul");
  if (node.tagName === "OL") node.start = parseInt(first[2], 10);
  let inner = [];
  let text = first[3];
  const end = () => {
    const item = inline(element("li"), text);
    if (inner.length) item.append(ITEM.test(inner[0]) ? list(inner) : inline(element("p"), inner.join("\n")));
    node.append(item);
    inner = [];
  };
  for (const line of lines.slice(1)) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent) {
      end();
      text = item[3];
    } else if (item && item[1].length < 40) {
      inner.push(line);
    } else if (inner.length) {
      inner.push(line);
    } else {
      text += `\n${line.trim()}`;
    }
  }
  end();
  return node;
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const node = element("table");
  const row = (line, kind) => {
    const made = element("tr");
    for (const cell of cells(line)) made.append(inline(element(kind), cell));
    return made;
  };
  node.append(row(lines[0], "th"));
  for (const line of lines.slice(2)) node.append(row(line, "td"));
  const box = element("div", "table");
  box.append(node);
  return box;
}

const INLINE = /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)|\*\*([^\s*][^*]*)\*\*|__([^\s_][^_]*)__|\*([^\s*][^*]*)\*|(?<!\w)_([^\s_][^_]*)_(?!\w)|~~([^~]+)~~|\[([^\]]*)\]\(([^()\s]+)\)|(https?:\/\/[^\s<>()"'`]+[^\s<>()"'`.,;:!?])/g;

function inline(node, text) {
  let from = 0;
  for (const match of text.matchAll(INLINE)) {
    node.append(text.slice(from, match.index));
    from = match.index + match[0].length;
    const [whole, , codeText, strong, strong2, weak, weak2, struck, label, target, bare] = match;
    if (codeText !== undefined) node.append(element("code", "", codeText));
    else if (strong ?? strong2) node.append(inline(element("strong"), strong ?? strong2));
    else if (weak ?? weak2) node.append(inline(element("em"), weak ?? weak2));
    else if (struck) node.append(inline(element("s"), struck));
    else node.append(link(label ?? bare, target ?? bare) ?? whole);
  }
  node.append(text.slice(from));
  return node;
}

/** Returns a link, or nothing if the target is not on the web. */
function link(label, target) {
  if (!/^https?:\/\//i.test(target) || !URL.canParse(target)) return null;
  const node = element("a", "", label || target);
  node.href = target;
  node.target = "_blank";
  node.rel = "noopener noreferrer";
  return node;
}

export function element(tag, name = "", text = "") {
  const node = document.createElement(tag);
  if (name) node.className = name;
  if (text) node.textContent = text;
  return node;
}
