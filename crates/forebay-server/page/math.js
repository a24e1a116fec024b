// Formulas, as MathML by Temml. The library is fetched when the first formula comes, and formulas are made in short turns, so that an
// answer with thousands of them does not stop the page.

const LIBRARY = "/page/temml.min.js";
/** Deeper formulas stay as they were written: a browser's layout may not end for them. */
const DEPTH_MAX = 80;
/** The longest turn, in milliseconds. */
const TURN = 8;

const waiting = [];
let loading = null;

/** Puts a formula into a node that shows its source. If it cannot be read, the source stays. */
export function typeset(node, source, display) {
  waiting.push({ node, source, display });
  if (waiting.length > 1) return;
  library().then(work, () => (waiting.length = 0));
}

function library() {
  loading ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = LIBRARY;
    script.onload = () => resolve(globalThis.temml);
    script.onerror = () => {
      loading = null;
      reject(new Error("the library for formulas did not come"));
    };
    document.head.append(script);
  });
  return loading;
}

function work(temml) {
  const until = performance.now() + TURN;
  while (waiting.length && performance.now() < until) make(temml, waiting.pop());
  if (waiting.length) setTimeout(work, 0, temml);
}

function depth(root) {
  let most = 0;
  for (let level = [root]; level.length; level = level.flatMap((node) => [...node.children])) most++;
  return most;
}

function make(temml, { node, source, display }) {
  if (!node.isConnected) return;
  const shown = document.createElement("span");
  try {
    temml.render(source, shown, { displayMode: display, throwOnError: true, maxExpand: 200, maxSize: [20, 20], trust: false });
    if (depth(shown) > DEPTH_MAX) throw new Error("the formula is too deep");
    node.replaceChildren(...shown.childNodes);
    node.title = source.trim();
  } catch {
    node.classList.add("unread");
  }
}
