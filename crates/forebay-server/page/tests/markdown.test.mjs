// What Markdown becomes, and that neither its time nor its depth grows faster than the text.

import assert from "node:assert/strict";
import { Session } from "node:inspector";
import { test } from "node:test";

import { element, render } from "../markdown.js";
import { written } from "./nodes.mjs";

function shown(text, tools = {}) {
  const node = element("div");
  render(node, text, { tools });
  return written(node);
}

const CASES = [
  ["emphasis", "a **b** *c* __d__ _e_ ~~f~~ `g`", "<p>a <strong>b</strong> <em>c</em> <strong>d</strong> <em>e</em> <s>f</s> <code>g</code></p>"],
  ["both", "***a***", "<p><em><strong>a</strong></em></p>"],
  ["names and products stay", "snake_case_name 2*3*4 a * b", "<p>snake_case_name 2*3*4 a * b</p>"],
  ["emphasis beside Chinese", "**强调。**后", "<p><strong>强调。</strong>后</p>"],
  ["code keeps marks", "`` a`*b* ``", "<p><code>a`*b*</code></p>"],
  ["escapes", "\\*a\\* \\<b\\>", "<p>*a* &lt;b&gt;</p>"],
  ["a link", "[a *b*](https://x.test/a_(b) \"t\")", '<p><a href="https://x.test/a_(b)">a <em>b</em></a></p>'],
  ["an image is a link", "![a](https://x.test/i.png)", '<p><a href="https://x.test/i.png">a</a></p>'],
  ["an address", "See https://x.test/a_b_c(d)). Or", '<p>See <a href="https://x.test/a_b_c(d)">https://x.test/a_b_c(d)</a>). Or</p>'],
  ["no link to scripts", "[a](javascript:x) [b](data:text/html,c)", "<p>[a](javascript:x) [b](data:text/html,c)</p>"],
  ["html is text", "<b onclick=x>y</b> &lt;", "<p>&lt;b onclick=x&gt;y&lt;/b&gt; &lt;</p>"],
  ["breaks", "a  \nb\\\nc<br>d\ne", "<p>a<br></br>b<br></br>c<br></br>d\ne</p>"],
  ["headings", "# a #\n## b\nc\n===\n#d", "<h1>a</h1><h2>b</h2><h1>c</h1><p>#d</p>"],
  ["a rule", "a\n\n---\n* * *", "<p>a</p><hr></hr><hr></hr>"],
  ["a tight list", "- a\n- b\n  - c\n- d", '<ul class="tight"><li><p>a</p></li><li><p>b</p><ul class="tight"><li><p>c</p></li></ul></li><li><p>d</p></li></ul>'],
  ["a loose list", "1. a\n\n   para\n2. b", '<ol start="1"><li><p>a</p><p>para</p></li><li><p>b</p></li></ol>'],
  ["loose items", "3. a\n\n4. b", '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol>'],
  ["code in a list", "1. a\n\n   ```py\n   x\n\n     y\n   ```\n2. b", '<ol start="1"><li><p>a</p><div class="code"><div class="top"><span>py</span></div><pre><code>x\n\n  y</code></pre></div></li><li><p>b</p></li></ol>'],
  ["tasks", "- [ ] a\n- [x] b", '<ul class="tight"><li><p><input checked="false"></input> a</p></li><li><p><input checked="true"></input> b</p></li></ul>'],
  ["a quote", "> a\nb\n>> c\n\nd", "<blockquote><p>a\nb</p><blockquote><p>c</p></blockquote></blockquote><p>d</p>"],
  ["a list in a quote", "> - a\n> - b", '<blockquote><ul class="tight"><li><p>a</p></li><li><p>b</p></li></ul></blockquote>'],
  ["an unclosed fence", "```\na\n# b", '<div class="code"><div class="top"><span></span></div><pre><code>a\n# b</code></pre></div>'],
  ["a longer fence", "````\n```\n````\na", '<div class="code"><div class="top"><span></span></div><pre><code>```</code></pre></div><p>a</p>'],
  ["a table", "t\n| a | b |\n|---|--:|\n| `x\\|y` | *c* |\n\nd", '<p>t</p><div class="table"><table><tr><th>a</th><th class="right">b</th></tr><tr><td><code>x|y</code></td><td class="right"><em>c</em></td></tr></table></div><p>d</p>'],
  ["no table", "a | b\nc", "<p>a | b\nc</p>"],
  ["formulas", "$x^2$, \\(y\\) $$z$$ cost $5 and $10", '<p><span class="formula">$x^2$</span>, <span class="formula">\\(y\\)</span> <span class="formula">$$z$$</span> cost $5 and $10</p>'],
  ["a formula of its own", "a\n\n\\[\n\\int\n\\]\nb", '<p>a</p><div class="formula">\\[\n\\int\n\\]</div><p>b</p>'],
  ["dollars that are none", "$$ a\n\nb", "<p>$$ a</p><p>b</p>"],
];

for (const [name, text, wanted] of CASES) test(name, () => assert.equal(shown(text), wanted));

test("formulas and code go to the tools", () => {
  const seen = [];
  shown("$x$ \\[y\\]\n\n```rust\nfn a() {}\n```", {
    math: (_, source, display) => seen.push([source, display]),
    highlight: (_, text, language) => seen.push([text, language]),
  });
  assert.deepEqual(seen, [["x", false], ["y", true], ["fn a() {}", "rust"]]);
});

test("a growing answer keeps its nodes, and ends as if it had come at once", () => {
  const random = generator(7);
  const parts = [...CASES.map(([, text]) => text), "\n\n", "\n", "- ", "1. ", "> ", "```", "| a | b |\n|---|---|\n", "$$", "   ", "x", "\t"];
  for (let round = 0; round < 400; round++) {
    const text = Array.from({ length: 1 + random(8) }, () => parts[random(parts.length)] + (random(2) ? "\n" : "")).join("");
    const node = element("div");
    for (let at = 0; at < text.length; at += 1 + random(7)) render(node, text.slice(0, at), { growing: true });
    render(node, text);
    assert.equal(written(node), shown(text), JSON.stringify(text));
  }
  const node = element("div");
  render(node, "first\n\nsecond", { growing: true });
  const [first] = node.childNodes;
  render(node, "first\n\nsecond and\n\nthird", { growing: true });
  assert.equal(node.childNodes[0], first);
});

/** Returns numbers below a limit, always the same ones for a seed. */
function generator(seed) {
  let state = seed;
  return (limit) => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return Math.floor((state / 2 ** 32) * limit);
  };
}

const times = (text, size) => text.repeat(Math.ceil(size / text.length)).slice(0, size);
const rising = (make, size) => {
  let text = "";
  for (let index = 0; text.length < size; index++) text += make(index);
  return text;
};

/** Patterns that are slow in one reader of Markdown or another. Each makes text of a size. */
const PATTERNS = {
  "unlike runs of backticks": (size) => rising((index) => `${"`".repeat(index + 1)}x`, size),
  "spaces in a heading": (size) => `# a${" ".repeat(size)}b`,
  "marks in a heading": (size) => `# ${" #".repeat(size / 2)}b`,
  "a deep list": (size) => rising((index) => `${" ".repeat(index % 90)}- x\n`, size),
  "a list that goes deeper": (size) => rising((index) => `${"  ".repeat(index)}- x\n`, size),
  "lines of quotes": (size) => times(`${"> ".repeat(20)}a\n`, size),
  "long lines of quotes": (size) => times(`${">".repeat(1000)}\n`, size),
  "quotes and lists by turns": (size) => times("> - ".repeat(40) + "x\n", size),
  "a wide table": (size) => `${times("|a", size / 3)}|\n${times("|-", size / 3)}|\n${times("|b", size / 3)}`,
  "a wide head and short rows": (size) => `${times("|a", size / 3)}|\n${times("|-", size / 3)}|\n${times("|\n", size / 3)}`,
  "heads without tables": (size) => times("|a|b|\n|-|\n", size),
  "many tables": (size) => times("|a|\n|-|\n|b|\n\n", size),
  "emphasis around emphasis": (size) => `${times("*a **b ", size / 2)}${times("c** d* ", size / 2)}`,
  "links around a link": (size) => `${"[".repeat(size / 2)}a${times("](https://x.test)", size / 2)}`,
  "titles without end": (size) => times('[a](b "', size),
  "titles of two sorts": (size) => times("[a](b '", size / 2) + times('[a](b "', size / 2),
  "parentheses without end": (size) => times("[a](((", size),
  "formulas without end": (size) => `${times("\\( $a \\[ ", size)}\\)`,
  "dollars at the beginnings of lines": (size) => times("$$\na\n\n", size),
  "brackets at the beginnings of lines": (size) => times("\\[\na\n\n", size),
  "an unclosed fence": (size) => `\`\`\`\n${times("~~~ a ```\n", size)}`,
  "fences in fences": (size) => rising((index) => `${"`".repeat(3 + (index % 50))}\n`, size),
  "underlines": (size) => times("a\n---\n", size),
  "marks of both sorts": (size) => times("_*a*_ **b__ ", size),
  "an address": (size) => `http://${times("a*_.(", size)}`,
  "entities": (size) => times("&#1234567", size),
  "breaks": (size) => times("a  \n", size),
  "blank lines in a list": (size) => `- a\n${times("\n", size)}b`,
  "spaces before nothing": (size) => `- a\n${times(`${" ".repeat(200)}\n`, size)}`,
  "escapes": (size) => "\\".repeat(size),
};
for (const part of ["a", " ", "`", "``a ", "**a", "** a **b", "[a", "[a](", "![", "~~a", "_a", "*a", "*a_", "[", "]", "<", "<a", "&", "$", "$a", "\\(", "\\[", "http://", "https://a ", "|", "-|", ">", "> ", "- ", "-", "1. ", "#", "\t", "a\n", "|a|\n", "***", "~", "](", "](https://a)", "(", ")", "!", "“", "强*"]) {
  PATTERNS[`only ${JSON.stringify(part)}`] = (size) => times(part, size);
}

/** Counts what the module executes: how often each of its blocks runs, and the characters that searches and copies pass. */
function counted(work) {
  const session = new Session();
  session.connect();
  session.post("Profiler.enable");
  session.post("Profiler.startPreciseCoverage", { callCount: true, detailed: true });
  let passed = 0;
  const restore = [];
  const watch = (object, name, cost) => {
    const own = object[name];
    restore.push(() => (object[name] = own));
    object[name] = function (...values) {
      const from = this.lastIndex ?? 0;
      const result = own.apply(this, values);
      passed += cost(this, values, result, from);
      return result;
    };
  };
  watch(String.prototype, "indexOf", (text, [, from = 0], found) => (found < 0 ? text.length : found) - from);
  watch(String.prototype, "includes", (text) => text.length);
  watch(String.prototype, "startsWith", (_, [part]) => part.length);
  for (const name of ["slice", "trim", "trimEnd", "replace", "replaceAll"]) watch(String.prototype, name, (text, _, made) => made.length);
  watch(RegExp.prototype, "exec", ({ sticky }, [text], found, from) => (found ? found.index - from + found[0].length : sticky ? 1 : text.length - from));
  watch(Array.prototype, "join", (_, __, made) => made.length);
  try {
    work();
  } finally {
    for (const undo of restore) undo();
  }
  let steps = 0;
  session.post("Profiler.takePreciseCoverage", (_, { result }) => {
    const module = result.find(({ url }) => url.endsWith("/markdown.js"));
    for (const { ranges } of module?.functions ?? []) for (const { count } of ranges) steps += count;
  });
  session.post("Profiler.stopPreciseCoverage");
  session.disconnect();
  assert.ok(steps > 0, "nothing was counted");
  return steps + passed;
}

for (const [name, make] of Object.entries(PATTERNS)) {
  test(`steps grow linearly: ${name}`, () => {
    const [small, large] = [4_000, 32_000].map((size) => {
      const text = make(size);
      return counted(() => render(element("div"), text)) / text.length;
    });
    assert.ok(large <= 1.5 * small + 1, `${small.toFixed(1)} steps per character, then ${large.toFixed(1)}`);
  });
}

test("steps grow linearly for random patterns", () => {
  const random = generator(11);
  const parts = ["a", " ", "`", "``", "*", "**", "_", "~~", "[", "](", "](https://a)", "(", ")", "\"", "'", "<", "&amp;", "$", "$$", "\\", "\\(", "\\[", "\n", "\n\n", "> ", "- ", "1. ", "  ", "    ", "|", "|-|", "---", "#", "```", "http://"];
  for (let round = 0; round < 24; round++) {
    const pattern = Array.from({ length: 1 + random(6) }, () => parts[random(parts.length)]).join("");
    const [small, large] = [4_000, 16_000].map((size) => {
      const text = times(pattern, size);
      return counted(() => render(element("div"), text)) / text.length;
    });
    assert.ok(large <= 1.5 * small + 1, `${JSON.stringify(pattern)}: ${small.toFixed(1)} steps per character, then ${large.toFixed(1)}`);
  }
});

test("nodes are never nested deeply", () => {
  for (const [name, make] of Object.entries(PATTERNS)) {
    const node = element("div");
    render(node, make(20_000));
    let level = [node];
    let depth = 0;
    while (level.length) {
      level = level.flatMap((one) => one.childNodes.filter((child) => typeof child !== "string"));
      depth++;
    }
    assert.ok(depth < 100, `${name}: ${depth}`);
  }
});
